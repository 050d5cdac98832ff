"""Meshes of device type cpu over several hosts: every collective is right on every layout, and
every fault gives every other rank an error that names the lost ranks, in time.

Every case has hosts of its own (tests/netlab.py) and takes some seconds, mostly of waiting."""

import signal
import socket

import pytest

from hostranks import LAYOUTS, SILENCE, HostJob, Loopback, Network, Watch, kill, strangers
from support.processes import wait_until

# What survivors may say about a rank or host that is gone.
LOST = "PEER_LOST"
# Seconds within which everybody knows of a process that has ended.
NOTICE = 1.0


@pytest.fixture
def across(programs):
    return programs.c("tests/c/programs/across.c")


@pytest.fixture
def job(across, tmp_path):
    """Starts a job on hosts of its own; both end with the test."""
    labs = []

    def start(places, **how):
        places = LAYOUTS.get(places, places)
        lab = Network(dict.fromkeys(places.split()), tmp_path / str(len(labs))).__enter__()
        labs.append(lab)
        return HostJob(across, lab, places, **how)

    yield start
    for lab in labs:
        lab.__exit__()


def ready(job):
    job.do("join", "init", "reduce 1001")
    return job


@pytest.mark.parametrize("layout", [
    "2x1", "3+1",
    pytest.param("2x2", marks=pytest.mark.long), "4x2",
    pytest.param("4x1", marks=pytest.mark.long), "in-turn"
])
def test_results(job, layout):
    """All collectives, from one element to messages that no wire keeps for a receiver; and sums
    have the same bits on all ranks and in every call."""
    one = job(layout)
    one.lab.watch(b"nothing")
    one.do("join", "init", "all 1", "all 1001", "all 0", "all 40000")
    passed = one.lab.seen()[1]
    assert passed > 40000 * 4 * 6, f"only {passed} bytes were on the network, so the ranks shared memory"
    assert one.digests(30011) == one.digests(30011)
    one.do("finalize")


@pytest.mark.parametrize("layout", ["2x2", pytest.param("3+1", marks=pytest.mark.long), pytest.param("4x2", marks=pytest.mark.long)])
def test_results_on_loopback(across, free_port, layout):
    """The hosts are names here, so every machine can run this."""
    with Loopback(free_port()) as lab:
        one = HostJob(across, lab, LAYOUTS[layout])
        one.do("join", "init", "all 1", "all 70001", "finalize")


@pytest.mark.parametrize("layout, victim", [
    ("2x1", 1), ("2x2", 3), ("4x2", 5), pytest.param("2x1", 0, marks=pytest.mark.long), pytest.param("3+1", 1, marks=pytest.mark.long),
    pytest.param("4x2", 0, marks=pytest.mark.long)])
@pytest.mark.parametrize("count", [1, 100000])
def test_killed(job, layout, victim, count):
    """A rank is killed while all compute. Everybody else knows within a second."""
    one = ready(job(layout, timeout=60))
    one.run(f"forever {count}")
    watch = Watch(one.lab)
    kill(one.ranks[victim])
    for rank in one.ranks:
        if rank.rank != victim:
            watch.knows(rank, LOST, NOTICE, names=[victim])


def test_killed_beside_ranks_that_wait_for_others(job):
    """Rank 0 is late, so all others wait for it when another one is killed. They know nonetheless,
    and rank 0 gets the error from its own call."""
    one = ready(job("4x2", timeout=60))
    one.start("reduce 1000", range(1, 8))
    watch = Watch(one.lab)
    kill(one.ranks[6])
    for number in (1, 2, 3, 4, 5, 7):
        watch.knows(one.ranks[number], LOST, NOTICE, names=[6])
    # Its message also says which rank noticed the loss.
    watch.knows(one.ranks[0].start("reduce 1000"), LOST, NOTICE, said=["rank 6 .*has gone|rank 6 was lost"])


