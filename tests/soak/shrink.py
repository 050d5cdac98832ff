#!/usr/bin/env python3
"""Going on without lost ranks, over and over: 2 to 6 ranks, of which some end at random moments while the others shrink, slice ranges and compute
(tests/c/programs/shrink.c). Each rank must end, be left out, or come to a mesh that joins the ranks it says. Ends with 1 and the seeds that failed.

`tests/soak/shrink.py --runs 100 --seed 1`; a seed repeats its plan, not its moments."""

import argparse
import os
import subprocess
import sys

from job import SCRATCH, TOOL, build

DEADLINE = 120


def complaints(program, seed):
    size, lost = 2 + seed % 5, SCRATCH / f"shrink-lost-{os.getpid()}-{seed}"
    environment = {**os.environ, "DM_SEED": str(seed), "DM_LOST": str(lost)}
    command = [TOOL, "run", "-n", str(size), "--grace-period", str(DEADLINE), "--timeout", str(DEADLINE), program]
    lost.write_text("")
    try:
        ran = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        dead = {int(line) for line in lost.read_text().split()}
    finally:
        lost.unlink()
    words = [line.split() for line in ran.stdout.splitlines()]
    left = [int(line[1]) for line in words if line and line[0] in ("done", "out")]
    odd = [" ".join(line) for line in words if not line or line[0] not in ("done", "out")]
    if not dead:
        odd.append("nobody died")
    if sorted([*dead, *left]) != list(range(size)):
        odd.append(f"of {size} ranks {sorted(dead)} died and {sorted(left)} went on or out")
    return odd + ran.stderr.splitlines() if odd else []


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    program, failed = build("shrink"), []
    for seed in range(options.seed, options.seed + options.runs):
        odd = complaints(program, seed)
        if odd:
            failed.append(seed)
            print(f"seed {seed}:", *odd, sep="\n  ", flush=True)
    print(f"{options.runs} runs, {len(failed)} failed" + (f": {failed}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
