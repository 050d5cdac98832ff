"""`devicemesh check` with real ranks: good runs, wrong command lines, terminals, and device type
cuda with a stand-in for the CUDA driver. The tests compare the exit code of every rank.
test_check_faults.py has the faults, test_check_hosts.py pairs and hosts, test_check_records.py the
records."""

import os
import pty
import re
import select
import signal
import socket
import subprocess
import termios
import time
from fcntl import ioctl

import pytest

from support import processes
from support.checks import LONG, QUICK, clean, jobs, report, run, torch_like
from support.paths import CXX, LIBRARY, ROOT, TOOL
from support.terminals import on_terminals

# Measuring takes as long as the processors are busy with other work; each wait has a deadline of
# its own.
pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def job(free_port):
    yield from jobs(free_port)


def test_report_of_a_good_mesh():
    told = report(run(8, "2,-1,2", "dp,cp,tp", "--flatten", "dp,cp=dpcp", "--json", *QUICK).stdout)
    assert told["schema"] == "devicemesh.check/1" and told["verdict"] in ("good", "slow"), told
    assert (told["world_size"], told["device_type"], told["dtype"], told["wrong"]) == (8, "cpu", "float32", []), told
    assert told["hosts"] == [{**told["hosts"][0], "ranks": list(range(8)), "pair_gbps": None}] and told["hosts"][0]["machine"] and len(told["ranks"]) == 8, told
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
    assert [(pairs["kind"], pairs["bytes"], pairs["pairs"], pairs["left_out"]) for pairs in told["pairs"]] == [
        ("within hosts", 4, 28, 0), ("within hosts", 4096, 28, 0)], told["pairs"]
    for dimension in told["dimensions"]:
        assert dimension["verified_calls"] > 100, dimension
        assert [m["collective"] for m in dimension["measurements"]] == [name for name in factors for _ in range(2)], dimension
        for measured in dimension["measurements"]:
            assert 0 < measured["seconds"] <= measured["slowest_seconds"], measured
            assert abs(measured["algbw_gbps"] - measured["bytes"] / measured["seconds"] / 1e9) <= 1e-9 * measured["algbw_gbps"], measured
            wanted = factors[measured["collective"]](dimension["size"]) * measured["algbw_gbps"]
            assert abs(measured["busbw_gbps"] - wanted) <= 1e-9 * wanted, measured
            assert len(measured["slowest_group"]) == dimension["size"], measured


def form(text):
    """A report without the parts that differ from machine to machine: numbers, units, hosts, and
    lines that depend on them."""
    lines = [line for line in text.strip().split("\n") if not line.startswith(("slow:", "up to"))]
    lines = [re.sub(r"verdict: .*", "verdict:", line) for line in lines]
    text = re.sub(r"\d+(\.\d+)*( (us|ms|s)\b)?", "N", "\n".join(lines))
    return re.sub(r" on [^\s,]+( -|,)", r" on H\1", re.sub(r"([^\n ]) +", r"\1 ", text))


def test_the_page_has_the_form_of_the_report():
    command, told = re.search(r"^\$ devicemesh run (.*check.*)\n((?:.*\n)*?)```", (ROOT / "docs/check.md").read_text(), re.M).groups()
    words = command.replace("-- devicemesh", f"-- {TOOL}").split()
    done = processes.run(TOOL, "run", *words, "--quiet", env=clean(), timeout=180)
    assert form(done.stdout) == form(told), done.stdout


def test_one_rank_alone():
    alone = processes.run(TOOL, "check", env=clean(), timeout=180)
    assert (
        "DeviceMesh((1,), 'cpu'" in alone.stdout
        and "every element is right" in alone.stdout
        and "1 rank on 1 host, started without a launcher; " in alone.stdout
        and "verdict: good" in alone.stdout
    ), alone.stdout