@pytest.mark.parametrize("layout, host", [("2x2", "beta"), ("4x2", "gamma"), pytest.param("4x2", "alpha", marks=pytest.mark.long)])
@pytest.mark.parametrize("busy", [True, False], ids=["busy", "waiting"])
def test_cut(job, layout, host, busy):
    """A host falls silent. The others name all its ranks within the time that is set; and the host
    itself, which hears nobody any more, fails too."""
    one = ready(job(layout, timeout=60, variables={SILENCE: 2000}))
    gone = one.on(host)
    if busy:
        one.run("forever 20000")
    else:
        first = min(set(range(len(one.ranks))) - gone)
        one.start("reduce 1000", set(range(len(one.ranks))) - {first})
    watch = Watch(one.lab)
    one.lab.cut(host)
    for rank in one.ranks:
        if rank.rank not in gone and (busy or rank.rank != first):
            watch.knows(rank, LOST, 2.0 + NOTICE, names=gone, said=[host])
    for number in gone:
        watch.knows(one.ranks[number], LOST, 2.0 + NOTICE)


def test_cut_without_room(job):
    """A host falls silent while a stopped rank of it reads nothing, so that data for it waits in
    the sender's kernel. Keepalive does not probe then."""
    one = ready(job("2x1", timeout=60, variables={SILENCE: 2000}))
    one.lab.watch(b"nothing")
    one.start("secret 4000000")  # a broadcast of 116 MB from rank 0, which rank 1 asks for at once
    wait_until(lambda: one.lab.seen()[1] > 1 << 20, "the broadcast is under way")
    kill(one.ranks[1], signal.SIGSTOP)
    wait_until(lambda: one.lab.has_zero_window("alpha"), "data waits for room", patience=10)
    watch = Watch(one.lab)
    one.lab.cut("beta")
    kill(one.ranks[1], signal.SIGCONT)
    watch.knows(one.ranks[0], LOST, 2.0 + NOTICE, names=[1], said=["beta"])
    watch.knows(one.ranks[1], LOST, 2.0 + NOTICE, names=[0], said=["alpha"])


def test_partition(job):
    """Two hosts on either side. Every rank knows that ranks of the other side are lost: the host
    whose silence it notices first, or both."""
    one = ready(job("4x1", timeout=60, variables={SILENCE: 2000}))
    one.run("forever 20000")
    watch = Watch(one.lab)
    one.lab.part("gamma", "delta")
    for rank in one.ranks:
        watch.knows(rank, LOST, 2.0 + NOTICE, among=one.on("gamma", "delta") if rank.rank < 2 else one.on("alpha", "beta"))


@pytest.mark.parametrize("layout, victim", [("2x2", 2), pytest.param("4x2", 7, marks=pytest.mark.long)])
def test_stopped(job, layout, victim):
    """A stopped process still answers on its connections, so only the deadline tells. The error
    names it, and not the ranks that waited for it themselves."""
    one = ready(job(layout, timeout=2))
    one.run("forever 1000")
    watch = Watch(one.lab)
    kill(one.ranks[victim], signal.SIGSTOP)
    for rank in one.ranks:
        if rank.rank != victim:
            watch.knows(rank, f"TIMEOUT {LOST}", 1.1 * 2 + 0.75, names=[victim])


@pytest.mark.parametrize("layout, who", [("2x2", 3), ("4x2", 0)])
def test_abort(job, layout, who):
    """All others wait for the rank that aborts."""
    one = ready(job(layout, timeout=60))
    others = set(range(len(one.ranks))) - {who}
    one.start("reduce 5000", others)
    watch = Watch(one.lab)
    one.do("abort", ranks=[who])
    for number in others:
        watch.knows(one.ranks[number], LOST, 0.2 + 0.1, names=[who])


def test_leaving_in_order(job):
    """A rank that has finalized and gone harms nobody that needs nothing more from it."""
    one = ready(job("2x2"))
    one.start("finalize")
    one.well()
    for rank in one.ranks:
        rank.process.stdin.close()
        assert rank.process.wait(20) == 0


@pytest.mark.parametrize("layout, victims", [("2x2", [3]), pytest.param("4x2", [2, 5], marks=pytest.mark.long)])
def test_survivors_shrink(job, layout, victims):
    """The survivors make a mesh without the lost ranks and go on, over hosts."""
    one = ready(job(layout, timeout=30))
    one.run("forever 1000")
    watch = Watch(one.lab)
    for victim in victims:
        kill(one.ranks[victim])
    left = set(range(len(one.ranks))) - set(victims)
    for number in left:
        watch.knows(one.ranks[number], LOST, NOTICE)
    one.do("shrink", "reduce 1", "reduce 50000", ranks=left)


