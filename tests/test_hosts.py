#!/usr/bin/env python3
"""Ranks on several hosts (tests/netlab.py makes them on one machine): where they meet, what happens when a host, an interface or the store goes away in the middle
of each phase, and what slow and lossy networks do. Every error names ranks or the address, and comes within timeout + 10 % + 250 ms.

Exit code 77: this machine cannot make hosts; the last line says why. `test_hosts.py NAME` runs one case here, with what it saw.
"""

import errno
import os
import random
import signal
import socket
import subprocess
import sys
import time

from netlab import Lab, Unavailable
from netranks import LIBRARY, MEET, PATIENCE, ROOT, SCRATCH, Rank, wait_until

PORT = 29500  # every lab has networks of its own
SKIPPED = 77
AT_ONCE = 6
PHASES = ("join", "init", "barrier")
CHANCE = random.Random(int(os.environ.get("DM_SEED", "0")) or None)
CASES = {}
# What is known not to work yet, by the beginning of the case's name. One that works again is a failure too, until it is taken off this list.
KNOWN = {
}


def case(hosts, each=((),), ipv6=False):
    """A test with these hosts; `each` are the arguments of its variants."""
    def register(body):
        for arguments in each:
            CASES["-".join((body.__name__, *map(str, arguments)))] = (body, arguments, hosts.split(), ipv6)
        return body
    return register


def meet(lab, places, method, timeout=20, **options):
    """Ranks on these hosts, each of which joins."""
    ranks = [Rank(lab, host, rank, len(places), method, timeout, **options) for rank, host in enumerate(places)]
    return [rank.start("join") for rank in ranks]


def all_well(ranks):
    for rank in ranks:
        rank.well()
    for word in ("barrier", "init", "barrier"):
        for rank in ranks:
            rank.start(word)
        for rank in ranks:
            rank.well()


def refused(lab, host, address):
    """Whether nobody listens there for this host."""
    with lab.hosts[host].socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.settimeout(PATIENCE)
        return probe.connect_ex((address, PORT)) == errno.ECONNREFUSED


def in_the_middle(lab, phase, timeout, size=3):
    """Ranks 0 (alpha) and 1 (beta) of three, in a call that rank 2 has not made: it comes with what is returned last."""
    method = f"tcp://10.77.0.1:{PORT}"
    hosts = ("alpha", "beta", "gamma")
    ranks = [Rank(lab, host, rank, size, method, timeout) for rank, host in enumerate(hosts)]
    for rank in ranks if phase != "join" else ranks[:2]:
        rank.start("join")
    if phase == "join":
        wait_until(lambda: any(remote == PORT for _, remote in lab.hosts["beta"].connections()), "rank 1 reached the store")
    else:
        for rank in ranks:
            rank.well()
        for rank in ranks[:2]:
            rank.start(phase)
    # Any moment of the wait will do.
    time.sleep(CHANCE.uniform(0, 0.4))
    return ranks


METHODS = ("10.77.0.1", "[fd77::1]", "alpha", "[fe80::1%net0]", "localhost")


@case("alpha beta gamma", [(host,) for host in METHODS[:4]], ipv6=True)
def address(lab, host):
    """Every way to write where rank 0 serves."""
    for each in lab.hosts.values():
        each.names_are("10.77.0.1 alpha", "fd77::1 alpha")
    all_well(meet(lab, ("alpha", "beta", "gamma"), f"tcp://{host}:{PORT}"))


@case("alpha beta gamma", [("10.77.0.1",), ("fd77::1",), ("[fd77::1]",), ("alpha",)], ipv6=True)
def environment(lab, host):
    ranks = [Rank(lab, name, rank, 3, "env://", 20, variables={"MASTER_ADDR": host, "MASTER_PORT": str(PORT), "RANK": str(rank), "WORLD_SIZE": "3"})
             for rank, name in enumerate(lab.hosts)]
    all_well([rank.start("join") for rank in ranks])


