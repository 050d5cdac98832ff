#!/usr/bin/env python3
"""A rank lost in each phase in each way: killed, stopped, exited; before the phase's first call and in the middle; by itself and from outside. What tests/soak does
at random, as a fixed set that is quick. Also under `devicemesh run`, which ends the job."""

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "soak"))

from death import Death, suffer  # noqa: E402
from job import TAG, TOOL, build, marked  # noqa: E402
from verdict import COLLECTIVES, MAKING, NOTICE  # noqa: E402

# A stopped rank is missed at the deadline, so it is short here.
SHORT_MS = 1000
PHASES = ("join", *MAKING, *COLLECTIVES, "barrier", "finalize", "free")


def fixed():
    """(death, whether a new job follows on the same port)"""
    number = 0
    for phase in PHASES:
        for how in ("kill", "exit", "stop"):
            for delay in (-1.0,) if phase == "free" else (-1.0, (0.0002, 0.001)[number // 2 % 2]):
                size = 3 + number % 2
                victim = (number * 5 // 2) % size
                outside = how != "exit" and delay >= 0
                yield Death(size, victim, how, phase, delay, outside, file=number % 5 == 4, short_ms=SHORT_MS), number % 4 == 0
                number += 1
    # Ranks that wait in the store for one that has not come.
    for victim in (1, 3):
        yield Death(4, victim, "kill", "join", outside=True, absent=2), True


def under_the_tool(program, victim, phase, how, code, said, timeout_ms, most):
    """The tool says who failed first and ends the job when the others have had their error, which names the lost rank; nobody outlives the tool."""
    began = time.monotonic()
    tag = f"tool-{os.getpid()}-{how}"
    environment = {**os.environ, TAG: tag, "DM_TIMEOUT_MS": str(timeout_ms), "DM_DIE": f"{victim}:{phase}:{how}:300"}
    ended = subprocess.run([TOOL, "run", "-n", "4", "--prefix", "--grace-period", "1", "--", program], env=environment, capture_output=True, text=True, timeout=60)
    took = time.monotonic() - began
    assert ended.returncode == code, f"exit code {ended.returncode}, expected {code}: {ended.stderr}"
    first = ended.stderr.splitlines()[0]
    assert re.search(said, first), ended.stderr
    errors = [line for line in ended.stdout.splitlines() if "] error " in line]
    assert len(errors) == 3 and any(f"rank {victim} " in line for line in errors), errors
    assert took < most, f"the job ended after {took:.2f} s"
    assert not marked(tag), marked(tag)
    return f"{first}; the job ended after {took:.2f} s"


def main():
    program = build()
    failed = 0

    def one(case):
        death, again = case
        outcome = suffer(program, death, again)
        return death, outcome

    with ThreadPoolExecutor(4) as pool:
        for death, outcome in pool.map(one, fixed()):
            if outcome.complaints:
                failed += 1
                print(f"FAIL {death}; lost in {outcome.phase}")
                print("".join(f"  {line}\n" for complaint in outcome.complaints for line in complaint.splitlines()), end="", flush=True)
    # A stopped rank does not even hear SIGTERM: the first that fails is one that met the deadline, and the tool kills the stopped one five seconds later.
    # The tool serves the store, so that of rank 0 is no special death there.
    for victim, phase, how, code, said, timeout_ms, most in (
            (2, "all_reduce", "kill", 137, r"^devicemesh run: rank 2 \(pid \d+\) was killed by signal 9 \(SIGKILL\)", 30_000, NOTICE + 2),
            (0, "init", "exit", 7, r"^devicemesh run: rank 0 \(pid \d+\) exited with code 7", 30_000, NOTICE + 2),
            (1, "barrier", "stop", 3, r"^devicemesh run: rank [023] \(pid \d+\) exited with code 3", SHORT_MS, SHORT_MS / 1000 + 1 + 5 + NOTICE)):
        print(under_the_tool(program, victim, phase, how, code, said, timeout_ms, most))
    print(f"{failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
