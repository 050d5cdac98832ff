"""The Python package: its unit tests on 1, 4 and 8 processes, its types, Ctrl-C, and the wheel
in a fresh environment."""

import fcntl
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from support import pinned, processes
from support.nccl import RECORDER, library
from support.paths import LIBRARY, ROOT, TARGET, TOOL

PACKAGE = ROOT / "bindings/python"
OURS = {"PYTHONPATH": PACKAGE, "DM_LIBRARY": LIBRARY / "libdevicemesh.so"}
# The last mypy that checks for Python 3.9, and the last numpy and auditwheel for it.
PINNED = [
    "numpy==2.4.6; python_version >= '3.11'", "numpy==2.0.2; python_version < '3.11'", "ml_dtypes==0.5.4",
    "mypy==1.18.2", "auditwheel==6.7.0; python_version >= '3.10'", "auditwheel==6.4.2; python_version < '3.10'"
]
# The exceptions that the interrupted rank and its peer report.
EXPECTED = {
    "all_reduce": ("KeyboardInterrupt", "PeerLostError"),
    "group": ("KeyboardInterrupt", "PeerLostError"),
    "flatten": ("KeyboardInterrupt", "PeerLostError"),
    "barrier": ("KeyboardInterrupt", "PeerLostError"),
    "work": ("KeyboardInterrupt", "returned"),
    "init": ("KeyboardInterrupt", "PeerLostError"),
    "default world": ("KeyboardInterrupt", None),
    "world": ("KeyboardInterrupt", None),
    "own handler": ("AbortedError", "PeerLostError"),
    "terminated": ("AbortedError", "PeerLostError"),
}
# The exceptions of the joins that are in vain, on rank 0 (on rank 1 where rank 0 has gone).
JOINS = {
    "late": ("MeshTimeoutError", "MeshTimeoutError"),
    "gone": ("(?:MeshTimeoutError|PeerLostError)",),
    "interrupted": ("KeyboardInterrupt",),
    "own world": ("KeyboardInterrupt",),
}


pytestmark = pytest.mark.timeout(900)  # fetches the packages once


def run(*command, cwd=PACKAGE, timeout=300, **variables):
    return processes.run(*command, cwd=cwd, timeout=timeout, env=processes.environment(**variables), merged=True).stdout


@pytest.fixture(scope="session")
def python():
    """An interpreter with what the tests need, fetched once."""
    folder = TARGET / "python"
    with open(TARGET / "python.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # pip takes seconds to install itself, so the environment has none of its own.
        if not (folder / "bin/python").exists():
            try:
                processes.run(sys.executable, "-m", "venv", "--without-pip", folder)
            except processes.Failed:
                pytest.skip("venv does not work here (Debian: apt-get install python3-venv)")
        packages = processes.run(folder / "bin/python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip()
        pinned.install(Path(packages), *PINNED)
    return folder / "bin/python"


def count_of(pattern, output):
    (count,) = re.findall(pattern, output, re.M)
    return int(count)


def test_on_one_process(python):
    output = run(python, "-m", "unittest", "tests/test_header.py", "tests/test_vectors.py", "tests/test_local.py",
                 "tests/test_memory.py", "tests/test_arguments.py", "tests/test_streams.py", "tests/test_interrupts.py",
                 **OURS, DM_ROOT=ROOT)
    assert count_of(r"^Ran (\d+) tests", output) > 10, output


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 4, pytest.param(8, marks=pytest.mark.long)])
def test_on_ranks(python, ranks):
    output = run(TOOL, "run", "-n", ranks, "--prefix", "--", python, "-m", "unittest", "tests/test_ranks.py",
                 "tests/test_groups.py", "tests/test_async.py", "tests/test_objects.py", **OURS, DM_ROOT=ROOT)
    assert count_of(r"^\[rank 0\] Ran (\d+) tests", output) > 10, output


def test_examples_of_the_readme(python, tmp_path):
    """The code of bindings/python/README.md, as one program on eight ranks."""
    program = tmp_path / "train.py"
    blocks = re.findall(r"```python\n(.*?)```", (PACKAGE / "README.md").read_text(), re.S)
    program.write_text(
        "".join(blocks) +
        "assert [list(part) for part in parts] == [[7.0] * count for count in (1, 2, 3, 4)]\nprint('fine', flush=True)\n"
    )
    output = run(TOOL, "run", "-n", 8, "--", python, program, **OURS)
    assert len(blocks) == 2 and output.count("fine") == 8, output


