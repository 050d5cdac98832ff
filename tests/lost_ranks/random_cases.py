"""Random deaths: what run K of a seed does, and the table of what came of the runs.
tests/soak.py runs them by pytest."""

import os
import platform
import random
import statistics
import subprocess
import time

from support.paths import ROOT

from .death import SHORT_MS, Death
from .verdict import COLLECTIVES, KINDS, MAKING, NOTICE, STARVATION, STOP_EXTRA, STOP_SHARE

REPORT = ROOT / "docs/reliability.md"
BEGIN, END = "<!-- soak: written by make soak -->", "<!-- soak: end -->"


def planned(seed, number):
    """The death of run `number` of a seed. It depends on these two alone."""
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
    return Death(size, victim, how, phase,
                 max(delay, 0.0) if outside else delay, outside,
                 chance.choice((1, 1, 2)) if phase != "join" else 1, file=chance.random() < 0.15)


class Table:
    """The results of the runs, in the rows of docs/reliability.md."""

    def __init__(self):
        # (kind of phase, how the rank was lost): [runs, failures, [notices in seconds]]
        self.rows = {}
        self.again = []           # seconds that the next job on the same port took
        self.failed = []          # the numbers of the runs that failed

    def add(self, number, how, phase, notice, again, survivors, failed):
        row = self.rows.setdefault((KINDS.get(phase, "joining"), how), [0, 0, []])
        row[0] += 1
        row[1] += failed
        if survivors and not failed:
            row[2].append(notice)
        self.again.append(again)
        if failed:
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


def write_report(table, seed, runs, jobs, took):
    """Writes the table into docs/reliability.md."""
    commit = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    model = next((line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), platform.machine())
    bound = SHORT_MS / 1000 * STOP_SHARE + STOP_EXTRA + STARVATION
    lines = [
        BEGIN, "",
        f"{time.strftime('%Y-%m-%d')}, commit {commit or 'unknown'}, {os.cpu_count()} processors ({model}), Linux {platform.release()}, "
        f"{jobs} runs at a time, {took / 60:.0f} minutes. Seed {seed}: `make soak SEED={seed} RUNS={runs}`.", "",
        *table.lines(), "",
        "A notice is the time from the death (or, later, from its own call) to the last survivor's error: "
        f"at most {NOTICE:.0f} s for kill and exit. "
        f"A stopped rank, and one that died before it had reached the store, is missed at the deadline: here {SHORT_MS} ms, "
        f"so at most {bound:.2f} s (10 %, {1000 * STOP_EXTRA:.0f} ms, and {1000 * STARVATION:.0f} ms for busy processors). "
        f"The next job on the same port took {1000 * statistics.median(table.again):.0f} ms (median; max {1000 * max(table.again):.0f}).",
        *([f"Failed runs: {sorted(table.failed)}."] if table.failed else []), "", END]
    text = REPORT.read_text()
    head, _, rest = text.partition(BEGIN)
    REPORT.write_text(head + "\n".join(lines) + rest.partition(END)[2])
