"""Text of a report of bench.py."""

import statistics

TITLES = {"ours": "devicemesh", "gloo": "Gloo", "mpich": "MPICH", "openmpi": "Open MPI", "torch": "PyTorch gloo"}


def time_text(seconds):
    for unit, scale in (("s", 1), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def size_text(size):
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size} B"


def best(runs):
    """The rounds' medians of the variant that is best over them, by round, and its name."""
    by_variant = {}
    for run in runs:
        by_variant.setdefault(run["variant"], {})[run["round"]] = run["median"]
    variant = min(by_variant, key=lambda name: statistics.median(by_variant[name].values()))
    return by_variant[variant], variant


def collectives_table(report):
    lines = [f"{report['machine']}, {report['date']}; {report['rounds']} rounds in turn; scheduling: {report['scheduling']}"]
    cases = {}
    for run in report["collectives"]:
        cases.setdefault((run["operation"], run["dtype"], run["ranks"]), {}).setdefault(run["bytes"], {}).setdefault(run["library"], []).append(run)
    libraries = list(report["versions"])
    for (operation, dtype, ranks), sizes in cases.items():
        lines.append(f"\n{operation}, {dtype}, {ranks} ranks: median of the rounds (least - most)")
        lines.append(f"{'bytes':>8} " + " ".join(f"{TITLES[library]:32}" for library in libraries) + "best peer / ours")
        for size, found in sorted(sizes.items()):
            cells, medians = [], {}
            for library in libraries:
                if library not in found:
                    cells.append("")
                    continue
                rounds, variant = best(found[library])
                medians[library] = rounds
                values = list(rounds.values())
                cells.append(f"{time_text(statistics.median(values))} ({time_text(min(values))} - {time_text(max(values))})" + (f" {variant}" if variant else ""))
            peers = [library for library in medians if library != "ours"]
            ratio = ""
            if peers and "ours" in medians:
                closest = min(peers, key=lambda library: statistics.median(medians[library].values()))
                ratio = statistics.median(medians[closest][number] / medians["ours"][number] for number in medians["ours"])
                ratio = f"{ratio:.2f} ({TITLES[closest]})"
            lines.append(f"{size_text(size):>8} " + " ".join(f"{cell:32}" for cell in cells) + ratio)
    return "\n".join(lines)
