"""`devicemesh why`: jobs of eight ranks hang in every way (tests/c/programs/hang.c), and the tool
names the rank, the operation and the ranks that wait. Each test waits until the job hangs, and
asks then."""

import json
import os
import re
import subprocess
import sys
import time

import pytest

from hangs import PATIENCE, WAYS, OneHost, asked, until
from support.paths import TOOL
from support.processes import run, words

# The ranks that rank 3 does not keep waiting itself have made their calls, too.
MORE = "; 4 more ranks wait for these in other groups"


@pytest.fixture
def hang(programs):
    """A function that starts a job that hangs in this way. It gives the job."""
    program = programs.c("tests/c/programs/hang.c", "-Wall", "-Wextra")
    started = []

    def start(way, **variables):
        started.append(OneHost(program))
        started[-1].start(way, **variables)
        return started[-1]

    yield start
    for job in started:
        job.end()


@pytest.mark.parametrize("way", WAYS)
def test_the_rank_that_did_not_come_is_named(hang, way):
    until(hang(way), way)


def test_text_says_where_the_rank_is_and_who_is_at_which_call(hang):
    job = hang("sleep")
    until(job, "sleep", also=MORE)
    end = time.monotonic() + PATIENCE
    while True:
        said = run(TOOL, "why", "--after", "0.3s", job.pid(), code=1).stdout
        lines = said.splitlines()
        # At this moment it may be awake.
        if " sleeps; " in lines[1] or time.monotonic() > end:
            break
    assert lines[0].startswith("hang: rank 3 has not called all-reduce 6 of mesh/tp"), said
    assert MORE in lines[0], said
    assert lines[1].startswith("  rank 3 (pid ") and "sleeps; its last call, all-reduce 3 of mesh/dp (ranks 3, 7), ended" in lines[1], said
    # Where the system lets this user trace processes, the stack ends in the program's own code.
    assert "main at programs/hang.c:" in said or "no stacks: " in said, said
    rows = [line.split() for line in lines if line.startswith("mesh/tp ")]
    assert [(row[1], row[2]) for row in rows] == [("3", "5"), ("0-2,", "4-7")] or rows[0][1:3] == ["3", "5"], said
    quiet = run(TOOL, "why", "--after", "0.3s", "--no-stacks", job.pid(), code=1).stdout
    assert "hang.c:" not in quiet and "rank 3 (pid " in quiet, quiet


def test_a_job_that_goes_on_is_not_stuck(hang):
    job = hang("none")
    end = time.monotonic() + PATIENCE
    while True:
        report, code = job.why("--after", "30s")
        if code == 0 and any(group["name"] == "mesh/tp" for found in report["jobs"] for group in found["groups"]):
            break
        assert time.monotonic() < end, report
        time.sleep(0.1)
    (found,) = report["jobs"]
    assert not found["stuck"] and found["findings"] == [] and found["summary"].startswith("nothing is stuck"), report


def test_recordings_of_a_job_that_is_gone(hang, tmp_path):
    job = hang("sleep", DM_TRACE_DIR=tmp_path)
    until(job, "sleep")
    files = sorted(tmp_path.glob("*.dmrec"))
    assert len(files) == 8, files
    living, code = asked("--after", "0.3s", tmp_path)
    assert code == 1 and living["jobs"][0]["findings"][0]["ranks"] == [3], living
    # The ranks have mapped these files, so copies must not be written into them.
    refused = subprocess.run(words([TOOL, "why", "--save", tmp_path, job.pid()]), capture_output=True, text=True, timeout=60)
    assert refused.returncode == 3 and "is the recording of a process itself: name another folder" in refused.stderr, refused
    assert sorted(tmp_path.iterdir()) == files and all(os.path.getsize(file) == os.path.getsize(files[0]) for file in files)
    again, code = asked("--after", "0.3s", tmp_path)
    assert code == 1 and again["jobs"][0]["findings"][0]["ranks"] == [3], again
    job.end()
    gone, code = asked(tmp_path)
    (found,) = gone["jobs"]
    first = found["findings"][0]
    assert code == 1 and (first["kind"], first["ranks"]) == ("behind", [3]), gone
    assert "rank 3 has not called all-reduce 6 of mesh/tp (ranks 0-3)" in first["sentence"], gone
    assert {rank["state"] for rank in found["ranks"]} == {"gone"}, gone
    # The recordings of some ranks alone say that the others are not seen.
    some, code = asked(*files[:4])
    assert len(some["jobs"]) == 1 and len(some["jobs"][0]["ranks"]) == 8, some


def test_copies_of_recordings_are_judged_elsewhere(hang, tmp_path):
    job = hang("sleep")
    until(job, "sleep")
    assert run(TOOL, "why", "--save", tmp_path, job.pid()).stdout == f"8 recordings saved in {tmp_path}\n"
    for file in tmp_path.glob("*.dmrec"):
        # As if the file were from another host: its name is in the header.
        data = bytearray(file.read_bytes())
        data[160:168] = b"other\0\0\0"
        file.write_bytes(data)
    report, code = asked("--after", "0.3s", tmp_path)
    (found,) = report["jobs"]
    assert code == 1 and found["findings"][0]["ranks"] == [3], report
    assert {(rank["host"], rank["state"]) for rank in found["ranks"]} <= {("other", "sleeps"), ("other", "computes")}, report
    assert found["findings"][0]["seconds"] is not None, report


def test_watching_goes_on(hang):
    job = hang("sleep")
    until(job, "sleep")
    command = words([TOOL, "why", "--json", "--watch=0.1s", "--after", "0.3s", job.pid()])
    watching = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        for _ in range(2):
            assert json.loads(watching.stdout.readline())["jobs"][0]["stuck"]
    finally:
        watching.kill()
        watching.communicate()


