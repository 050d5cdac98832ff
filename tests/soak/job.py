"""One job of tests/c/programs/phases.c under plain environment variables: starting it, reading what its ranks say, ending it."""

import os
import selectors
import signal
import socket
import subprocess
import time
from pathlib import Path

ROOT = Path(os.environ.get("DM_ROOT", Path(__file__).resolve().parents[2]))
LIBRARY = Path(os.environ.get("DM_LIB_DIR", ROOT / "target/release"))
SCRATCH = Path(os.environ.get("DM_TMP", ROOT / "target/tests"))
TOOL = LIBRARY / "devicemesh"
TAG = "DM_SOAK_JOB"


def build(name="phases"):
    """A program of tests/c/programs."""
    SCRATCH.mkdir(parents=True, exist_ok=True)
    program = SCRATCH / f"soak-{name}"
    subprocess.run([os.environ.get("CC", "cc"), "-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-I", ROOT / "include", ROOT / f"tests/c/programs/{name}.c",
                    f"-L{LIBRARY}", "-ldevicemesh", f"-Wl,-rpath,{LIBRARY}", "-pthread", "-o", program], check=True)
    return program


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def marked(tag):
    """Processes that carry a job's mark, by pid."""
    found = {}
    mark = f"{TAG}={tag}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "comm").read_text().strip()
            except OSError:
                continue
    return found


class Rank:
    """A rank's process and what it has said."""

    def __init__(self, number, process):
        self.number, self.process = number, process
        self.text, self.open = b"", True
        self.phases = []          # (name, seconds)
        self.dying = None         # seconds
        self.error = None         # (status, seconds, message)
        self.done = False
        self.other = []           # whatever else it wrote: each line is a failure

    def take(self, data):
        self.text += data
        *lines, self.text = self.text.split(b"\n")
        for line in lines:
            self.read(line.decode(errors="replace"))

    def read(self, line):
        words = line.split(" ", 3)
        if words[0] == "phase" and len(words) == 3:
            self.phases.append((words[1], float(words[2])))
        elif words[0] == "error" and len(words) == 4 and self.error is None:
            self.error = (words[1], float(words[2]), words[3])
        elif words[0] == "dying" and len(words) == 3:
            self.dying = float(words[2])
        elif words[0] == "done":
            self.done = True
        else:
            self.other.append(line)

    def phase(self, at=None):
        """The last phase announced (before that moment), and when."""
        known = [entry for entry in self.phases if at is None or entry[1] <= at]
        return known[-1] if known else ("start", 0.0)

    def running(self):
        return self.process.poll() is None


class Job:
    """Ranks of one job. Leaves none behind when used as a context manager."""

    def __init__(self, program, size, port, timeout_ms, rounds=0, die=None, held=(), file=None):
        self.tag = f"{os.getpid()}-{time.monotonic_ns()}-{port}"
        self.program, self.size, self.port = program, size, port
        self.environment = {TAG: self.tag, "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                            "DM_ROUNDS": str(rounds), "DM_TIMEOUT_MS": str(timeout_ms)}
        if die:
            self.environment["DM_DIE"] = die
        if file:
            self.environment["DM_INIT"] = f"file://{file}"
        self.selector = selectors.DefaultSelector()
        self.ranks = {}
        self.started = time.monotonic()
        for number in range(size):
            if number not in held:
                self.start(number)

    def start(self, number):
        environment = {**os.environ, **self.environment, "RANK": str(number), "LOCAL_RANK": str(number)}
        process = subprocess.Popen([self.program], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
        self.ranks[number] = Rank(number, process)
        self.selector.register(process.stdout, selectors.EVENT_READ, self.ranks[number])

    def pump(self, condition, until):
        """Reads until the condition holds; False when the moment came first."""
        while not condition():
            left = until - time.monotonic()
            if left <= 0:
                return False
            for key, _ in self.selector.select(min(left, 0.05)):
                data = os.read(key.fd, 1 << 16)
                if data:
                    key.data.take(data)
                else:
                    key.data.open = False
                    self.selector.unregister(key.fileobj)
        return True

    def stacks(self, number):
        """Where a rank hangs."""
        pid = self.ranks[number].process.pid
        try:
            shown = subprocess.run(["gdb", "-p", str(pid), "-batch", "-nx", "-ex", "thread apply all bt 12"], capture_output=True, text=True, timeout=60).stdout
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"no stacks of rank {number}: {error}"
        lines = [line[:160] for line in shown.splitlines() if line.startswith(("#", "Thread")) and "/library/" not in line]
        return f"stacks of rank {number} (pid {pid}):\n" + "\n".join(lines)

    def end(self):
        for rank in self.ranks.values():
            if rank.running():
                rank.process.send_signal(signal.SIGKILL)
        for rank in self.ranks.values():
            rank.process.wait(timeout=60)
        self.pump(lambda: not any(rank.open for rank in self.ranks.values()), time.monotonic() + 5)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()
        for rank in self.ranks.values():
            rank.process.stdout.close()
        self.selector.close()
