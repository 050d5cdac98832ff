#!/usr/bin/env python3
"""The Python package: its unit tests on 1, 4 and 8 processes, its types, Ctrl-C, and the wheel in a fresh environment."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(os.environ.get("DM_ROOT", Path(__file__).resolve().parent.parent))
LIBRARY = Path(os.environ.get("DM_LIB_DIR", ROOT / "target/release"))
PACKAGE = ROOT / "bindings/python"
TOOL = LIBRARY / "devicemesh"
# The last mypy that checks for Python 3.9, and the last numpy for it.
PINNED = ["numpy==2.4.6; python_version >= '3.11'", "numpy==2.0.2; python_version < '3.11'", "ml_dtypes==0.5.4", "mypy==1.18.2", "auditwheel==6.7.0"]
SKIPPED = 77
EXPECTED = {
    "all_reduce": ("KeyboardInterrupt", "PeerLostError"),
    "group": ("KeyboardInterrupt", "PeerLostError"),
    "flatten": ("KeyboardInterrupt", "PeerLostError"),
    "barrier": ("KeyboardInterrupt", "PeerLostError"),
    "init": ("KeyboardInterrupt", "PeerLostError"),
    "default world": ("KeyboardInterrupt", None),
    "world": ("KeyboardInterrupt", None),
    "own handler": ("AbortedError", "PeerLostError"),
    "terminated": ("AbortedError", "PeerLostError"),
}
# What rank 0 (rank 1 where rank 0 has gone) says of its joins in vain, before both ranks join.
JOINS = {
    "late": ("MeshTimeoutError", "MeshTimeoutError"),
    "gone": ("(?:MeshTimeoutError|PeerLostError)",),
    "interrupted": ("KeyboardInterrupt",),
    "own world": ("KeyboardInterrupt",),
}


def run(*command, cwd=PACKAGE, timeout=300, **environment):
    done = subprocess.run([str(part) for part in command], cwd=cwd, env={**os.environ, **environment}, timeout=timeout,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, f"$ {' '.join(map(str, command))}\n{done.stdout}\nexit code {done.returncode}"
    return done.stdout


def environment():
    """An interpreter with what the tests need, fetched once."""
    folder = ROOT / "target/python"
    python, complete = folder / "bin/python", folder / "complete"
    if not complete.exists() or complete.read_text() != "\n".join(PINNED):
        shutil.rmtree(folder, ignore_errors=True)
        made = subprocess.run([sys.executable, "-m", "venv", folder], capture_output=True, text=True)
        if made.returncode == 0:
            made = subprocess.run([python, "-m", "pip", "install", "--quiet", *PINNED], capture_output=True, text=True, timeout=900)
        if made.returncode != 0:
            print(made.stdout + made.stderr)
            print(f"no environment with {'; '.join(PINNED)} could be made")
            sys.exit(SKIPPED)
        complete.write_text("\n".join(PINNED))
    return python


def unit_tests(python):
    own = {"PYTHONPATH": str(PACKAGE), "DM_LIBRARY": str(LIBRARY / "libdevicemesh.so"), "DM_ROOT": str(ROOT)}
    output = run(python, "-m", "unittest", "tests/test_header.py", "tests/test_vectors.py", "tests/test_local.py", "tests/test_arguments.py", **own)
    counts = [int(count) for count in re.findall(r"^Ran (\d+) tests", output, re.M)]
    for ranks in (1, 4, 8):
        output = run(TOOL, "run", "-n", ranks, "--prefix", "--", python, "-m", "unittest", "tests/test_ranks.py", "tests/test_groups.py", **own)
        counts += [int(count) for count in re.findall(r"^\[rank 0\] Ran (\d+) tests", output, re.M)]
    assert len(counts) == 4 and min(counts) > 10, (counts, output)
    print(f"unit tests: {counts[0]} in one process, {counts[1]} on 1, 4 and 8")


def types(python):
    for folder, arguments in ((PACKAGE, ["devicemesh"]), (PACKAGE, ["tests/typed_user.py"])):
        print(run(python, "-m", "mypy", "--strict", "--python-version", "3.9", "--cache-dir", ROOT / "target/python/mypy", *arguments, cwd=folder))


def interrupted(python, mode):
    """SIGINT to a rank that is blocked in a call its peer does not make."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "go on"
        process = subprocess.Popen(
            [TOOL, "run", "-n", "2", "--", python, "tests/interrupted.py", mode, file], cwd=PACKAGE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(PACKAGE), "DM_LIBRARY": str(LIBRARY / "libdevicemesh.so")})
        # Closes the pipe of ranks that never say anything.
        deadline = threading.Timer(120, process.terminate)
        deadline.start()
        lines, sent = [], None
        for line in process.stdout:
            lines.append(line.strip())
            if line.startswith("blocked"):
                sent = time.monotonic()
                number = signal.SIGTERM if mode == "terminated" else signal.SIGINT
                os.kill(int(line.split()[1]), number)
                if mode in ("own handler", "terminated"):
                    time.sleep(0.5)
                    assert not any("Error" in line for line in lines), "the first signal leaves the call alone"
                    os.kill(int(line.split()[1]), number)
            elif line.startswith(("KeyboardInterrupt", "AbortedError", "returned")):
                took = time.monotonic() - sent
                file.touch()
        code = process.wait(timeout=60)
        deadline.cancel()
    ours, theirs = EXPECTED[mode]
    assert code == 0 and any(line.startswith(ours) for line in lines), (mode, code, lines)
    assert theirs is None or any(line.startswith(f"peer {theirs}") for line in lines), (mode, lines)
    assert "descriptor -1" in lines, "the wakeup descriptor was put back"
    assert took < 2, (mode, took)
    print(f"Ctrl-C in {mode}: {ours} after {took:.2f} s")


