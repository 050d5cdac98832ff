"""One communicator has one order of issue: tests/c/order.c, 1,000 rounds beside two processes that
keep the cores busy. It takes half a minute, and more on a busy machine; tests/c/order.c alone is
the short form."""

import subprocess
import sys

import pytest

from support import processes
from support.paths import TOOL


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_thousand_rounds_under_load(programs):
    program = programs.c("tests/c/order.c", "-Wall", "-Wextra", "-pthread")
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        processes.run(TOOL, "run", "-n", 2, "--", program, env=processes.environment(DM_ORDER_ROUNDS=1000), timeout=500)
    finally:
        processes.kill_all(busy)
