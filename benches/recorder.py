#!/usr/bin/env python3
"""Measures what the recording of calls costs (docs/recording.md). It compares the usual build of
the library, the same build with DM_RECORDER=0, and a build without the recorder, in turn in the
same processes.

`make bench-recorder`. The build without the recorder is for this comparison alone: it is compiled
with --cfg devicemesh_without_recorder, in target/without-recorder. Each round makes a block of
calls in each library. The processes are started anew several times, because the addresses that they
get change the times by some dozens of nanoseconds. A difference is the median of the differences in
each round, because other work on the machine disturbs this median less than the difference of two
medians. --also NAME=LIBRARY adds another libdevicemesh.so, for example one from before a
change."""

import argparse
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import ROOT, machine, today

HERE = Path(__file__).resolve().parent
DOCUMENT = ROOT / "docs/recording.md"
PLACE = re.compile(r"(<!-- bench-recorder -->\n).*(<!-- end of bench-recorder -->)", re.S)
CASES = {
    "all_reduce": "all-reduce of 4 bytes",
    "all_reduce_large": "all-reduce of 64 KiB",
    "send_recv": "4 bytes to a rank and back, one way",
    "init": "`dm_init` and `dm_free`",
}


def run(command, **options):
    done = subprocess.run([str(part) for part in command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, **options)
    if done.returncode != 0:
        raise SystemExit(f"{command[0]}: exit code {done.returncode}")
    return done.stdout


def build(target, flags):
    """libdevicemesh.so of this tree, compiled with these flags into that folder."""
    environment = {**os.environ, "CARGO_TARGET_DIR": str(target), "RUSTFLAGS": " ".join([os.environ.get("RUSTFLAGS", ""), flags]).strip()}
    if not environment["RUSTFLAGS"]:
        del environment["RUSTFLAGS"]
    run(["cargo", "build", "--release", "--quiet", "--package", "devicemesh", "--lib"], cwd=ROOT, env=environment)
    return target / "release/libdevicemesh.so"


def libraries(also, folder):
    """Returns the libraries by name. Each is a file of its own, because the dynamic linker loads a
    file once."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    usual, without = build(target, ""), build(target / "without-recorder", "--cfg devicemesh_without_recorder")
    found = {"without": without, "with": usual, "off": usual, **dict(one.split("=", 1) for one in also)}
    return {name: shutil.copy(path, folder / f"{name}.so") for name, path in found.items()}


def instructions(program, name, library, folder):
    """Returns how many instructions the processor executes for one all-reduce of 4 bytes on one
    rank; None without valgrind."""
    environment = {**os.environ, "DM_RECORDER": "0" if name == "off" else "1"}
    if not shutil.which("valgrind"):
        return None
    def total(calls):
        scratch = tempfile.mkdtemp(dir=folder)
        command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={scratch}/out", program, "count", calls, scratch, library]
        run(command, stderr=subprocess.DEVNULL, env=environment)
        return int(re.search(r"^(?:totals|summary): (\d+)", Path(scratch, "out").read_text(), re.M).group(1))
    few, many = 20_000, 40_000
    return (total(many) - total(few)) / (many - few)


def differences(lines, name, base):
    """The difference to `base` in each round."""
    times = lambda wanted: {line["round"]: line["ns"] for line in lines if line["name"] == wanted}
    ours, theirs = times(name), times(base)
    return [ours[number] - theirs[number] for number in ours]


def shown(ns):
    return f"{ns:,.0f} ns" if abs(ns) < 10_000 else f"{ns / 1000:,.1f} us"


def rows(lines, names):
    """The rows of the table: the time without the recorder, and what each other library adds."""
    for case, title in CASES.items():
        for ranks in sorted({line["ranks"] for line in lines if line["case"] == case}):
            of = [line for line in lines if (line["case"], line["ranks"]) == (case, ranks)]
            base = statistics.median(line["ns"] for line in of if line["name"] == "without")
            cells = [title, str(ranks), shown(base)]
            for name in names:
                low, middle, high = statistics.quantiles(differences(of, name, "without"), n=4)
                cells.append(f"{middle:+,.0f} ns ({low:+,.0f} to {high:+,.0f})")
            yield cells


def table(lines, names, counted):
    titles = {"with": "with the recorder", "off": "with `DM_RECORDER=0`"}
    head = ["call", "ranks", "without a recorder", *(titles.get(name, name) for name in names)]
    body = list(rows(lines, names))
    if counted["without"] is not None:
        added = [f"{counted[name] - counted['without']:+.0f}" for name in names]
        body.append(["all-reduce of 4 bytes (instructions, not ns)", "1", f"{counted['without']:.0f}", *added])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *body])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 8])
    parser.add_argument("--cases", type=lambda text: text.split(","), default=list(CASES), help=", ".join(CASES))
    parser.add_argument("--runs", type=int, default=12, help="how often the processes are started anew")
    parser.add_argument("--rounds", type=int, default=25, help="the rounds of each run")
    parser.add_argument("--calls", type=int, default=2000, help="the calls of a block; large ones and dm_init are fewer")
    parser.add_argument("--also", action="append", default=[], metavar="NAME=LIBRARY", help="another libdevicemesh.so")
    parser.add_argument("--json", type=Path, help="keep every figure here")
    parser.add_argument("--update-docs", action="store_true", help="put the table into docs/recording.md")
    options = parser.parse_args()
    if wrong := [case for case in options.cases if case not in CASES]:
        parser.error(f"no such case: {', '.join(wrong)}")
    with tempfile.TemporaryDirectory(prefix="dm-bench-") as folder:
        folder = Path(folder)
        found, program = libraries(options.also, folder), folder / "recorder"
        run([os.environ.get("CC", "cc"), "-std=c11", "-O2", "-Wall", "-Wextra", f"-I{ROOT}/include", HERE / "recorder.c", "-o", program, "-ldl"])
        lines = []
        for ranks, run_number in ((ranks, number) for number in range(options.runs) for ranks in options.ranks):
            scratch = tempfile.mkdtemp(dir=folder)
            cases = ",".join(case for case in options.cases if case != "send_recv" or ranks > 1)
            contestants = [f"{name}={path}" for name, path in random.sample(list(found.items()), len(found))]
            said = run([program, ranks, options.rounds, options.calls, scratch, cases, *contestants])
            told = [json.loads(line) for line in said.splitlines()]
            lines += [{**line, "round": run_number * options.rounds + line["round"]} for line in told]
        counted = {name: instructions(program, name, path, folder) for name, path in found.items()}
    names = [name for name in found if name != "without"]
    text = table(lines, names, counted)
    print(text)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "date": today(), "lines": lines, "counted": counted}, indent=1))
    if options.update_docs:
        about = f"{machine()}, {today()}; {options.runs} runs of {options.rounds} rounds, the quartiles in brackets."
        page = DOCUMENT.read_text()
        DOCUMENT.write_text(PLACE.sub(lambda place: f"{place[1]}{about}\n\n{text}\n{place[2]}", page))
    return 0


if __name__ == "__main__":
    sys.exit(main())
