#!/usr/bin/env python3
"""tests/gpu without a GPU: the programs on host memory by the embedded engine, then some of them by the GPU's way (a stand-in for the CUDA driver,
libhostccl.so in NCCL's place). Whatever can run here must. Then run.sh itself: what it says of a case that fails, hangs or is ended; and that the example's
PTX is of its source."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(os.environ.get("DM_ROOT", Path(__file__).resolve().parent.parent))
LIBRARY = Path(os.environ.get("DM_LIB_DIR", ROOT / "target/release"))
SCRATCH = Path(os.environ.get("DM_TMP", ROOT / "target/tests"))
BUILD = SCRATCH / "gpu"
RUN = ROOT / "tests/gpu/run.sh"
# Without GPU or PyTorch these have nothing to run on.
CANNOT = {"torch", "adopt_torch", "multirank", "sanitizer"}


def environment(build=BUILD):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DM_", "NCCL_", "LD_LIBRARY_PATH"))}
    return {**kept, "DM_GPU_BUILD": str(build), "DM_LIB_DIR": str(LIBRARY), "DM_GPU_PYTHON": "/nonexistent"}


def suite(*arguments, build=BUILD, code=0, out="results"):
    command = ["bash", str(RUN), "--out", str(build / out), *arguments]
    done = subprocess.run(command, env=environment(build), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    text = done.stdout + done.stderr
    assert done.returncode == code, f"{' '.join(command)}: exit code {done.returncode}\n{text}\n{(build / out / 'log.txt').read_text()}"
    verdicts = re.findall(r"^(ok|FAIL|skip) +(\w+)(?: x(\d+))?", done.stdout, re.M)
    closing = re.search(r"^(\d+) passed, (\d+) failed, (\d+) skipped$", done.stdout, re.M)
    counts = tuple(sum(verdict == kind for verdict, _, _ in verdicts) for kind in ("ok", "FAIL", "skip"))
    assert closing and tuple(map(int, closing.groups())) == counts, text
    return verdicts, text


def only(names):
    return [part for name in sorted(names) for part in ("--only", name)]


def dry_runs():
    listed = subprocess.run(["bash", RUN, "--list"], env=environment(), capture_output=True, text=True, check=True)
    named = set(listed.stdout.split())
    # The example trains for seconds: once each way is enough.
    verdicts, text = suite("--dry-run", "--ranks", "1 2 4", *only(named - {"hsdp_tp"}))
    assert {name for verdict, name, _ in verdicts if verdict == "skip"} == CANNOT, text
    ran = {(name, int(ranks)) for verdict, name, ranks in verdicts if verdict == "ok"}
    assert {name for name, _ in ran} == named - CANNOT - {"hsdp_tp"}, text
    alone = ("collectives", "meshes", "check", "adopt", "lazy", "config")
    for name in (*alone, "abort", "kill", "cost"):
        assert {ranks for case, ranks in ran if case == name} == ({1, 2, 4} if name in alone else {2, 4}), f"{name}: {ran}"
    count = len(ran)
    for mode, ranks, names in (("--dry-run", "8", named - CANNOT - {"hsdp_tp", "overhead"}), ("--dry-run", "2", {"hsdp_tp"}),
                               ("--dry-run=driver", "2 4", {"collectives", "check", "abort", "cost", "config"}), ("--dry-run=driver", "2", {"hsdp_tp"})):
        verdicts, text = suite(mode, "--ranks", ranks, *only(names), out=f"results{mode}-{ranks[0]}")
        assert len(verdicts) == len(names) * len(ranks.split()) and all(verdict == "ok" for verdict, _, _ in verdicts), text
        count += len(verdicts)
    results = (BUILD / "results--dry-run-8/results.md").read_text()
    assert "nothing here ran on a GPU" in results and "| x8 | mesh (2, 2, 2): dm_init | " in results, results
    return count


def no_gpu_is_no_success():
    verdicts, text = suite(code=1, out="none")
    assert {verdict for verdict, _, _ in verdicts} == {"skip"} and "no GPU: " in text, text


def alive(build):
    """Processes of programs in that folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.readlink(entry / "exe").startswith(str(build)):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def wait_until(what, condition, patience=30):
    until = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < until, f"after {patience} s: not {what}"
        time.sleep(0.05)


def bad_cases():
    """One program hangs, one fails, one gives wrong results: each is a case that failed, and nothing is left of it."""
    build = SCRATCH / "gpu-bad"
    shutil.rmtree(build, ignore_errors=True)
    shutil.copytree(BUILD, build)
    hangs = build / "meshes"
    hangs.unlink()
    subprocess.run([os.environ.get("CC", "cc"), "-x", "c", "-", "-o", hangs], input="#include <unistd.h>\nint main(void) { for (;;) pause(); }",
                   text=True, check=True)
    (build / "config").write_text("#!/bin/sh\necho why it failed\nexit 3\n")
    (build / "kill").write_text('#!/bin/sh\n[ "$RANK" = 0 ] && kill -9 $$\nexit 0\n')
    verdicts, text = suite("--dry-run", "--ranks", "2", "--deadline", "2", "--only", "meshes", "--only", "config", "--only", "kill", "--only", "adopt",
                           build=build, code=1)
    assert verdicts == [("FAIL", "meshes", "2"), ("FAIL", "kill", "2"), ("ok", "adopt", "2"), ("FAIL", "config", "2")], text
    assert "exit code 124" in text and "why it failed" in text and "0 lines like «^survivor" in text, text
    assert not alive(build), alive(build)

    # A budget ends it too, and that is no failure of the case.
    verdicts, text = suite("--dry-run", "--ranks", "2 4", "--budget", "2", "--only", "meshes", build=build, code=1)
    assert verdicts == [("skip", "meshes", "2"), ("skip", "meshes", "4")] and "budget" in text, text
    assert not alive(build), alive(build)

    # Ended from outside: it takes its ranks with it.
    process = subprocess.Popen(["bash", str(RUN), "--dry-run", "--ranks", "2", "--only", "meshes", "--out", str(build / "ended")],
                               env=environment(build), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until("both ranks started", lambda: len(alive(build)) == 3)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)
    wait_until("everything ended", lambda: not alive(build))
    shutil.rmtree(build)


def main():
    subprocess.run([sys.executable, ROOT / "examples/generate_ptx.py", "--check"], check=True)
    shutil.rmtree(BUILD, ignore_errors=True)
    built = subprocess.run(["bash", ROOT / "tests/gpu/pack.sh"], env=environment(), capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stdout + built.stderr
    count = dry_runs()
    no_gpu_is_no_success()
    bad_cases()
    print(f"{count} cases ran without a GPU")
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", RUN, ROOT / "tests/gpu/pack.sh"], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
