#!/usr/bin/env python3
"""Children beside a running job. A rank that has one is killed while the child sleeps on: the other ranks know at once, and the next job has the port. In Python:
multiprocessing, os.fork, subprocess and os.system."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(os.environ.get("DM_ROOT", Path(__file__).resolve().parent.parent))
LIBRARY = Path(os.environ.get("DM_LIB_DIR", ROOT / "target/release"))
SCRATCH = Path(os.environ.get("DM_TMP", ROOT / "target/tests"))
# A survivor's notice; the deadline is a minute.
MOST = 2.0


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


class Job:
    def __init__(self, command, size, port):
        plain = {**os.environ, "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                 "PYTHONPATH": str(ROOT / "bindings/python"), "DM_LIBRARY": str(LIBRARY / "libdevicemesh.so")}
        self.ranks = [
            subprocess.Popen([str(part) for part in command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
                             env={**plain, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(size)
        ]
        self.children = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for rank in self.ranks:
            rank.kill()
            rank.wait(timeout=60)
            rank.stdout.close()
        for child in self.children:
            try:
                os.kill(child, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def until_ready(self):
        for rank in self.ranks:
            for line in rank.stdout:
                word, *numbers = line.split()
                if word == "ready":
                    break
                assert word in ("child", "children"), line
                self.children += map(int, numbers)
            else:
                raise AssertionError("a rank ended before it was ready")

    def goes_well(self):
        for number, rank in enumerate(self.ranks):
            output = rank.communicate(timeout=120)[0]
            assert rank.returncode == 0, f"rank {number} exited with {rank.returncode}: {output}"


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def killed_beside_a_child(command, next_job, size, victim, status):
    """The survivors' slowest notice, in seconds; and the port is free."""
    port = free_port()
    with Job(command, size, port) as job:
        job.until_ready()
        assert job.children and all(map(is_alive, job.children)), job.children
        killed = time.monotonic()
        os.kill(job.ranks[victim].pid, signal.SIGKILL)
        slowest = 0.0
        for number, rank in enumerate(job.ranks):
            if number == victim:
                continue
            said, when, message = rank.communicate(timeout=90)[0].split("\n")[0].split(" ", 2)
            assert said == status and f"rank {victim}" in message, (said, message)
            slowest = max(slowest, float(when) - killed)
        job.ranks[victim].wait(timeout=60)
        assert slowest < MOST, f"the last survivor knew after {slowest:.3f} s"
        assert all(map(is_alive, job.children)), "the children were to outlive their rank"
        with Job(next_job, 2, port) as following:
            following.goes_well()
        assert all(map(is_alive, job.children)), "the children were to outlive the next job"
    return slowest


def main():
    program = SCRATCH / "forks"
    SCRATCH.mkdir(parents=True, exist_ok=True)
    subprocess.run([os.environ.get("CC", "cc"), "-std=c11", "-O1", "-I", ROOT / "include", ROOT / "tests/c/programs/forks.c",
                    f"-L{LIBRARY}", "-ldevicemesh", f"-Wl,-rpath,{LIBRARY}", "-pthread", "-o", program], check=True)
    following = [program, "none", "0"]
    for how in ("fork", "daemon", "blocked", "system"):
        for victim in (0, 1):
            slowest = killed_beside_a_child([program, how, str(victim)], following, 3, victim, "DM_STATUS_PEER_LOST")
            print(f"{how}, rank {victim} killed: the last of the others knew after {1000 * slowest:.0f} ms; the next job had the port")
    forked = [sys.executable, ROOT / "bindings/python/tests/forked.py"]
    slowest = killed_beside_a_child([*forked, "sleeps"], following, 2, 0, "PeerLostError")
    print(f"Python, four kinds of children: the other rank knew after {1000 * slowest:.0f} ms; the next job had the port")
    for how in ("workers", "calls"):
        with Job([*forked, how], 2, free_port()) as job:
            job.goes_well()
        print(f"Python, {how}: the parent is as before")
    return 0


if __name__ == "__main__":
    sys.exit(main())