@pytest.mark.long
def test_types(python):
    # One after the other, because both use the cache.
    for what in ("devicemesh", "tests/typed_user.py"):
        run(python, "-m", "mypy", "--strict", "--python-version", "3.9", "--cache-dir", TARGET / "python/mypy", what)


@pytest.mark.parametrize("mode", EXPECTED)
def test_interrupted(python, tmp_path, mode):
    """SIGINT to a rank that is blocked in a call its peer does not make."""
    file = tmp_path / "go on"
    process = subprocess.Popen([TOOL, "run", "-n", "2", "--", python, "tests/interrupted.py", mode, file], cwd=PACKAGE,
                               stdout=subprocess.PIPE, text=True, env=processes.environment(**OURS))
    pids = lambda: [os.getpid(), *processes.marked(os.environ[processes.MARK])]
    # Ends ranks that never say anything, which closes the pipe.
    deadline = threading.Timer(120, process.terminate)
    deadline.start()
    try:
        lines, sent = [], None
        for line in process.stdout:
            lines.append(line.strip())
            if line.startswith("blocked"):
                before, sent = processes.waits(pids()), time.monotonic()
                number = signal.SIGTERM if mode == "terminated" else signal.SIGINT
                os.kill(int(line.split()[1]), number)
                if mode in ("own handler", "terminated"):
                    # A second signal changes nothing while the first has not arrived.
                    processes.wait_until(lambda: not processes.is_pending(int(line.split()[1]), number), "a signal arrives")
                    early = select.select([process.stdout], [], [], 0.5)[0]
                    assert not early, "the first signal leaves the call alone"
                    os.kill(int(line.split()[1]), number)
            elif line.startswith(("KeyboardInterrupt", "AbortedError", "returned")):
                took = time.monotonic() - sent
                starved = processes.starvation(before, pids())
                file.touch()
        code = process.wait(timeout=60)
    finally:
        deadline.cancel()
        processes.kill_all([process])
    ours, theirs = EXPECTED[mode]
    assert code == 0 and any(line.startswith(ours) for line in lines), (code, lines)
    assert theirs is None or any(line.startswith(f"peer {theirs}") for line in lines), lines
    assert "descriptor -1" in lines, "the wakeup descriptor was put back"
    assert took < 2 + starved, f"{took:.3f} s, of which {starved:.3f} s may be waiting for processors"


@pytest.mark.parametrize("mode", JOINS)
def test_joins(python, tmp_path, mode):
    """Joins that are in vain end when their timeout or Ctrl-C says so, not after ten minutes,
    and the ranks can still meet."""
    output = run(TOOL, "run", "-n", "2", "--", python, "tests/joins.py", mode, tmp_path / "go on", timeout=120, **OURS)
    for said in JOINS[mode]:
        took = re.search(rf"{said} after (\d+\.\d) s", output)
        assert took and float(took.group(1)) < 30, (said, output)
    assert output.count("done") == 2, output


