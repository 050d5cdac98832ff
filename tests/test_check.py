"""`devicemesh check` with real ranks: good runs, wrong command lines, a library that gives wrong
data, ranks that die, stop or are slow, terminals, and device type cuda with a stand-in for the
CUDA driver. The tests compare the exit code of every rank."""

import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import threading
import time

import pytest

from support import processes
from support.paths import CC, CXX, LIBRARY, ROOT, TOOL

HOST = socket.gethostname()
QUICK = ("--sizes", "4B,4KiB", "--iterations", "5", "--repeats", "2", "--timeout", "120")
# Measuring takes as long as the processors are busy with other work; each wait has a deadline of
# its own.
pytestmark = pytest.mark.timeout(400)


def clean(**more):
    return processes.environment(without=["NO_COLOR", "DM_"], **{"TERM": "xterm", **more})


def torch_like(rank, size, port):
    return {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


class Job:
    """Ranks that no launcher ends, so that each one's exit code is its own."""

    def __init__(self, size, arguments, variables):
        """`arguments` and `variables` are functions of the rank."""
        self.ranks = [subprocess.Popen([TOOL, "check", *arguments(rank)], env=clean(**variables(rank)), text=True, stdin=subprocess.DEVNULL,
                                       stdout=subprocess.PIPE, stderr=subprocess.PIPE) for rank in range(size)]
        self.errors = [""] * size
        self.outputs = [""] * size
        self.readers = [
            threading.Thread(target=self.read, args=(rank, kind), daemon=True)
            for rank in range(size)
            for kind in ("stdout", "stderr")
        ]
        for reader in self.readers:
            reader.start()

    def read(self, rank, kind):
        told = self.outputs if kind == "stdout" else self.errors
        for line in getattr(self.ranks[rank], kind):
            told[rank] += line

    def until(self, rank, text, patience=120):
        end = time.monotonic() + patience
        while text not in self.errors[rank]:
            assert time.monotonic() < end and self.ranks[rank].poll() is None, f"rank {rank} did not say {text!r}: {self.errors[rank]}"
            time.sleep(0.01)

    def codes(self, but=(), patience=120):
        end = time.monotonic() + patience
        for rank, process in enumerate(self.ranks):
            if rank not in but:
                try:
                    process.wait(timeout=max(0.1, end - time.monotonic()))
                except subprocess.TimeoutExpired:
                    raise AssertionError(f"rank {rank} has not ended after {patience} s\n{self}") from None
                # The process may end before the threads here have read its last lines.
                for reader in self.readers[2 * rank:2 * rank + 2]:
                    reader.join(timeout=max(0.1, end - time.monotonic()))
        return [None if rank in but else process.returncode for rank, process in enumerate(self.ranks)]

    def end(self):
        for process in self.ranks:
            if process.poll() is None:
                process.kill()
            process.wait()
        for reader in self.readers:
            reader.join(timeout=10)
        for process in self.ranks:
            process.stdout.close()
            process.stderr.close()

    def __str__(self):
        return "\n".join(f"rank {rank}:\n{out}{error}" for rank, (out, error) in enumerate(zip(self.outputs, self.errors)))


@pytest.fixture
def job(free_port):
    """Starts ranks, by default with torchrun's variables; they end with the test."""
    started = []

    def start(size, *arguments, world=None, place=None, more=None, of_each=None, **environment):
        """`world` is the size that the ranks are told. The others are functions of the rank:
        `place` gives the launcher's variables, `more` adds to them, and `of_each` gives further
        arguments."""
        port = free_port()
        place = place or (lambda rank: torch_like(rank, world or size, port))
        nothing = lambda rank: {}
        started.append(
            Job(size, lambda rank: [*arguments, *(of_each or nothing)(rank)],
                lambda rank: {**environment, **place(rank), **(more or nothing)(rank)}))
        return started[-1]

    yield start
    for one in started:
        one.end()


def run(size, *arguments, code=0, **environment):
    return processes.run(TOOL, "run", "-n", size, "--grace-period", "20", "--", TOOL, "check", *arguments,
                         env=clean(**environment), code=code, timeout=180)


def report(text):
    assert text.count("\n") == 1 and text.endswith("\n"), text
    return json.loads(text)


def test_report_of_a_good_mesh():
    told = report(run(8, "2,-1,2", "dp,cp,tp", "--flatten", "dp,cp=dpcp", "--json", *QUICK).stdout)
    assert told["schema"] == "devicemesh.check/1" and told["verdict"] in ("good", "slow"), told
    assert (told["world_size"], told["device_type"], told["dtype"], told["wrong"]) == (8, "cpu", "float32", []), told
    assert told["hosts"] == [{"name": told["hosts"][0]["name"], "ranks": list(range(8))}] and len(told["ranks"]) == 8, told
    assert [(d["name"], d["size"], d["groups"]) for d in told["dimensions"]] == [
        ("dp", 2, 4),
        ("cp", 2, 4),
        ("tp", 2, 4),
        ("dpcp", 4, 2),
    ], told
    factors = {
        "all_reduce": lambda n: 2 *
                      (n - 1) / n, "reduce": lambda n: 1, "broadcast": lambda n: 1, "all_gather": lambda n: (n - 1) / n,
        "reduce_scatter": lambda n: (n - 1) / n, "all_to_all": lambda n: (n - 1) / n, "send_recv": lambda n: 1
    }
    for dimension in told["dimensions"]:
        assert dimension["verified_calls"] > 100, dimension
        assert [m["collective"] for m in dimension["measurements"]] == [name for name in factors for _ in range(2)], dimension
        for measured in dimension["measurements"]:
            assert 0 < measured["seconds"] <= measured["slowest_seconds"], measured
            assert abs(measured["algbw_gbps"] - measured["bytes"] / measured["seconds"] / 1e9) <= 1e-9 * measured["algbw_gbps"], measured
            wanted = factors[measured["collective"]](dimension["size"]) * measured["algbw_gbps"]
            assert abs(measured["busbw_gbps"] - wanted) <= 1e-9 * wanted, measured
            assert len(measured["slowest_group"]) == dimension["size"], measured


def test_one_rank_alone():
    alone = run(1)
    assert (
        "DeviceMesh((1,), 'cpu'" in alone.stdout
        and "every element is right" in alone.stdout
        and "verdict: good" in alone.stdout
    ), alone.stdout


def test_some_collectives_of_four_ranks():
    four = run(4, "2,2", "dp,tp", "--op", "all_reduce,all_gather", *QUICK)
    assert re.search(r"^dp +2 +2 +all_reduce .*\n +all_gather ", four.stdout, re.M) and "reduce_scatter" not in four.stdout, four.stdout
    # Standard error is no terminal, so there is a line for each phase and no control sequence.
    assert "] verifying dp\n" in four.stderr and "] measuring tp\n" in four.stderr and "\x1b" not in four.stdout + four.stderr, four.stderr


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "float16", "bfloat16"])
def test_type_of_elements(dtype):
    told = report(run(3, "--dtype", dtype, "--no-measure", "--json", "--quiet").stdout)
    assert (told["verdict"], told["dtype"]) == ("good", dtype), told
    assert told["dimensions"][0]["measurements"] == [], told


