#!/usr/bin/env python3
"""libdevicemesh beside Gloo, MPICH, Open MPI and PyTorch's gloo backend, with the same work on the same machine, in turn."""

import argparse
import json
import sys
from pathlib import Path

from contestants import NAMES, Contestant, Missing, scheduling
from table import collectives_table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import in_turn, machine, today  # noqa: E402

OPERATIONS = ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv"]
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def size_of(text):
    return int(text[:-1]) * UNITS[text[-1].upper()] if text[-1].upper() in UNITS else int(text)


def listed(kind):
    return lambda text: [kind(part) for part in text.split(",")]


def collectives(contestants, options, report, save):
    sizes = ",".join(str(size) for size in options.sizes)
    for round_number in range(options.rounds):
        for contestant in in_turn(contestants, round_number):
            for ranks in options.ranks:
                output = contestant.output(options.scheduling, ranks, "collectives", options.budget, ",".join(options.operations), ",".join(options.dtypes), sizes)
                for line in output.splitlines():
                    if line.startswith("{"):
                        report["collectives"].append({"library": contestant.name, "ranks": ranks, "round": round_number, **json.loads(line)})
                save()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=listed(int), default=[2, 4, 8])
    parser.add_argument("--sizes", type=listed(size_of), default=listed(size_of)("4,64,1K,16K,64K,256K,1M,4M,16M,64M,256M"))
    parser.add_argument("--operations", type=listed(str), default=OPERATIONS)
    parser.add_argument("--dtypes", type=listed(str), default=["float32", "bfloat16"])
    parser.add_argument("--libraries", type=listed(str), default=list(NAMES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=150, help="milliseconds for a case")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--scheduling", choices=["auto", "realtime", "autogroup", "none"], default="auto")
    options = parser.parse_args()
    options.scheduling = scheduling(options.scheduling)
    contestants = []
    for name in options.libraries:
        try:
            contestants.append(Contestant(name))
        except Missing as missing:
            print(f"no {NAMES[name]} here: {missing}", file=sys.stderr)
    report = {"machine": machine(), "date": today(), "rounds": options.rounds, "scheduling": options.scheduling,
              "versions": {contestant.name: contestant.version for contestant in contestants}, "collectives": []}
    def save():
        if options.json:
            options.json.write_text(json.dumps(report, indent=1))

    collectives(contestants, options, report, save)
    print(collectives_table(report))


if __name__ == "__main__":
    main()
