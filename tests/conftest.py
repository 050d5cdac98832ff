"""The fixtures of the Python tests, and the rules for every test.

Every test has ports and folders of its own, so several tests can run side by side. When a test has
ended, no process that it started may still run, its temporary folder (TMPDIR) must be empty, and
nothing new may be in /dev/shm. A test that a machine cannot run is
skipped with the reason; no test is tried twice."""

import contextlib
import gc
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from support.machine import forget_machine
from support.paths import LIBRARY, ROOT, SCRATCH, TOOL
from support.ports import Ports
from support.processes import MARK, environment, kill_all, marked
from support.programs import Programs
from support.ranks import Ranks

# The folder of the session, which all workers of pytest-xdist share.
SESSION = "LIBDEVICEMESH_SESSION"
# The seed of a session's random numbers when DM_SEED is not set: the same run, the same tests.
# `make soak` is what draws others.
SEED = "1"
# How long the processes of a test may take to end after the test, on a busy machine.
PATIENCE = 10.0


def pytest_addoption(parser):
    parser.addoption("--name", action="append", default=[], metavar="TEXT", help="only tests whose name contains this")
    parser.addoption("--random-deaths", type=int, default=4, metavar="N",
                     help="how many random cases of test_lost_ranks.py (tests/soak.py)")


def is_worker():
    return "PYTEST_XDIST_WORKER" in os.environ


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    forget_machine()
    if not is_worker():
        os.environ[SESSION] = str(new_session())
        os.environ.setdefault("DM_SEED", SEED)
    if config.option.basetemp is None:
        config.option.basetemp = f"{os.environ[SESSION]}/tests"


def new_session():
    """A folder for this session; those of sessions that have ended are removed."""
    SCRATCH.mkdir(parents=True, exist_ok=True)
    for old in SCRATCH.glob("session-*"):
        # A session that has ended may have had this one's number, because containers number alike.
        number = old.name.rpartition("-")[2]
        if number == str(os.getpid()) or not Path(f"/proc/{number}").exists():
            shutil.rmtree(old, ignore_errors=True)
    folder = SCRATCH / f"session-{os.getpid()}"
    folder.mkdir()
    return folder


def pytest_report_header():
    return f"seed of this session: DM_SEED={os.environ['DM_SEED']}"


def pytest_collection_modifyitems(config, items):
    """Names are as tests/run.py has them: tests/test_x.py::test_case[parameters]."""
    wanted = config.option.name
    if wanted:
        chosen = [item for item in items if any(part in name_of(item) for part in wanted)]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
    both = [name_of(item) for item in items if item.get_closest_marker("long") and item.get_closest_marker("release")]
    assert not both, f"marked both `long` and `release`: {both}"
    # The longest tests begin first, so that none of them is the last one that runs.
    items.sort(key=lambda item: item.get_closest_marker("lengthy") is None)


def pytest_collection_finish():
    """Takes what pytest has collected out of the garbage collector's passes, because it stays until
    the end."""
    gc.freeze()


def name_of(item):
    return f"{item.path.relative_to(ROOT)}::{item.nodeid.partition('::')[2]}"


def pytest_sessionfinish(session, exitstatus):
    """Removes what the session wrote, unless somebody may want to look at a failure."""
    if is_worker():
        return
    if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        shutil.rmtree(os.environ[SESSION], ignore_errors=True)


def left_in_memory(before):
    """The new files in /dev/shm. UCX's are left out, because a test that runs beside this one may
    have them for longer than this one waits. What is left of them is found at the end of all tests
    (tests/run.py)."""
    return {name for name in set(os.listdir("/dev/shm")) - before if not name.startswith("ucx_shm")}


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch):
    """Fails a test whose processes, files or shared memory outlive it, and ends the processes."""
    shared = set(os.listdir("/dev/shm"))
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    temporary = Path(tempfile.mkdtemp(prefix="tmp-", dir=os.environ[SESSION]))
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield
    until = time.monotonic() + PATIENCE
    # To look at all processes of the machine takes 3 ms, so this is done once where nothing is
    # left.
    while True:
        running, left = marked(mark), left_in_memory(shared)
        if not (running or left) or time.monotonic() > until:
            break
        time.sleep(0.02)
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    files = sorted(path.name for path in temporary.iterdir())
    shutil.rmtree(temporary, ignore_errors=True)
    assert not running, f"still running: {running}"
    assert not files, f"left in TMPDIR: {files}"
    assert not left, f"left in /dev/shm: {left}"


@pytest.fixture(autouse=True)
def programs_in_memory(request):
    """Reads the tool and the libraries before a test that judges seconds. A machine with a slow
    disk may need seconds for that, where it has dropped the files from its memory."""
    if request.node.get_closest_marker("alone"):
        for file in (TOOL, *LIBRARY.glob("lib*.so")):
            file.read_bytes()


@pytest.fixture
def free_port():
    """A function that gives ports where nobody listens; nobody else gets them while the test
    runs."""
    ports = Ports()
    yield ports.free
    ports.close()


@pytest.fixture
def start_ranks(free_port):
    """A function that starts ranks by environment variables (support/ranks.py); they end with
    the test."""
    started = []

    def start(command, size, port=None, **how):
        started.append(Ranks(command, size, port or free_port(), **how))
        return started[-1]

    yield start
    for ranks in started:
        ranks.end()


@pytest.fixture
def spawn():
    """Starts a process with pipes, and without this one's variables of the tool and the library; it
    ends with the test."""
    started = []

    def one(*command, **variables):
        started.append(subprocess.Popen([str(word) for word in command], env=environment(without=["DM_", "NO_COLOR"], **variables), text=True,
                                        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        return started[-1]

    yield one
    kill_all(started)


@pytest.fixture(scope="session")
def programs():
    """The C and C++ programs of the session (support/programs.py)."""
    return Programs(Path(os.environ[SESSION]) / "programs")


@pytest.fixture
def chance(request):
    """Random numbers that depend on the session's seed and the test's name alone."""
    return random.Random(f"{os.environ['DM_SEED']}/{name_of(request.node)}")
