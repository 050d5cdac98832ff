"""Ranks of tests/c/programs/across.c, which make a mesh of device type cpu over several hosts, and
what is expected of them. The hosts are those of tests/netlab.py, or names on the loopback
device."""

import os
import random
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

from lost_ranks.job import HOST
from lost_ranks.verdict import named
from netlab import Lab
from netranks import Rank
from support.processes import environment, kill_all, starvation, waits

# How many milliseconds a host may say nothing before it counts as lost.
SILENCE = "DM_HOST_TIMEOUT_MS"
PORT = 29500  # every lab has networks of its own

# Where the ranks are, by the names of the hosts.
LAYOUTS = {
    "2x1": "alpha beta", "2x2": "alpha alpha beta beta", "3+1": "alpha alpha alpha beta", "4x1": "alpha beta gamma delta",
    "4x2": "alpha alpha beta beta gamma gamma delta delta", "in-turn": "alpha beta alpha beta gamma",
}


class Loopback:
    """Hosts that are only names: the engine shares no memory between them, and their ranks meet on
    the loopback device. It has the functions of Lab that need no network of its own."""

    def __init__(self, port):
        self.port, self.processes = port, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        kill_all(self.processes)

    def spawn(self, host, command, **options):
        self.processes.append(subprocess.Popen(command, **options))
        return self.processes[-1]

    def pids(self):
        return [process.pid for process in self.processes]

    def address(self):
        return "127.0.0.1", self.port


class Network(Lab):
    """Hosts of netlab.py, where the first one serves the store."""

    def address(self):
        return next(iter(self.hosts.values())).ipv4, PORT

    def listeners(self, host):
        """Where somebody listens on this host: triples (family, address, port)."""
        found = set()
        for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
            for line in Path(f"/proc/{self.hosts[host].holder}/net/{table}").read_text().splitlines()[1:]:
                local, _, state = line.split()[1:4]
                address, port = local.split(":")
                if state != "0A":
                    continue
                packed = b"".join(bytes.fromhex(address[at:at + 8])[::-1] for at in range(0, len(address), 8))
                found.add((family, socket.inet_ntop(family, packed), int(port, 16)))
        return sorted(found)

    def has_zero_window(self, host):
        """Whether this host's kernel holds bytes for which a receiver has no room. Such a
        connection is established (01), and its timer probes for room (04)."""
        lines = [line.split() for table in ("tcp", "tcp6")
                 for line in Path(f"/proc/{self.hosts[host].holder}/net/{table}").read_text().splitlines()[1:]]
        return any(line[3] == "01" and line[5].startswith("04:") for line in lines)


class HostRank(Rank):
    """One rank. `moment` is when its last call ended (CLOCK_MONOTONIC)."""

    def __init__(self, program, lab, host, rank, size, timeout, variables, without):
        self.lab, self.host, self.rank, self.timeout, self.unread, self.waits, self.moment = lab, host, rank, timeout, b"", {}, 0.0
        address, port = lab.address()
        about = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": address, "MASTER_PORT": port, HOST: host, **variables}
        about = {name: value for name, value in about.items() if name not in without}
        self.process = lab.spawn(host, [str(program), str(int(1000 * timeout))], stdin=subprocess.PIPE,
                                 stdout=subprocess.PIPE, env=environment(**about))

    def result(self):
        status, millis, moment, message = self.line().split(" ", 3)
        self.moment = float(moment)
        print(f"rank {self.rank} on {self.host}: {status} after {millis} ms {message}", flush=True)
        return status, int(millis) / 1000, message