def joins(python, mode):
    """Joins that are in vain end when their timeout or Ctrl-C says so, not after ten minutes, and the ranks can still meet."""
    own = {"PYTHONPATH": str(PACKAGE), "DM_LIBRARY": str(LIBRARY / "libdevicemesh.so")}
    with tempfile.TemporaryDirectory() as folder:
        output = run(TOOL, "run", "-n", "2", "--", python, "tests/joins.py", mode, Path(folder) / "go on", timeout=120, **own)
    for said in JOINS[mode]:
        took = re.search(rf"{said} after (\d+\.\d) s", output)
        assert took and float(took.group(1)) < 30, (mode, said, output)
    assert output.count("done") == 2, (mode, output)
    told = ", ".join(re.findall(r"[A-Z]\w+ after [0-9.]+ s", output))
    print(f"joins, {mode}: {told}")


def nobody_serves(python):
    """The store is where rank 0 would serve it, and rank 0 has gone."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen
        output = run(python, "tests/joins.py", "gone", "no file", timeout=120, PYTHONPATH=str(PACKAGE), DM_LIBRARY=str(LIBRARY / "libdevicemesh.so"), RANK="1",
                     LOCAL_RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(unused.getsockname()[1]))
    took = re.search(r"(?:MeshTimeoutError|StoreError) after (\d+\.\d) s", output)
    assert took and float(took.group(1)) < 30, output


def wheel(python):
    """pip install ./bindings/python, used from elsewhere."""
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder) / "fresh"
        run(sys.executable, "-m", "venv", fresh, cwd=folder)
        # The environment's own library must not help, and the network is not needed.
        clean = {"DM_LIBRARY": "", "PYTHONPATH": "", "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        run(fresh / "bin/pip", "install", PACKAGE, cwd=folder, timeout=580, **clean)
        where = run(fresh / "bin/python", "-c", "import devicemesh._library as l; print(l.PATH)", cwd=folder, **clean).strip()
        assert where.startswith(str(fresh)) and where.endswith("/_native/libdevicemesh.so"), where
        example = re.search(r"```python\n(.*?)```", (PACKAGE / "README.md").read_text(), re.S).group(1)
        program = Path(folder) / "train.py"
        # What the example needs numpy for, array does here: the fresh environment has no numpy.
        program.write_text(example.replace("import numpy", "import array").replace('numpy.ones(1000, "float32")', 'array.array("f", 1000 * [mesh.get_rank()])')
                           + "assert gradients[999] == mesh.get_local_rank('tp') + 2, gradients[999]\nprint('fine' , flush=True)\n")
        for tool in ([fresh / "bin/python", "-m", "devicemesh"], [fresh / "bin/devicemesh"]):
            output = run(*tool, "run", "-n", 8, "--", fresh / "bin/python", program, cwd=folder, **clean)
            assert output.count("fine") == 8, output
        run(python, PACKAGE / "build_wheel.py", folder, cwd=folder, timeout=580)
        (made,) = Path(folder).glob("*.whl")
        shown = run(python, "-m", "auditwheel", "show", made, cwd=folder)
        tag = made.stem.split("-")[-1]
        assert f'"{tag}"' in shown, f"the wheel says {tag}, auditwheel says\n{shown}"
        size = made.stat().st_size
    print(f"wheel: {made.name}, {size / 1e6:.1f} MB")


def main():
    python = environment()
    unit_tests(python)
    types(python)
    for mode in EXPECTED:
        interrupted(python, mode)
    for mode in JOINS:
        joins(python, mode)
    nobody_serves(python)
    wheel(python)
    return 0


if __name__ == "__main__":
    sys.exit(main())
