"""`devicemesh check` where something is wrong: a library that gives wrong data, ranks without
memory, ranks that die, stop, are slow or never come, and the time limit."""

import re
import signal
import socket
import time

import pytest

from support import processes
from support.checks import LONG, QUICK, before_engine, clean, jobs, report, run
from support.paths import CC, TOOL

HOST = socket.gethostname()
# Measuring takes as long as the processors are busy with other work; each wait has a deadline of
# its own.
pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def job(free_port):
    yield from jobs(free_port)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_without_address_space_is_named(victim):
    """The rank gets no memory for one of these: a thread, the communicator of all ranks, the
    communicator of a dimension, or the buffers of the check."""
    refusals = 0
    for kib in (12_000, 20_000, 30_000, 36_000, 44_000, 54_000, 200_000):
        script = f'[ "$RANK" = {victim} ] && ulimit -v {kib}; exec "$0" check 2,2 --no-measure --quiet'
        job = processes.launch(4, "sh", "-c", script, TOOL, env=clean(), code=None, merged=True)
        # Where even the program's own loader gets no memory, the check has not begun.
        if job.returncode == 0 or "error while loading shared libraries" in job.stdout:
            continue
        # Rust and glibc end a process that gets no memory for a small object, and no code of ours
        # can run then.
        if "memory allocation of" in job.stdout or "Fatal glibc error" in job.stdout:
            continue
        refusals += 1
        assert "RLIMIT_AS of process" in job.stdout and "ulimit -v" in job.stdout, job.stdout
        assert "NCCL_DEBUG" not in job.stdout and "stack backtrace" not in job.stdout, job.stdout
        assert not re.search(rf"rank (?!{victim})\d failed (in|first)", job.stdout), job.stdout
        assert f"rank {victim} failed first" in job.stdout, job.stdout
    assert 2 <= refusals < 7, "some of these limits are too low, and the last one is enough"


FAULTY = """
#include <dlfcn.h>
#include <stdlib.h>
#include <stdint.h>
typedef int (*all_reduce)(const void *, void *, size_t, int, int, void *, void *);
typedef int (*all_gather)(const void *, void *, size_t, int, void *, void *);
static int here(void) { return atoi(getenv("RANK")) == atoi(getenv("FAULTY_RANK")); }
/* One bit of element 700 of sums of 1021 float32, on one rank. */
int ncclAllReduce(const void *send, void *recv, size_t count, int type, int op, void *comm, void *stream)
{
  const int code = ((all_reduce)dlsym(RTLD_NEXT, "ncclAllReduce"))(send, recv, count, type, op, comm, stream);
  if (code == 0 && here() && getenv("FAULTY_SUM") && count == 1021 && op == 0) ((uint32_t *)recv)[700] ^= 1u << 22;
  return code;
}
/* The blocks of two ranks change places. */
int ncclAllGather(const void *send, void *recv, size_t count, int type, void *comm, void *stream)
{
  const int code = ((all_gather)dlsym(RTLD_NEXT, "ncclAllGather"))(send, recv, count, type, comm, stream);
  float *values = recv;
  if (code == 0 && here() && getenv("FAULTY_ORDER") && count == 1) {
    const float first = values[0];
    values[0] = values[1], values[1] = first;
  }
  return code;
}
"""


@pytest.fixture
def faulty(tmp_path):
    """The engine behind a library that gives wrong data on one rank."""
    return before_engine(tmp_path, FAULTY)


def test_a_wrong_sum_is_named(job, faulty):
    ranks = job(4, "2,2", "dp,tp", "--json", *QUICK, DM_CCL_LIBRARY=faulty, FAULTY_RANK="3", FAULTY_SUM="1")
    assert ranks.codes() == [1, 1, 1, 1], ranks
    told = report(ranks.outputs[0])
    assert told["verdict"] == "wrong" and not any(ranks.outputs[1:]), told
    assert {(w["dimension"], w["collective"], w["rank"], w["index"], w["count"]) for w in told["wrong"]} == {
        ("dp", "all_reduce", 3, 700, 1021), ("tp", "all_reduce", 3, 700, 1021)}, told["wrong"]
    first = told["wrong"][0]
    assert first["group"] == [1, 3] and first["host"] == told["hosts"][0]["name"] and first["expected"] != first["got"], first
    assert (first["elements"], first["of"]) == (1, 1021) and all(d["measurements"] == [] for d in told["dimensions"]), told


def test_a_wrong_order_is_named(job, faulty):
    ranks = job(4, "2,2", "dp,tp", "--op", "all_gather", DM_CCL_LIBRARY=faulty, FAULTY_RANK="2", FAULTY_ORDER="1")
    assert ranks.codes() == [1, 1, 1, 1], ranks
    said = ranks.outputs[0]
    pattern = rf"^wrong: all_gather along dp \{{0, 2\}}, 1 elements, on rank 2 on {re.escape(HOST)}: element 0 \(of rank 0\) is -?\d+, not -?\d+; 2 of 2 are wrong$"
    assert re.search(pattern, said, re.M) and "verdict: wrong" in said and "; next: " in said, said


def test_the_library_without_the_fault_is_good(faulty):
    assert "verdict: " in run(2, "--no-measure", DM_CCL_LIBRARY=faulty, FAULTY_RANK="-1").stdout