def test_some_collectives_of_four_ranks():
    four = run(4, "2,2", "dp,tp", "--op", "all_reduce,all_gather", *QUICK)
    rows = re.findall(r"^  (\w+) +(\d+ K?i?B) +[\d.]+ \w+ +(?:-|[\d.]+) +(?:-|[\d.]+)$", four.stdout, re.M)
    assert rows == [("all_reduce", "4 B"), ("all_reduce", "4 KiB"), ("all_gather", "8 B"), ("all_gather", "4 KiB")] * 2, four.stdout
    assert "\ndp: 2 groups of 2 ranks\n" in four.stdout and "\npairs within hosts, 4 KiB: " in four.stdout, four.stdout
    # Standard error is no terminal, so there is a line for each step and no control sequence.
    told = re.findall(r"^devicemesh check: \[(\d+)/(\d+)\] (.+)$", four.stderr, re.M)
    assert [int(at) for at, _, _ in told] == list(range(1, int(told[0][1]) + 1)), four.stderr
    assert "verifying dp: all_reduce" in [what for _, _, what in told] and "\x1b" not in four.stdout + four.stderr, four.stderr


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
    (("--sizes", "4,5"), "--sizes: 5 B is no whole number of elements of float32, which have 4 B each; take 8"),
    (("--sizes", "4B:1KiB", "--dtype", "int64"), "--sizes: 4 B is no whole number of elements of int64"),
    (("--slow-factor", "1"), "above 1"),
    (("--dtype", "float8"), "bfloat16"),
], ids=lambda value: " ".join(value) if isinstance(value, tuple) else "")
def test_wrong_command_line(job, arguments, said):
    ranks = job(3, *arguments)
    assert ranks.codes(but=(1, 2)) == [2, None, None], ranks
    assert said in ranks.errors[0] and not any(ranks.outputs), ranks


@pytest.mark.parametrize("arguments", [("--no-such-option", ), ("2,2", )], ids=["option", "shape"])
def test_other_ranks_with_the_same_wrong_command_line_are_silent(job, arguments):
    ranks = job(3, *arguments)
    assert ranks.codes() == [2, 2, 2], ranks
    assert ranks.errors[0] and not any(ranks.outputs) and not any(ranks.errors[1:]), ranks


@pytest.mark.parametrize("own, said", [
    (("--no-such-option",), "invalid value '--no-such-option' for '[SIZES]': there is no such option"),
    (("3,3",), "the shape 3,3 has 9 ranks, but the world has 4"),
], ids=["option", "shape"])
def test_a_wrong_command_line_of_one_rank_is_told_by_rank_0(job, own, said):
    ranks = job(4, of_each=lambda rank: own if rank == 2 else ["2,2", "dp,tp", *QUICK])
    assert ranks.codes() == [3, 3, 2, 3], ranks
    line = ranks.errors[0].splitlines()[-1]
    assert re.fullmatch(f"devicemesh check: .*rank 2 .*wrong command line on {socket.gethostname()}: .*{re.escape(said)}.*", line), ranks
    assert not any(ranks.errors[1:]), ranks


@pytest.mark.parametrize("arguments, said", [
    (("--no-such-option",), "no such option"),
    (("2", "dp", "--no-such-option"), "unexpected argument '--no-such-option' found\n\nUsage: devicemesh check"),
    (("3,3",), "the shape 3,3 has 9 ranks, but the world has 2"),
], ids=["option", "option behind a shape", "shape"])
def test_a_wrong_command_line_is_told_once(arguments, said):
    """Rank 0 tells the mistake, so `devicemesh run` does not tell it again for each rank."""
    refused = run(2, *arguments, code=2)
    assert said in refused.stderr and "devicemesh run" not in refused.stderr and refused.stdout == "", refused.stderr


def test_quiet(job):
    ranks = job(2, "--quiet", *QUICK)
    assert ranks.codes() == [0, 0] and ranks.errors == ["", ""], ranks
    assert "\nverdict: " in ranks.outputs[0] and ranks.outputs[1] == "", ranks


@pytest.mark.parametrize("own, said", [
    (("2,2", "dp,tp", "--sizes", "4B,4KiB", "--warmup", "7"), "--warmup 7, and rank 0 has --warmup 2"),
    (("4,1", "dp,tp", "--sizes", "4B,1MiB"), "the shape 4,1 and --sizes 4B,1MiB, and rank 0 has the shape 2,2 and --sizes 4B,4KiB"),
    (("2,2", "dp,pp", "--sizes", "4B,4KiB", "--op", "all_reduce", "--no-measure"),
     "the names dp,pp and --op all_reduce and --no-measure, and rank 0 has the names dp,tp and --op all_reduce,reduce,broadcast,"),
], ids=["warmup", "shape", "names"])
def test_options_that_differ_are_named(job, own, said):
    """Every rank ends with the same code. The message names options as they are on the command
    line."""
    ranks = job(4, of_each=lambda rank: [*QUICK[2:], *own] if rank == 1 else ["2,2", "dp,tp", *QUICK])
    assert ranks.codes() == [3] * 4, ranks
    line = ranks.errors[0].splitlines()[-1]
    start = f"devicemesh check: the ranks were started with different options: rank 1 on {socket.gethostname()} has "
    assert line.startswith(start + said) and line.endswith("; next: start every rank with the same command line and the same version"), ranks
    assert not any(ranks.errors[1:]), ranks


