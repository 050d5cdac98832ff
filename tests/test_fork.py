"""Forked children of a running job. A rank with a child is killed while the child sleeps. The
other ranks notice at once, and the next job gets the port. The Python cases are multiprocessing,
os.fork, subprocess and os.system."""

import contextlib
import os
import signal
import sys
import time

import pytest

from support.paths import LIBRARY, ROOT
from support.processes import MARK, gone, marked, rest_of, starvation, waits

# A survivor must notice the death within this many seconds, and the time for which it waits for a
# busy processor. The deadline is a minute, so noticing only at the deadline is a failure.
MOST = 2.0
FORKED = [sys.executable, ROOT / "bindings/python/tests/forked.py"]


@pytest.fixture
def forks(programs):
    return programs.c("tests/c/programs/forks.c")


@pytest.fixture
def children():
    """The children's process numbers; they are killed at the end."""
    known = []
    yield known
    # The number of a child that has ended may be another process's.
    for child in set(known) & set(marked(os.environ[MARK])):
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def start(start_ranks, command, size, port=None):
    return start_ranks(command, size, port, stderr=None,
                       variables={"PYTHONPATH": ROOT / "bindings/python", "DM_LIBRARY": LIBRARY / "libdevicemesh.so"})


def until_ready(ranks, children):
    for rank in ranks:
        for line in rank.stdout:
            word, *numbers = line.split()
            if word == "ready":
                break
            assert word in ("child", "children"), line
            children += map(int, numbers)
        else:
            raise AssertionError("a rank ended before it was ready")


def killed_beside_a_child(start_ranks, children, command, next_job, size, victim, status):
    """The survivors notice in time, the children outlive the rank, and the next job has the
    port."""
    job = start(start_ranks, command, size)
    until_ready(job, children)
    assert children and not any(map(gone, children)), children
    pids = [os.getpid(), *(rank.pid for rank in job)]
    before, killed = waits(pids), time.monotonic()
    os.kill(job[victim].pid, signal.SIGKILL)
    told = {number: rank.stdout.readline() for number, rank in enumerate(job) if number != victim}
    starved = starvation(before, pids)
    for number, line in told.items():
        assert line, f"rank {number} ended with {job[number].wait(60)}"
        said, when, message = line.split(" ", 2)
        assert said == status and f"rank {victim}" in message, (said, message)
        late = float(when) - killed
        assert late < MOST + starved, f"rank {number} knew after {late:.3f} s, of which {starved:.3f} s may be waiting for processors"
        rest_of(job[number], 90)
    job[victim].wait(timeout=60)
    assert not any(map(gone, children)), "the children were to outlive their rank"
    start(start_ranks, next_job, 2, job.port).outputs()
    assert not any(map(gone, children)), "the children were to outlive the next job"


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("how", ["fork", "daemon", "blocked", "system"])
def test_killed_beside_a_child(forks, start_ranks, children, how, victim):
    killed_beside_a_child(start_ranks, children, [forks, how, victim], [forks, "none", 0], 3, victim, "DM_STATUS_PEER_LOST")


def test_killed_beside_children_of_python(forks, start_ranks, children):
    killed_beside_a_child(start_ranks, children, [*FORKED, "sleeps"], [forks, "none", 0], 2, 0, "PeerLostError")


@pytest.mark.parametrize("how", ["workers", "calls"])
def test_the_parent_in_python_is_as_before(start_ranks, how):
    start(start_ranks, [*FORKED, how], 2).outputs()
