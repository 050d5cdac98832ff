"""The libraries that benches/peers/bench.py compares: how each one's program is built and
started."""

import atexit
import functools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from table import TITLES

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TOOL = ROOT / "target/release/devicemesh"
LIBRARY = ROOT / "target/release/libdevicemesh.so"
CC, CXX = os.environ.get("CC", "cc"), os.environ.get("CXX", "c++")
WARNINGS = ["-O2", "-Wall", "-Wextra"]
NAMES = TITLES


class Missing(Exception):
    """A peer that is not on this machine; the text says what to do."""


def run(command, timeout=None, **options):
    """The output of a command. If the bench ends before the command does (Ctrl-C, SIGTERM), or the
    time is over, this ends the command, which ends the ranks that it has started. When the time is
    over, subprocess.TimeoutExpired has the output up to then."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([str(part) for part in command], text=True, **pipes, **options) as started:
        try:
            output, errors = started.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as late:
            end(started)
            # All output that the command wrote before it ended counts. A process that it has left
            # behind may hold the output open.
            late.output, _ = started.communicate(timeout=20)
            raise
        finally:
            end(started)
    if started.returncode != 0:
        raise SystemExit(f"$ {shlex.join(map(str, command))}\n{output}{errors}\nexit code {started.returncode}")
    return output


def lines_of(output):
    """The records that a program of the bench has printed, one on a line."""
    # Behind the last line break may be a line whose printing was ended.
    output = output[:output.rfind("\n") + 1]
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def end(process):
    """Ends a process that still runs, for example a launcher with its ranks. After 20 s this kills
    them. A launcher that `prefer` has prepared leads a process group, in which its ranks are."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        if os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            continue


def scheduling(wanted):
    """How all contestants' processes are preferred to other work of the machine: "realtime" (round
    robin), "autogroup" (a session of their own, nice -20) or "none". `wanted` may be "auto": the
    first that is permitted. A real-time process runs at once when it wakes up. On kernels without
    preemption other processes may wait for milliseconds."""
    for kind in ("realtime", "autogroup", "none") if wanted == "auto" else (wanted,):
        if permitted(kind):
            return kind
    raise SystemExit(f"not permitted here: --scheduling {wanted}")


# This program ends by itself when the bench has ended, in whatever way.
COMPUTE = """
import os, sys
bench = int(sys.argv[1])
while os.getppid() == bench:
    for _ in range(100_000):
        pass
"""


@contextmanager
def load(processes):
    """Keeps this number of processes computing. Each has a session of its own, as other jobs of a
    machine have."""
    command = [sys.executable, "-c", COMPUTE, str(os.getpid())]
    with ExitStack() as stack:
        for _ in range(processes):
            stack.callback(end, subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True))
        yield


def permitted(kind):
    with suppress(Exception):
        return kind == "none" or subprocess.run(["true"], preexec_fn=lambda: prefer(kind)).returncode == 0
    return False


def prefer(kind):
    """Sets the scheduling of the process that is about to be started, inside that process."""
    os.setsid()
    if kind == "realtime":
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    elif kind == "autogroup":
        Path("/proc/self/autogroup").write_text("-20")


@functools.cache
def own_folder():
    """The folder with the programs of this bench, which is removed at its end. Each bench has its
    own, so benches at the same time can compare different libraries."""
    (ROOT / "target").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=ROOT / "target"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def built(name, *options):
    """A C program of this folder."""
    program = own_folder() / name
    run([CC, "-std=c11", *WARNINGS, HERE / f"{name}.c", *options, "-o", program])
    return program


def executed():
    """The program that starts the C programs and notes when they are executed."""
    return built("executed", "-static")


def memory(kind):
    """The output of memory.c: how fast all processors together copy data that is larger than the
    caches."""
    return run([built("memory", "-pthread"), 64], preexec_fn=lambda: prefer(kind))


class Contestant:
    # Whether its waiting ranks give way to others when there are more of them than processors.
    # MPICH's do not: in real time each would spin for its whole slice of 100 ms.
    gives_way = True

    def __init__(self, name):
        self.name = name
        self.title = NAMES[name]
        self.version = getattr(self, name)()

    def ours(self):
        """This tree's libdevicemesh.so, or the one that DM_BENCH_LIB names."""
        library = Path(os.environ.get("DM_BENCH_LIB", LIBRARY)).resolve()
        folder = own_folder() / "library"
        folder.mkdir(exist_ok=True)
        soname = run(["readelf", "-d", library]).split("soname: [")[1].split("]")[0]
        for link in (folder / soname, folder / "libdevicemesh.so"):
            link.unlink(missing_ok=True)
            link.symlink_to(library)
        program = built("ours", f"-I{ROOT}/include", f"-L{folder}", "-ldevicemesh", f"-Wl,-rpath,{folder}")
        self.under_the_tool(executed(), program)
        return "" if library == LIBRARY else str(library)

    def gloo(self):
        if not Path("/usr/include/gloo/allreduce.h").exists():
            raise Missing("apt-get install libgloo-dev")
        program = own_folder() / "gloo"
        run([CXX, "-std=c++17", *WARNINGS, HERE / "gloo.cpp", "-lgloo", "-pthread", "-o", program])
        self.under_the_tool(program)
        return debian("libgloo-dev")

    def under_the_tool(self, *program):
        """`program` is what each rank executes, which hosts.py starts in another way."""
        self.program = program
        self.start = lambda ranks: [TOOL, "run", "-n", ranks, "--", *program]

    def mpich(self):
        self.gives_way = False
        self.mpi("mpich", "mpicc.mpich", "mpirun.mpich")
        return debian("libmpich12", "mpich")

    def openmpi(self):
        self.mpi("openmpi-bin libopenmpi-dev", "mpicc.openmpi", "mpirun.openmpi", "--allow-run-as-root", "--oversubscribe")
        return debian("openmpi-bin")

    def mpi(self, packages, compiler, launcher, *options):
        if not shutil.which(compiler) or not shutil.which(launcher):
            raise Missing(f"apt-get install {packages}")
        program = own_folder() / self.name
        run([compiler, "-std=gnu11", *WARNINGS, HERE / "mpi.c", "-o", program])
        self.program = executed(), program
        self.start = lambda ranks: [launcher, *options, "-n", ranks, *self.program]

    def torch(self):
        sys.path.insert(0, str(HERE.parent))
        from common import interpreter
        python = interpreter()
        if python is None:
            raise Missing("make bench-peers, or DM_BENCH_PYTHON=/path/to/a/python/that/has/it")
        self.under_the_tool(python, HERE / "torch_ranks.py")
        return run([python, "-c", "import torch; print(torch.__version__)"]).strip()

    def output(self, kind, ranks, *arguments, timeout=1800):
        with tempfile.TemporaryDirectory(prefix="dm-bench-") as scratch:
            if kind == "realtime" and not self.gives_way and ranks > os.cpu_count():
                kind = "autogroup" if permitted("autogroup") else "none"
            command = [str(part) for part in (*self.start(ranks), *arguments)]
            return run(command, env={**os.environ, "DM_BENCH_SCRATCH": scratch, "OMP_NUM_THREADS": "1"},
                       timeout=timeout, preexec_fn=lambda: prefer(kind))


def debian(*packages):
    for package in packages:
        done = subprocess.run(["dpkg-query", "-W", "-f", "${Version}", package], capture_output=True, text=True)
        if done.returncode == 0 and done.stdout:
            return done.stdout
    return ""