# What alpha and the other hosts take the name for.
NAMES = {
    "debian_and_ipv6": (["127.0.1.1 alpha", "fd77::1 alpha"], ["10.77.0.1 alpha", "fd77::1 alpha"]),
    "debian_and_ipv4": (["127.0.1.1 alpha", "10.77.0.1 alpha"], ["10.77.0.1 alpha"]),
    "nobody_listens_on_ipv6": (["10.77.0.1 alpha"], ["fd77::1 alpha", "10.77.0.1 alpha"]),
    "only_others_have_ipv4": (["fd77::1 alpha", "10.77.0.1 alpha"], ["10.77.0.1 alpha"]),
    "only_others_have_ipv6": (["fd77::1 alpha", "10.77.0.1 alpha"], ["fd77::1 alpha"]),
    "nobody_is_there_on_ipv6": (["10.77.0.1 alpha"], ["fd77::99 alpha", "10.77.0.1 alpha"]),
}


@case("alpha beta", [(name,) for name in NAMES], ipv6=True)
def name(lab, kind):
    alpha, beta = NAMES[kind]
    lab.hosts["alpha"].names_are(*alpha)
    lab.hosts["beta"].names_are(*beta)
    all_well(meet(lab, ("alpha", "beta", "alpha"), f"tcp://alpha:{PORT}", timeout=6))


@case("alpha beta")
def name_means_this_host_alone(lab):
    """As Debian writes a host's own name: the store is served where the name leads, and rank 0 says why nobody came."""
    lab.hosts["alpha"].names_are("127.0.1.1 alpha")
    lab.hosts["beta"].names_are("10.77.0.1 alpha")
    first, second = meet(lab, ("alpha", "beta"), f"tcp://alpha:{PORT}", timeout=2)
    first.fails("TIMEOUT", "rank 1 never called dm_world_init", "127.0.1.1 alone", "/etc/hosts")
    second.fails("STORE", f"tcp://alpha:{PORT}")
    all_well(meet(lab, ("alpha", "alpha"), f"tcp://alpha:{PORT + 1}"))


@case("alpha beta", [("10.77.0.1", "fd77::1 127.0.0.1 ::1"), ("[fd77::1]", "10.77.0.1 127.0.0.1 ::1"), ("alpha", "fd77::1 127.0.0.1 ::1"),
                     ("127.0.0.1", "10.77.0.1 fd77::1"), ("localhost", "10.77.0.1 fd77::1")], ipv6=True)
def listens_on_nothing_else(lab, host, others):
    first = Rank(lab, "alpha", 0, 2, f"tcp://{host}:{PORT}", 20).start("join")
    wait_until(lambda: lab.hosts["alpha"].connections(), "rank 0 serves")
    for other in others.split():
        for source in ("alpha",) if other in ("127.0.0.1", "::1") else ("alpha", "beta"):
            assert refused(lab, source, other), f"{source} can connect to {other}, not only to {host}"
    second = Rank(lab, "alpha", 1, 2, f"tcp://{host}:{PORT}", 20).start("join")
    all_well([first, second])


@case("alpha beta")
def unknown_name(lab):
    lab.hosts["beta"].names_are()
    first, second = meet(lab, ("alpha", "beta"), f"tcp://alpha:{PORT}", timeout=2)
    first.fails("TIMEOUT", "rank 1 never called dm_world_init")
    second.fails("STORE", f"tcp://alpha:{PORT}")


@case("alpha beta")
def another_hosts_address(lab):
    """Rank 0 does not run on the host that is named."""
    first, second = meet(lab, ("beta", "alpha"), f"tcp://10.77.0.1:{PORT}", timeout=2)
    first.fails("STORE", f"10.77.0.1:{PORT}", "not an address of this host", within=0.5)
    second.fails("STORE", f"tcp://10.77.0.1:{PORT}")


