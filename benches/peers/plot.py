"""A report of bench.py as an SVG: bus bandwidth against size, both logarithmic, a panel for each
number of ranks and a line for each library.

`python3 benches/peers/plot.py REPORT.json OUT.svg [OPERATION]` draws one again."""

import json
import math
import statistics
import sys
from pathlib import Path

from table import TITLES, best, figure, size_text

COLORS = {"ours": "#c2410c", "gloo": "#0f766e", "mpich": "#7c3aed", "openmpi": "#2563eb", "torch": "#64748b"}
PANEL, HEIGHT, LEFT, TOP, GAP, BOTTOM = 300, 250, 64, 74, 40, 62


def bus_bandwidth(operation, ranks, size, seconds):
    """The bus bandwidth as nccl-tests defines it: the bytes per second that each link would
    carry."""
    factor = {"all_reduce": 2 * (ranks - 1) / ranks, "all_gather": (ranks - 1) / ranks, "reduce_scatter": (ranks - 1) / ranks,
              "all_to_all": (ranks - 1) / ranks}.get(operation, 1.0)
    return size * factor / seconds


def curves(report, operation, dtype):
    """{ranks: {library: [(bytes, bytes per second)]}}"""
    runs = {}
    for run in report["collectives"]:
        if run["operation"] == operation and run["dtype"] == dtype:
            runs.setdefault(run["ranks"], {}).setdefault(run["library"], {}).setdefault(run["bytes"], []).append(run)
    return {
        ranks: {
            library: [(size, bus_bandwidth(operation, ranks, size, statistics.median(best(found, figure(report))[0].values())))
                      for size, found in sorted(sizes.items())]
            for library, sizes in libraries.items()
        }
        for ranks, libraries in sorted(runs.items())
    }


def text(x, y, content, size=12, anchor="start", color="#334155", weight="normal", extra=""):
    content = str(content).replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{color}" font-weight="{weight}" {extra}>{content}</text>'


def rate_text(exponent):
    return [
        "1 B/s", "10 B/s", "100 B/s", "1 kB/s", "10 kB/s", "100 kB/s", "1 MB/s", "10 MB/s", "100 MB/s", "1 GB/s",
        "10 GB/s", "100 GB/s", "1 TB/s"
    ][exponent]


def svg(report, operation="all_reduce", dtype="float32"):
    panels = curves(report, operation, dtype)
    points = [point for libraries in panels.values() for line in libraries.values() for point in line]
    if not points:
        return None
    low_x, high_x = math.log2(min(x for x, _ in points)), math.log2(max(x for x, _ in points))
    low_y = math.floor(math.log10(min(y for _, y in points)))
    high_y = max(low_y + 1, math.ceil(math.log10(max(y for _, y in points))))
    width = max(680, LEFT + len(panels) * PANEL + (len(panels) - 1) * GAP + 24)
    height = TOP + HEIGHT + BOTTOM
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, sans-serif">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        text(LEFT, 22, f"{operation.replace('_', '-')} of {dtype}: bus bandwidth", 15, weight="bold", color="#0f172a")
    ]
    at = LEFT
    for library in report["versions"]:
        if any(library in libraries for libraries in panels.values()):
            out.append(f'<line x1="{at}" y1="40" x2="{at + 20}" y2="40" stroke="{COLORS[library]}" stroke-width="{3 if library == "ours" else 2}"/>')
            out.append(text(at + 26, 44, TITLES[library], 12, weight="bold" if library == "ours" else "normal"))
            at += 46 + 7.2 * len(TITLES[library])
    for number, (ranks, libraries) in enumerate(panels.items()):
        left = LEFT + number * (PANEL + GAP)
        place = lambda x, y: (left + (math.log2(x) - low_x) / max(1e-9, high_x - low_x) * PANEL, TOP +
                              (high_y - math.log10(y)) / (high_y - low_y) * HEIGHT)
        out.append(text(left + PANEL / 2, TOP - 8, f"{ranks} ranks", 13, "middle", weight="bold"))
        for exponent in range(low_y, high_y + 1):
            y = TOP + (high_y - exponent) / (high_y - low_y) * HEIGHT
            out.append(f'<line x1="{left}" y1="{y:.1f}" x2="{left + PANEL}" y2="{y:.1f}" stroke="#e2e8f0"/>')
            if number == 0:
                out.append(text(left - 6, y + 4, rate_text(exponent), 11, "end"))
        for exponent in range(math.ceil(low_x), math.floor(high_x) + 1):
            if (exponent - 2) % 4 == 0:
                x = left + (exponent - low_x) / max(1e-9, high_x - low_x) * PANEL
                out.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{TOP + HEIGHT}" stroke="#f1f5f9"/>')
                out.append(text(x, TOP + HEIGHT + 16, size_text(2 ** exponent).replace("iB", ""), 11, "middle"))
        out.append(f'<rect x="{left}" y="{TOP}" width="{PANEL}" height="{HEIGHT}" fill="none" stroke="#94a3b8"/>')
        for library in sorted(libraries, key=lambda name: name == "ours"):
            spots = [place(x, y) for x, y in libraries[library]]
            wide = 3 if library == "ours" else 1.8
            out.append(f'<polyline fill="none" stroke="{COLORS[library]}" stroke-width="{wide}" stroke-linejoin="round" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in spots)}"/>')
            out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{wide + 0.4:.1f}" fill="{COLORS[library]}"/>' for x, y in spots]
    out.append(
        text(
            LEFT, height - 14,
            f"size of a rank's buffer in bytes; {report['machine']}, {report['date']}, rounds in turn: {report['rounds']}",
            11, color="#64748b"))
    return "\n".join([*out, "</svg>", ""])


def main():
    report, target, *operation = sys.argv[1:]
    Path(target).write_text(svg(json.loads(Path(report).read_text()), *operation))


if __name__ == "__main__":
    main()
