"""A job of examples/elastic.cpp under `devicemesh run`: what its ranks say, and signals to them.
examples/demo_elastic.py, tests/test_elastic.py and tests/soak_elastic.py use it."""

import contextlib
import os
import re
import signal
import subprocess
import threading
import time

from support.processes import end_group, environment, marked, words

# What a rank says with --events: the seconds of CLOCK_MONOTONIC, its number, and the rest.
EVENT = re.compile(r"^(\d+\.\d+) rank (-?\d+) (.*)$")
MESH = 8
# The variable by which the processes of a job are found.
MARK = "LIBDEVICEMESH_ELASTIC_JOB"


class Event:
    def __init__(self, moment, rank, words):
        self.moment, self.rank, self.words = float(moment), int(rank), words


def read_into(job, line):
    """Adds a line to what a job has said."""
    found = EVENT.match(line)
    with job.changed:
        job.lines.append(line)
        if found:
            job.events.append(Event(*found.groups()))
        job.changed.notify_all()


class Job:
    """The mesh has 8 ranks; the ranks from 8 on are spares. With `restarts` a lost rank is started
    again alone, that often."""

    def __init__(self, tool, program, spares=0, restarts=0, arguments=(), variables=None):
        self.mark = f"elastic-{os.getpid()}-{time.monotonic_ns()}"
        how = ["--restart", "rank", "--max-restarts", restarts, "--spares", spares] if restarts else []
        command = [tool, "run", "-n", MESH if restarts else MESH + spares, *how, "--failure-grace", "100", "--", program, "--events", *arguments]
        self.size = MESH + spares
        self.process = subprocess.Popen(
            words(command), env=environment(**{MARK: self.mark}, **(variables or {})), text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True)
        self.events, self.lines, self.changed = [], [], threading.Condition()
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        for line in self.process.stdout:
            read_into(self, line)

    def is_over(self):
        return not self.reader.is_alive()

    def wait_for(self, condition, patience):
        """Waits until condition(events) is true or the job has ended. Returns what it gives."""
        until = time.monotonic() + patience
        with self.changed:
            while True:
                value = condition(self.events)
                if value or time.monotonic() > until or self.is_over():
                    return value
                self.changed.wait(0.1)

    def pid(self, rank):
        """The newest process of a rank; None where there is none yet."""
        with self.changed:
            pids = [event.words for event in self.events if event.rank == rank and event.words.startswith("is process ")]
        return int(pids[-1].split()[-1]) if pids else None

    def send(self, rank, number):
        """Sends a signal to a rank. Returns the process and the moment; None where the rank does
        not run."""
        pid = self.pid(rank)
        # The number may belong to another process by now, so the mark is looked at first.
        if pid is None or pid not in marked(self.mark, MARK):
            return None
        moment = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            return pid, moment
        return None

    def wake(self, pid):
        """Lets a stopped process go on."""
        if pid in marked(self.mark, MARK):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def end(self, patience):
        """Waits for the end. Returns whether the job ended by itself."""
        try:
            self.process.wait(timeout=patience)
            by_itself = True
        except subprocess.TimeoutExpired:
            by_itself = False
            self.stop()
        self.reader.join(timeout=10)
        return by_itself

    def stop(self):
        """Ends everything that the job has started."""
        if self.process.poll() is None:
            end_group(self.process)
        for pid in marked(self.mark, MARK):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def said(self):
        return "".join(self.lines)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()
        self.reader.join(timeout=10)
        self.process.stdout.close()
