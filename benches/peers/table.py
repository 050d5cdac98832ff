"""Text of a report of bench.py. `python3 benches/peers/table.py REPORT.json` prints one again."""

import functools
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import spread, time_text  # noqa: E402

TITLES = {"ours": "devicemesh", "gloo": "Gloo", "mpich": "MPICH", "openmpi": "Open MPI", "torch": "PyTorch gloo"}


def size_text(size):
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size} B"


def figure(report):
    """The figure of a round that the tables show. On a busy machine some iterations last long,
    because a rank waits for a processor. A median would hide such iterations."""
    return "mean" if report.get("load") else "median"


def best(runs, figure):
    """The rounds' figures of the variant that is best over them, by round, and its name."""
    by_variant = {}
    for run in runs:
        by_variant.setdefault(run.get("variant", ""), {})[run["round"]] = run[figure]
    variant = min(by_variant, key=lambda name: statistics.median(by_variant[name].values()))
    return by_variant[variant], variant


def ratio_text(medians, wanted=None):
    """The best of the peers over ours: the median of the rounds' ratios."""
    peers = [library for library in medians if library != "ours"]
    if not peers or "ours" not in medians:
        return ""
    closest = min(peers, key=lambda library: statistics.median(medians[library].values()))
    ratios = [medians[closest][number] / value for number, value in medians["ours"].items() if number in medians[closest]]
    return f"{statistics.median(ratios):.2f} {TITLES[closest]}" if ratios else ""


def rows(head, body):
    widths = [max(len(str(row[column])) for row in [head, *body]) for column in range(len(head))]
    return ["  ".join(str(cell).ljust(width) for cell, width in zip(row, widths)).rstrip() for row in [head, *body]]


def grouped(runs, *keys):
    groups = {}
    for run in runs:
        groups.setdefault(tuple(run[key] for key in keys), []).append(run)
    return groups


def by_library(runs):
    return {library: found for (library,), found in grouped(runs, "library").items()}


# Data of fewer bytes stays in the caches of common processors.
LARGE = 128 << 20
# The bytes that a collective of `ranks` ranks moves for a buffer of one byte, if each input is
# read once and each output written once.
MOVED = {
    "all_reduce": lambda ranks: 2 * ranks,
    "all_gather": lambda ranks: ranks + 1,
    "reduce_scatter": lambda ranks: ranks + 1,
    "broadcast": lambda ranks: ranks,
    "all_to_all": lambda ranks: 2 * ranks,
    "send_recv": lambda ranks: 2,
}


def bandwidths_of(report):
    return [found["bytes_per_second"] for found in report.get("memory", [])]


def limit(report, operation, ranks, size):
    """The time that memory needs to move the data of a collective."""
    bandwidths, moved = bandwidths_of(report), MOVED[operation](ranks) * size
    return time_text(moved / statistics.median(bandwidths)) if bandwidths and moved >= LARGE else ""


def memory_line(report):
    bandwidths = bandwidths_of(report)
    if not bandwidths:
        return []
    median = statistics.median(bandwidths) / 1e9
    return ["", f"memory limit: each input read once and each output written once, at the {median:.3g} GB/s (reads and writes, {min(bandwidths) / 1e9:.3g} - "
                f"{max(bandwidths) / 1e9:.3g}) with which the processors together copy 64 MiB each"]


def table_by_size(runs, libraries, figure, limit_title, limit):
    """A row for each size: every library's time, the best peer over ours, and `limit(size)`."""
    body = []
    for (size,), found in sorted(grouped(runs, "bytes").items()):
        cells, medians = [], {}
        for library in libraries:
            mine = by_library(found).get(library)
            if mine:
                medians[library], variant = best(mine, figure)
                cells.append(spread(medians[library].values()) + (f" [{variant}]" if variant else ""))
            else:
                cells.append("")
        body.append([size_text(size), *cells, ratio_text(medians), limit(size)])
    return rows(["size", *(TITLES[library] for library in libraries), "best peer / ours", limit_title], body)


def collectives_table(report):
    libraries, lines = list(report["versions"]), memory_line(report)
    for (operation, dtype, ranks), runs in grouped(report["collectives"], "operation", "dtype", "ranks").items():
        lines += ["", f"{operation}, {dtype}, {ranks} ranks: time of one, median of the rounds' {figure(report)}s (least - most)"]
        lines += table_by_size(runs, libraries, figure(report), "memory limit", functools.partial(limit, report, operation, ranks))
    return lines


def start_table(report):
    libraries, body, parts = [library for library in report["versions"] if library != "gloo"], [], []
    for (ranks,), runs in sorted(grouped([run for run in report["start"] if not run["apart"]], "ranks").items()):
        found = by_library(runs)
        medians = {library: {run["round"]: run["total"] for run in mine} for library, mine in found.items()}
        loaded = {run["round"]: run["total"] - run["phases"]["load"] for run in found.get("ours", [])}
        from_exec = {library: values for library, values in medians.items() if library != "torch"}
        from_loaded = {"ours": loaded, "torch": medians["torch"]} if loaded and "torch" in medians else {}
        body.append([
            ranks, *(spread(medians[library].values()) if library in medians else "" for library in libraries),
            ratio_text(from_exec),
            spread(loaded.values()) if loaded else "",
            ratio_text(from_loaded)
        ])
    for (ranks, library, apart), runs in sorted(grouped(report["start"], "ranks", "library", "apart").items()):
        phases = ", ".join(f"{phase} {time_text(statistics.median(run['phases'][phase] for run in runs))}" for phase in runs[0]["phases"])
        parts.append([ranks, TITLES[library] + (", in parts" if apart else ""), phases])
    if not body:
        return []
    return [
        "",
        "start of N processes, from exec (PyTorch: from the end of its imports) to all communicators of (N/4, 2, 2) and a flattened pair",
        *rows([
            "ranks", *(TITLES[library]
                       for library in libraries), "best MPI / ours", "ours when loaded", "PyTorch / that"
        ], body), "", *rows(["ranks", "", "phases, medians"], parts)
    ]


def idle_table(report):
    body = []
    for (ranks,), runs in sorted(grouped(report["idle"], "ranks").items()):
        found = by_library(runs)
        body.append([ranks, *(spread(run["idle"] for run in found[library]) if library in found else "" for library in report["versions"])])
    if not body:
        return []
    return ["", f"processor time of a rank that waits {report['idle'][0]['seconds']:g} s in an all-reduce of 4 bytes for one that sleeps",
            *rows(["ranks", *(TITLES[library] for library in report["versions"])], body)]


def late_lines(report):
    """Names the libraries that were ended because they took too long."""
    lines = [
        f"{TITLES[one['library']]} on {one['ranks']} ranks, round {one['round'] + 1}: "
        f"not done after {one['longest']:g} s, so some of its figures are missing" for one in report.get("late", [])
    ]
    return ["", *lines] if lines else []


def whole(report):
    versions = ", ".join(f"{TITLES[library]} {version}".strip() for library, version in report["versions"].items())
    head = f"{report['machine']}, {report['date']}; {report['rounds']} rounds in turn; scheduling: {report['scheduling']}"
    if report.get("load"):
        head += f"; other processes that compute beside them: {report['load']}"
    tables = [*start_table(report), *idle_table(report), *collectives_table(report)]
    return "\n".join([head, versions, *tables, *late_lines(report)])


if __name__ == "__main__":
    print(whole(json.loads(Path(sys.argv[1]).read_text())))
