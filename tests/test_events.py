"""Events of real ranks (docs/events.md): each rank runs tests/c/programs/watch.c, whose handler
prints what it gets. A rank that is stopped goes on when the others have told that they wait for
it."""

import os
import re
import signal
import subprocess
import threading
import time

import pytest

from netlab import Lab
from support.processes import environment, is_stopped

PATIENCE = 60.0
EVENT = re.compile(r"rank (?P<rank>\d+) of (?P<size>\d+): (?P<kind>\w+)(?: ranks=(?P<ranks>[\d,]+))? group=(?P<group>.*) dim=(?P<dim>\S+) "
                   r"operation=(?P<operation>.*) call=(?P<call>-?\d+) waited=(?P<waited>\S+) epoch=(?P<epoch>\d+) dropped=0 message=(?P<message>.*)")


class Watched:
    """Ranks of watch.c, and the lines that each of them has printed."""

    def __init__(self, ranks):
        self.ranks, self.lines = list(ranks), [[] for _ in ranks]
        self.readers = [threading.Thread(target=self.read, args=place, daemon=True) for place in enumerate(self.ranks)]
        for process, reader in zip(self.ranks, self.readers):
            process.readers = [reader]
            reader.start()

    def read(self, rank, process):
        for line in process.stdout:
            self.lines[rank].append(line.rstrip("\n"))

    def events(self, rank, kind=None):
        """The events of a rank, as dictionaries."""
        found = [match.groupdict() for match in map(EVENT.fullmatch, list(self.lines[rank])) if match]
        for event in found:
            event["ranks"] = [int(other) for other in (event["ranks"] or "").split(",") if other]
            assert event["rank"] == str(rank), event
        return [event for event in found if kind in (None, event["kind"])]

    def until(self, what):
        """Waits until the condition holds."""
        end = time.monotonic() + PATIENCE
        while not (found := what()):
            assert time.monotonic() < end, self.said()
            time.sleep(0.02)
        return found

    def event(self, rank, kind):
        """The first event of that kind of a rank."""
        return self.until(lambda: self.events(rank, kind))[0]

    def slow(self, rank, operation, call=None):
        """The first event that this call of a rank waits for rank 1 alone, which is stopped. On a
        busy machine other calls may be slow, too, other ranks may come late, and rank 1 may be on
        its way to the stop."""
        fits = lambda event: (event["operation"] == operation and event["ranks"] == [1] and call in (None, event["call"])
                              and event["message"].endswith(" is stopped"))
        return self.until(lambda: list(filter(fits, self.events(rank, "slow"))))[0]

    def stopped(self, rank):
        self.until(lambda: is_stopped(self.ranks[rank].pid))

    def go_on(self, rank):
        os.kill(self.ranks[rank].pid, signal.SIGCONT)

    def end(self, ranks=None, code=0):
        for rank in range(len(self.ranks)) if ranks is None else ranks:
            assert self.ranks[rank].wait(PATIENCE) == code, self.said()
            self.readers[rank].join(PATIENCE)

    def said(self):
        return "\n".join(f"{rank}: {line}" for rank, lines in enumerate(self.lines) for line in lines)


@pytest.fixture
def watched(programs, start_ranks):
    """A function that starts ranks that watch, of which the first ones are in the mesh."""
    program = programs.c("tests/c/programs/watch.c", "-Wall", "-Wextra", "-pthread")

    def start(way, size=4, mesh=None, store=()):
        return Watched(start_ranks([program, way, mesh or size, *store], size))

    return start


def test_each_rank_learns_that_it_has_joined_and_no_end_in_order_is_an_event(watched):
    job = watched("none")
    job.end()
    for rank in range(4):
        # On a busy machine a call may be slow.
        (joined,) = [event for event in job.events(rank) if event["kind"] != "slow"]
        assert (joined["kind"], joined["size"], joined["ranks"], joined["group"]) == ("joined", "4", [rank], "-"), job.said()
        assert re.match(rf"rank {rank} has joined a world of 4 ranks: launcher the environment, met in tcp://127\.0\.0\.1:\d+", joined["message"]), joined


