"""Collectives that differ between ranks of device type cuda, which NCCL does not notice: what
dm_finalize, DM_CHECK_COLLECTIVES and dm_stream_wait say of them (tests/nccl/order.c)."""

import pytest

from support.nccl import check, job_of
from support.paths import LIBRARY

run = job_of("order")


@pytest.mark.parametrize("what", ["other count", "one call less", "long ago", "legal", "ended", "behind"])
def test_the_order_certificate(run, what):
    run(what, ranks=4, RECORDER_IDLE=1)


def test_the_certificate_of_calls_of_which_nccl_tells(run):
    run("profiled", ranks=4, RECORDER_IDLE=1, NCCL_PROFILER_PLUGIN=LIBRARY / "libdevicemesh.so")


def test_records_of_nccl_and_of_the_library_are_not_compared(run):
    run("profiled on one rank", ranks=4, RECORDER_IDLE=1, PLUGIN_OF_RANK_0=LIBRARY / "libdevicemesh.so")


def test_without_a_recording_nothing_is_compared(run):
    run("ended", ranks=4, RECORDER_IDLE=1, DM_RECORDER=0)


@pytest.mark.parametrize("what", ["checked", "legal"])
def test_collectives_are_compared_before_they_are_issued(run, what):
    _, records = run(what, ranks=4, RECORDER_IDLE=1, DM_CHECK_COLLECTIVES=1)
    for rank, lines in records.items() if what == "checked" else ():
        before = lines[:lines.index("# nothing")]
        check(not any("ncclAllReduce" in line for line in before), f"rank {rank}: {before}")
