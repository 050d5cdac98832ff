"""NVTX ranges of operations, as a tool sees them that NVTX_INJECTION64_PATH names
(tests/c/programs/nvtx_tool.c)."""

import pytest

from support.paths import CC, ROOT
from support.processes import environment, run


@pytest.fixture
def ranges(programs):
    """What the program writes with that tool, and with more variables."""
    program = programs.c("tests/c/programs/ranges.c")
    source = ROOT / "tests/c/programs/nvtx_tool.c"
    tool = programs.once("nvtx_tool.so", lambda path: run(CC, "-std=c11", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE", "-O1",
                                                          "-shared", "-fPIC", source, "-o", path))

    def ranges(path=tool, **variables):
        return run(program, env=environment(NVTX_INJECTION64_PATH=path, **variables), merged=True).stdout.splitlines()
    return ranges


def test_each_operation_is_a_range_with_the_name_of_its_dimension(ranges):
    said = ranges()
    pop = "pop libdevicemesh"
    expected = ["domain libdevicemesh",
                "push libdevicemesh [mesh/tp: all-reduce] 4", pop,
                "push libdevicemesh [mesh/dp: broadcast] 3", pop,
                "push libdevicemesh [dm_group_end] 0", pop,
                # The range of an operation that is refused ends, too.
                "push libdevicemesh [mesh/tp: all-reduce] 2", pop]
    assert said == expected, said


def test_without_a_tool_nothing_happens(ranges):
    assert ranges(path="") == [] and ranges(NVTX_TOOL_REFUSES=1) == []
    said = ranges(path="/no/such/tool.so", DM_LOG="warn")
    assert len(said) == 1 and "marks no NVTX ranges, because NVTX_INJECTION64_PATH cannot be loaded" in said[0], said
