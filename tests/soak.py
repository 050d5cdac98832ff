#!/usr/bin/env python3
"""`make soak`: the random cases of tests/test_lost_ranks.py. Any rank of 2 to 8 is killed, stopped
or exits anywhere; every other rank must get an error that names it in time, nothing may be left,
and a new job on the same port must make every call without an error.

Each run depends on the seed and its number alone: `tests/soak.py --seed S --only K` repeats run
K. With --shrink the survivors go on by dm_shrink instead. With --hosts the ranks are on four hosts,
of which some fall silent, are parted from the others, or have a bad network."""

import argparse
import os
import random
import subprocess
import sys

from run import ROOT, pytest_python


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, help="600; with --hosts 500")
    parser.add_argument("--seed", type=int, default=int(os.environ.get("DM_SEED", "0")) or random.randrange(1, 1 << 31))
    parser.add_argument("--only", type=int, metavar="K", help="only run K of the seed")
    parser.add_argument("--jobs", type=int, default=3, help="how many at a time")
    parser.add_argument("--shrink", action="store_true", help="the survivors go on without the lost ranks")
    parser.add_argument("--hosts", action="store_true", help="jobs on four hosts")
    parser.add_argument("--report", action="store_true", help="write the figures into docs/reliability.md")
    options = parser.parse_args()
    name = "test_survivors_shrink" if options.shrink else "test_random_fault" if options.hosts else "test_random_death"
    options.runs = options.runs or (500 if options.hosts else 600)
    file = "tests/test_lost_hosts.py" if options.hosts else "tests/test_lost_ranks.py"
    print(f"seed {options.seed}", flush=True)
    command = [pytest_python(), "-m", "pytest", "-q", "-p", "lost_ranks.summary", file]
    if options.only is None:
        command += [f"--name={name}[", f"--random-deaths={options.runs}", "-n", str(options.jobs)]
    else:
        command += [f"--name={name}[{options.only}]", f"--random-deaths={options.only + 1}", "-n", "0"]
    command += ["--report"] if options.report and options.only is None and not options.shrink and not options.hosts else []
    environment = {**os.environ, "DM_SEED": str(options.seed), "PYTHONPATH": str(ROOT / "tests")}
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
