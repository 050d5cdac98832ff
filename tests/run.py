#!/usr/bin/env python3
"""Runs the tests of the project. Python 3.9 and its standard library.

    make test        every part once: Rust, C, C++, Python, JAX, Go, installing, faults
    make test-all    everything, also the cases marked `long` and `release`
    tests/run.py -k TEXT      all cases whose name contains TEXT
    tests/run.py --rest       only those marked `long`, which .ci/run has beyond `make test`: they
                              show the behaviour of other cases in another way (more ranks, more
                              compilers, sanitizers), need big downloads, or concern only what a
                              release or a benchmark consists of
    tests/run.py --release    only those marked `release`, which are run before a release: they take
                              the processors too long for every change

tests/parts adds the cases of Rust, C, C++ and the headers; pytest runs tests/test_*.py. To add a
test, add a file. A C or C++ file may begin with comments:

    /* ranks: 1 4 8 */            run it under `devicemesh run -n N` for each N; without this
                                  comment it is one process without a launcher
    /* static */                  also link it to libdevicemesh.a
    /* flags: -fno-exceptions */  add to the compiler's flags

pytest is installed into target/pytest-venv (tests/requirements.txt). Python tests that judge
seconds (marked `alone`) run after the others, one at a time. LIBDEVICEMESH_BESIDE=PID names a
process that the machine runs beside the tests (.ci/run): the tests marked `alone` wait for its
end. No test is tried twice. SIGTERM ends the runner and all that it has started, as Ctrl-C does.

The last line is "N passed, N failed" (", N skipped" may follow) and counts each test of Rust and
each case of pytest. The lines before it name the cases that failed.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from xml.etree import ElementTree

from parts import headers, programs, rust
from parts.base import CC, CXX, LIBRARY, ROOT, SCRATCH, TARGET, Failure, Skip
from parts.python import pytest_python
from support.machine import forget_machine
from support.processes import GATE, gone, marked, state_and_parent

# The cases that each level of the runner has, and the marks by which pytest selects them.
LEVELS = {"quick": ("quick",), "rest": ("long",), "release": ("release",), "all": ("quick", "long", "release")}
MARKS = {"quick": "not long and not release", "rest": "long", "release": "release", "all": ""}
# The number of a process beside which tests that judge seconds must not run.
BESIDE = "LIBDEVICEMESH_BESIDE"
# All processes that this runner has started have this variable. A test may start another runner.
STARTED = f"LIBDEVICEMESH_STARTED_BY_{os.getpid()}"
# Set when the runner is stopped. No other case begins then.
IS_STOPPED = threading.Event()
# When the runner is stopped, the tests may take this many seconds to end what they have started.
GRACE = 20.0


class Runner:
    """The cases that were added, and how many of those that ran passed, failed and were skipped."""

    def __init__(self, options):
        self.options = options
        # The level says which cases run.
        self.level = "all" if options.k else options.level
        self.passed, self.skipped = 0, 0
        # The name of each case that failed.
        self.failed = []
        self.lock = threading.Lock()
        # (name, body) of the cases that were added and have not run.
        self.cases = []

    def add(self, name, body, mark="quick"):
        """Adds a case if the command line selects it. `body()` raises Failure or Skip, or returns
        how many tests it ran (None: one). The mark is "quick", "long" or "release"."""
        selected = any(part in name for part in self.options.k) if self.options.k else mark in LEVELS[self.level]
        if selected:
            self.cases.append((name, body))

    def run(self):
        with ThreadPoolExecutor(self.options.jobs) as pool:
            list(pool.map(lambda case: self.one(*case), self.cases))
        self.cases = []

    def one(self, name, body, is_test=True):
        """Runs one case and prints how it went. A step that is no test is counted when it fails."""
        if IS_STOPPED.is_set():
            return
        began = time.monotonic()
        try:
            count = body()
            count = 1 if count is None else count
            verdict, text = "ok  ", ""
        except Skip as why:
            count, verdict, text = 1, "skip", f": {why}"
        except Failure as failure:
            count, verdict, text = 1, "FAIL", f"\n{failure}"
        except Exception as error:  # a broken test is a failed test, not a broken run
            count, verdict, text = 1, "FAIL", f"\n{type(error).__name__}: {error}"
        with self.lock:
            if verdict == "ok  ":
                self.passed += count * is_test
            elif verdict == "skip":
                self.skipped += count
            else:
                self.failed.append(name)
            print(f"{verdict} {name} ({time.monotonic() - began:.1f} s){text}", flush=True)

    def close(self):
        """The failed cases, a line each, and the last line."""
        for name in self.failed:
            print(f"failed: {name}")
        print(f"{self.passed} passed, {len(self.failed)} failed" + (f", {self.skipped} skipped" if self.skipped else ""))


def pytest(runner):
    """The command that runs the Python tests whose names the runner's -k selects; None, and a case
    that was skipped or failed, where pytest cannot be had."""
    command = []
    names = [f"--name={name}" for name in runner.options.k or []]
    runner.one("build pytest", lambda: command.extend([str(pytest_python()), "-m", "pytest", *names, "tests"]), is_test=False)
    return command or None


def fetch_ahead(python):
    """Starts fetching what the JAX tests need, beside the first tests. A test that needs it waits
    for it, by a lock. The end of the runner ends it."""
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.Popen([python, "-m", "support.jax"], cwd=ROOT / "tests", **quiet)


def both(first, second):
    """An expression of pytest's that asks for both."""
    return f"{first} and {second}" if second else first


