"""examples/survive.c: ranks are killed by SIGKILL while it computes, and the others go on without
them. The program reads no message. Each survivor checks its sums itself."""

import os
import re
import signal

import pytest

from support.paths import LINK, ROOT
from support.processes import rest_of

# A step takes 5 ms. The job must not be done before the ranks are killed.
STEPS = 600


def wait_for(ranks, numbers, words):
    """Reads what these ranks print until each has printed a line that ends so. Returns what each
    has printed."""
    said = {number: "" for number in numbers}
    for number in numbers:
        while not said[number].endswith(words + "\n"):
            line = ranks[number].stdout.readline()
            assert line, f"rank {number} ended: {said[number]}"
            said[number] += line
    return said


def was_done(ranks, killed):
    """Whether one of these ranks, which the test has killed, had ended well before."""
    return any(ranks[rank].wait(60) == 0 for rank in killed)


@pytest.fixture
def survive(programs, start_ranks):
    def run(size, victims, later=()):
        """Kills the victims at once, and the later ones as soon as a survivor is about to call
        dm_shrink. On a busy machine a rank may be done before it is killed. Then another job is
        tried."""
        for _ in range(5):
            if play(size, victims, later):
                return
        raise AssertionError("each time a rank was done before it was killed")

    def play(size, victims, later):
        """Returns False where a rank was done before it was killed."""
        ranks = start_ranks([programs.c("examples/survive.c", name="survive-example", link=LINK), STEPS], size)
        wait_for(ranks, range(size), "is at step 10")
        for rank in victims:
            os.kill(ranks[rank].pid, signal.SIGKILL)
        gone = {*victims, *later}
        left = [rank for rank in range(size) if rank not in gone]
        if was_done(ranks, victims):
            return False
        if later:
            wait_for(ranks, left[:1], "lost ranks")
            for rank in later:
                os.kill(ranks[rank].pid, signal.SIGKILL)
            if was_done(ranks, later):
                return False
        replicas = size // 2 - len({rank // 2 for rank in gone})
        for rank in left:
            output, _ = rest_of(ranks[rank], 120)
            assert ranks[rank].returncode == 0, f"rank {rank}: {output}"
            is_out = rank ^ 1 in gone
            last = f"rank {rank} is out" if is_out else f"rank {rank} is done with {replicas} replicas"
            assert output.splitlines()[-1] == last, f"rank {rank}: {output}"
            named = [line.split()[5:] for line in output.splitlines() if re.match(r"rank \d+ goes on", line)]
            assert {int(word) for line in named for word in line} <= {*gone, *(rank ^ 1 for rank in gone)}, output
        return True

    return run


@pytest.mark.parametrize("size, victims", [(8, [5]), (8, [2, 7]), (6, [4, 5]), (8, [3, 5, 7])], ids=str)
def test_ranks_are_killed_at_once(survive, size, victims):
    survive(size, victims)


@pytest.mark.parametrize("size, victims, later", [(8, [5], [2]), (6, [3], [5]), (8, [6, 7], [2, 5])], ids=str)
def test_further_ranks_are_killed_in_the_shrink(survive, size, victims, later):
    survive(size, victims, later)


def test_rank_0_is_killed_that_serves_the_store(programs, start_ranks):
    """No call goes on without the store, so each survivor gives up with an error that says so."""
    ranks = start_ranks([programs.c("examples/survive.c", name="survive-example", link=LINK), 100000], 4)
    wait_for(ranks, range(4), "is at step 10")
    os.kill(ranks[0].pid, signal.SIGKILL)
    for rank in (1, 2, 3):
        output, _ = rest_of(ranks[rank], 120)
        assert ranks[rank].returncode == 1, f"rank {rank}: {output}"
        assert re.match(rf"rank {rank}: dm_shrink: .*rank 0", output.splitlines()[-1]), output


def test_the_page_shows_the_program():
    page = (ROOT / "docs/reliability.md").read_text()
    shown = re.search(r"```c\n(static dm_mesh \*without_the_lost.*?)```", page, re.S).group(1)
    assert shown in (ROOT / "examples/survive.c").read_text()