@pytest.mark.parametrize("arguments, said", [
    (("2,2", "dp,tp"), "the shape 2,2 has 4 ranks, but the world has 3: start 4"),
    (("2,-1",), "the shape 2,-1 has 2 ranks times what -1 stands for, but the world has 3"),
    (("3", "dp,tp"), "name"),
    (("--flatten", "dp=x"), "dp"),
    (("--expect", "tp=3"), "tp"),
    (("--no-such-option",), "no such option"),
    (("2,2,2", "dp,cp,tp", "--nothing"), "--nothing"),
    (("--op", "all_scatter"), "all_reduce"),
    (("--sizes", "4Q"), "KiB"),
    (("--slow-factor", "1"), "above 1"),
    (("--dtype", "float8"), "bfloat16"),
], ids=lambda value: " ".join(value) if isinstance(value, tuple) else "")
def test_wrong_command_line(job, arguments, said):
    ranks = job(3, *arguments)
    assert ranks.codes() == [2, 2, 2], ranks
    assert said in ranks.errors[0] and not any(ranks.outputs), ranks


def test_quiet(job):
    ranks = job(2, "--quiet")
    assert ranks.codes() == [0, 0], ranks


def test_options_that_differ_are_named(job):
    ranks = job(2, *QUICK, of_each=lambda rank: ["--warmup", "7"] if rank == 1 else [])
    assert ranks.codes() == [3, 3], ranks
    assert "warmup=7" in ranks.errors[0] and "same command line" in ranks.errors[0], ranks


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_without_address_space_is_named(victim):
    """Whatever the rank gets no memory for: a thread, the communicator of all ranks, that of a
    dimension, or the buffers of the check."""
    refusals = 0
    for kib in (9_000, 20_000, 30_000, 36_000, 44_000, 54_000, 200_000):
        script = f'[ "$RANK" = {victim} ] && ulimit -v {kib}; exec "$0" check 2,2 --no-measure --quiet'
        job = processes.launch(4, "sh", "-c", script, TOOL, env=clean(), code=None, merged=True)
        if job.returncode == 0:
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
/* Two ranks' blocks in the other's place. */
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
    real = tmp_path / "libhostccl.so.0.2"
    real.symlink_to(LIBRARY / "libhostccl.so")  # under its SONAME
    processes.run(CC, "-std=c11", "-D_GNU_SOURCE", "-shared", "-fPIC", "-x", "c", "-", "-x", "none",
                  "-Wl,--no-as-needed", real, f"-Wl,-rpath,{tmp_path}", "-ldl", "-o", tmp_path / "libfaulty.so",
                  input=FAULTY)
    return str(tmp_path / "libfaulty.so")


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