def test_nobody_is_lost_when_a_partition_has_ended(job):
    """Each side blames ranks of the other side. When the network is whole again, all of them come
    to dm_shrink, so none of them is lost, and the world's calls go on."""
    one = ready(job("2x2", timeout=30, variables={SILENCE: 2000}))
    one.run("forever 20000")
    watch = Watch(one.lab)
    one.lab.part("beta")
    for rank in one.ranks:
        watch.knows(rank, LOST, 2.0 + NOTICE)
    one.lab.part()
    one.start("shrink")
    for rank in one.ranks:
        status, _, message = rank.result()
        assert status == "DM_STATUS_INVALID_STATE" and "no rank is lost" in message, f"{status} {message}"
    one.do("barrier")


@pytest.mark.parametrize("delay, loss", [(0.02, 0.0), pytest.param(0.005, 0.02, marks=[pytest.mark.long, pytest.mark.lengthy])])
def test_weather(job, delay, loss, chance):
    """A slow or lossy network gives right results, later."""
    one = job("2x2", timeout=60)
    one.lab.weather(delay, loss, chance.randrange(1 << 31))
    one.do("join", "init", "all 1001", "all 40000", "finalize")


def test_hold_out_a_short_silence(job):
    """A host that is cut off for less than the time that is set is not lost."""
    one = ready(job("2x2", timeout=60, variables={SILENCE: 10000}))
    one.start("reduce 40000", [0, 1, 2])
    one.lab.cut("beta")
    one.start("reduce 40000", [3])
    with pytest.raises(AssertionError):
        wait_until(lambda: one.ranks[0].process.poll() is not None, "it ends", patience=1)
    one.lab.heal("beta")
    one.well()


def test_strangers(job, chance):
    """Garbage, silent connections and many of them, at every port of every host, while ranks join
    and compute."""
    one = job("2x2", timeout=60)
    one.start("join")
    wait_until(lambda: one.lab.listeners("alpha"), "rank 0 serves")
    held = strangers(one.lab, "beta", one.lab.listeners("alpha"), 40, chance.random())
    one.well()
    one.start("init")
    held += strangers(one.lab, "beta", one.lab.listeners("alpha"), 40, chance.random())
    one.well()
    one.run("forever 2000")
    for host, source in (("alpha", "beta"), ("beta", "alpha")):
        targets = [each for each in one.lab.listeners(host) if each[0] == socket.AF_INET or one.lab.has_ipv6()]
        assert targets, f"nobody listens on {host}"
        held += strangers(one.lab, source, targets, 150, chance.random())
    assert all(rank.process.poll() is None for rank in one.ranks) and not any(rank.rest() for rank in one.ranks)
    watch = Watch(one.lab)
    kill(one.ranks[3])
    for number in (0, 1, 2):
        watch.knows(one.ranks[number], LOST, NOTICE, names=[3])
    for stranger in held:
        stranger.close()


TEXT = b"no wire may show these words. "


@pytest.mark.parametrize("secret", [None, "hush"], ids=["open", "secret"])
def test_bytes_on_the_wire(job, secret):
    """With a secret nobody can read on the network what the ranks send. Without one the words are
    there, so the watch sees what it should."""
    one = job("2x2", variables={"DM_STORE_SECRET": secret} if secret else {})
    one.lab.watch(TEXT)
    one.do("join", "init", "secret 5", "secret 3000", "all 1001")
    seen, passed = one.lab.seen()
    assert passed > 3000 * len(TEXT), f"only {passed} bytes were on the wire"
    assert (seen == 0) == bool(secret), f"{seen} packets show the text"


@pytest.mark.parametrize("theirs", [None, "another"], ids=["without", "wrong"])
def test_secret_of_one_side(job, theirs):
    """A host without the secret, or with another one, does not get in, and both sides say why."""
    one = job(
        "2x1", timeout=3, each=lambda rank, _: {"DM_STORE_SECRET": "hush"}
        if rank == 0 else {"DM_STORE_SECRET": theirs} if theirs else {})
    one.start("join")
    status, _, message = one.ranks[1].result()
    assert status != "DM_STATUS_OK" and "DM_STORE_SECRET" in message, message
    status, _, message = one.ranks[0].result()
    assert status == "DM_STATUS_TIMEOUT" and "rank 1" in message, message