@case("alpha beta", [("alpha",), ("beta",)])
def interface_is_down(lab, host):
    lab.hosts[host].interface(False)
    first, second = meet(lab, ("alpha", "beta"), f"tcp://10.77.0.1:{PORT}", timeout=2)
    first.fails("TIMEOUT", "rank 1 never called dm_world_init")
    second.fails("STORE", f"tcp://10.77.0.1:{PORT} within 2000 ms")


@case("alpha beta gamma", [(phase,) for phase in PHASES])
def rank_missing(lab, phase):
    ranks = in_the_middle(lab, phase, 2)
    for rank in ranks[:2]:
        rank.fails("TIMEOUT", "rank 2 never called dm_")


@case("alpha beta gamma", [(phase, what) for phase in PHASES for what in ("cut", "down")])
def store_host_goes(lab, phase, what):
    """Silently: rank 1 hears nothing more of the store; rank 0 serves it and misses the others."""
    ranks = in_the_middle(lab, phase, 3)
    lab.cut("alpha") if what == "cut" else lab.hosts["alpha"].interface(False)
    ranks[0].fails("TIMEOUT PEER_LOST", "rank", "2")
    ranks[1].fails("TIMEOUT STORE PEER_LOST", f"tcp://10.77.0.1:{PORT}")


@case("alpha beta")
def short_timeout(lab):
    """The promise holds where the timeout is short beside a last look at the store. The best of several ranks counts: that one did not starve."""
    ranks = meet(lab, ("alpha", "beta", "beta", "beta"), f"tcp://10.77.0.1:{PORT}")
    for rank in ranks:
        rank.well()
    lab.cut("alpha")
    for rank in ranks[1:]:
        rank.start("hurry")
    seconds = []
    for rank in ranks[1:]:
        status, took, message = rank.result()
        assert "tcp://10.77.0.1" in message, message
        seconds.append(took)
    assert min(seconds) <= 1.1 * 0.3 + 0.25, f"{seconds} s, expected 0.3 s + 10 % + 250 ms"


@case("alpha beta")
def looking_around(lab):
    """What a waiting rank looks up in the store now and then ends by its deadline too: the store falls silent shortly before such a look, and that
    is shortly before the deadline."""
    ranks = meet(lab, ("alpha", "beta"), f"tcp://10.77.0.1:{PORT}", timeout=1.1)
    for rank in ranks:
        rank.well()
    ranks[1].start("barrier")
    time.sleep(0.75)
    lab.cut("alpha")
    ranks[1].fails("TIMEOUT STORE PEER_LOST", f"tcp://10.77.0.1:{PORT}")


@case("alpha beta gamma", [("alpha",), ("beta",)])
def long_timeout(lab, host):
    """A host that has fallen silent is noticed within about half a minute, however long one would wait for its ranks."""
    ranks = in_the_middle(lab, "barrier", 300)
    lab.cut(host)
    if host == "alpha":
        ranks[1].fails("STORE PEER_LOST", f"tcp://10.77.0.1:{PORT}", within=35)
    else:
        ranks[0].fails("PEER_LOST", "rank 1 was lost", within=35)
        ranks[2].start("barrier").fails("PEER_LOST", "rank 1 was lost", within=1)


@case("alpha beta gamma", [(phase, what) for phase in PHASES for what in ("cut", "down")])
def other_host_goes(lab, phase, what):
    ranks = in_the_middle(lab, phase, 3)
    lab.cut("beta") if what == "cut" else lab.hosts["beta"].interface(False)
    ranks[0].fails("TIMEOUT PEER_LOST", "rank")
    ranks[1].fails("TIMEOUT STORE PEER_LOST", f"tcp://10.77.0.1:{PORT}")