def test_a_report_that_cannot_be_written(tmp_path):
    """The exit code is not the one for wrong data, and the record is written all the same."""
    with open("/dev/full", "w") as full:
        done = subprocess.run([TOOL, "check", "--op", "all_reduce", "--quiet", *QUICK, "--save", tmp_path / "record"], env=clean(),
                              stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE, text=True, timeout=180)
    assert done.returncode == 3 and "cannot write to standard output: No space left on device" in done.stderr, done
    assert report((tmp_path / "record").read_text())["wrong"] == []


def test_bandwidths_can_be_expected():
    done = run(2, "2", "dp", "--op", "all_reduce", "--expect", "dp=1000000", "--fail-slow", *QUICK, code=4)
    assert re.search(
        r"^slow: dp as a whole: [\d.]+ GB/s of bus bandwidth for all_reduce of 4 KiB, expected 1000000$",
        done.stdout,
        re.M,
    ), done.stdout
    verdict = done.stdout[done.stdout.index("verdict: slow"):]
    assert "check again; if the figures stay" in verdict or "slow: rank" in done.stdout, done.stdout
    run(2, "2", "dp", "--op", "all_reduce", "--expect", "dp=1000000", *QUICK)


def on_terminal(*arguments, width=80, **environment):
    """Standard output and standard error of one rank on a terminal each."""
    return on_terminals(width, TOOL, "check", *arguments, env=clean(**environment))


def interrupted(step, *command):
    """Runs a command on a terminal and presses Ctrl-C in this step of a check. Gives the exit code
    and what is on the terminal then."""
    def log_in():
        # A shell starts background jobs with this signal ignored. The check would ignore it, too,
        # and measure until it is done.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        ioctl(0, termios.TIOCSCTTY, 0)

    ours, theirs = pty.openpty()
    command = subprocess.Popen([str(word) for word in command], env=clean(), stdin=theirs, stdout=theirs, stderr=theirs,
                               start_new_session=True, preexec_fn=log_in)
    os.close(theirs)
    told, until = b"", time.monotonic() + 120
    while True:
        assert time.monotonic() < until, told
        if not select.select([ours], [], [], 1)[0]:
            continue
        try:
            told += os.read(ours, 65536)
        except OSError:
            break
        if step in told and b"\x03" not in told:
            os.write(ours, b"\x03")
            told += b"\x03"
    os.close(ours)
    return command.wait(timeout=60), told.decode()


def test_after_ctrl_c_a_new_line_begins():
    words = ("2", "dp", "--op", "all_reduce", *LONG, "300")
    code, told = interrupted(b"measuring dp", TOOL, "run", "-n", "2", "--", TOOL, "check", *words)
    assert code == 130 and re.search(r"\n(\r\x1b\[K)?devicemesh run: (\x1b\[[\d;]*m)*got signal 2 \(SIGINT\)", told), told


def test_after_ctrl_c_the_line_of_progress_is_empty():
    """One rank under no launcher, where nobody else writes."""
    code, told = interrupted(b"measuring each rank alone", TOOL, "check", *LONG, "300")
    assert code == -signal.SIGINT and told.endswith("\r\x1b[K"), (code, told)


def test_a_terminal_has_colours_and_a_line_of_progress():
    out, error = on_terminal("--no-measure")
    assert "\x1b[1m" in out and "\r\x1b[K[" in error and "verifying dim_0: all_reduce" in error and error.endswith("\r\x1b[K"), (out, error)


@pytest.mark.parametrize("width", [60, 200])
def test_lines_fit_into_the_terminal(job, free_port, tmp_path, width):
    """Lines are broken between words, and rows of the table are not broken."""
    words = ("2", "data_parallel_replicas", "--quiet", *QUICK)
    saved = job(2, *words, "--save", tmp_path / "record")
    assert saved.codes() == [0, 0], saved
    port = free_port()
    other = job(1, *words, "--compare", tmp_path / "record", place=lambda rank: torch_like(1, 2, port))
    out, _ = on_terminal(*words, "--compare", tmp_path / "record", width=width, NO_COLOR="1", **torch_like(0, 2, port))
    assert other.codes() == [0], other
    lines = out.split("\r\n")
    rows = [line for line in lines if re.fullmatch(r"  \w+ +\d+ K?i?B +[\d.]+ \w+ +(-|[\d.]+) +(-|[\d.]+) +[\d.]+\*?", line)]
    assert len(rows) == 14, out
    # The name of the file is one word, which is not broken.
    words = [line for line in lines if len(line) > width and len(line.split()) > 1]
    assert not words and (width > 60 or "\n  " in out), out


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
    without = r"no usable communicator library: tried libnccl\.so\.2 .*; devicemesh info says what is found here$"
    idle = r"no CUDA driver that works: .*; use device type cpu, or install the driver$"
    assert re.search(rf"^devicemesh check: ({without}|{idle})", none.stderr, re.M), none.stderr
