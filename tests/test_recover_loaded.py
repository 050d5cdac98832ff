"""Blocked calls in a libhostccl.so that the program has loaded end when another rank has begun a
recovery, as those of the embedded engine do (tests/c/recover_blocked.c)."""

from support.paths import LIBRARY, LINK, TOOL
from support.processes import environment, run


def test_blocked_calls_of_a_loaded_engine_end_with_a_recovery(programs, tmp_path):
    program = programs.c("tests/c/recover_blocked.c", link=LINK)
    run(TOOL, "run", "-n", 4, "--failure-grace", "10", "--", program, timeout=300,
        env=environment(DM_CCL_LIBRARY=LIBRARY / "libhostccl.so", DM_TMP=tmp_path))