def test_a_collective_that_waits_is_slow_and_says_for_whom(watched):
    job = watched("slow")
    job.stopped(1)
    slow = job.slow(0, "all-reduce", "2")
    assert (slow["group"], slow["dim"], slow["call"]) == ("mesh/tp", "tp", "2"), job.said()
    assert 0.1 <= float(slow["waited"]) < PATIENCE, slow
    assert re.fullmatch(r"rank 0 has waited in all-reduce 2 of mesh/tp for [\d.]+ s: rank 1 did not come; rank 1 is at all-reduce 1 of mesh/tp and is stopped",
                        slow["message"]), slow
    # It is told of again when the time has doubled. Ranks 2 and 3 do not wait for rank 1 in their
    # group.
    is_again = lambda event: event["call"] == "2" and event["operation"] == "all-reduce" and float(event["waited"]) > float(slow["waited"])
    again = job.until(lambda: list(filter(is_again, job.events(0, "slow"))))[0]
    assert float(again["waited"]) >= 2 * float(slow["waited"]), job.said()
    job.go_on(1)
    job.end()
    assert not any(event["ranks"] == [1] and event["dim"] == "tp" for rank in (2, 3) for event in job.events(rank, "slow")), job.said()
    assert not any(job.events(rank, "lost") for rank in range(4)), job.said()


def test_a_receive_without_a_send_is_slow(watched):
    job = watched("message")
    job.stopped(1)
    slow = job.slow(0, "recv")
    assert (slow["dim"], slow["call"]) == ("tp", "1"), job.said()
    assert "rank 0 has waited in recv 1 of mesh/tp for " in slow["message"], slow
    job.go_on(1)
    job.end()


def test_an_agreement_that_waits_is_slow(watched):
    job = watched("agree")
    job.stopped(1)
    for rank in (0, 2, 3):
        slow = job.slow(rank, "dm_flatten(dims=(dp, tp), name=all)")
        assert (slow["group"], slow["dim"]) == ("the world", "-"), job.said()
        assert f"rank {rank} has waited in dm_flatten(dims=(dp, tp), name=all) for " in slow["message"], slow
        assert "rank 1 did not come; rank 1 is at dm_init(" in slow["message"] and slow["message"].endswith(" and is stopped"), slow
    job.go_on(1)
    job.end()


def test_a_join_that_waits_is_slow(watched):
    job = watched("join")
    job.stopped(1)
    # Rank 1 has no recording yet.
    for rank in (0, 2, 3):
        # The first event may come before the others have recorded the call.
        slow = job.until(lambda: [event for event in job.events(rank, "slow")
                                  if event["message"].endswith(" s: rank 1 is not seen on this host, and no other rank is missing")])[0]
        assert slow["group"] == "the world" and slow["operation"].startswith("dm_world_init(device_type=cpu, world_size=4, "), job.said()
        assert slow["size"] == "4", job.said()
        assert slow["ranks"] == [] and not job.events(rank, "joined"), job.said()
    job.go_on(1)
    job.end()
    assert all(job.events(rank, "joined") for rank in range(4)), job.said()


def test_a_rank_that_is_killed_is_lost_on_all_others_though_they_make_no_call(watched):
    job = watched("lost")
    job.until(lambda: all("told" in job.lines[rank] for rank in (0, 2, 3)))
    for rank in (0, 2, 3):
        (lost,) = job.events(rank, "lost")
        assert lost["ranks"] == [1] and re.match(rf"rank {rank}: rank 1 is lost \(.+\)$", lost["message"]), lost
    job.end([1], -signal.SIGKILL)


def test_a_killed_rank_is_lost_also_where_the_store_cannot_know_it(watched, tmp_path):
    job = watched("lost", store=[f"file://{tmp_path}/store"])
    job.until(lambda: all("told" in job.lines[rank] for rank in (0, 2, 3)))
    for rank in (0, 2, 3):
        (lost,) = job.events(rank, "lost")
        assert lost["ranks"] == [1], job.said()


def test_rank_0_is_lost_with_its_store(watched):
    job = watched("lost")
    job.event(2, "lost")
    os.kill(job.ranks[0].pid, signal.SIGKILL)
    lost = job.until(lambda: job.events(2, "lost")[1:])[0]
    assert lost["ranks"] == [0], job.said()


def test_an_abort_is_an_event_on_its_rank_at_once_and_on_the_others_soon(watched):
    job = watched("abort")
    job.until(lambda: all("told" in lines for lines in job.lines))
    for rank in range(4):
        (aborted,) = job.events(rank, "aborted")
        assert (aborted["ranks"], aborted["group"]) == ([1], "mesh"), job.said()
    assert job.events(0, "aborted")[0]["message"] == "rank 0: rank 1 ended mesh by dm_abort", job.said()
    assert "rank 1: dm_abort ends " in job.events(1, "aborted")[0]["message"], job.said()


