"""dm_stream_wait, memory that NCCL cannot use, and communicators of another copy of NCCL, over the
recorder and the driver's stand-in (tests/nccl/streams.c). Takes 20 seconds, because ranks wait for
deadlines and for the grace after a loss."""

import re
import shutil

import pytest

from support.nccl import RECORDER, check, job_of

run = job_of("streams")


@pytest.mark.parametrize("what", ["work", "failures", "dead", "abort", "recovery", "shrink", "slow"])
def test_waiting_for_a_stream(run, what):
    """A wait ends when the work is done, a communicator fails, a rank is lost, the mesh ends,
    another rank recovers, or the deadline passes; a waiter sleeps."""
    output, _ = run(what, ranks=4, **({"RECORDER_DEAF": 1} if what != "work" else {}))
    if what == "work":
        spent = [float(found) for found in re.findall(r"queries, ([\d.]+) ms of CPU", output)]
        # On a quiet machine a wait of two seconds takes less than five milliseconds.
        check(len(spent) == 4 and min(spent) < 15, output)


@pytest.mark.parametrize("variables", [{}, {"DM_CHECK_POINTERS": 0}, {"DM_CHECK_POINTERS": 1}, {"CUDA_UNKNOWN": 1}, {"CUDA_PAGEABLE": 1}],
                         ids=["remembered", "never", "each call", "unknown is an error", "pageable access"])
def test_memory_of_another_device_or_of_the_host(run, variables):
    run("pointers", ranks=4, cuda=run.driver("-DPOINTERS"), **variables)


def test_a_thread_on_another_device_makes_no_communicators(run):
    run("another device", ranks=4)


def test_adopting_from_the_copy_that_is_loaded(run, tmp_path):
    """DM_CCL_LIBRARY names another copy than the one that made the communicator."""
    other = tmp_path / "other/libnccl.so.2"
    other.parent.mkdir()
    shutil.copy(run.recorder(), other)
    run("adopt", ranks=1, library=False, OTHER=other, DM_CCL_LIBRARY=run.recorder())


def test_adopting_where_no_copy_is_loaded(run):
    run("adopt from nowhere", ranks=1, library=False, DM_CCL_LIBRARY=run.recorder())


def test_every_thread_beside_rccl_has_the_callers_device(run):
    """HIP begins each thread with device 0, so a thread of the library takes the caller's."""
    library = run.library("librccl.so.1", RECORDER, "-DHIP")
    for rank, lines in run("amd", ranks=4, library=library, cuda=False)[1].items():
        used = re.findall(r"device[ =](-?\d+)", "\n".join(lines))
        check(len(used) > 10 and set(used) == {str(7 - rank)}, f"rank {rank}: {lines}")
