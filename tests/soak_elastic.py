#!/usr/bin/env python3
"""`make soak-elastic`: jobs of examples/elastic.cpp whose ranks are killed and stopped at random
moments, while they join, train, recover and end, one to three at a time. Every job must end right,
or on all ranks with one error that the losses explain. Nothing may hang, be left or be computed
wrongly.

Each run's plan depends on the seed and its number alone:
`tests/soak_elastic.py --program P --seed S --only K` repeats run K."""

import argparse
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from elastic.plan import planned
from elastic.verdict import suffer, undisturbed
from support.paths import TOOL


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", required=True, help="examples/elastic.cpp, built")
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, metavar="K", help="begin with run K of the seed, as the continuation of an earlier soak")
    parser.add_argument("--seed", type=int, default=random.randrange(1, 1 << 31))
    parser.add_argument("--only", type=int, metavar="K", help="only run K of the seed, and show all that it says")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--seconds", type=float, help="start no further run after so many seconds")
    parser.add_argument("--restarts", choices=["no", "yes", "both"], default="both", help="whether lost ranks start again alone")
    parser.add_argument("--hosts", action="store_true", help="on four hosts, which also fall silent; without restarts")
    parser.add_argument("--folder", type=Path, help="keeps what failed runs have said")
    options = parser.parse_args()
    # A process that enters a host's namespaces has / as its working folder, where a relative path
    # leads nowhere.
    options.program = Path(options.program).resolve()
    print(f"seed {options.seed}", flush=True)
    expected = undisturbed(TOOL, options.program)
    counts, failed, lock, began = Counter(), [], threading.Lock(), time.monotonic()

    def run(number):
        if options.seconds and time.monotonic() - began > options.seconds:
            return
        plan = planned(options.seed, number, options.restarts, options.hosts)
        with tempfile.TemporaryDirectory() as folder:
            outcome = suffer(TOOL, options.program, plan, expected, folder)
        with lock:
            counts.update(outcome.counts)
            if outcome.complaints:
                failed.append(number)
                print(f"run {number}: {plan}\n  " + "\n  ".join(outcome.complaints), flush=True)
                if options.folder:
                    options.folder.mkdir(parents=True, exist_ok=True)
                    (options.folder / f"run-{number}.txt").write_text(f"{plan}\n{outcome.said}")
            if options.only is not None:
                print(f"{plan}\n{outcome.said}")

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(run, [options.only] if options.only is not None else range(options.first, options.runs)))
    print("; ".join(f"{name}: {count}" for name, count in sorted(counts.items())) + f"; {time.monotonic() - began:.0f} s")
    print(f"{counts['runs'] - len(failed)} right, {len(failed)} wrong" + (f": {sorted(failed)}" if failed else ""))
    for number in sorted(failed):
        print(f"again: tests/soak_elastic.py --program {options.program} --seed {options.seed} --restarts {options.restarts}{' --hosts' if options.hosts else ''} --only {number}")
    return 1 if failed or not counts["runs"] else 0


if __name__ == "__main__":
    sys.exit(main())
