"""A running job grows along its outermost dimension when processes beyond its ranks come
(docs/recovery.md, "Spares, benched ranks, growth"). Every rank is a process.
tests/c/programs/grow.c checks every communicator after each recovery."""

import os
import re
import select
import signal
import subprocess
import time

import pytest

from support.paths import LINK
from support.processes import environment, kill_all, words

# A job says what a test waits for within this many seconds, also on a busy machine.
PATIENCE = 100


class Job:
    """Ranks that were started by environment variables at one address, and may be started later,
    too. All of them write to one pipe, one line at a time."""

    def __init__(self, program, folder, port, arguments=(0, ""), **variables):
        self.program, self.folder, self.arguments = program, folder, arguments
        self.variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **variables}
        self.processes, self.said, self.lines, self.unread = {}, [], {}, b""
        self.reader, self.writer = os.pipe()

    def start(self, ranks, size, join="running", words_of=None):
        """Starts processes of these ranks, which believe that the world has `size` ranks."""
        for rank in ranks:
            max_size, default = self.arguments
            command = words([self.program, self.folder, max_size, default if words_of is None else words_of])
            env = environment(**self.variables, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, DM_JOIN=join)
            process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=self.writer, stderr=subprocess.STDOUT)
            self.processes.setdefault(rank, []).append(process)
        return self

    def wait_for(self, ranks, pattern):
        """Reads until each of these ranks has said something that fits, after what it was waited
        for before."""
        until = time.monotonic() + PATIENCE
        for rank in ranks:
            while not self.has_said(rank, pattern):
                line = self.line(until)
                assert line, f"rank {rank} has not said {pattern!r} within {PATIENCE} s:\n{''.join(self.said)}"
                self.said.append(line)
                found = re.match(r"rank (\d+) (.*)", line)
                if found:
                    self.lines.setdefault(int(found.group(1)), []).append(found.group(2))

    def line(self, until):
        """The next line that a rank has said; nothing where none comes until this moment. The pipe
        does not end with the ranks, because this process may start others that write to it."""
        while b"\n" not in self.unread:
            if not select.select([self.reader], [], [], max(0.0, until - time.monotonic()))[0]:
                return ""
            self.unread += os.read(self.reader, 1 << 16)
        line, _, self.unread = self.unread.partition(b"\n")
        return line.decode() + "\n"

    def has_said(self, rank, pattern):
        lines = self.lines.get(rank, [])
        while lines:
            if re.match(pattern, lines.pop(0)):
                return True
        return False

    def kill(self, rank):
        self.processes[rank][-1].kill()
        self.processes[rank][-1].wait()

    def end(self, done):
        """Lets the job end. These ranks have to be done; others may have been killed, refused or
        benched."""
        (self.folder / "stop").touch()
        self.wait_for(done, "is done in epoch")
        for rank in done:
            assert self.processes[rank][-1].wait(60) == 0, "".join(self.said)
        return "".join(self.said)

    def close(self):
        kill_all([process for processes in self.processes.values() for process in processes])
        os.close(self.writer)
        os.close(self.reader)


@pytest.fixture
def grow(programs, free_port, tmp_path):
    """A job of (dp=2, tp=2) whose ranks make steps."""
    program = programs.c("tests/c/programs/grow.c", link=LINK)
    jobs = []

    def start(max_size=0, how="", **variables):
        jobs.append(Job(program, tmp_path, free_port(), (max_size, how), **variables))
        job = jobs[-1].start(range(4), 4, join="")
        job.wait_for(range(4), r"is at \(\d, \d\) in epoch 0: dp=2, world=4, ranks 0 1 2 3, lost nobody, joined nobody")
        return job

    yield start
    for job in jobs:
        print("".join(job.said))
        job.close()


def is_at(epoch, size, ranks, lost="nobody", joined="nobody", world=None):
    return rf"is at \(\d, \d\) in epoch {epoch}: dp={size}, world={world or len(ranks.split())}, ranks {ranks}, lost {lost}, joined {joined}$"


SIX, EIGHT = "0 1 2 3 4 5", "0 1 2 3 4 5 6 7"


@pytest.mark.parametrize("where", ["server", "folder", "hosts"])
def test_a_job_grows(grow, where, tmp_path):
    """4 ranks become 6. Rank 0 serves the store, or it is a folder; or every process is a host of
    its own."""
    variables = {"server": {}, "folder": {"DM_INIT_METHOD": f"file://{tmp_path}/store"}, "hosts": {"DM_HOSTCCL_SHM": "0"}}[where]
    job = grow(**variables)
    job.start([4, 5], 6)
    job.wait_for(range(6), is_at(1, 3, SIX, joined="4 5"))
    said = job.end(range(6))
    assert re.search(r"rank 4 is at \(2, 0\)", said) and re.search(r"rank 5 is at \(2, 1\)", said), said
    assert "epoch 2" not in said, said
    assert not (tmp_path / "store").exists()


def test_an_index_that_is_not_complete_stays_outside(grow):
    """Rank 5 comes a second after rank 4. Nobody recovers for rank 4 alone."""
    job = grow()
    job.start([4], 6)
    job.wait_for([4], "knocks")
    time.sleep(1)
    job.start([5], 6)
    job.wait_for(range(6), is_at(1, 3, SIX, joined="4 5"))
    job.end(range(6))


