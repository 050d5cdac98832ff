#!/usr/bin/env python3
"""libdevicemesh beside Gloo, MPICH, Open MPI and PyTorch's gloo backend: the same work on the same
machine, in turn.

`make bench`. Cases: start, idle, collectives, hosts (hosts.py: collectives over several hosts,
which are namespaces and need root), and mesh and store, which are `make bench-mesh` and `make
bench-store`. A peer that is not here is left out, with a line that says so (`make bench-peers`
fetches them). A cell has no figure where the library does not have the case, or had no time for it.
DM_BENCH_LIB names another libdevicemesh.so than this tree's, DM_BENCH_PYTHON an interpreter with
PyTorch. docs/performance.md says how each figure is measured."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import hosts
from contestants import NAMES, ROOT, Contestant, Missing, end, lines_of, load, memory, scheduling
from plot import svg
from table import LARGE, MOVED, whole

sys.path.insert(0, str(ROOT / "benches"))
from common import in_turn, machine, today  # noqa: E402

CASES = ["start", "idle", "collectives", "hosts", "mesh", "store"]
SIZES = "4,64,1K,16K,64K,256K,1M,4M,16M,64M,256M"
OPERATIONS = ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv"]
DOCUMENT = ROOT / "docs/performance.md"
PLACE = re.compile(r"(<!-- bench -->\n).*(<!-- end of bench -->)", re.S)
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def size_of(text):
    return int(text[:-1]) * UNITS[text[-1].upper()] if text[-1].upper() in UNITS else int(text)


def listed(kind):
    return lambda text: [kind(part) for part in text.split(",")]


def one_of(names):
    def name(text):
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(names)}")
        return text
    return name


def measure(case, contestant, options, ranks, round_number, report):
    """One contestant's part of a round."""
    about = {"library": contestant.name, "ranks": ranks, "round": round_number}
    if case == "collectives":
        try:
            found = contestant.output(options.scheduling, ranks, "collectives", options.budget,
                                      ",".join(options.operations), ",".join(options.dtypes),
                                      ",".join(map(str, options.sizes)), timeout=options.longest)
        except subprocess.TimeoutExpired as late:
            # Its figures up to then stand in the tables.
            found = late.output or ""
            report["late"].append({**about, "longest": options.longest})
        report[case] += [{**about, **line} for line in lines_of(found)]
    elif case == "idle":
        report[case] += [{**about, **line} for line in lines_of(contestant.output(options.scheduling, ranks, "idle", 2))]
    elif contestant.name != "gloo":
        for command in ("start", "phases") if contestant.name == "ours" else ("start",):
            report[case] += [{**about, "apart": command == "phases", **line}
                             for line in lines_of(contestant.output(options.scheduling, ranks, command))]


def one_round(cases, contestants, options, round_number, report, keep):
    """Measures every contestant once in every case."""
    most = max(MOVED[operation](max(options.ranks or [8])) for operation in options.operations) * max(options.sizes)
    if "collectives" in cases and most >= LARGE:
        report["memory"] += lines_of(memory(options.scheduling))
    for case in cases:
        for ranks in options.ranks or ([2, 4, 8, 16, 32] if case == "start" else [2, 4, 8]):
            for contestant in in_turn(contestants, round_number):
                measure(case, contestant, options, ranks, round_number, report)
                keep()


def contestants_of(options):
    found = []
    for name in options.libraries:
        try:
            found.append(Contestant(name))
        except Missing as missing:
            print(f"no {NAMES[name]} here: {missing}", file=sys.stderr)
    return found


def update_document(report, drawing):
    """Writes the whole report into a file beside the page, and the most important tables into the
    page."""
    page = DOCUMENT.read_text()
    DOCUMENT.with_name("bench.txt").write_text("\n".join([whole(report), *hosts.tables(report)]) + "\n")
    first = [run for run in report["collectives"] if (run["operation"], run["dtype"]) == ("all_reduce", "float32")]
    text, picture = whole({**report, "collectives": first}), ""
    if drawing:
        DOCUMENT.with_name("bench.svg").write_text(drawing)
        picture = "![Bus bandwidth of all-reduce](bench.svg)\n\n"
    DOCUMENT.write_text(PLACE.sub(lambda match: f"{match[1]}{picture}```\n{text}\n```\n{match[2]}", page))