class HostJob:
    """All ranks of a job. `places` has the host of each rank. `variables` are set for all ranks,
    `each(rank, host)` gives further variables of one rank, and the names in `without` are set for
    no rank."""

    def __init__(self, program, lab, places, timeout=20, variables=None, each=None, without=()):
        self.lab, self.places = lab, places.split()
        self.ranks = [
            HostRank(program, lab, host, rank, len(self.places), timeout,
                     {**(variables or {}), **(each(rank, host) if each else {})}, without)
            for rank, host in enumerate(self.places)
        ]

    def on(self, *hosts):
        """The numbers of the ranks on these hosts."""
        return {rank for rank, host in enumerate(self.places) if host in hosts}

    def start(self, word, ranks=None):
        for rank in self.ranks if ranks is None else [self.ranks[number] for number in sorted(ranks)]:
            rank.start(word)

    def well(self, ranks=None):
        for rank in self.ranks if ranks is None else [self.ranks[number] for number in sorted(ranks)]:
            rank.well()

    def do(self, *lines, ranks=None):
        """Every rank makes these calls, one after the other, and none fails."""
        for word in lines:
            self.start(word, ranks)
            self.well(ranks)

    def run(self, word):
        """Every rank begins a call that can only end with an error."""
        self.start(word)
        for rank in self.ranks:
            assert rank.line() == "running", f"rank {rank.rank} does not run"

    def digests(self, count):
        """The hash of the sums, which must be the same on all ranks."""
        self.start(f"digest {count}")
        hashes = {rank.result()[2] for rank in self.ranks}
        assert len(hashes) == 1, f"the sums have different bits: {hashes}"
        return hashes.pop()


class Watch:
    """Measures how soon after an event the ranks know. On a busy machine they may know later by the
    time for which they waited for a processor, or the test did, which makes the event."""

    def __init__(self, lab):
        self.lab = lab
        self.waits, self.began = waits(self.pids()), time.monotonic()

    def pids(self):
        return [os.getpid(), *self.lab.pids()]

    def knows(self, rank, statuses, within, names=None, among=None, said=()):
        """The call of the rank fails with one of these statuses, at most `within` seconds after the
        event or after its own begin. It blames exactly the ranks `names`, or some of `among`."""
        status, took, message = rank.result()
        assert status in [f"DM_STATUS_{each}" for each in statuses.split()], f"rank {rank.rank}: {status} {message}, expected {statuses}"
        late = min(rank.moment - self.began, took)
        starved = starvation(self.waits, self.pids())
        assert late <= within + starved, (
            f"rank {rank.rank} knew after {late:.3f} s, expected {within} s and {starved:.3f} s of waiting for processors: {message}"
        )
        blamed = named(message) - {rank.rank}
        if names is not None:
            assert blamed == set(names), f"rank {rank.rank} blames {sorted(blamed)}, not {sorted(names)}: {message}"
        if among is not None:
            assert blamed and blamed <= among, f"rank {rank.rank} blames {sorted(blamed)}, not some of {sorted(among)}: {message}"
        for text in said:
            assert re.search(text, message), f"rank {rank.rank}: no {text!r} in: {message}"
        return late


def kill(rank, number=signal.SIGKILL):
    os.kill(rank.process.pid, number)


def garbage(chance):
    """Bytes that a stranger may send: noise, the first bytes of other protocols, long lengths."""
    return chance.choice([
        chance.randbytes(chance.randrange(1, 2000)), b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, b"\0" * 4096,
        b"hccljoin" + chance.randbytes(200), b"hcclwire" + b"\xff" * 300, b"\x16\x03\x01" + chance.randbytes(300)
    ])


def strangers(lab, host, targets, count, seed):
    """Connections from this host to `targets` (family, address, port): some send garbage, some a
    part of it, some nothing, some close at once. Gives those that are still open."""
    chance, held = random.Random(seed), []
    for number in range(count):
        family, address, port = chance.choice(targets)
        stranger = lab.hosts[host].socket(family)
        stranger.settimeout(10)
        try:
            stranger.connect((address, port))
            if number % 4:
                stranger.sendall(garbage(chance))
            if number % 4 == 1:
                stranger.close()
                continue
        except OSError:
            stranger.close()
            continue
        held.append(stranger)
    return held
