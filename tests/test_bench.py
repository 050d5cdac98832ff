"""The bench (benches/peers) runs for our library alone: every collective's result is right, and
the table, the JSON and the drawing have what was run."""

import json
import os
import re
import sys
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from support.paths import ROOT, STRICT
from support.processes import run

OPERATIONS = {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv"}


def test_ours_alone(tmp_path):
    report, drawing = tmp_path / "bench.json", tmp_path / "bench.svg"
    done = run(sys.executable, "benches/peers/bench.py", "--case", "start,collectives", "--libraries", "ours",
               "--ranks", "2", "--sizes", "4,1000,64K", "--rounds", "2", "--budget", "1", "--scheduling", "none",
               "--json", report, "--svg", drawing)
    found = json.loads(report.read_text())
    cases = [(run["operation"], run["dtype"], run["bytes"], run["round"]) for run in found["collectives"]]
    expected = {(operation, dtype, size, number)
                for operation in OPERATIONS
                for dtype in ("float32", "bfloat16")
                for size in (1000, 65536)
                for number in (0, 1)}
    assert expected <= set(cases) and len(cases) == len(set(cases)), sorted(expected ^ set(cases))
    for one in found["collectives"]:
        assert 0 < one["least"] <= one["median"] and one["iterations"] >= 3, one
    starts = {(one["apart"], one["round"]): one for one in found["start"]}
    assert len(starts) == 4, found["start"]
    for one in starts.values():
        assert abs(sum(one["phases"].values()) - one["total"]) < 1e-6, one
    assert set(starts[False, 0]["phases"]) == {"load", "rendezvous", "dm_init", "flatten"}, starts[False, 0]
    for operation in OPERATIONS:
        assert re.search(rf"^{operation}, bfloat16, 2 ranks:.*\n.*\n.*\n.*\n64 KiB  \S+ [mun]?s", done.stdout, re.M), (
            f"no {operation} in\n{done.stdout}"
        )
    lines = ElementTree.parse(drawing).getroot().findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 1 and len(lines[0].get("points").split()) == 3, "one line through three sizes"


def test_quick(tmp_path):
    report = tmp_path / "bench.json"
    run(sys.executable, "benches/peers/bench.py", "--quick", "--libraries", "ours", "--sizes", "4,1K", "--budget", "1",
        "--scheduling", "none", "--json", report)
    cases = [(run["operation"], run["dtype"], run["ranks"], run["bytes"]) for run in json.loads(report.read_text())["collectives"]]
    assert len(cases) == 24 and {(dtype, ranks) for _, dtype, ranks, _ in cases} == {("float32", 2), ("float32", 8)}, cases


@pytest.fixture
def modules_of_the_bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benches/peers"))
    monkeypatch.syspath_prepend(str(ROOT / "benches"))


def test_a_library_that_takes_too_long_is_ended(modules_of_the_bench):
    """What it has printed by then counts, and the tables say that it was ended. What it has started
    is gone (conftest.py looks for what is left). The test takes over 5 s, so that a busy machine
    starts the shell in time."""
    import bench
    import contestants
    import table
    line = '{"operation": "all_reduce", "dtype": "float32", "bytes": 4, "variant": "", "iterations": 3, "median": 1e-6, "least": 1e-6}'

    class Slow:
        name = "ours"

        def output(self, *_, timeout):
            return contestants.run(["sh", "-c", f"echo '{line}'; sleep 1000 & wait"], timeout=timeout, start_new_session=True)

    report = {"machine": "a machine", "date": "today", "rounds": 1, "scheduling": "none", "versions": {"ours": ""}, "start": [], "idle": [],
              "memory": [], "collectives": [], "late": []}
    options = SimpleNamespace(scheduling="none", budget=1, operations=["all_reduce", "broadcast"], dtypes=["float32"], sizes=[4], longest=5)
    bench.measure("collectives", Slow(), options, 2, 0, report)
    assert [one["operation"] for one in report["collectives"]] == ["all_reduce"], report
    text = table.whole(report)
    assert text.endswith("\n\ndevicemesh on 2 ranks, round 1: not done after 5 s, so some of its figures are missing"), text


def test_on_a_busy_machine(tmp_path):
    """With --load, the report names the number of processes that compute beside the libraries. The
    bench ends these processes (conftest.py looks for what is left)."""
    report = tmp_path / "bench.json"
    done = run(sys.executable, "benches/peers/bench.py", "--case", "collectives", "--libraries", "ours", "--operations",
               "all_reduce", "--ranks", "2", "--sizes", "4", "--dtypes", "float32", "--rounds", "1", "--budget", "1", "--load", "1",
               "--json", report)
    found = json.loads(report.read_text())
    assert (found["load"], found["scheduling"], len(found["collectives"])) == (1, "none", 1), found
    assert "scheduling: none; other processes that compute beside them: 1\n" in done.stdout, done.stdout


def test_limit_of_the_memory(modules_of_the_bench):
    """The table's column of what memory allows, for a report that is made up."""
    from table import limit
    report = {"memory": [{"bytes_per_second": rate} for rate in (40e9, 10e9, 20e9)]}
    assert limit(report, "all_reduce", 8, 1 << 30) == "859 ms" and limit(report, "all_gather", 7, 1 << 30) == "429 ms"
    assert limit(report, "all_reduce", 2, 1 << 20) == "" and limit({}, "all_reduce", 8, 1 << 30) == ""


def test_bandwidth_of_the_memory(programs):
    memory = programs.c("benches/peers/memory.c", "-O2", "-U_GNU_SOURCE", *STRICT[:2], "-Werror", link=["-pthread"])
    found = json.loads(run(memory, 1, timeout=60).stdout)
    assert found["threads"] == len(os.sched_getaffinity(0)) and 1e8 < found["bytes_per_second"] < 1e13, found


@pytest.mark.long
def test_hosts_ours_alone(tmp_path):
    """The case hosts, on namespaces that the bench makes (root)."""
    report = tmp_path / "bench.json"
    done = run(sys.executable, "benches/peers/bench.py", "--case", "hosts", "--libraries", "ours", "--layouts",
               "2x1,2x2", "--sizes", "4,64K", "--rounds", "1", "--budget", "1", "--scheduling", "none", "--json",
               report)
    if "no hosts here" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    found = json.loads(report.read_text())["hosts"]
    cases = {(run["operation"], run["layout"], run["bytes"]) for run in found["runs"]}
    assert {(operation, layout) for operation, layout, _ in cases} == {
        (operation, layout) for operation in OPERATIONS for layout in ("2x1", "2x2")
    }, cases
    assert len(cases) == len(OPERATIONS) * 4 and not found["failed"], found
    assert found["streams"][0]["bytes_per_second"] > 1e7 and len(found["start"]) == 1, found
    for operation in OPERATIONS:
        assert re.search(
            rf"^{operation}, float32, 2 hosts x 2 ranks:.*\n.*\n.*\n64 KiB  \S+ [mun]?s", done.stdout, re.M
        ), f"no {operation} in\n{done.stdout}"