@pytest.mark.parametrize("victim, speaker", [(2, 0), (0, 1)])
def test_a_rank_that_dies_is_named(job, victim, speaker):
    ranks = job(4, "2,2", "dp,tp", *LONG, "300")
    ranks.until(0, "] measuring dp")
    killed = time.monotonic()
    ranks.ranks[victim].kill()
    codes = ranks.codes(but=(victim,), patience=60)
    late = time.monotonic() - killed
    assert codes == [None if rank == victim else 3 for rank in range(4)], ranks
    said = ranks.errors[speaker].splitlines()[-1]
    assert f"rank {victim}" in said and "; next: " in said, ranks
    assert late < 30, f"the last rank knew after {late:.1f} s"


def test_a_rank_that_hangs_ends_the_check_in_time(job):
    ranks = job(4, "2,2", "dp,tp", *LONG, "24", "--json")
    ranks.until(0, "] measuring dp")
    ranks.ranks[3].send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    assert ranks.codes(but=(3,), patience=60)[:3] == [3, 3, 3], ranks
    late = time.monotonic() - stopped
    told = report(ranks.outputs[0])
    assert told["verdict"] == "error" and "rank 3" in told["error"]["message"], told
    assert late < 35, f"{late:.1f} s with --timeout 24"


@pytest.mark.alone
def test_a_rank_that_never_comes(job):
    """The other ranks end when the time has passed, to a second. The test takes 5 s, in which rank
    0 is missing in one job and rank 2 in another one."""
    began = time.monotonic()
    both = {missing: job(4, "2,2", "--timeout", "5s", "--json", before=lambda rank, missing=missing: ["sh", "-c", "exit 2"] if rank == missing else [])
            for missing in (0, 2)}
    for missing, ranks in both.items():
        codes = ranks.codes(patience=60)
        took = time.monotonic() - began
        assert codes == [2 if rank == missing else 124 for rank in range(4)], ranks
        said = ranks.errors[1 if missing == 0 else 0]
        assert "not done after 5 s (--timeout), while joining the world: " in said and f"rank {missing}" in said, ranks
        assert "; start devicemesh check on every rank, and allow more with --timeout if some ranks start late" in said, ranks
        assert 4 < took < 6.5, f"ended after {took:.1f} s"
    told = report(both[2].outputs[0])
    assert (told["verdict"], told["error"]["status"]) == ("error", "TIMEOUT"), told


@pytest.mark.long
@pytest.mark.alone
def test_the_time_limit_is_that_of_the_rank_that_began_first(job):
    """The measurement would take an hour. The last rank joins when 2 s of the 6 s have passed, so
    the measurement ends after 4 s. The test takes 6 s."""
    late = ["sh", "-c", 'sleep 2; exec "$0" "$@"']
    ranks = job(3, "3", "dp", "--op", "all_reduce", *LONG, "0.1m", before=lambda rank: late if rank == 2 else [])
    ranks.until(0, "] measuring dp")
    began = time.monotonic()
    assert ranks.codes(patience=60) == [124] * 3, ranks
    took = time.monotonic() - began
    assert re.search(r"not done after 6 s \(--timeout\), while measuring dp: all_reduce; allow more", ranks.errors[0]), ranks
    assert took < 5, f"ended after {took:.1f} s"


SLOW = """
#include <stdlib.h>
#include <string.h>
#include <time.h>
/* So many large copies take 5 ms longer, however busy the machine is. */
static long slow;
void *memcpy(void *to, const void *from, size_t size)
{
  const struct timespec pause = {.tv_nsec = 5000000};
  if (size >= 1 << 20 && slow > 0) {
    slow -= 1;
    nanosleep(&pause, NULL);
  }
  return memmove(to, from, size);
}
__attribute__((constructor)) static void prepare(void)
{
  slow = atol(getenv("SLOW_COPIES"));
}
"""
# The large copies of two batches of the slow rank, and the 15 before its first batch. A batch takes
# 250 ms, and a copy more than 5 ms.
TWO_BATCHES = 15 + 2 * 50


@pytest.mark.alone
@pytest.mark.parametrize("slow", [pytest.param(TWO_BATCHES, marks=pytest.mark.long), 1_000_000], ids=["for a moment", "always"])
def test_a_slow_rank_is_found(job, tmp_path, slow):
    """A rank whose copies look slow is measured again, so the test takes some seconds."""
    processes.run(CC, "-std=c11", "-D_GNU_SOURCE", "-shared", "-fPIC", "-x", "c", "-", "-o", tmp_path / "slow.so", input=SLOW)
    ranks = job(4, "2,2", "dp,tp", "--op", "all_reduce", "--sizes", "4B", "--repeats", "2", "--timeout", "240", "--json", "--fail-slow",
                more=lambda rank: {"LD_PRELOAD": tmp_path / "slow.so", "SLOW_COPIES": slow} if rank == 2 else {})
    codes = ranks.codes(patience=240)
    told = report(ranks.outputs[0])
    found = {rank["rank"]: rank for rank in told["slow_ranks"]}
    if slow == TWO_BATCHES:
        assert 2 not in found or found[2]["evidence"] != "copy", told["slow_ranks"]
        return
    assert 2 in found and found[2]["evidence"] == "copy" and found[2]["times"] > 1.5, f"{told['slow_ranks']}\n{told['ranks']}"
    assert found[2]["times"] == max(rank["times"] or 0 for rank in found.values()) and found[2]["host"] == told["hosts"][0]["name"], found
    assert codes == [4] * 4 and told["verdict"] == "slow", (codes, told)