def test_nobody_serves(python):
    """The store is where rank 0 would serve it, and rank 0 has gone."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen
        output = run(python, "tests/joins.py", "gone", "no file", timeout=120, **OURS, RANK="1", LOCAL_RANK="1",
                     WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=unused.getsockname()[1])
    took = re.search(r"(?:MeshTimeoutError|StoreError) after (\d+\.\d) s", output)
    assert took and float(took.group(1)) < 30, output


# The environment's own library must not help, and the network is not needed.
CLEAN = {"DM_LIBRARY": "", "PYTHONPATH": "", "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def trains(fresh, tmp_path):
    """Runs the README's example in a virtual environment on eight processes, from another
    folder."""
    where = run(fresh / "bin/python", "-c", "import devicemesh._library as l; print(l.PATH)", cwd=tmp_path, **CLEAN).strip()
    assert where.startswith(str(fresh)) and where.endswith("/_native/libdevicemesh.so"), where
    example = re.search(r"```python\n(.*?)```", (PACKAGE / "README.md").read_text(), re.S).group(1)
    program = tmp_path / "train.py"
    # The fresh environment has no numpy, so the example uses array instead.
    program.write_text(
        example.replace("import numpy", "import array").replace('numpy.ones(1000, "float32")',
                                                                'array.array("f", 1000 * [mesh.get_rank()])') +
        "assert gradients[999] == mesh.get_local_rank('tp') + 2, gradients[999]\nprint('fine' , flush=True)\n")
    for tool in ([fresh / "bin/python", "-m", "devicemesh"], [fresh / "bin/devicemesh"]):
        output = run(*tool, "run", "-n", 8, "--", fresh / "bin/python", program, cwd=tmp_path, **CLEAN)
        assert output.count("fine") == 8, output


# test_readme.py has pip install the package into a fresh environment, too.
@pytest.mark.release
def test_package_in_a_fresh_environment(tmp_path):
    """pip install ./bindings/python, used from elsewhere."""
    run(sys.executable, "-m", "venv", tmp_path / "fresh", cwd=tmp_path)
    run(tmp_path / "fresh/bin/pip", "install", PACKAGE, cwd=tmp_path, timeout=580, **CLEAN)
    trains(tmp_path / "fresh", tmp_path)


def interpreters():
    """The interpreters of this machine from Python 3.9 on, one for each version. pyenv has some
    that are not on the PATH."""
    found = {}
    for minor in range(9, 20):
        places = [shutil.which(f"python3.{minor}"), *Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python3")]
        for place in filter(None, places):
            # A command of pyenv's fails where its version is not chosen.
            asked = subprocess.run([place, "-c", "import ensurepip, sys; print(sys.version_info.minor)"], capture_output=True, text=True)
            if asked.stdout.strip() == str(minor):
                found[f"3.{minor}"] = place
    return found


@pytest.mark.release
def test_one_wheel_serves_the_oldest_and_the_newest_python(python, tmp_path):
    run(python, PACKAGE / "build_wheel.py", tmp_path, cwd=tmp_path, timeout=580)
    (wheel,) = tmp_path.glob("*.whl")
    found = list(interpreters().items())
    assert found, "not even the Python of this machine"
    # Each Python between these two can do what both can do.
    chosen = dict([found[0], found[-1]])
    for version, interpreter in chosen.items():
        folder = tmp_path / version
        folder.mkdir()
        # An older pip leaves a file in TMPDIR.
        run(interpreter, "-m", "venv", folder / "fresh", cwd=tmp_path, TMPDIR=folder)
        run(folder / "fresh/bin/pip", "install", wheel, cwd=tmp_path, **CLEAN, TMPDIR=folder)
        trains(folder / "fresh", folder)
    print(f"the wheel works with Python {', '.join(chosen)}")


FAKE_CARGO = """#!{python}
import json, os, pathlib
folder = pathlib.Path(os.environ["CARGO_TARGET_DIR"], os.environ.get("CARGO_BUILD_TARGET", "by-config"), "release")
folder.mkdir(parents=True)
for name in ("libdevicemesh.so", "devicemesh"):
    (folder / name).write_text("built now")
    print(json.dumps({{"reason": "compiler-artifact", "filenames": [str(folder / name)]}}))
