"""One C program gives equal results under the tool, under plain environment variables, and as
threads of one process."""

import pytest

from support.processes import launch, run

SIZE = 8


def by_threads(program, free_port, start_ranks):
    return run(program, "--threads", free_port()).stdout


def by_environment(program, free_port, start_ranks):
    return "".join(start_ranks([program], SIZE).outputs())


@pytest.mark.parametrize("way", [by_threads, by_environment])
def test_same_as_under_the_tool(way, programs, free_port, start_ranks):
    program = programs.c("tests/c/programs/results.c")
    tool = sorted(launch(SIZE, program).stdout.splitlines())
    assert len(tool) == SIZE, tool
    assert sorted(way(program, free_port, start_ranks).splitlines()) == tool
