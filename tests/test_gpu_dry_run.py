"""Runs tests/gpu without a GPU: the programs on host memory with the host engine, and some of them
as device type cuda, with a stand-in for the CUDA driver and libhostccl.so in NCCL's place. Every
case that can run here must pass. Also checks what run.sh reports for a case that fails, hangs or
is ended, that a part goes on where it was cut off, that all parts run from the packed folder in an
empty root, and that the example's PTX belongs to its source. Takes a minute, because the programs
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
# These cases need a GPU, PyTorch, JAX, or a release of NCCL.
CANNOT = {"torch", "adopt_torch", "other_copy", "torch_streams", "torch_graph", "jax", "jax_buffers", "jax_mismatch", "sanitizer", "renew", "rust"}
# The host engine has no streams and no graphs; they run by the stand-in driver.
ON_STREAMS = {"graph", "stream_wait"}
# "uneven" belongs to the setting multirank.
ELSEWHERE = {"uneven"}


# The programs train and wait for their own deadlines, up to eight at a time on two cores. `make
# test-all` only: tests/gpu has what a GPU shows, and compiling its programs takes most of the time.
pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


def environment(build):
    return processes.environment(without=["DM_", "NCCL_", "LD_LIBRARY_PATH"], DM_GPU_BUILD=build, DM_LIB_DIR=LIBRARY,
                                 DM_GPU_PYTHON="/nonexistent")


@pytest.fixture(scope="session")
def packed(programs):
    """The folder of the built programs. No test writes into it. The Rust example is left out,
    because cargo would compile everything once more, and no case of a dry run needs it
    (tests/test_rust_example.py runs the example)."""
    return programs.once(
        "gpu", lambda folder: run("bash", "tests/gpu/pack.sh", "--no-nccl", "--no-python", "--no-rust",
                                  env=environment(folder), timeout=300))


def logs(folder):
    """The output of every case that has ended."""
    return run("tar", "-xOf", folder / "logs.tar", code=None).stdout if (folder / "logs.tar").exists() else "no log"


@pytest.fixture
def suite(packed, tmp_path):
    """Runs run.sh and gives its verdicts, its text and the folder of its results."""
    def start(*arguments, build=packed, code=0):
        done = run("bash", RUN, "--out", tmp_path / "results", *arguments, env=environment(build), code=None, timeout=300)
        text = done.stdout + done.stderr
        assert done.returncode == code, f"exit code {done.returncode}\n{text}\n{logs(tmp_path / 'results')}"
        verdicts = re.findall(r"^(ok|FAIL|skip) +([\w.]+) x(\d+)", done.stdout, re.M)
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
    skipped = {name.split(".")[0] for verdict, name, _ in verdicts if verdict == "skip"}
    # The benchmark wants as many ranks as cores.
    assert skipped - {"bench"} == CANNOT | ON_STREAMS, text
    ran = {(name.split(".")[0], int(ranks)) for verdict, name, ranks in verdicts if verdict == "ok"}
    assert {name for name, _ in ran} | {"bench"} == named() - CANNOT - ON_STREAMS - ELSEWHERE - {"hsdp_tp"} | {"bench"}, text
    single = ("collectives", "meshes", "check", "adopt", "lazy", "config", "memory")
    for name in (*single, "abort", "kill", "cost", "alone", "shrink"):
        assert {ranks for case, ranks in ran if case == name} == ({1, 2, 4} if name in single else {2, 4}), f"{name}: {ran}"


@pytest.mark.parametrize(
    "mode, ranks, names",
    [("--dry-run", "8", {
        "inventory", "info", "collectives", "meshes", "check", "abort", "kill", "shrink", "cost", "adopt", "lazy",
        "config"
    }), ("--dry-run", "2", {"hsdp_tp"}),
     ("--dry-run=driver", "2 4", {"collectives", "check", "abort", "cost", "config", "graph", "stream_wait"}),
     ("--dry-run=driver", "2", {"hsdp_tp"}), ], ids=["8-ranks", "example", "by-driver", "example-by-driver"])
def test_dry_run(suite, mode, ranks, names):
    verdicts, text, folder = suite(mode, "--ranks", ranks, *only(names))
    assert {name.split(".")[0] for _, name, _ in verdicts} == names and all(verdict == "ok" for verdict, _, _ in verdicts), text
    if ranks == "8":
        results = (folder / "results.md").read_text()
        assert "nothing here ran on a GPU" in results and re.search(
            r"^\| x8 \| sockets \| machine-host \| mesh \(2, 2, 2\): dm_init \| \d", results, re.M
        ), results


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
    verdicts, text, _ = suite("--dry-run", "--ranks", "2", "--deadline", "2",
                              *only(["meshes", "config", "kill", "adopt"]), build=bad, code=1)
    assert sorted(verdicts) == [("FAIL", "config", "2"), ("FAIL", "kill", "2"), ("FAIL", "meshes", "2"), ("ok", "adopt", "2")], text
    assert "exit code 124" in text and "why it failed" in text and "0 lines like «^survivor" in text, text
    assert not alive(bad), alive(bad)


def test_a_part_goes_on_where_it_stopped(suite, bad, packed, tmp_path):
    """A case with a verdict is not run again; one that two runs were cut off in fails at once; one
    that was cut off once is run again."""
    table = tmp_path / "earlier/results.tsv"
    table.parent.mkdir()
    lines = [("adopt", "ok"), ("meshes", "began"), ("meshes", "began"), ("config", "FAIL"), ("lazy", "began"), ("overhead", "skip")]
    table.write_text("".join(f"sockets\tmachine-host\t{name}\t2\t{kind}\t0\t\n" for name, kind in lines))
    verdicts, text, folder = suite("--dry-run", "--ranks", "2", "--seen", table.parent,
                                   *only(["adopt", "meshes", "config", "overhead"]), build=bad, code=1)
    assert sorted(verdicts) == [("FAIL", "meshes", "2"), ("ok", "overhead", "2")] and "cut off" in text, text
    verdicts, text, _ = suite("--dry-run", "--ranks", "2", "--seen", table.parent, "--only", "lazy", "--only", "adopt")
    assert verdicts == [("ok", "lazy", "2")], text
    # The folder of --out counts as well, unless --again is given.
    verdicts, text, _ = suite("--dry-run", "--ranks", "2", "--only", "lazy")
    assert verdicts == [], text
    verdicts, text, folder = suite("--dry-run", "--ranks", "2", "--only", "lazy", "--again")
    assert verdicts == [("ok", "lazy", "2")], text
    assert {path.name for path in folder.iterdir()} == {"results.tsv", "results.md", "logs.tar"}, list(folder.iterdir())


def test_parts_in_an_empty_root(packed, tmp_path):
    """A short form of every part, from the packed folder, without cargo, compilers and network.
    Part b has PyTorch and JAX alone, which are not there."""
    if subprocess.run([
            "unshare", "--user", "--map-root-user", "--mount", "--pid", "--net", "--fork", "mount", "-t", "tmpfs",
            "none", "/mnt"
    ], capture_output=True).returncode != 0:
        pytest.skip("no namespaces of mounts and networks here (unshare)")
    parts = "a b c d bench eight-a eight-b eight-c"
    done = run(
        sys.executable, "tests/gpu/bare.py", packed, tmp_path, "bash", "-c",
        f"for part in {parts}; do ./part.sh $part --dry-run --short --out /out/$part; done; command -v cargo cc pip",
        code=None, timeout=200)
    ended = re.findall(r"^part (\S+): ended after \d+ s; (\d+) ok, 0 FAIL", done.stdout, re.M)
    good = [name for name, count in ended if int(count) > 0 or name == "b"]
    bad = "".join(f"---- {part}\n{logs(tmp_path / part)}" for part in parts.split() if part not in good)
    assert done.returncode == 1 and not bad, done.stdout + done.stderr + bad
    assert "No such file" not in done.stderr, done.stderr


def test_a_budget_ends_a_case_without_failing_it(suite, bad):
    verdicts, text, _ = suite("--dry-run", "--ranks", "2 4", "--budget", "2", "--only", "meshes", build=bad, code=1)
    assert verdicts == [("skip", "meshes", "2"), ("skip", "meshes", "4")] and "budget" in text, text
    assert not alive(bad), alive(bad)


def test_ended_from_outside_it_takes_its_ranks_along(bad, tmp_path):
    process = subprocess.Popen(["bash", str(RUN), "--dry-run", "--ranks", "2", "--only", "meshes", "--out", str(tmp_path / "ended")],
                               env=environment(bad), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: len(alive(bad)) == 4, "both ranks and the two processes of their launcher run")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)
    wait_until(lambda: not alive(bad), "everything has ended")


def test_ptx_is_of_its_source():
    run(sys.executable, "examples/generate_ptx.py", "--check")


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="no shellcheck here")
def test_scripts_are_clean():
    run("shellcheck", "-x", *sorted((ROOT / "tests/gpu").glob("*.sh")))
