"""Ranks of `devicemesh check`, for the tests in tests/test_check*.py."""

import json
import subprocess
import threading
import time

from . import processes
from .paths import CC, LIBRARY, TOOL

# Little to measure.
QUICK = ("--sizes", "4B,4KiB", "--iterations", "5", "--repeats", "2", "--timeout", "120")
# So much to measure that the check ends only by a fault or the time limit, which follows.
LONG = ("--sizes", "4B,64KiB", "--iterations", "1000000", "--repeats", "1000", "--timeout")


def clean(**more):
    return processes.environment(without=["NO_COLOR", "DM_"], **{"TERM": "xterm", **more})


def torch_like(rank, size, port):
    return {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


class Job:
    """Ranks that no launcher ends, so that the exit code of each rank is its own."""

    def __init__(self, size, arguments, variables, before):
        """`arguments`, `variables` and `before`, the words before the command, are functions of the
        rank."""
        self.ranks = [
            subprocess.Popen([*before(rank), TOOL, "check", *arguments(rank)], env=clean(**variables(rank)), text=True,
                             stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for rank in range(size)
        ]
        self.errors = [""] * size
        self.outputs = [""] * size
        self.readers = [
            threading.Thread(target=self.read, args=(rank, kind), daemon=True)
            for rank in range(size)
            for kind in ("stdout", "stderr")
        ]
        for rank, process in enumerate(self.ranks):
            process.readers = self.readers[2 * rank:2 * rank + 2]
        for reader in self.readers:
            reader.start()

    def read(self, rank, kind):
        told = self.outputs if kind == "stdout" else self.errors
        for line in getattr(self.ranks[rank], kind):
            told[rank] += line

    def until(self, rank, text, patience=120):
        end = time.monotonic() + patience
        while text not in self.errors[rank]:
            assert time.monotonic() < end and self.ranks[rank].poll() is None, f"rank {rank} did not say {text!r}: {self.errors[rank]}"
            time.sleep(0.01)

    def codes(self, but=(), patience=120):
        end = time.monotonic() + patience
        for rank, process in enumerate(self.ranks):
            if rank not in but:
                try:
                    process.wait(timeout=max(0.1, end - time.monotonic()))
                except subprocess.TimeoutExpired:
                    raise AssertionError(f"rank {rank} has not ended after {patience} s\n{self}") from None
                # The process may end before the threads here have read its last lines.
                for reader in process.readers:
                    reader.join(timeout=max(0.1, end - time.monotonic()))
        return [None if rank in but else process.returncode for rank, process in enumerate(self.ranks)]

    def end(self):
        processes.kill_all(self.ranks)

    def __str__(self):
        return "\n".join(f"rank {rank}:\n{out}{error}" for rank, (out, error) in enumerate(zip(self.outputs, self.errors)))


def jobs(free_port):
    """The body of the fixture `job`: a function that starts ranks, by default with torchrun's
    variables. They end with the test."""
    started = []

    def start(size, *arguments, world=None, place=None, more=None, of_each=None, before=None, **environment):
        """`world` is the size that the ranks are told. The others are functions of the rank:
        `place` gives the launcher's variables, `more` adds to them, `of_each` gives further
        arguments, and `before` the words before the command."""
        port = free_port()
        place = place or (lambda rank: torch_like(rank, world or size, port))
        nothing = lambda rank: {}
        started.append(
            Job(size, lambda rank: [*arguments, *(of_each or nothing)(rank)],
                lambda rank: {**environment, **place(rank), **(more or nothing)(rank)}, before or nothing))
        return started[-1]

    yield start
    for one in started:
        one.end()


def before_engine(folder, source):
    """Compiles this C to a library whose functions stand before those of the host engine, and
    gives its path."""
    engine, library = folder / "libhostccl.so.0.2", folder / "libbefore.so"
    engine.symlink_to(LIBRARY / "libhostccl.so")  # under its SONAME
    processes.run(CC, "-std=c11", "-D_GNU_SOURCE", "-shared", "-fPIC", "-x", "c", "-", "-x", "none", "-Wl,--no-as-needed",
                  engine, f"-Wl,-rpath,{folder}", "-ldl", "-o", library, input=source)
    return str(library)


def run(size, *arguments, code=0, **environment):
    return processes.run(TOOL, "run", "-n", size, "--failure-grace", "20", "--", TOOL, "check", *arguments,
                         env=clean(**environment), code=code, timeout=180)


def report(text):
    assert text.count("\n") == 1 and text.endswith("\n"), text
    return json.loads(text)
