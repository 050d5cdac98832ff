#!/usr/bin/env python3
"""That the bench (benches/peers) runs for our library alone: every collective's result is right, and the table, the JSON and the drawing have what was run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(os.environ.get("DM_ROOT", Path(__file__).resolve().parent.parent))
SCRATCH = Path(os.environ.get("DM_TMP", ROOT / "target/tests"))
OPERATIONS = {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv"}


def limits():
    """The column of what memory allows, of a report that is made up."""
    sys.path.insert(0, str(ROOT / "benches/peers"))
    from table import limit
    report = {"memory": [{"bytes_per_second": rate} for rate in (40e9, 10e9, 20e9)]}
    assert limit(report, "all_reduce", 8, 1 << 30) == "859 ms" and limit(report, "all_gather", 7, 1 << 30) == "429 ms"
    assert limit(report, "all_reduce", 2, 1 << 20) == "" and limit({}, "all_reduce", 8, 1 << 30) == ""
    memory = SCRATCH / "memory"
    subprocess.run([os.environ.get("CC", "cc"), "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread", ROOT / "benches/peers/memory.c", "-o", memory], check=True)
    found = json.loads(subprocess.run([memory, "1"], check=True, capture_output=True, text=True, timeout=60).stdout)
    assert found["threads"] == len(os.sched_getaffinity(0)) and 1e8 < found["bytes_per_second"] < 1e13, found


def main():
    SCRATCH.mkdir(parents=True, exist_ok=True)
    report, drawing = SCRATCH / "bench.json", SCRATCH / "bench.svg"
    done = subprocess.run(
        [sys.executable, ROOT / "benches/peers/bench.py", "--case", "start,collectives", "--libraries", "ours", "--ranks", "2", "--sizes", "4,1000,64K", "--rounds", "2",
         "--budget", "1", "--scheduling", "none", "--json", report, "--svg", drawing], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    cases = [(run["operation"], run["dtype"], run["bytes"], run["round"]) for run in found["collectives"]]
    expected = {(operation, dtype, size, number) for operation in OPERATIONS for dtype in ("float32", "bfloat16") for size in (1000, 65536) for number in (0, 1)}
    assert expected <= set(cases) and len(cases) == len(set(cases)), sorted(expected ^ set(cases))
    for run in found["collectives"]:
        assert 0 < run["least"] <= run["median"] and run["iterations"] >= 3, run
    starts = {(run["apart"], run["round"]): run for run in found["start"]}
    assert len(starts) == 4, found["start"]
    for run in starts.values():
        assert abs(sum(run["phases"].values()) - run["total"]) < 1e-6, run
    assert set(starts[False, 0]["phases"]) == {"load", "rendezvous", "dm_init", "flatten"}, starts[False, 0]
    for operation in OPERATIONS:
        assert re.search(rf"^{operation}, bfloat16, 2 ranks:.*\n.*\n.*\n.*\n64 KiB  \S+ [mun]?s", done.stdout, re.M), f"no {operation} in\n{done.stdout}"
    lines = ElementTree.parse(drawing).getroot().findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 1 and len(lines[0].get("points").split()) == 3, "one line through three sizes"
    limits()
    print(f"{len(cases)} figures of collectives, {len(starts)} starts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
