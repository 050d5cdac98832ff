#!/usr/bin/env python3
"""`make trace-picture`: runs examples/hsdp_tp on eight processes with a recording each, makes their
trace by `devicemesh trace`, and draws some steps of it as docs/pictures/trace.svg.

    tests/trace_picture.py PROGRAM [-o FILE]

Each picture shows another run, so no test compares it. The colours and the style are those of
`devicemesh show --svg`: the picture is readable on light and dark pages."""

import argparse
import json
import statistics
import tempfile
from html import escape
from pathlib import Path

from support.paths import ROOT, TOOL
from support.processes import environment, run

# The dimensions in the order of the legend, each with its colour and what the training does there.
DIMENSIONS = {
    "tp": ("#77aadd", "tp: all-reduce of partial sums"),
    "shard": ("#44bb99", "shard: all-gather of weights, reduce-scatter of gradients"),
    "replicate": ("#ee8866", "replicate: all-reduce of gradients"),
    "data": ("#ccbb44", "data: all-reduce of the loss"),
}
PICTURE = ROOT / "docs/pictures/trace.svg"
STEPS = 3
LEFT, TOP, WIDTH, LANE, GAP = 64, 62, 760, 22, 6
# A call that waited for nobody has no length. It is drawn as a stroke.
THINNEST = 1.6
STYLE = """text{font:12px system-ui,'Segoe UI',Helvetica,Arial,sans-serif;fill:#1f2328}
.page{fill:#fff;stroke:#d8dee4}.lane{fill:#f2f4f7}.title{font-size:14px;font-weight:600}.note{fill:#59636e}
.axis{stroke:#59636e;stroke-opacity:.35}.end{text-anchor:end}.middle{text-anchor:middle}"""
DARK = """text{fill:#e6edf3}.page{fill:#0d1117;stroke:#30363d}.lane{fill:#1b212b}.note{fill:#9da7b3}.axis{stroke:#9da7b3}"""


def recorded(program):
    """The calls of a run: rank, dimension, number, text, begin and length in microseconds."""
    with tempfile.TemporaryDirectory() as folder:
        data = ROOT / "examples/data/digits.csv"
        run(TOOL, "run", "-n", 8, "--", program, "--data", data, env=environment(DM_TRACE_DIR=folder))
        run(TOOL, "trace", folder, "-o", f"{folder}/job.json")
        events = json.loads(Path(f"{folder}/job.json").read_text())["traceEvents"]
    # A rank has 64 lanes (tool/src/trace/chrome.rs).
    lanes = {event["tid"]: event["tid"] // 64 for event in events if event["ph"] == "X"}
    first = min(lanes.values())
    calls = []
    for event in events:
        dimension = event.get("cat", "").replace("/", "_").partition("_")[2]
        if event["ph"] == "X" and dimension in DIMENSIONS:
            call = (lanes[event["tid"]] - first, dimension, event["args"]["number"], event["name"], event["ts"], event["dur"])
            calls.append(call)
    return calls


def window(calls):
    """The begin and the end of some steps, of which half of all are shorter. A step ends with the
    sum of the loss."""
    ends = {}
    for _, dimension, number, _, begun, length in calls:
        if dimension == "data":
            ends[number] = max(ends.get(number, 0), begun + length)
    spans = [(ends[number + STEPS] - end, end) for number, end in ends.items() if number + STEPS in ends]
    middle = statistics.median_low([span for span, _ in spans])
    return next((end, end + span) for span, end in spans if span == middle)


def picture(calls):
    begin, end = window(calls)
    scale = WIDTH / (end - begin)
    bottom = TOP + 8 * (LANE + GAP)
    height = bottom + 74
    parts = [f'<rect class="page" x=".5" y=".5" width="{LEFT + WIDTH + 23}" height="{height - 1}" rx="6"/>',
             f'<text class="title" x="16" y="26">{STEPS} steps of examples/hsdp_tp on 8 processes of one host</text>',
             '<text class="note" x="16" y="45">A bar is the time of a rank in a call, which includes its wait for others. '
             'A stroke is a rank that came last.</text>']
    for rank in range(8):
        y = TOP + rank * (LANE + GAP)
        parts.append(f'<text class="end" x="{LEFT - 8}" y="{y + 15}">rank {rank}</text>'
                     f'<rect class="lane" x="{LEFT}" y="{y}" width="{WIDTH}" height="{LANE}"/>')
    step = next(step for step in (10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000) if step * scale >= 90)
    for tick in range(0, int(end - begin) + 1, step):
        x = LEFT + tick * scale
        parts.append(f'<line class="axis" x1="{x:.1f}" y1="{TOP - 4}" x2="{x:.1f}" y2="{bottom}"/>'
                     f'<text class="note middle" x="{x:.1f}" y="{bottom + 14}">{tick} µs</text>')
    for rank, dimension, number, name, begun, length in calls:
        if begun + length < begin or begun > end:
            continue
        left = max(LEFT, LEFT + (begun - begin) * scale)
        right = min(LEFT + WIDTH, LEFT + (begun + length - begin) * scale)
        y = TOP + rank * (LANE + GAP) + 2
        parts.append(f'<rect x="{left:.1f}" y="{y}" width="{max(right - left, THINNEST):.1f}" height="{LANE - 4}" '
                     f'fill="{DIMENSIONS[dimension][0]}"><title>rank {rank}, {escape(name)}, call {number}: {length:.0f} µs</title></rect>')
    for place, (colour, text) in enumerate(DIMENSIONS.values()):
        x, y = LEFT + place // 2 * WIDTH // 2, height - 42 + place % 2 * 20
        parts.append(f'<rect x="{x}" y="{y}" width="11" height="11" rx="2" fill="{colour}"/>'
                     f'<text x="{x + 16}" y="{y + 10}">{escape(text)}</text>')
    width = LEFT + WIDTH + 24
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">\n'
            f'<title>{STEPS} steps of a training on 8 processes: the calls of each rank</title>\n'
            f'<style>{STYLE}\n@media (prefers-color-scheme:dark){{{DARK}}}</style>\n' + "\n".join(parts) + "\n</svg>\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", type=Path, help="examples/hsdp_tp, built")
    parser.add_argument("-o", "--output", type=Path, default=PICTURE)
    options = parser.parse_args()
    options.output.write_text(picture(recorded(options.program)))


if __name__ == "__main__":
    main()
