#!/usr/bin/env python3
"""`make soak`: random deaths of ranks. Any rank of 2 to 8 is killed, stopped or exits anywhere; every other rank must get an error that names it in time, nothing
may be left, and a new job on the same port must start at once and go through everything.

Each run is made from the seed and its number alone: `tests/soak/run.py --seed S --only K` repeats run K."""

import argparse
import os
import platform
import random
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from death import SHORT_MS, Death, suffer
from job import ROOT, build
from verdict import COLLECTIVES, KINDS, MAKING, NOTICE, STARVATION, STOP_EXTRA, STOP_SHARE

REPORT = ROOT / "docs/reliability.md"
BEGIN, END = "<!-- soak: written by make soak -->", "<!-- soak: end -->"


def planned(seed, number):
    """Run `number` of a seed."""
    chance = random.Random(f"{seed}/{number}")
    size = chance.choice((2, 3, 4, 4, 5, 6, 7, 8))
    victim = chance.choice((0, size - 1, chance.randrange(size)))
    how = chance.choices(("kill", "exit", "stop"), (5, 3, 2))[0]
    kind = chance.choices(("join", "absent", "barrier", "make", "collective", "finalize", "free"), (10, 6, 10, 30, 28, 14, 2))[0]
    if kind == "absent" and (size < 3 or how != "kill"):
        kind = "join"
    if kind == "absent":
        victim = chance.randrange(1, size)
        absent = chance.choice([rank for rank in range(1, size) if rank != victim])
        return Death(size, victim, how, "join", outside=True, absent=absent)
    phase = {"make": chance.choice(MAKING), "collective": chance.choice(COLLECTIVES)}.get(kind, kind)
    longest = chance.choice((0.0005, 0.005, 0.05))
    delay = -1.0 if phase == "free" or chance.random() < 0.2 else chance.uniform(0.0, longest)
    outside = how != "exit" and phase != "free" and chance.random() < 0.6
    return Death(size, victim, how, phase, max(delay, 0.0) if outside else delay, outside, chance.choice((1, 1, 2)) if phase != "join" else 1,
                 file=chance.random() < 0.15)


class Table:
    """What the runs so far have come to."""

    def __init__(self):
        self.lock = threading.Lock()
        self.rows = {}            # (kind of phase, how): [runs, failed, [notices]]
        self.again = []
        self.failed = []

    def add(self, number, death, outcome):
        with self.lock:
            row = self.rows.setdefault((KINDS.get(outcome.phase or death.phase, "joining"), death.how), [0, 0, []])
            row[0] += 1
            row[1] += bool(outcome.complaints)
            if outcome.survivors and not outcome.complaints:
                row[2].append(outcome.notice)
            self.again.append(outcome.again)
            if outcome.complaints:
                self.failed.append(number)

    def lines(self):
        def ms(values):
            return f"{1000 * statistics.median(values):.0f} | {1000 * max(values):.0f}" if values else "- | -"
        kinds = list(dict.fromkeys(KINDS.values()))
        rows = sorted(self.rows.items(), key=lambda item: (kinds.index(item[0][0]), item[0][1]))
        yield "| phase of the lost rank | how | runs | failures | slowest notice: median ms | max ms |"
        yield "|---|---|---|---|---|---|"
        for (kind, how), (runs, failures, notices) in rows:
            yield f"| {kind} | {how} | {runs} | {failures} | {ms(notices)} |"
        runs, failures = sum(row[0] for row in self.rows.values()), len(self.failed)
        yield f"| all | | {runs} | {failures} | | |"


def one(program, table, seed, number, options):
    death = planned(seed, number)
    outcome = suffer(program, death, again=not options.no_again)
    table.add(number, death, outcome)
    if outcome.complaints or options.verbose:
        verdict = "FAIL" if outcome.complaints else "ok"
        text = "".join(f"\n  {line}" for complaint in outcome.complaints for line in complaint.splitlines())
        print(f"{verdict} run {number} of seed {seed}: {death}; lost in {outcome.phase}; notice {1000 * outcome.notice:.0f} ms{text}", flush=True)


def write_report(table, seed, took, options):
    commit = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    model = next((line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), platform.machine())
    bound = SHORT_MS / 1000 * STOP_SHARE + STOP_EXTRA + STARVATION
    lines = [
        BEGIN, "",
        f"{time.strftime('%Y-%m-%d')}, commit {commit or 'unknown'}, {os.cpu_count()} processors ({model}), Linux {platform.release()}, {options.jobs} runs at a time, "
        f"{took / 60:.0f} minutes. Seed {seed}: `make soak SEED={seed} RUNS={options.runs}`.", "",
        *table.lines(), "",
        f"A notice is the time from the death (or, later, from its own call) to the last survivor's error: at most {NOTICE:.0f} s for kill and exit. A stopped rank, and one that "
        f"died before it had reached the store, is missed at the deadline: here {SHORT_MS} ms, so at most {bound:.2f} s (10 %, {1000 * STOP_EXTRA:.0f} ms, and {1000 * STARVATION:.0f} ms for busy processors). "
        f"The next job on the same port took {1000 * statistics.median(table.again):.0f} ms (median; max {1000 * max(table.again):.0f}).",
        *([f"Failed runs: {sorted(table.failed)}."] if table.failed else []), "", END]
    text = REPORT.read_text()
    head, _, rest = text.partition(BEGIN)
    REPORT.write_text(head + "\n".join(lines) + rest.partition(END)[2])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=600)
    parser.add_argument("--seed", type=int, default=int(os.environ.get("DM_SEED", "0")) or random.randrange(1, 1 << 31))
    parser.add_argument("--only", type=int, action="append", metavar="K", help="only run K of the seed")
    parser.add_argument("--jobs", type=int, default=3, help="how many at a time")
    parser.add_argument("--verbose", action="store_true", help="a line for each run")
    parser.add_argument("--no-again", action="store_true", help="no new job on the same port")
    parser.add_argument("--report", action="store_true", help=f"write the figures into {REPORT.relative_to(ROOT)}")
    options = parser.parse_args()
    program = build()
    print(f"seed {options.seed} (DM_SEED)", flush=True)
    table, began = Table(), time.monotonic()
    numbers = options.only or range(options.runs)
    with ThreadPoolExecutor(1 if options.only else options.jobs) as pool:
        for _ in pool.map(lambda number: one(program, table, options.seed, number, options), numbers):
            pass
    print("\n".join(table.lines()))
    print(f"{len(numbers)} runs, {len(table.failed)} failed, {time.monotonic() - began:.0f} s")
    for number in sorted(table.failed):
        print(f"again: python3 tests/soak/run.py --seed {options.seed} --only {number}")
    if options.report and not options.only:
        write_report(table, options.seed, time.monotonic() - began, options)
    return 1 if table.failed else 0


if __name__ == "__main__":
    sys.exit(main())