def started():
    """The processes that this runner has started, and those that they have started."""
    return [pid for pid in marked("1", STARTED) if not gone(pid)]


def kill_started():
    """Kills what the runner has started. A thread of the runner may start another process
    meanwhile, so this looks twice."""
    calm = 0
    while calm < 2:
        left = started()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        calm = 0 if left else calm + 1
        time.sleep(0.05)


def stop(number, _):
    """Handles SIGINT and SIGTERM: ends what the runner has started, and then ends the runner by the
    same signal. After a SIGINT to pytest and its workers, the fixtures of the tests end their
    processes. A terminal sends this SIGINT to the runner's process group. Other processes send it
    to the runner alone, so it is passed on to those that have not begun to end a second later."""
    for again in (signal.SIGINT, signal.SIGTERM):
        signal.signal(again, signal.SIG_IGN)
    IS_STOPPED.set()
    # print() may be what the signal has interrupted.
    os.write(2, f"tests/run.py: got {signal.Signals(number).name}, ends the tests\n".encode())
    for pid in started():
        with contextlib.suppress(OSError):
            if os.getpgid(pid) == os.getpgrp():
                if number != signal.SIGINT:
                    os.kill(pid, signal.SIGINT)
            elif state_and_parent(pid)[1] == os.getpid():
                # The command of a case has a group of its own. The tool ends its ranks at SIGTERM.
                os.kill(pid, signal.SIGTERM)
    until = time.monotonic() + GRACE
    while started() and time.monotonic() < until:
        time.sleep(0.1)
    kill_started()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def python_tests(runner, command, what, marks, *arguments):
    """Runs the Python tests that these marks select, and counts their cases."""
    try:
        count_python_tests(runner, command, what, marks, *arguments)
    except Exception as error:  # for example: pytest was killed while it wrote the report
        with runner.lock:
            print(f"FAIL pytest, {what}: {type(error).__name__}: {error}", flush=True)
            runner.failed.append(f"pytest, {what}")


def count_python_tests(runner, command, what, marks, *arguments):
    environment = {**os.environ, "DM_LIB_DIR": str(LIBRARY), "CC": CC, "CXX": CXX}
    print(f"---- tests/test_*.py, {what}", flush=True)
    report = SCRATCH / f"pytest-{os.getpid()}.xml"
    report.unlink(missing_ok=True)
    # pytest runs in the runner's process group, so that Ctrl-C reaches it.
    options = ["-v", "--durations=30", "--durations-min=3", f"--junitxml={report}", "-m", both(marks, MARKS[runner.level])]
    done = subprocess.run([*command, *options, *arguments], cwd=ROOT, env=environment)
    if not report.exists():
        raise Failure(f"exit code {done.returncode}, and no report")
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    # pytest exits with 1 when tests failed and with 5 when it has selected none, which is right
    # only where few tests are asked for. The exit code alone tells of anything else.
    codes = (0, 1, 5) if runner.options.k or marks == "alone" else (0, 1)
    with runner.lock:
        for suite in suites:
            # A test may have a failure, and an error of a fixture besides.
            cases = [case for case in suite.iter("testcase") for end in case if end.tag in ("failure", "error")]
            failed = [f"{case.get('classname')}::{case.get('name')}" for case in cases]
            runner.failed.extend(failed)
            skipped = int(suite.get("skipped"))
            runner.skipped += skipped
            runner.passed += max(int(suite.get("tests")) - len(failed) - skipped, 0)
        if done.returncode not in codes:
            runner.failed.append(f"pytest, {what}: exit code {done.returncode}")
    report.unlink()