LONG = ("--sizes", "4B,64KiB", "--iterations", "1000000", "--repeats", "1000", "--timeout", "300")


@pytest.mark.parametrize("victim, speaker", [(2, 0), (0, 1)])
def test_a_rank_that_dies_is_named(job, victim, speaker):
    ranks = job(4, "2,2", "dp,tp", *LONG)
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
    ranks = job(4, "2,2", "dp,tp", *LONG[:-1], "24", "--json")
    ranks.until(0, "] measuring dp")
    ranks.ranks[3].send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    assert ranks.codes(but=(3,), patience=60)[:3] == [3, 3, 3], ranks
    late = time.monotonic() - stopped
    told = report(ranks.outputs[0])
    assert told["verdict"] == "error" and "rank 3" in told["error"]["message"], told
    assert late < 35, f"{late:.1f} s with --timeout 24"


def test_a_rank_that_never_comes(job):
    ranks = job(1, "2,2", "--timeout", "3", world=4)
    assert ranks.codes(patience=60) == [3] and "rank" in ranks.errors[0], ranks


SLOW = """
#include <signal.h>
#include <string.h>
#include <time.h>
/* From SIGUSR1 on: a rest of 10 ms with every large copy, however busy the machine is. */
static volatile sig_atomic_t is_slow;
static void begin(int signal) { (void)signal, is_slow = 1; }
void *memcpy(void *to, const void *from, size_t size)
{
  const struct timespec pause = {.tv_nsec = 10000000};
  if (is_slow && size >= 1 << 20) nanosleep(&pause, NULL);
  return memmove(to, from, size);
}
__attribute__((constructor)) static void prepare(void)
{
  struct sigaction action = {.sa_handler = begin, .sa_flags = SA_RESTART};
  sigaction(SIGUSR1, &action, NULL);
}
"""


@pytest.mark.alone
def test_a_slow_rank_is_found(job, tmp_path):
    processes.run(CC, "-std=c11", "-D_GNU_SOURCE", "-shared", "-fPIC", "-x", "c", "-", "-o", tmp_path / "slow.so", input=SLOW)
    ranks = job(4, "2,2", "dp,tp", "--op", "all_reduce", "--sizes", "4B", "--repeats", "3", "--timeout", "240", "--json", "--fail-slow",
                more=lambda rank: {"LD_PRELOAD": tmp_path / "slow.so"} if rank == 2 else {})
    ranks.until(0, "] measuring dp")
    ranks.ranks[2].send_signal(signal.SIGUSR1)
    codes = ranks.codes(patience=240)
    told = report(ranks.outputs[0])
    found = {slow["rank"]: slow for slow in told["slow_ranks"]}
    assert 2 in found and found[2]["evidence"] == "copy" and found[2]["times"] > 1.5, f"{told['slow_ranks']}\n{told['ranks']}"
    assert found[2]["times"] == max(slow["times"] or 0 for slow in found.values()) and found[2]["host"] == told["hosts"][0]["name"], found
    assert codes == [4] * 4 and told["verdict"] == "slow", (codes, told)