def test_an_index_stays_outside_in_a_recovery_for_another_reason(grow):
    """Rank 3 is lost while rank 4 waits for rank 5. Rank 3 comes later, and then rank 5. If rank 5
    came first, the job would have 6 ranks when rank 3 comes."""
    job = grow()
    job.start([4], 6)
    job.wait_for([4], "knocks")
    time.sleep(0.2)
    job.kill(3)
    job.wait_for([0, 1], is_at(1, 1, "0 1", lost="3", world=4))
    job.wait_for([2], "waits outside the mesh of epoch 1")
    job.start([3], 6)
    job.wait_for([3], "dm_world_init: DM_STATUS_MISMATCH: rank 3 joins a world of 6 ranks, and the running job has 4: ")
    job.start([5], 6)
    job.wait_for([0, 1, 4, 5], is_at(2, 2, "0 1 4 5", joined="4 5", world=6))
    job.start([3], 4, join="auto")
    job.wait_for(range(6), is_at(3, 3, SIX, joined="2 3"))
    job.end(range(6))


def test_max_size(grow):
    """Eight ranks would be (4, 2), and the job goes up to (3, 2). Ranks 6 and 7 wait, which is no
    reason to recover again."""
    job = grow(max_size=3)
    job.start([6, 7], 8, words_of="short")
    job.wait_for([6, 7], "waits on: ")
    job.start([4, 5], 8)
    # Ranks 6 and 7 may have begun a recovery. It had no place for them, because nobody had taken
    # the places 4 and 5.
    job.wait_for(range(6), is_at(r"\d", 3, SIX, joined="4 5"))
    job.wait_for([6, 7], r"waits on: .* \(rank \d is beyond the ranks of the job, so it comes in by a recovery with DM_RECOVER_GROW, whose max_size leaves room, when processes for places 6 to 7 of the mesh wait together\)\. Call again")
    said = job.end(range(6))
    assert "epoch 3" not in said and not re.search("^rank [67] is at", said, re.M), said


def test_a_loss_and_growth_in_one_recovery(grow):
    job = grow(how="deaf")
    job.start([4, 5], 6)
    job.wait_for([0], "sees 2 at the door")
    job.kill(3)
    job.wait_for([0, 1, 4, 5], is_at(1, 2, "0 1 4 5", lost="3", joined="4 5", world=6).replace("lost 3", "lost (?:3|nobody)"))
    job.wait_for([2], "waits outside the mesh of epoch 1")
    said = job.end([0, 1, 4, 5])
    job.wait_for([2], "waited until the job had ended")
    assert "rank 0 is at (0, 0) in epoch 1: dp=2, world=6, ranks 0 1 4 5, lost 3, joined 4 5" in said, said


def test_growth_needs_the_flag(grow):
    """Two processes are a reason for one recovery, which has no place for them, and for no other
    one."""
    job = grow(how="fixed")
    job.start([4, 5], 6, words_of="short")
    job.wait_for(range(4), is_at(1, 2, "0 1 2 3"))
    job.wait_for([4, 5], "waits on: .* did not let rank . in .*DM_RECOVER_GROW")
    job.wait_for([4, 5], "waits on: ")
    said = job.end(range(4))
    assert "epoch 2" not in said, said


def test_several_growths_in_turn(grow):
    job = grow()
    job.start([4, 5], 6)
    job.wait_for(range(6), is_at(1, 3, SIX, joined="4 5"))
    job.start([7, 6], 8)
    job.wait_for(range(8), is_at(2, 4, EIGHT, joined="6 7"))
    job.start([8, 9, 10, 11], 12)
    job.wait_for([11], r"is at \(5, 1\) in epoch \d: dp=6, world=12")
    job.end(range(12))


def test_ranks_are_lost_after_growth_and_come_back(grow):
    """A rank that came later comes back as any other one. A rank of the start may ask for the mesh
    of the start or for the grown one."""
    job = grow()
    job.start([4, 5], 6)
    job.wait_for(range(6), is_at(1, 3, SIX, joined="4 5"))
    job.wait_for(range(6), "is ready in epoch 1")
    job.kill(5)
    job.wait_for(range(4), is_at(2, 2, "0 1 2 3", lost="5", world=6))
    job.wait_for([4], "waits outside the mesh of epoch 2")
    job.start([5], 6, join="auto")
    job.wait_for(range(6), is_at(3, 3, SIX, joined="4 5"))
    for epoch, size in ((4, 4), (6, 6)):
        # Whoever has joined needs the state first.
        job.wait_for(range(6), f"is ready in epoch {epoch - 1}")
        job.kill(1)
        job.wait_for([2, 3, 4, 5], is_at(epoch, 2, "2 3 4 5", lost="1", world=6))
        job.start([1], size, join="auto")
        job.wait_for(range(6), is_at(epoch + 1, 3, SIX, joined="0 1"))
    job.end(range(6))


def test_a_process_that_asks_for_a_mesh_without_it_is_refused(grow):
    job = grow()
    job.start([4], 6, words_of="old")
    job.wait_for([4], r"dm_init: DM_STATUS_INVALID_ARGUMENT: rank 4 is beyond the ranks of the running job, and .* does not have this rank: ask for a mesh with more indices of dimension dp")
    job.end(range(4))


def test_a_second_try_takes_nobody_for_lost_who_has_replaced_a_lost_rank(grow):
    """The communicators of the mesh blame rank 3, whose next process is in the epoch in which the
    recovery has failed: it was stopped. The others call again with the mesh that blames the rank,
    and the process goes on."""
    job = grow(how="deaf brief")
    first = job.processes[3][-1]
    job.start([3], 4)
    job.wait_for([0], "sees 1 at the door")
    second = job.processes[3][-1]
    second.send_signal(signal.SIGSTOP)
    first.kill()
    first.wait()
    job.wait_for(range(3), "tries again: .*")
    second.send_signal(signal.SIGCONT)
    job.wait_for(range(4), is_at("[2-9]", 2, "0 1 2 3", lost="(?:3|nobody)", joined="3"))
    said = job.end(range(4))
    assert "rank 3 dm_" not in said, said
