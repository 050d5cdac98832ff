#!/usr/bin/env python3
"""A rank killed with SIGKILL in the middle of an all-reduce: every other rank has an error that names it within 2 seconds, nothing is left in /dev/shm and
no process is left. With plain environment variables, so that no launcher ends the others first."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(os.environ.get("DM_ROOT", Path(__file__).resolve().parent.parent))
LIBRARY = Path(os.environ.get("DM_LIB_DIR", ROOT / "target/release"))
SCRATCH = Path(os.environ.get("DM_TMP", ROOT / "target/tests"))


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def kill_one(program, size, victim, pause):
    before = set(os.listdir("/dev/shm"))
    port = free_port()
    ranks = [
        subprocess.Popen([program], stdout=subprocess.PIPE, text=True,
                         env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank),
                              "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
        for rank in range(size)
    ]
    try:
        for rank in ranks:
            line = rank.stdout.readline()
            assert line == "running\n", f"instead of running: {line!r}"
        time.sleep(pause)
        killed = time.monotonic()
        os.kill(ranks[victim].pid, signal.SIGKILL)
        slowest = 0.0
        for number, rank in enumerate(ranks):
            if number == victim:
                rank.wait(timeout=60)
                continue
            words = rank.communicate(timeout=60)[0].split(" ", 2)
            assert words[0] == "DM_STATUS_PEER_LOST", words
            assert f"rank {victim} was lost" in words[2], words
            slowest = max(slowest, float(words[1]) - killed)
            assert rank.returncode == 0, rank.returncode
        assert slowest < 2.0, f"the last rank knew after {slowest:.3f} s"
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(timeout=60)
    left = set(os.listdir("/dev/shm")) - before
    assert not left, f"left in /dev/shm: {left}"
    return slowest


def main():
    seed = int(os.environ.get("DM_SEED", "0")) or random.randrange(1, 1 << 31)
    print(f"seed {seed} (DM_SEED)")
    chance = random.Random(seed)
    program = SCRATCH / "reduce_forever"
    SCRATCH.mkdir(parents=True, exist_ok=True)
    subprocess.run([os.environ.get("CC", "cc"), "-std=c11", "-D_GNU_SOURCE", "-O1", "-I", ROOT / "include", ROOT / "tests/c/programs/reduce_forever.c",
                    f"-L{LIBRARY}", "-ldevicemesh", f"-Wl,-rpath,{LIBRARY}", "-pthread", "-o", program], check=True)
    for size, victim in ((2, 1), (4, 0), (4, 2), (8, 5), (8, 0)):
        slowest = kill_one(program, size, victim, chance.uniform(0.0, 0.3))
        print(f"{size} ranks, rank {victim} killed: the last of the others knew after {1000 * slowest:.0f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