def test_a_smaller_mesh_is_a_recovery(watched):
    """Rank 0 shares its replica with rank 1, and has no place in the next mesh."""
    job = watched("recover")
    job.end([2, 3])
    for rank in (0, 2, 3):
        recovered = job.event(rank, "recovered")
        assert (recovered["ranks"], recovered["epoch"], recovered["group"]) == ([1], "1", "recovery1"), job.said()
    rest = "in epoch 1, whose mesh has 2 ranks; rank 1 was lost"
    assert job.event(2, "recovered")["message"] == f"rank 2: goes on {rest}", job.said()
    assert job.event(0, "recovered")["message"] == f"rank 0: waits for a place {rest}", job.said()


def test_a_spare_joins_by_a_recovery(watched):
    job = watched("recover", 5, 4)
    job.end([0, 2, 3, 4])
    for rank in (0, 2, 3, 4):
        recovered, joined = job.event(rank, "recovered"), job.events(rank, "joined")[-1]
        assert (recovered["ranks"], recovered["epoch"]) == ([1], "1"), job.said()
        assert (joined["ranks"], joined["epoch"], joined["group"]) == ([4], "1", "recovery1"), job.said()
        kinds = [event["kind"] for event in job.events(rank) if event["kind"] != "slow"]
        assert kinds == (["joined", "lost", "recovered", "joined"] if "lost" in kinds else ["joined", "recovered", "joined"]), job.said()


def test_a_recovery_that_waits_is_slow_on_the_ranks_of_the_mesh_alone(watched):
    """Rank 1 is killed, and rank 3 is stopped before it comes to dm_recover. Rank 4 is a spare."""
    job = watched("late", 5, 4)
    job.stopped(3)
    waits = lambda event: (event["operation"] or "").startswith("dm_recover(shape=(2, 2), names=(dp, tp), dim=dp") and event["ranks"] == [3]
    for rank in (0, 2):
        slow = job.until(lambda: list(filter(waits, job.events(rank, "slow"))))[0]
        assert (slow["group"], slow["dim"], slow["call"], slow["size"], slow["epoch"]) == ("-", "-", "-1", "5", "0"), slow
        assert float(slow["waited"]) >= 0.1, slow
        assert re.fullmatch(rf"rank {rank} has waited in dm_recover\(.*\) for [\d.]+ s: rank 3 did not come", slow["message"]), slow
        again = lambda event: waits(event) and float(event["waited"]) >= 2 * float(slow["waited"])
        job.until(lambda: list(filter(again, job.events(rank, "slow"))))
    assert not list(filter(waits, job.events(4, "slow"))), job.said()
    job.go_on(3)
    job.end([0, 2, 3, 4])
    assert job.event(0, "recovered")["ranks"] == [1], job.said()


def test_a_rank_of_another_host_is_named_that_does_not_send(programs, tmp_path):
    """Two hosts have two ranks each. Rank 1 is stopped, and rank 3 on the other host waits for a
    message of rank 1 along dp."""
    program = programs.c("tests/c/programs/watch.c", "-Wall", "-Wextra", "-pthread")
    with Lab(["alpha", "beta"], tmp_path / "lab", own_pids=True) as lab:
        variables = lambda rank: environment(RANK=rank, LOCAL_RANK=rank % 2, WORLD_SIZE=4, MASTER_ADDR="alpha", MASTER_PORT=29400)
        job = Watched([lab.spawn(["alpha", "beta"][rank // 2], [str(program), "far", "4"], env=variables(rank), stdin=subprocess.DEVNULL,
                                 stdout=subprocess.PIPE, text=True) for rank in range(4)])
        waits = lambda event: event["operation"] == "all-reduce" and event["ranks"] == [1] and event["dim"] == "dp" and event["call"] == "2"
        slow = job.until(lambda: list(filter(waits, job.events(3, "slow"))))[0]
        assert re.fullmatch(r"rank 3 has waited in all-reduce 2 of mesh/dp for [\d.]+ s: no rank of this host is missing, and the call waits for "
                            r"a message of rank 1 on another host", slow["message"]), slow
        assert 0.1 <= float(slow["waited"]) < PATIENCE, slow
        pid = lab.hosts["alpha"].inner_pid(job.ranks[1])
        job.until(lambda: is_stopped(pid))
        os.kill(pid, signal.SIGCONT)
        job.end()
