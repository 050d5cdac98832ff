"""A job of examples/elastic.cpp on four hosts of two ranks (tests/netlab.py), whose store is on a
fifth host. No launcher starts a rank again there, so only spares take places."""

import contextlib
import os
import re
import subprocess
import threading
import time

from hostranks import SILENCE, Network
from lost_ranks.job import HOST
from support.processes import environment, wait_until

from .job import MARK, MESH, Job, read_into

HOSTS = ("alpha", "beta", "gamma", "delta")
STORE, PORT = "store", 29500
# After how long a host that says nothing is lost, in milliseconds.
SILENCE_MS = 2000


def host_of(rank):
    """The ranks 0 and 1 are on the first host, 2 and 3 on the second one; spares follow in turn."""
    return HOSTS[rank // 2] if rank < MESH else HOSTS[rank % len(HOSTS)]


class HostJob(Job):
    def __init__(self, tool, program, spares, arguments, folder):
        self.lab = Network((*HOSTS, STORE), folder)
        self.lab.__enter__()
        try:
            self.begin(tool, program, spares, arguments)
        except BaseException:
            self.lab.__exit__()
            raise

    def begin(self, tool, program, spares, arguments):
        self.size, self.mark = MESH + spares, f"elastic-{os.getpid()}-{time.monotonic_ns()}"
        self.events, self.lines, self.changed = [], [], threading.Condition()
        address = self.lab.hosts[STORE].ipv4
        self.store = self.lab.spawn(STORE, [str(tool), "store", "--listen", f"{address}:{PORT}"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                    env=environment(**{MARK: self.mark}))
        assert re.match(rb"serving ", self.store.stdout.readline())
        self.ranks = []
        for rank in range(self.size):
            variables = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": self.size, "MASTER_ADDR": address, "MASTER_PORT": PORT, HOST: host_of(rank),
                         "TORCHELASTIC_USE_AGENT_STORE": "True", SILENCE: SILENCE_MS, MARK: self.mark}
            self.ranks.append(self.lab.spawn(host_of(rank), [str(program), "--events", *map(str, arguments)], stdout=subprocess.PIPE,
                                             stderr=subprocess.STDOUT, env=environment(**variables)))
        self.readers = [threading.Thread(target=self.read_from, args=(process,), daemon=True) for process in self.ranks]
        for process, reader in zip(self.ranks, self.readers):
            process.readers = [reader]
            reader.start()

    def read_from(self, process):
        for line in process.stdout:
            read_into(self, line.decode(errors="replace"))

    def is_over(self):
        return not any(reader.is_alive() for reader in self.readers)

    def cut(self, host):
        """Nothing comes from or to the host any more. Returns the ranks on it that run, with their
        processes and the moment."""
        moment = time.monotonic()
        self.lab.cut(host)
        return [(rank, self.pid(rank), moment) for rank in range(self.size) if host_of(rank) == host and self.pid(rank)]

    def end(self, patience):
        by_itself = True
        try:
            wait_until(lambda: all(process.poll() is not None for process in self.ranks), "all ranks have ended", patience)
        except AssertionError:
            by_itself = False
            for process in self.ranks:
                process.kill()
        for reader in self.readers:
            reader.join(timeout=10)
        self.store.kill()
        self.store.wait()
        return by_itself

    def stop(self):
        with contextlib.suppress(OSError):
            self.lab.__exit__()

    def __exit__(self, *_):
        self.stop()
        for process in (*self.ranks, self.store):
            if process.stdout and not process.stdout.closed:
                process.stdout.close()
