"""The operating system refuses a resource to one rank or to both: descriptors, threads or memory,
/proc, or access to the other process. Every rank gets a message that names the cause and says what
to change. Takes longer than 5 s, because a store that can take no connection is known only at the
deadline, which is 5 s here."""

import os
import shutil
import subprocess

import pytest

from support.paths import LIBRARY
from support.processes import environment, kill_all

# Users that run nothing else, so that a limit on their processes counts only the ranks. Each worker
# of pytest-xdist has users of its own.
FIRST_USER = 64321 + 2 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
USERS = FIRST_USER, FIRST_USER + 1
# Parts of messages that earlier versions gave for these causes, and that are wrong for them.
WRONG = "another host", "use device type cuda", "used up", "a bug in"
PLAIN = ([], "none none 0", None)
# With this many descriptors left a rank works. With none it is refused.
MOST_FILES = 12
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="starts ranks as other users or without /proc, which takes root")


class Place:
    """A folder that every user can read, with the program and the library."""

    def __init__(self, programs, folder, free_port):
        self.free_port = free_port
        self.library = folder
        os.chmod(folder, 0o755)
        (soname,) = (path for path in LIBRARY.glob("libdevicemesh.so.*"))
        shutil.copy(soname, folder)
        program = programs.c("tests/c/programs/limits.c", link=[f"-L{LIBRARY}", "-ldevicemesh"])
        self.program = shutil.copy(program, folder)

    def said(self, *ranks):
        """Runs these ranks and gives what each says. A rank is (the words before the program,
        the program's arguments, its user or None)."""
        port = self.free_port()
        started = []
        try:
            for number, (before, arguments, user) in enumerate(ranks):
                variables = environment(RANK=number, WORLD_SIZE=len(ranks), LOCAL_RANK=number, MASTER_ADDR="127.0.0.1",
                                        MASTER_PORT=port, LD_LIBRARY_PATH=self.library)
                as_user = {} if user is None else {"user": user, "group": user, "extra_groups": []}
                command = [*before, self.program, *arguments.split()]
                try:
                    started.append(subprocess.Popen(
                        command, env=variables, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT, text=True, **as_user))
                except PermissionError:
                    pytest.skip(f"user {user} may not reach {self.program}")
            said = [rank.communicate(timeout=90)[0].strip() for rank in started]
            assert all(rank.returncode == 0 for rank in started), (ranks, said)
        finally:
            kill_all(started)
        for text in said:
            assert "\n" not in text and not any(wrong in text for wrong in WRONG), (ranks, said)
        return said


@pytest.fixture
def place(programs, free_port):
    # pytest's own folders are closed to other users.
    folder = programs.folder.parent / f"limits-{os.getpid()}"
    folder.mkdir()
    yield Place(programs, folder, free_port)
    shutil.rmtree(folder)


def expect(said, *texts, on=(0, 1)):
    for rank in on:
        assert not said[rank].startswith("DM_STATUS_OK") and all(text in said[rank] for text in texts), (texts, said)


def with_one(victim, limited, other=PLAIN):
    """Two ranks, of which one is limited."""
    return [limited if rank == victim else other for rank in (0, 1)]


def test_without_limits(place):
    assert place.said(PLAIN, PLAIN) == ["DM_STATUS_OK"] * 2


@pytest.mark.parametrize("left", range(MOST_FILES))
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("stage", ["join", "mesh"])
def test_descriptors(place, stage, victim, left):
    """However many descriptors are left, from none to enough, the rank is told of the limit."""
    said = place.said(*with_one(victim, ([], f"{stage} files {left}", None)))
    if said[victim] != "DM_STATUS_OK" or left == 0:
        expect(said, "ulimit -n", on=[victim])
        assert left < MOST_FILES - 1, said


@as_root
def test_a_join_without_a_thread(place):
    """Rank 0 serves the store, which takes a thread."""
    said = place.said(([], "join threads 1", USERS[0]), ([], "none none 0", USERS[0]))
    expect(said, "thread", "ulimit -u", "pids.max", on=[0])


@as_root
@pytest.mark.parametrize("victim", [0, 1])
def test_a_mesh_takes_no_thread(place, victim):
    said = place.said(*with_one(victim, ([], "mesh threads 1", USERS[0]), ([], "none none 0", USERS[0])))
    assert said == ["DM_STATUS_OK"] * 2


@pytest.mark.parametrize("victim", range(4))
def test_memory(place, victim):
    """Whichever rank reports it first, every rank is told which rank gets no memory, and its
    limit."""
    for _ in range(3):
        said = place.said(*(([], "mesh memory 6", None) if rank == victim else PLAIN for rank in range(4)))
        expect(said, f" rank {victim} failed in dm_init", "RLIMIT_AS of process", " more are needed", "ulimit -v", on=range(4))


@as_root
def test_a_process_that_is_not_dumpable(place):
    expect(place.said(([], "join dumpable 0", USERS[0]), ([], "none none 0", USERS[0])), "dumpable", f"user {USERS[0]}")


@as_root
def test_another_user(place):
    """Ranks of two users share no memory, so they are two hosts."""
    assert place.said(([], "none none 0", USERS[0]), ([], "none none 0", USERS[1])) == ["DM_STATUS_OK", "DM_STATUS_OK"]


HIDDEN = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /proc && exec "$0" "$@"']


@as_root
@pytest.mark.parametrize("before", [(HIDDEN, HIDDEN), ([], HIDDEN), (HIDDEN, [])], ids=["both", "rank1", "rank0"])
def test_without_proc(place, before):
    expect(place.said(*((words, "none none 0", None) for words in before)), "/proc is not mounted", "mount -t proc")


@as_root
def test_with_the_proc_of_another_namespace(place):
    said = place.said(PLAIN, (["unshare", "--pid", "--fork"], "none none 0", None))
    expect(said, "/proc belongs to another process-id namespace", "mount -t proc")


@as_root
def test_a_rank_alone_needs_no_proc(place):
    assert place.said((HIDDEN, "none none 0", None)) == ["DM_STATUS_OK"]
