"""Runs tests/gpu without a GPU: the programs on host memory with the host engine, and some of them
as device type cuda, with a stand-in for the CUDA driver and libhostccl.so in NCCL's place. Every
case that can run here must pass. Also checks what run.sh reports for a case that fails, hangs or
is ended, and that the example's PTX belongs to its source. Takes a minute, because the programs
are built and each runs on 1 to 8 ranks."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support import processes
from support.paths import CC, LIBRARY, ROOT
from support.processes import run, wait_until

RUN = ROOT / "tests/gpu/run.sh"
# These cases need a GPU or PyTorch.
CANNOT = {"torch", "adopt_torch", "multirank", "sanitizer"}


# The programs train and wait for their own deadlines, up to eight at a time on two cores. `make
# test-all` only: tests/gpu has what a GPU shows, and compiling its programs takes most of the time.
pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


def environment(build):
    return processes.environment(without=["DM_", "NCCL_", "LD_LIBRARY_PATH"], DM_GPU_BUILD=build, DM_LIB_DIR=LIBRARY, DM_GPU_PYTHON="/nonexistent")


@pytest.fixture(scope="session")
def packed(programs):
    """The folder of the built programs. No test writes into it."""
    return programs.once("gpu", lambda folder: run("bash", "tests/gpu/pack.sh", env=environment(folder), timeout=300))


@pytest.fixture
def suite(packed, tmp_path):
    """Runs run.sh and gives its verdicts, its text and the folder of its results."""
    def start(*arguments, build=packed, code=0):
        done = run("bash", RUN, "--out", tmp_path / "results", *arguments, env=environment(build), code=None, timeout=300)
        text = done.stdout + done.stderr
        assert done.returncode == code, f"exit code {done.returncode}\n{text}\n{(tmp_path / 'results/log.txt').read_text()}"
        verdicts = re.findall(r"^(ok|FAIL|skip) +(\w+)(?: x(\d+))?", done.stdout, re.M)
        closing = re.search(r"^(\d+) passed, (\d+) failed, (\d+) skipped$", done.stdout, re.M)
        counts = tuple(sum(verdict == kind for verdict, _, _ in verdicts) for kind in ("ok", "FAIL", "skip"))
        assert closing and tuple(map(int, closing.groups())) == counts, text
        return verdicts, text, tmp_path / "results"
    return start


def only(names):
    return [part for name in sorted(names) for part in ("--only", name)]


def named():
    return set(run("bash", RUN, "--list", env=environment("/nonexistent")).stdout.split())


def test_all_on_host_memory(suite):
    """On 1, 2 and 4 ranks all but the example, which trains for seconds."""
    verdicts, text, _ = suite("--dry-run", "--ranks", "1 2 4", *only(named() - {"hsdp_tp"}))
    assert {name for verdict, name, _ in verdicts if verdict == "skip"} == CANNOT, text
    ran = {(name, int(ranks)) for verdict, name, ranks in verdicts if verdict == "ok"}
    assert {name for name, _ in ran} == named() - CANNOT - {"hsdp_tp"}, text
    alone = ("collectives", "meshes", "check", "adopt", "lazy", "config")
    for name in (*alone, "abort", "kill", "cost"):
        assert {ranks for case, ranks in ran if case == name} == ({1, 2, 4} if name in alone else {2, 4}), f"{name}: {ran}"


@pytest.mark.parametrize("mode, ranks, names", [
    ("--dry-run", "8", named() - CANNOT - {"hsdp_tp", "overhead"}),
    ("--dry-run", "2", {"hsdp_tp"}),
    ("--dry-run=driver", "2 4", {"collectives", "check", "abort", "cost", "config"}),
    ("--dry-run=driver", "2", {"hsdp_tp"}),
], ids=["8-ranks", "example", "by-driver", "example-by-driver"])
def test_dry_run(suite, mode, ranks, names):
    verdicts, text, folder = suite(mode, "--ranks", ranks, *only(names))
    assert len(verdicts) == len(names) * len(ranks.split()) and all(verdict == "ok" for verdict, _, _ in verdicts), text
    if ranks == "8":
        results = (folder / "results.md").read_text()
        assert "nothing here ran on a GPU" in results and "| x8 | mesh (2, 2, 2): dm_init | " in results, results


def test_no_gpu_is_no_success(suite):
    verdicts, text, _ = suite(code=1)
    assert {verdict for verdict, _, _ in verdicts} == {"skip"} and "no GPU: " in text, text


def alive(build):
    """The processes whose program lies in that folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.readlink(entry / "exe").startswith(str(build)):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@pytest.fixture
def bad(packed, tmp_path):
    """Programs of which one hangs, one fails and one gives wrong results."""
    folder = tmp_path / "bad"
    shutil.copytree(packed, folder)
    hangs = folder / "meshes"
    hangs.unlink()
    run(CC, "-x", "c", "-", "-o", hangs, input="#include <unistd.h>\nint main(void) { for (;;) pause(); }")
    (folder / "config").write_text("#!/bin/sh\necho why it failed\nexit 3\n")
    (folder / "kill").write_text('#!/bin/sh\n[ "$RANK" = 0 ] && kill -9 $$\nexit 0\n')
    return folder


def test_bad_cases_fail(suite, bad):
    """Each is a case that failed, and nothing is left of it."""
    verdicts, text, _ = suite("--dry-run", "--ranks", "2", "--deadline", "2", *only(["meshes", "config", "kill", "adopt"]), build=bad, code=1)
    assert sorted(verdicts) == [("FAIL", "config", "2"), ("FAIL", "kill", "2"), ("FAIL", "meshes", "2"), ("ok", "adopt", "2")], text
    assert "exit code 124" in text and "why it failed" in text and "0 lines like «^survivor" in text, text
    assert not alive(bad), alive(bad)


def test_a_budget_ends_a_case_without_failing_it(suite, bad):
    verdicts, text, _ = suite("--dry-run", "--ranks", "2 4", "--budget", "2", "--only", "meshes", build=bad, code=1)
    assert verdicts == [("skip", "meshes", "2"), ("skip", "meshes", "4")] and "budget" in text, text
    assert not alive(bad), alive(bad)


def test_ended_from_outside_it_takes_its_ranks_along(bad, tmp_path):
    process = subprocess.Popen(["bash", str(RUN), "--dry-run", "--ranks", "2", "--only", "meshes", "--out", str(tmp_path / "ended")],
                               env=environment(bad), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: len(alive(bad)) == 3, "both ranks and their launcher run")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)
    wait_until(lambda: not alive(bad), "everything has ended")


def test_ptx_is_of_its_source():
    run(sys.executable, "examples/generate_ptx.py", "--check")


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="no shellcheck here")
def test_scripts_are_clean():
    run("shellcheck", RUN, "tests/gpu/pack.sh")
