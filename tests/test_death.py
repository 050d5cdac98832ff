#!/usr/bin/env python3
"""A rank lost in each phase in each way: killed, stopped, exited; before the phase's first call and in the middle; by itself and from outside. What tests/soak does
at random, as a fixed set that is quick. Also under `devicemesh run`, which ends the job."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "soak"))

from death import Death, suffer  # noqa: E402
from job import TOOL, build  # noqa: E402
from verdict import COLLECTIVES, MAKING, NOTICE  # noqa: E402

# A stopped rank is missed at the deadline, so it is short here.
SHORT_MS = 1000
PHASES = ("join", *MAKING, *COLLECTIVES, "barrier", "finalize", "free")


def fixed():
    """(death, whether a new job follows on the same port)"""
    number = 0
    for phase in PHASES:
        for how in ("kill", "exit", "stop"):
            size = 3 + number % 2
            victim = (number * 5 // 2) % size
            delay = -1.0 if phase == "free" else (-1.0, 0.0002, 0.001)[number % 3]
            outside = how != "exit" and delay >= 0 and phase != "free"
            yield Death(size, victim, how, phase, delay, outside, short_ms=SHORT_MS), number % 3 == 0
            number += 1
    # Ranks that wait in the store for one that has not come.
    for victim in (1, 3):
        yield Death(4, victim, "kill", "join", outside=True, absent=2), True


def under_the_tool(program, how, code, said):
    """The tool says who failed first and ends the job when the others have had their error; they name the rank too."""
    began = time.monotonic()
    environment = {**os.environ, "DM_TIMEOUT_MS": "30000", "DM_DIE": f"2:all_reduce:{how}:300"}
    ended = subprocess.run([TOOL, "run", "-n", "4", "--prefix", "--grace-period", "10", "--", program], env=environment, capture_output=True, text=True, timeout=60)
    took = time.monotonic() - began
    assert ended.returncode == code, f"exit code {ended.returncode}, expected {code}: {ended.stderr}"
    first = ended.stderr.splitlines()[0]
    assert first.startswith("devicemesh run: rank 2 ") and said in first, ended.stderr
    errors = [line for line in ended.stdout.splitlines() if "] error " in line]
    assert len(errors) == 3, errors
    assert took < NOTICE + 3, f"the job ended after {took:.2f} s"
    return f"devicemesh run: {first.removeprefix('devicemesh run: ')}; the job ended after {took:.2f} s"


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
    for how, code, said in (("kill", 137, "SIGKILL"), ("exit", 7, "exited with code 7")):
        print(under_the_tool(program, how, code, said))
    print(f"{failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