def main():
    # SIGTERM ends the bench as Ctrl-C does: with the processes that it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("bench.py: got SIGTERM"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", type=listed(one_of(CASES)), default=CASES, help=f"any of {','.join(CASES)}")
    parser.add_argument("--libraries", type=listed(one_of(list(NAMES))), default=list(NAMES), help=f"any of {','.join(NAMES)}")
    parser.add_argument("--ranks", type=listed(int), help="2,4,8; of start 2,4,8,16,32")
    parser.add_argument("--sizes", type=listed(size_of), help=f"bytes, as 4,64K,256M; of collectives {SIZES}, of hosts 4,64K,1M")
    parser.add_argument("--layouts", type=listed(one_of(hosts.LAYOUTS)), default=hosts.LAYOUTS,
                        help=f"of hosts: any of {','.join(hosts.LAYOUTS)} (hosts x ranks on each)")
    parser.add_argument("--whole", action="store_true", help="of hosts: 64M too, which takes some minutes a round")
    parser.add_argument("--operations", type=listed(one_of(OPERATIONS)), default=OPERATIONS, help=f"any of {','.join(OPERATIONS)}")
    parser.add_argument("--dtypes", type=listed(one_of(["float32", "bfloat16"])), default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=100, help="milliseconds for each size of a collective, after its warm-up")
    parser.add_argument("--longest", type=float, default=1800, metavar="S",
                        help="seconds that one library may take for its collectives on one number of ranks in one round; then it is ended, "
                        "and the tables have what it has measured and say so")
    parser.add_argument("--load", type=int, default=0, metavar="N",
                        help="N processes compute all the time beside the contestants; the cases mesh and store are left out, "
                        "--scheduling is none and --budget 500; an option that is given beside --load wins")
    parser.add_argument("--same-inputs", action="store_true",
                        help="nobody writes to the inputs of collectives; otherwise each rank writes its whole input before each iteration, "
                        "outside the measured time")
    parser.add_argument("--scheduling", choices=["auto", "realtime", "autogroup", "none"], default="auto",
                        help="how the processes are preferred to other work of the machine")
    parser.add_argument("--json", type=Path, help="keep every figure here, and add to it after each run")
    parser.add_argument("--svg", type=Path, help="draw the bus bandwidth of the first operation and type here")
    parser.add_argument(
        "--update-docs", action="store_true",
        help="put the tables into docs/bench.txt, what is asked for most and the drawing into docs/performance.md")
    parser.add_argument("--quick", action="store_true",
                        help="the 24 rows that matter most, in 1 to 8 minutes: each collective and the message on 2 and 8 ranks, "
                        "with 4 bytes and 64 MiB of float32, one round; an option that is given beside --quick wins")
    known = parser.parse_known_args()[0]
    if known.load:
        parser.set_defaults(scheduling="none", budget=500)
    if known.quick:
        parser.set_defaults(case=["collectives"], ranks=[2, 8], sizes=[4, 64 << 20], dtypes=["float32"], rounds=1, longest=45)
    options = parser.parse_args()
    if options.quick and options.update_docs:
        parser.error("--quick has too few rows for --update-docs")
    if options.load and options.update_docs:
        parser.error("--update-docs writes the tables of a machine without other work, so --load cannot be beside it")
    if options.same_inputs and options.update_docs:
        parser.error("--update-docs writes the tables of inputs that are written before each iteration, so --same-inputs cannot be beside it")
    cases, measures_hosts = [case for case in CASES[:3] if case in options.case], "hosts" in options.case
    keep = lambda: options.json and options.json.write_text(json.dumps(report, indent=1))
    report = {
        "machine": machine(), "date": today(), "rounds": options.rounds, "load": options.load, "versions": {}, "start": [], "idle": [],
        "memory": [], "collectives": [], "late": []
    }
    if cases or measures_hosts:
        options.scheduling = report["scheduling"] = scheduling(options.scheduling)
        contestants = contestants_of(options)
        report["versions"] = {contestant.name: contestant.version for contestant in contestants}
        if options.load:
            os.environ["DM_BENCH_WHOLE_BUDGET"] = "1"
        if options.same_inputs:
            os.environ["DM_BENCH_SAME_INPUTS"] = "1"
        with load(options.load):
            if measures_hosts:
                hosts.measure(contestants, options, report, in_turn, keep)
            options.sizes = options.sizes or listed(size_of)(SIZES)
            for round_number in range(options.rounds if cases else 0):
                one_round(cases, contestants, options, round_number, report, keep)
        text, drawing = "\n".join([whole(report), *hosts.tables(report)]), svg(report, options.operations[0], options.dtypes[0])
        print(text, flush=True)
        if options.svg and drawing:
            options.svg.write_text(drawing)
        if options.update_docs:
            update_document(report, drawing)
    for case, script in (("mesh", "mesh.py"), ("store", "store_start.py")):
        if case in options.case and not options.load:
            print(f"\n{case}", flush=True)
            command = [sys.executable, ROOT / "benches" / script, "--rounds", str(options.rounds)]
            with subprocess.Popen(command, start_new_session=True) as started:
                try:
                    code = started.wait()
                finally:
                    end(started)
            if code:
                sys.exit(f"{script}: exit code {code}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
