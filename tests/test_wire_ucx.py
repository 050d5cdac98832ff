"""Whole jobs with UCX between the hosts (DM_WIRE=ucx): every collective is right, and faults give
errors in time. Each test uses the UCX of the machine (Debian: libucx0), and the UCX of PyPI's wheel
libucx-cu12 (43 MB, fetched once). The Rust tests test the wire alone.

Every case has hosts of its own (tests/netlab.py) and takes some seconds, mostly of waiting."""

import re
import signal
import sys
from pathlib import Path

import pytest

from hostranks import LAYOUTS, SILENCE, HostJob, Loopback, Network, Watch, kill
from support.paths import ROOT, TOOL
from support.pinned import ucx_of_wheel
from support.processes import environment, run

# The status that survivors report for a rank or host that is gone.
LOST = "PEER_LOST"
# Every rank knows within so many seconds that a process has ended.
NOTICE = 1.0


@pytest.fixture(params=["machine", pytest.param("wheel", marks=[pytest.mark.long, pytest.mark.timeout(900)])])
def ucx(request):
    """The environment variables that choose UCX."""
    variables = {"DM_WIRE": "ucx"}
    if request.param == "wheel":
        variables["DM_UCX_LIBRARY"] = str(ucx_of_wheel())
    wire = re.search(r"^wire +(.*)$", run(TOOL, "info", env=environment(**variables)).stdout, re.M).group(1)
    if not wire.startswith("UCX "):
        pytest.skip(wire)
    return variables


@pytest.fixture
def job(programs, ucx, tmp_path):
    """Returns a function that starts a job over UCX on hosts of its own. Both end with the test."""
    across, labs = programs.c("tests/c/programs/across.c"), []

    def start(layout, variables=None, lab=None, **how):
        places = LAYOUTS[layout]
        labs.append((lab or Network(dict.fromkeys(places.split()), tmp_path / str(len(labs)), own_sysfs=True)).__enter__())
        one = HostJob(across, labs[-1], places, variables={**ucx, **(variables or {})}, **how)
        one.do("join", "init", "all 1")
        for rank in one.ranks:
            assert "libucp.so" in Path(f"/proc/{rank.process.pid}/maps").read_text(), "the ranks do not use UCX"
        return one

    yield start
    for lab in labs:
        lab.__exit__()


def finish(job):
    """Every rank finalizes, and its process exits at once."""
    job.start("finalize")
    for rank in job.ranks:
        rank.process.stdin.close()
    job.well()
    for rank in job.ranks:
        assert rank.process.wait(20) == 0


def test_results_on_loopback(job, free_port):
    """The hosts are only names on loopback, so every machine that has UCX can run this test."""
    one = job("3+1", lab=Loopback(free_port()))
    one.do("all 1001", "all 0", "all 300000")
    assert one.digests(30011) == one.digests(30011)
    finish(one)


@pytest.mark.parametrize("layout", ["2x2", pytest.param("4x2", marks=pytest.mark.long)])
def test_results(job, layout):
    """All collectives are right, from one element to messages in several pieces, and their bytes
    pass between the hosts."""
    one = job(layout)
    one.lab.watch(b"nothing")
    one.do("all 1001", "all 0", "all 40000")
    passed = one.lab.seen()[1]
    assert passed > 40000 * 4 * 6, f"only {passed} bytes were on the network"
    finish(one)


@pytest.mark.parametrize("count", [1, pytest.param(100000, marks=pytest.mark.long)])
def test_killed_and_shrunk(job, count):
    """A rank is killed while all ranks are in collectives. The others know within a second, and go
    on without that rank."""
    one = job("2x2", timeout=30)
    one.run(f"forever {count}")
    watch = Watch(one.lab)
    kill(one.ranks[3])
    for rank in one.ranks[:3]:
        watch.knows(rank, LOST, NOTICE, names=[3])
    one.do("shrink", "reduce 1", "reduce 50000", ranks=[0, 1, 2])


def test_abort(job):
    """A rank aborts while all others wait for it. They get an error in time."""
    one = job("2x2", timeout=60)
    one.start("reduce 5000", [0, 1, 2])
    watch = Watch(one.lab)
    one.do("abort", ranks=[3])
    for rank in one.ranks[:3]:
        watch.knows(rank, LOST, 0.2 + 0.1, names=[3])


@pytest.mark.parametrize("fault", ["cut", pytest.param("stop", marks=pytest.mark.long)])
def test_silence(job, fault):
    """A host falls silent in the middle of long messages. UCX gives all buffers back, so the others
    know in time."""
    one = job("2x1", timeout=60, variables={SILENCE: 2000})
    one.run("forever 1000000")
    watch = Watch(one.lab)
    if fault == "cut":
        one.lab.cut("beta")
    else:
        kill(one.ranks[1], signal.SIGSTOP)
    watch.knows(one.ranks[0], LOST, 2.0 + NOTICE, names=[1])


@pytest.mark.long
def test_training(programs, ucx):
    """examples/hsdp_tp trains over UCX to the losses of one host. It takes ten seconds, because it
    trains twice."""
    program = programs.cpp("examples/hsdp_tp.cpp", "-O3")
    demo = [sys.executable, ROOT / "examples/demo_hosts.py", "--loopback", "--tool", TOOL, "--program", program]
    said = run(*demo, env=environment(**ucx), timeout=170).stdout
    assert "the losses differ by at most" in said