def test_what_is_not_there_is_an_error(tmp_path):
    assert "no job and no process \"nowhere\"" in run(TOOL, "why", "nowhere", code=3).stderr
    assert "has no recordings" in run(TOOL, "why", f"{tmp_path}/", code=3).stderr
    (tmp_path / "broken.dmrec").write_bytes(b"no recording")
    done = run(TOOL, "why", f"{tmp_path}/", code=3)
    assert "broken.dmrec: the file is too short for a recording" in done.stderr and not done.stdout, done
    os.mkfifo(tmp_path / "pipe.dmrec")
    done = run(TOOL, "why", f"{tmp_path}/", code=3)
    assert "pipe.dmrec: it is not a regular file" in done.stderr and not done.stdout, done
    run(TOOL, "why", "--after", "soon", code=2)


def test_the_counters_of_all_ranks_are_text_for_prometheus(hang):
    job = hang("sleep")
    until(job, "sleep", also=MORE)
    text = run(TOOL, "why", "--metrics", job.pid()).stdout
    begun = dict(re.findall(r'^devicemesh_calls_begun_total\{pid="\d+",host="[^"]+",job_id="[^"]*",rank="(\d)",group="mesh/tp",kind="dimension"\} (\d+)$', text, re.M))
    assert begun == {str(rank): "5" if rank == 3 else "6" for rank in range(8)}, text
    waits = dict(re.findall(r'^devicemesh_running_call_seconds\{pid="\d+",host="[^"]+",job_id="[^"]*",rank="(\d)",group="mesh/tp",kind="dimension"\} (\S+)$', text, re.M))
    assert float(waits["0"]) > 0 and float(waits["3"]) == 0 and len(waits) == 8, text
    run(TOOL, "why", "--metrics", "--json", code=2)


def test_a_folder_of_several_hosts_has_ranks_of_other_hosts(hang, tmp_path):
    shared, copies = tmp_path / "shared", tmp_path / "copies"
    shared.mkdir()
    job = hang("sleep", DM_TRACE_DIR=shared)
    until(job, "sleep")
    for file in sorted(shared.glob("*.dmrec")):
        # The copies look as if another host had ranks 8 to 15, with the process numbers of this
        # host's ranks. The host and the rank are in the header.
        data = bytearray(file.read_bytes())
        data[160:168], data[528] = b"other\0\0\0", data[528] + 8
        (shared / f"other-{file.name}").write_bytes(data)
    text = run(TOOL, "why", "--metrics", job.pid()).stdout
    assert text.count("devicemesh_world_size{") == 8 and 'host="other"' not in text, text
    for _ in range(2):
        assert run(TOOL, "why", "--save", copies, job.pid()).stdout == f"8 recordings saved in {copies}\n"
    # Where the folder is named, its recordings are meant. Those with one process number are apart.
    text = run(TOOL, "why", "--metrics", shared).stdout
    recorded = re.findall(r'^devicemesh_recorded_calls_total\{pid="(\d+)",host="([^"]+)"\} \d+$', text, re.M)
    others = [pid for pid, host in recorded if host == "other"]
    assert len(recorded) == 16 and sorted(others) == sorted(pid for pid, host in recorded if host != "other"), text


def test_a_folder_with_very_many_files_is_not_read_whole(hang, tmp_path):
    job = hang("sleep", DM_TRACE_DIR=tmp_path)
    until(job, "sleep")
    for number in range(4096):
        (tmp_path / f"alpha-{number}-1.dmrec").touch()
    said = run(TOOL, "why", "--after", "0.3s", "--timeout", "0", "--no-stacks", job.pid(), code=1).stderr
    left_out = re.search(rf"(\d+) recordings in {tmp_path} are left out, because only the newest (\d+) are read", said)
    assert left_out, said
    # The limit is on all folders together, and other tests may have recordings in folders, too.
    left, read = (int(number) for number in left_out.groups())
    assert left + read == 8 + 4096 and read <= 4096, said


def test_the_recordings_need_more_open_files_than_the_soft_limit(hang):
    job = hang("sleep")
    until(job, "sleep")

    def limited(limit):
        shell = ["sh", "-c", f'ulimit {limit}; exec "$@"', "sh"]
        return run(*shell, TOOL, "why", "--json", "--after", "0.3s", "--timeout", "0", "--no-stacks", job.pid(), code=None)

    done = limited("-Sn 8")
    assert done.returncode == 1 and json.loads(done.stdout)["jobs"][0]["findings"][0]["ranks"] == [3], done
    done = limited("-n 8")
    assert re.search(r"the recordings of processes [^:]+: Too many open files .*raise `ulimit -n`, now 8", done.stderr), done


# Holds a lease on a file, so that whoever opens the file waits, for 45 s by Linux's default.
LEASE = """
import fcntl, os, signal, sys
signal.signal(signal.SIGIO, signal.SIG_IGN)
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
try:
    fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    print("held", flush=True)
except OSError as error:
    print(error, flush=True)
sys.stdin.read()
"""


def test_a_file_with_a_lease_holds_nobody_up(tmp_path):
    command = words([sys.executable, "-c", LEASE, tmp_path / "held.dmrec"])
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        said = holder.stdout.readline().strip()
        if said != "held":
            pytest.skip(f"the file system of {tmp_path} has no leases: {said}")
        done = run(TOOL, "why", "--timeout", "0", "--no-stacks", code=None)
    finally:
        holder.communicate()
    # The tool would read the file after the 45 s, and would say that it is too short.
    assert f"the recording of process {holder.pid}: Resource temporarily unavailable" in done.stderr, done