@case("alpha beta gamma", [(phase, host, what) for phase in PHASES for host in ("alpha", "beta") for what in ("cut", "down")])
def comes_back(lab, phase, host, what):
    ranks = in_the_middle(lab, phase, 8)
    lab.cut(host) if what == "cut" else lab.hosts[host].interface(False)
    time.sleep(1.5)
    lab.heal(host) if what == "cut" else lab.hosts[host].interface(True)
    ranks[2].start(phase)
    all_well(ranks)


@case("alpha beta gamma", [(phase, number) for phase in PHASES for number in ("SIGKILL", "SIGSTOP")])
def store_process_goes(lab, phase, number):
    ranks = in_the_middle(lab, phase, 3)
    os.kill(ranks[0].process.pid, getattr(signal, number))
    # A killed process's connections are closed by its kernel; a stopped one is only silent.
    within = 1.0 if number == "SIGKILL" else None
    ranks[1].fails("STORE PEER_LOST" if number == "SIGKILL" else "TIMEOUT STORE", f"tcp://10.77.0.1:{PORT}", within=within)


@case("alpha beta gamma", [(phase,) for phase in PHASES])
def rank_killed(lab, phase):
    ranks = in_the_middle(lab, phase, 10)
    ranks[1].process.kill()
    ranks[0].fails("PEER_LOST", "rank 1 was lost", within=1)


@case("alpha beta gamma", [("alpha",), ("beta",)])
def again_after_an_outage(lab, host):
    """A barrier that timed out while a host was cut off; the next one finds it back."""
    ranks = meet(lab, lab.hosts, f"tcp://10.77.0.1:{PORT}")
    for rank in ranks:
        rank.well()
    lab.cut(host)
    for rank in ranks:
        rank.start("hurry")
    for rank in ranks:
        assert rank.result()[0] == "DM_STATUS_TIMEOUT"
    lab.heal(host)
    for rank in ranks:
        rank.start("barrier")
    all_well(ranks)


@case("alpha beta gamma", [(phase,) for phase in PHASES])
def store_process_pauses(lab, phase):
    ranks = in_the_middle(lab, phase, 8)
    os.kill(ranks[0].process.pid, signal.SIGSTOP)
    time.sleep(1.5)
    os.kill(ranks[0].process.pid, signal.SIGCONT)
    ranks[2].start(phase)
    all_well(ranks)


@case("alpha beta", [("nobody",), ("silent",)])
def store_comes_late(lab, how):
    """Rank 0 starts two seconds after the others; its host answers before that, or is not even there."""
    others = [Rank(lab, "beta", rank, 3, f"tcp://10.77.0.1:{PORT}", 20).start("join") for rank in (1, 2)]
    if how == "silent":
        lab.cut("alpha")
    time.sleep(2)
    lab.heal("alpha")
    all_well([Rank(lab, "alpha", 0, 3, f"tcp://10.77.0.1:{PORT}", 20).start("join"), *others])


@case("alpha beta gamma", [(0.02, 0.0), (0.05, 0.05), (0.0, 0.1), (0.1, 0.0), (0.1, 0.05)])
def weather(lab, delay, loss):
    lab.weather(delay, loss, CHANCE.randrange(1 << 31))
    # Joining takes about ten round trips; a lost packet's repetition waits for twice as long each time.
    all_well(meet(lab, ("alpha", "beta", "gamma"), f"tcp://alpha:{PORT}", timeout=25 if loss else 8))


@case("alpha beta gamma", [(phase,) for phase in PHASES])
def slow_rank_missing(lab, phase):
    """A deadline over a slow wire: joining takes about ten round trips, 2 s, and more on a busy machine."""
    lab.weather(0.1, 0.0, 0)
    ranks = in_the_middle(lab, phase, 6)
    for rank in ranks[:2]:
        rank.fails("TIMEOUT", "rank 2 never called dm_|10.77.0.1")


@case("alpha beta gamma delta")
def many(lab):
    places = [host for host in lab.hosts for _ in range(4)]
    all_well(meet(lab, places, f"tcp://alpha:{PORT}", timeout=40))