def wait_for_what_runs_beside():
    pid = os.environ.get(BESIDE)
    if pid and not gone(int(pid)):
        print(f"---- waiting for the end of process {pid}, beside which no test may judge seconds", flush=True)
        while not gone(int(pid)):
            time.sleep(0.5)


def has_alone():
    return any("mark.alone" in path.read_text() for path in (ROOT / "tests").glob("test_*.py"))


def mine():
    """Processes whose program lies in this tree's target folder, by pid, except those of a gate."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                program = os.readlink(entry / "exe")
                if program.startswith(str(TARGET)) and f"{GATE}=".encode() not in (entry / "environ").read_bytes():
                    found[int(entry.name)] = program
            except OSError:
                continue
    return found


def leftovers(shm_before):
    def body():
        until = time.monotonic() + 5
        while True:
            left = sorted(set(os.listdir("/dev/shm")) - shm_before)
            running = mine()
            if not left and not running:
                return
            if time.monotonic() > until:
                raise Failure(f"left in /dev/shm: {left}; still running: {running}")
            time.sleep(0.1)
    return body


def main():
    try:
        return run_tests()
    finally:
        kill_started()


def run_tests():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-k", action="append", metavar="TEXT", help="only tests whose name contains this")
    level = parser.add_mutually_exclusive_group()
    for name, what in (("all", "all cases"), ("rest", "only those marked `long`"), ("release", "only those marked `release`")):
        level.add_argument(f"--{name}", dest="level", action="store_const", const=name, default="quick", help=what)
    parser.add_argument("--jobs", type=int, default=3, help="how many cases at a time; some of them wait")
    parser.add_argument("--pytest-jobs", type=int, default=5, help="how many Python tests at a time; most of them wait")
    parser.add_argument("--list", action="store_true", help="name the tests and stop")
    options = parser.parse_args()
    os.chdir(ROOT)
    forget_machine()
    # A shell starts background jobs with these signals ignored. The tests send them to programs,
    # and programs inherit what is ignored.
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    os.environ[STARTED] = "1"
    # With this variable Python would write no folders __pycache__, and each of some hundred
    # processes would compile the tests and the package again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    SCRATCH.mkdir(parents=True, exist_ok=True)
    shm_before = set(os.listdir("/dev/shm"))
    runner = Runner(options)
    programs.add_tests(runner)
    programs.add_examples(runner)
    runner.add("build exports and SONAME", headers.exports)
    headers.add_headers(runner)
    headers.add_compilers(runner)
    # The cases of Rust are the last ones, because they wait for cargo.
    others = len(runner.cases)
    build_rust = rust.add(runner)
    has_rust = len(runner.cases) > others
    if options.list:
        print("\n".join(name for name, _ in runner.cases), flush=True)
        command = pytest(runner)
        return subprocess.run([*command, "--collect-only", "-q", "-m", MARKS[runner.level]], cwd=ROOT).returncode if command else 1

    print("building", flush=True)
    subprocess.run(["cargo", "build", "--release", "--quiet"], check=True)
    command = []

    def beside_the_others():
        # pip installs pytest on one processor, so this is done beside the others, too.
        command.extend(pytest(runner) or [])
        if not command:
            return
        if not options.k:
            fetch_ahead(command[0])
        spread = ["-n", str(options.pytest_jobs), "--dist", "loadgroup"]
        python_tests(runner, command, "beside the others", "not alone", *spread)

    # Many tests wait, so they run beside the compiler and each other.
    beside = threading.Thread(target=beside_the_others)
    beside.start()
    if has_rust:
        threading.Thread(target=runner.one, args=("build the Rust tests", build_rust, False)).start()
    runner.run()
    beside.join()
    if command and has_alone():
        wait_for_what_runs_beside()
        python_tests(runner, command, "alone", "alone")
    if not options.k:
        runner.one("nothing left behind", leftovers(shm_before))
    runner.close()
    return 1 if runner.failed or not runner.passed else 0


if __name__ == "__main__":
    sys.exit(main())
