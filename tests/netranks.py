"""Ranks on the hosts of netlab.py: processes of tests/c/programs/meet.c, and what is expected of
them."""

import os
import re
import select
import subprocess
import time

from support.paths import LIBRARY
from support.processes import disk_waits, environment, starvation, waits

# Seconds that an error may take beyond the promised 10 % + 250 ms, besides the time that the
# hosts' processes waited for a busy processor.
SLACK = 0.25
PATIENCE = 50


class Rank:
    """A running tests/c/programs/meet.c."""

    def __init__(self, program, lab, host, rank, size, method, timeout, device="cuda", variables=None):
        self.lab, self.rank, self.timeout, self.unread = lab, rank, timeout, b""
        # How long the threads of the hosts had waited for a processor when the call began, and how
        # long processes of the machine had waited for its disk.
        self.waits, self.disk_waits = {}, 0.0
        command = [program, device, method, rank, size, int(1000 * timeout), LIBRARY / "libhostccl.so"]
        self.process = lab.spawn(host, list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                 env=environment(**(variables or {})))

    def rest(self):
        """Gives the output of the rank that nobody has read yet."""
        os.set_blocking(self.process.stdout.fileno(), False)
        return self.unread + (self.process.stdout.read() or b"")

    def line(self):
        until = time.monotonic() + PATIENCE
        while b"\n" not in self.unread:
            if not select.select([self.process.stdout], [], [], max(0, until - time.monotonic()))[0]:
                raise AssertionError(f"rank {self.rank} said nothing for {PATIENCE} s")
            part = os.read(self.process.stdout.fileno(), 4096)
            assert part, f"rank {self.rank} ended with {self.process.wait()}"
            self.unread += part
        line, self.unread = self.unread.split(b"\n", 1)
        return line.decode()

    def start(self, word):
        self.waits, self.disk_waits = waits(self.lab.pids()), disk_waits()
        self.process.stdin.write(f"{word}\n".encode())
        self.process.stdin.flush()
        assert self.line() == "begin"
        return self

    def result(self):
        """Status, seconds and message of the call that was started."""
        status, millis, message = self.line().split(" ", 2)
        print(f"rank {self.rank}: {status} after {millis} ms {message}", flush=True)
        return status, int(millis) / 1000, message

    def well(self):
        status, seconds, message = self.result()
        assert status == "DM_STATUS_OK", f"rank {self.rank}: {status} {message}"
        return seconds

    def fails(self, statuses, *texts, within=None):
        """The call that was started fails by its deadline, or within so many seconds, with one of
        these statuses; each of the texts is in its message."""
        status, seconds, message = self.result()
        assert status in [f"DM_STATUS_{name}" for name in statuses.split()], f"rank {self.rank}: {status} {message}, expected {statuses}"
        for text in texts:
            assert re.search(text, message), f"rank {self.rank}: no {text!r} in: {message}"
        for said in re.findall(r"within (\d+) ms", message):
            assert int(said) == int(1000 * self.timeout), f"rank {self.rank} has a timeout of {self.timeout} s, and says {message}"
        limit = within or 1.1 * self.timeout + 0.25
        starved = starvation(self.waits, self.lab.pids()) + disk_waits() - self.disk_waits
        late = f"rank {self.rank}: {status} after {seconds} s, expected within {limit:.2f} s"
        waited = f"{starved:.2f} s of waiting for processors and disks"
        assert seconds <= limit + SLACK + starved, f"{late} and {waited}: {message}"
        return message