@case("alpha beta gamma", [("alpha alpha beta beta",), ("alpha beta",), ("alpha alpha alpha beta beta gamma",), ("beta alpha alpha",)])
def cpu_refused(lab, places):
    """The host engine is for one machine: every rank is told who is where, and what to do."""
    places = places.split()
    server = places[0]
    ranks = meet(lab, places, f"tcp://{server}:{PORT}", device="cpu")
    for rank in ranks:
        message = rank.fails("UNSUPPORTED", "device type cpu", "use device type cuda", within=4)
        for host in set(places):
            assert host in message, f"rank {rank.rank}: {host} is not in: {message}"


@case("alpha", [("10.77.0.1",), ("[fd77::1]",), ("localhost",), ("alpha",)], ipv6=True)
def cpu_on_one_host(lab, host):
    """Whatever address it has; one without an interface too."""
    if host == "localhost":
        lab.hosts["alpha"].interface(False)
    all_well(meet(lab, ["alpha"] * 3, f"tcp://{host}:{PORT}", device="cpu"))


def run_here(name):
    body, arguments, hosts, ipv6 = CASES[name]
    with Lab(hosts, SCRATCH / name.replace("/", "-")) as lab:
        if ipv6 and not lab.has_ipv6():
            raise Unavailable("this kernel has no IPv6")
        try:
            body(lab, *arguments)
        except AssertionError:
            time.sleep(0.3)
            for rank in Rank.all:
                print(f"rank {rank.rank} had yet to say: {rank.rest()}")
            raise


def main():
    if len(sys.argv) > 1:
        try:
            run_here(sys.argv[1])
        except Unavailable as why:
            print(why)
            return SKIPPED
        return 0
    try:
        with Lab(["alpha"], SCRATCH):
            pass
    except Unavailable as why:
        print(why)
        return SKIPPED
    subprocess.run([os.environ.get("CC", "cc"), "-std=c11", "-D_GNU_SOURCE", "-O1", "-I", ROOT / "include", ROOT / "tests/c/programs/meet.c",
                    f"-L{LIBRARY}", "-ldevicemesh", f"-Wl,-rpath,{LIBRARY}", "-pthread", "-o", MEET], check=True)
    # The longest first.
    waiting, running, failed, known, skipped = sorted(CASES, key=lambda name: not name.startswith(("long", "weather"))), {}, [], [], {}
    # They wait much more than they compute.
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            name = waiting.pop(0)
            running[name] = time.monotonic(), subprocess.Popen([sys.executable, __file__, name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for name, (began, process) in list(running.items()):
            try:
                output = process.communicate(timeout=0.02)[0]
            except subprocess.TimeoutExpired:
                continue
            del running[name]
            verdict = {0: "ok  ", SKIPPED: "skip"}.get(process.returncode, "FAIL")
            reason = next((f": {reason}" for known, reason in KNOWN.items() if name.startswith(known)), "")
            if reason and verdict != "skip":
                verdict, output = ("known", "") if verdict == "FAIL" else ("FAIL", "it works now: take it off KNOWN")
            print(f"{verdict} {name} ({time.monotonic() - began:.1f} s){reason}", flush=True)
            if verdict == "skip":
                skipped[name] = output.strip().splitlines()[-1]
            elif verdict == "known":
                known.append(name)
            elif verdict == "FAIL":
                failed.append(name)
                print(output, flush=True)
    passed = len(CASES) - len(failed) - len(known) - len(skipped)
    print(f"{passed} passed, {len(known)} known not to work, {len(skipped)} skipped, {len(failed)} failed {' '.join(failed)}")
    if failed:
        return 1
    if skipped:
        print(f"{len(skipped)} of {len(CASES)} cases skipped: {'; '.join(sorted(set(skipped.values())))}")
        return SKIPPED
    return 0


if __name__ == "__main__":
    sys.exit(main())
