"""devicemesh trace: the recordings of real ranks become one trace and the two tables."""

import json
import os
import sys
from collections import Counter

import pytest

from support.paths import ROOT, TOOL
from support.processes import environment, run

# Rank 2 comes 0.1 s late to each of ten all-reduces along dp. A rank that a busy machine holds up
# for some time is late for less than that in all.
LATE = """
import time
from array import array
from devicemesh import init_device_mesh
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
data = array("f", [1.0] * 4096)
for step in range(10):
    tp.all_reduce(data)
began = time.monotonic()
for step in range(10):
    if mesh.get_rank() == 2:
        time.sleep(0.1)
    dp.all_reduce(data)
if mesh.get_rank() == 0:
    print("took", time.monotonic() - began)
mesh.finalize()
"""


@pytest.fixture
def traces(tmp_path):
    """The folder of the recordings of four ranks, of which rank 2 comes late. The file `took` there
    has the seconds that the calls along dp took on rank 0, by another clock."""
    folder = tmp_path / "traces"
    folder.mkdir()
    said = run(TOOL, "run", "-n", 4, "--rdzv-id", "late", "--", sys.executable, "-c", LATE,
        env=environment(PYTHONPATH=ROOT / "bindings/python", DM_TRACE_DIR=folder)).stdout
    (folder / "took").write_text(said.split()[1])
    return folder


def test_the_late_rank_is_named(traces, tmp_path):
    summary = json.loads(run(TOOL, "trace", traces, "-o", tmp_path / "late.json", "--json").stdout)
    latest = summary["stragglers"][0]
    assert (latest["rank"], latest["mostly_in"].rpartition("/")[2], latest["mostly_rank"]) == (2, "dp", 0), summary
    assert latest["waited_seconds"] > 0.2 and latest["last_in"] >= 10, summary
    costs = {(cost["group"].rpartition("/")[2], cost["operation"]): cost for cost in summary["costs"]}
    for name in ("dp", "tp"):
        cost = costs[name, "all-reduce"]
        assert (cost["calls"], cost["bytes"], cost["size_class"]) == (40, 40 * 16384, 16384), cost
    # The wait is a part of the time, and not of the transfer.
    dp = costs["dp", "all-reduce"]
    assert dp["seconds"] > 0.25 and 0 < dp["transfer_seconds"] < dp["seconds"] and dp["busbw_gbps"] > 0, dp

    events = json.loads((tmp_path / "late.json").read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    calls = [event for event in events if event["ph"] == "X"]
    # The trace's clock counts as another one does.
    took = float((traces / "took").read_text())
    dp = [call for call in calls if call["cat"].endswith("/dp") and lanes[call["tid"]] == "rank 0"]
    traced = (dp[-1]["ts"] + dp[-1]["dur"] - dp[0]["ts"]) / 1e6
    assert abs(traced - took) < 0.1 * took + 0.02, (traced, took)
    by_rank = Counter(lanes[call["tid"]] for call in calls if call["cat"].endswith("/dp"))
    assert by_rank == {f"rank {rank}": 10 for rank in range(4)}, by_rank
    # In one lane, no call begins before the one before it has ended. (Times are rounded to 1 ns.)
    for lane in lanes:
        own = sorted((call["ts"], call["dur"]) for call in calls if call["tid"] == lane)
        assert all(begun + took <= later + 0.002 for (begun, took), (later, _) in zip(own, own[1:]))


def test_the_tables(traces):
    said = run(TOOL, "trace", traces).stdout
    assert said.startswith("late: 4 processes, ") and "for whom the others waited" in said, said
    rows = [line.split() for line in said.splitlines()]
    assert ["all-reduce", "16", "KiB", "40", "640", "KiB"] in [row[1:7] for row in rows], said


def test_what_is_no_recording_is_refused(tmp_path):
    empty = run(TOOL, "trace", tmp_path, code=1).stderr
    assert "has no recordings" in empty and "DM_TRACE_DIR" in empty, empty
    text = tmp_path / "notes.txt"
    text.write_text("not a recording")
    wrong = run(TOOL, "trace", text, code=1).stderr
    assert "notes.txt" in wrong and "too short for a recording" in wrong, wrong
    os.mkfifo(tmp_path / "pipe.dmrec")
    pipe = run(TOOL, "trace", tmp_path, code=1).stderr
    assert "pipe.dmrec" in pipe and "it is not a regular file" in pipe, pipe
    missing = run(TOOL, "trace", tmp_path / "nowhere", code=1).stderr
    assert "nowhere" in missing and "No such file" in missing, missing


def test_one_job_is_chosen(traces):
    assert "there are late (4 processes)" in run(TOOL, "trace", traces, "--job", "early", code=2).stderr
    assert run(TOOL, "trace", traces, "--job", "late").stdout.startswith("late: ")