def test_bandwidths_can_be_expected():
    done = run(2, "2", "dp", "--op", "all_reduce", "--expect", "dp=1000000", "--fail-slow", *QUICK, code=4)
    assert re.search(
        r"^slow: dp as a whole: [\d.]+ GB/s of bus bandwidth for all_reduce of 4 KiB, expected 1000000$",
        done.stdout,
        re.M,
    ), done.stdout
    assert "verdict: slow" in done.stdout, done.stdout
    run(2, "2", "dp", "--op", "all_reduce", "--expect", "dp=1000000", *QUICK)


def on_terminal(*arguments, **environment):
    """Standard output and standard error of one rank on a terminal each."""
    ends = [pty.openpty(), pty.openpty()]
    process = subprocess.Popen([TOOL, "check", *arguments], env=clean(**environment), stdin=subprocess.DEVNULL,
                               stdout=ends[0][1], stderr=ends[1][1])
    for _, ours in ends:
        os.close(ours)
    told = {ends[0][0]: b"", ends[1][0]: b""}
    open_ends = set(told)
    until = time.monotonic() + 120
    while open_ends:
        assert time.monotonic() < until, told
        for end in select.select(list(open_ends), [], [], 1)[0]:
            try:
                piece = os.read(end, 65536)
            except OSError:
                piece = b""
            told[end] += piece
            if not piece:
                open_ends.remove(end)
                os.close(end)
    assert process.wait(timeout=60) == 0, told
    return [text.decode() for text in told.values()]


def test_a_terminal_has_colours_and_a_line_of_progress():
    out, error = on_terminal("--no-measure")
    assert "\x1b[1m" in out and "\r\x1b[K[" in error and "verifying dim_0: all_reduce" in error and error.endswith("\r\x1b[K"), (out, error)


def test_a_terminal_without_colours():
    out, error = on_terminal("--no-measure", NO_COLOR="1")
    assert "\x1b" not in out and not re.search(r"\x1b\[[\d;]*m", error), (out, error)


def test_a_terminal_that_can_do_nothing():
    out, error = on_terminal("--no-measure", "--quiet", TERM="dumb")
    assert "\x1b" not in out and error == "", (out, error)


def test_under_mpich(job):
    ranks = job(
        2, "-1,2", "dp,tp", *QUICK, place=lambda rank:
        {"PMI_RANK": rank, "PMI_SIZE": 2, "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": 2, "PMI_FD": 9})
    assert ranks.codes() == [0, 0], ranks
    assert "started by PMI" in ranks.outputs[0] and ranks.outputs[1] == "", ranks


def test_by_the_way_of_a_gpu(tmp_path):
    processes.run(CXX, "-std=c++17", "-O1", "-fPIC", "-shared", "-Wl,-soname,libcuda.so.1",
                  ROOT / "tests/gpu/standin.cpp", "-o", tmp_path / "libcuda.so.1")
    told = report(
        run(2, "2", "dp", "--device", "cuda", "--json", *QUICK, DM_CCL_LIBRARY=LIBRARY / "libhostccl.so",
            LD_LIBRARY_PATH=tmp_path).stdout)
    assert told["device_type"] == "cuda" and told["wrong"] == [] and told["ranks"][0]["device"] == "no GPU: the stand-in driver", told
    assert told["dimensions"][0]["measurements"] and told["ranks"][1]["copy_gbps"] > 0, told


def test_no_gpu_is_said():
    none = run(1, "--device", "cuda", code=3)
    assert "next" in none.stderr or "devicemesh info" in none.stderr or "install" in none.stderr, none.stderr
