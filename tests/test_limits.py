#!/usr/bin/env python3
"""What the machine refuses, made for real on one rank or on both: too few descriptors, threads or bytes, no /proc, processes that may not look into each other. Every
rank gets a message that names the cause and says what to change. Some need root, and are left out without it. Takes longer than 5 s, because a store that can take no
connection is known only at the deadline, which is 5 s here."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(os.environ.get("DM_ROOT", Path(__file__).resolve().parent.parent))
LIBRARY = Path(os.environ.get("DM_LIB_DIR", ROOT / "target/release"))
# Users that run nothing else, so that a limit on their processes counts these only.
USERS = 64321, 64322
# Sentences that were said of these causes and have nothing to do with them.
WRONG = "another host", "use device type cuda", "used up", "a bug in"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


class Place:
    """A folder that every user can read, with the program and the library."""

    def __init__(self, folder):
        os.chmod(folder, 0o755)
        self.program = folder / "limits"
        shutil.copy(LIBRARY / "libdevicemesh.so.0.1", folder)
        subprocess.run([os.environ.get("CC", "cc"), "-std=c11", "-O1", "-I", ROOT / "include", ROOT / "tests/c/programs/limits.c",
                        f"-L{LIBRARY}", "-ldevicemesh", f"-Wl,-rpath,{folder}", "-o", self.program], check=True)

    def said(self, ranks):
        """What each rank says; a rank is (what is before the program, the program's arguments, its user or None)."""
        port = free_port()
        started = []
        try:
            for number, (before, arguments, user) in enumerate(ranks):
                environment = {**os.environ, "RANK": str(number), "WORLD_SIZE": str(len(ranks)), "LOCAL_RANK": str(number),
                               "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                as_user = {} if user is None else {"user": user, "group": user, "extra_groups": []}
                started.append(subprocess.Popen([*before, str(self.program), *arguments.split()], env=environment, cwd="/", stdin=subprocess.DEVNULL,
                                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **as_user))
            said = [rank.communicate(timeout=90)[0].strip() for rank in started]
            assert all(rank.returncode == 0 for rank in started), (ranks, said)
        finally:
            for rank in started:
                rank.kill()
                rank.wait(timeout=60)
        for text in said:
            assert "\n" not in text and not any(wrong in text for wrong in WRONG), (ranks, said)
        return said


def expect(said, *texts, on=(0, 1)):
    for rank in on:
        assert not said[rank].startswith("DM_STATUS_OK") and all(text in said[rank] for text in texts), (texts, said)


PLAIN = ([], "none none 0", None)


def files(place):
    """However many descriptors are left, from none to enough, every rank is told of the limit."""
    def limited(stage, victim, left):
        ranks = [PLAIN, PLAIN]
        ranks[victim] = ([], f"{stage} files {left}", None)
        return place.said(ranks)

    most = 12
    with ThreadPoolExecutor(8) as pool:
        jobs = {(stage, victim): [pool.submit(limited, stage, victim, left) for left in range(most)] for stage in ("join", "mesh") for victim in (0, 1)}
    for (stage, victim), tries in jobs.items():
        refused = [job.result() for job in tries if job.result()[victim] != "DM_STATUS_OK"]
        for said in refused:
            expect(said, "ulimit -n", on=[victim])
        assert 0 < len(refused) < most, refused
        print(f"descriptors, {stage}, rank {victim}: {len(refused)} limits refused")


def threads(place):
    for stage, victim in (("join", 0), ("mesh", 0), ("mesh", 1)):
        ranks = [([], "none none 0", USERS[0]), ([], "none none 0", USERS[0])]
        ranks[victim] = ([], f"{stage} threads 1", USERS[0])
        said = place.said(ranks)
        expect(said, "thread", "ulimit -u", "pids.max", on=[victim])
        print(f"threads, {stage}: {said[victim]}")


def memory(place):
    said = place.said([PLAIN, ([], "mesh memory 6", None)])
    expect(said, "ulimit -v", on=[1])
    print(f"memory: {said[1]}")


def undumpable(place):
    said = place.said([([], "join dumpable 0", USERS[0]), ([], "none none 0", USERS[0])])
    expect(said, "dumpable", f"user {USERS[0]}")
    print(f"not dumpable: {said[1]}")


def other_user(place):
    said = place.said([([], "none none 0", USERS[0]), ([], "none none 0", USERS[1])])
    expect(said, f"runs as user {USERS[0]}", f"as user {USERS[1]}", "as one user")
    print(f"another user: {said[1]}")


def proc(place):
    """Without /proc, and with another namespace's; a rank alone needs none."""
    hidden = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /proc && exec "$0" "$@"']
    foreign = ["unshare", "--pid", "--fork"]
    for before in ([hidden, hidden], [[], hidden], [hidden, []]):
        said = place.said([(before[0], "none none 0", None), (before[1], "none none 0", None)])
        expect(said, "/proc is not mounted", "mount -t proc")
    print(f"no /proc: {said[1]}")
    said = place.said([([], "none none 0", None), (foreign, "none none 0", None)])
    expect(said, "/proc belongs to another process-id namespace", "mount -t proc")
    print(f"another namespace's /proc: {said[0]}")
    assert place.said([(hidden, "none none 0", None)]) == ["DM_STATUS_OK"]


def main():
    with tempfile.TemporaryDirectory(prefix="dm-limits-") as folder:
        place = Place(Path(folder))
        assert place.said([PLAIN, PLAIN]) == ["DM_STATUS_OK"] * 2
        files(place)
        memory(place)
        if os.geteuid() != 0:
            print("left out, as they need root: threads, undumpable, other_user, proc")
            return 0
        for case in (threads, undumpable, other_user, proc):
            case(place)
    return 0


if __name__ == "__main__":
    sys.exit(main())