"""


def test_a_build_in_another_folder_of_cargo(tmp_path):
    """The package gets the files of this build, and not those of an earlier one in target/release.
    The machine to compile for may stand in a variable, which the build removes, or in cargo's
    configuration, which stays in force."""
    backend, cargo = tmp_path / "checkout/bindings/python/build_wheel.py", tmp_path / "bin/cargo"
    for file, text in ((backend, (PACKAGE / "build_wheel.py").read_text()), (cargo, FAKE_CARGO.format(python=sys.executable)),
                       (tmp_path / "checkout/target/release/libdevicemesh.so", "old")):
        file.parent.mkdir(parents=True)
        file.write_text(text)
    cargo.chmod(0o755)
    code = ("import build_wheel, pathlib; build_wheel.write = lambda *_: ''; build_wheel.build_editable('')\n"
            "print([(build_wheel.ROOT / 'target/release' / name).read_text() for name in build_wheel.NATIVE])")
    output = run(sys.executable, "-c", code, cwd=backend.parent, CARGO_TARGET_DIR=tmp_path / "elsewhere", CARGO_BUILD_TARGET="wasm32",
                 PATH=f"{cargo.parent}:{os.environ['PATH']}")
    assert "['built now', 'built now']" in output and not (tmp_path / "elsewhere/wasm32").exists(), output


@pytest.mark.long
def test_what_the_wheel_holds(python, tmp_path):
    run(python, PACKAGE / "build_wheel.py", tmp_path, cwd=tmp_path, timeout=580)
    (made,) = tmp_path.glob("*.whl")
    shown = run(python, "-m", "auditwheel", "show", made, cwd=tmp_path)
    tag = made.stem.split("-")[-1]
    assert f'"{tag}"' in shown, f"the wheel says {tag}, auditwheel says\n{shown}"

    # Its library is libdevicemesh.so with the tool in it.
    with zipfile.ZipFile(made) as wheel:
        wheel.extractall(tmp_path)
    native = tmp_path / "devicemesh/_native"
    own, shipped = (set(re.findall(r"(\S+)$", run("nm", "-D", "--defined-only", "--with-symbol-versions", library), re.M))
                    for library in (LIBRARY / "libdevicemesh.so", native / "libdevicemesh.so"))
    (soname,) = (name for name in own if name.startswith("libdevicemesh.so."))
    assert shipped - own == {f"devicemesh_tool_main@@{soname}"} and own <= shipped, own ^ shipped
    tool = native / "devicemesh"
    tool.chmod(0o755)
    assert run(tool, "run", "-n", 2, "--", tool, "check", "--sizes", "4B", timeout=60).count("verdict: good") == 1
    assert processes.run(tool, "no-command", code=2, merged=True).stdout.startswith("error: unrecognized subcommand 'no-command'")
    # An answer without a line break at its end comes whole, and a closed output is an error, as
    # where the tool is a program of its own.
    answers = [subprocess.run([each, "answer", "127.0.0.1:1"], input=b'{"format":1,"stacks":[]}', capture_output=True, check=True).stdout
               for each in (tool, TOOL)]
    assert len(answers[0]) == len(answers[1]) > 0, answers
    closed = processes.run("sh", "-c", 'exec "$0" show 2,4 a,b >&-', tool, code=1, merged=True).stdout
    assert closed.startswith("devicemesh show: cannot write to standard output: Bad file descriptor"), closed
    (native / "libdevicemesh.so").unlink()
    assert f"{native}/libdevicemesh.so: cannot open shared object file" in processes.run(tool, "ps", code=1, merged=True).stdout


def test_order_of_streams(python, programs, tmp_path):
    """Collectives on cuda go through the C library and a recorder in NCCL's place, and the stand-in
    for the driver shows the order of streams."""
    recorder, driver = library(programs, "libnccl.so.2", RECORDER), library(programs, "libcuda.so.1", ["device.c", "events.c"])
    output = run(TOOL, "run", "-n", 2, "--", python, "tests/on_device.py", tmp_path, **OURS, DM_CCL_LIBRARY=recorder,
                 RECORDER_HOST=LIBRARY / "libhostccl.so", LD_LIBRARY_PATH=driver.parent)
    assert output.count("fine") == 2, output


@pytest.mark.parametrize("rounds", [20, pytest.param(1000, marks=pytest.mark.long)])
def test_threads_along_the_dimensions_of_a_mesh(python, rounds):
    """The numbers are right, or there is an error. The long form has two processes beside it that
    keep the cores busy."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 if rounds > 20 else 0)]
    try:
        output = run(TOOL, "run", "-n", 2, "--", python, "tests/order.py", rounds, timeout=500, **OURS)
    finally:
        processes.kill_all(busy)
    assert output.count(f"{rounds} rounds") == 2, output


def test_a_project_of_devicemesh_new_trains(python, tmp_path):
    run(TOOL, "new", tmp_path / "trainer", "--python")
    output = run(TOOL, "run", "-n", 8, "--", python, "train.py", cwd=tmp_path / "trainer", **OURS)
    first, last = (float(loss) for loss in re.search(r"step +1: loss (.+)\n(?:.*\n)*step 200: loss (.+)\n", output).groups())
    assert first > 10 * last, output
