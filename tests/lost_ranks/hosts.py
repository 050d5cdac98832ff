"""Faults of jobs on four hosts: a rank is killed, stopped or exits, a host falls silent, the
network is parted in two halves, or it only delays and loses packets. All others must get an error
in time that names who is lost, and with a bad network alone a job must come to its end."""

import random
import signal
import time
from dataclasses import dataclass

from hostranks import SILENCE, Network
from support.processes import marked, starvation, waits

from .death import PATIENCE, Outcome
from .job import MARK, Job
from .verdict import COLLECTIVES, KINDS, LEAVE, MAKING, NOTICE, STOP_EXTRA, STOP_SHARE, cut_short, last_arrival, leads_to, named

HOSTS = ("alpha", "beta", "gamma", "delta")
LAYOUTS = ("alpha beta gamma delta", "alpha beta gamma delta beta", "alpha alpha beta gamma delta",
           "alpha beta gamma delta alpha beta gamma delta", "alpha alpha beta beta gamma gamma delta delta",
           "alpha alpha alpha beta beta gamma delta")
# How long a host may be silent, and the timeout of calls in which only the deadline tells.
SILENCE_S, SHORT_MS, LONG_MS = 2.0, 4_000, 60_000
# How much longer a join may take: a rank that fails gives its number back to the store, which may
# be out of reach (join_attempt.rs).
GIVE_BACK = 0.2
# How much longer a rank may take that is told that another one has left: it asks the store who is
# lost, which may be out of reach (losses.rs).
ASK = 0.5
PORT = 29500


@dataclass
class Fault:
    """What happens to a job."""

    # The host of each rank.
    places: tuple
    # kill, stop, exit (a rank), cut (a host), part (two hosts from the two others), or weather.
    how: str
    # The rank that is lost, or one of the hosts that are cut off.
    victim: int
    # The phase of phases.c in which it happens, and how often the phase is announced before.
    phase: str
    occurrence: int
    # Seconds after the phase was announced.
    delay: float
    # Seconds for which each packet is under way, and the share of packets that are lost.
    weather: tuple

    def lost_hosts(self):
        host = self.places[self.victim]
        if self.how == "cut":
            return {host}
        number = HOSTS.index(host)
        return {HOSTS[number], HOSTS[(number + 1) % 4]} if self.how == "part" else set()

    def lost_for(self, rank):
        """The ranks that are lost for this one."""
        if self.how in ("kill", "stop", "exit"):
            return {self.victim}
        inside = [place in self.lost_hosts() for place in self.places]
        return {other for other in range(len(self.places)) if inside[other] != inside[rank]}

    def ended(self):
        """Whether the lost rank's kernel tells the others."""
        return self.how in ("kill", "exit")

    def timeout_ms(self):
        return LONG_MS if self.how in ("kill", "exit", "weather") and self.phase != "join" else SHORT_MS

    def __str__(self):
        what = {"cut": "hosts fall silent:", "part": "hosts are parted:"}.get(self.how, f"rank {self.victim}: {self.how}")
        return (f"{' '.join(self.places)}; {what} {' '.join(sorted(self.lost_hosts()))} at {self.phase}, "
                f"occurrence {self.occurrence}, {1000 * self.delay:.2f} ms later; "
                f"delay {1000 * self.weather[0]:.1f} ms, loss {100 * self.weather[1]:.1f} %")


def planned(seed, number):
    """The fault of run `number` of a seed. It depends on these two alone."""
    chance = random.Random(f"hosts/{seed}/{number}")
    places = tuple(chance.choice(LAYOUTS).split())
    size = len(places)
    how = chance.choices(("kill", "exit", "stop", "cut", "part", "weather"), (26, 12, 12, 20, 14, 16))[0]
    victim = chance.choice((0, size - 1, chance.randrange(size)))
    phase = chance.choices(("join", "barrier", "finalize", chance.choice(MAKING), chance.choice(COLLECTIVES)), (6, 8, 10, 28, 48))[0]
    occurrence = 1 if phase == "join" else chance.choice((1, 1, 2))
    delay = chance.uniform(0.0, chance.choice((0.0005, 0.005, 0.05)))
    weather = (chance.uniform(0.0, 0.004), chance.choice((0.0, 0.005, 0.01))) if how == "weather" or chance.random() < 0.25 else (0.0, 0.0)
    return Fault(places, how, victim, phase, occurrence, delay, weather)


def started(program, fault, lab, rounds=0):
    inside = f"{fault.victim}:{fault.phase}:exit:{int(1e6 * fault.delay)}" if fault.how == "exit" and rounds == 0 else None
    return Job(program, len(fault.places), PORT,
               fault.timeout_ms() if rounds == 0 else LONG_MS, rounds=rounds, die=inside, lab=lab, places=fault.places,
               variables={SILENCE: int(1000 * SILENCE_S)})


def strike(job, fault, lab, outcome):
    """Lets it happen. Gives the moment, or None."""
    victim, until = job.ranks[fault.victim], time.monotonic() + PATIENCE
    if fault.how == "exit":
        there = lambda: victim.dying is not None
    else:
        there = lambda: sum(name == fault.phase for name, _ in victim.phases) >= fault.occurrence
    failed = lambda: any(rank.error or not rank.open for rank in job.ranks.values() if rank is not victim)
    if not job.pump(lambda: there() or (fault.how != "exit" and failed()), until) or not there():
        outcome.complaints.append(f"rank {fault.victim} did not come to {fault.phase}: {victim.phase()}")
        outcome.complaints += [f"rank {rank.number}: {rank.phase()} {rank.error} {rank.other}" for rank in job.ranks.values()]
        return None
    if fault.how == "exit":
        return victim.dying
    time.sleep(fault.delay)
    moment = time.monotonic()
    if fault.how in ("kill", "stop"):
        victim.process.send_signal(signal.SIGKILL if fault.how == "kill" else signal.SIGSTOP)
    elif fault.how == "cut":
        lab.cut(*fault.lost_hosts())
    else:
        lab.part(*fault.lost_hosts())
    return moment


def kind_of(rank):
    """What the rank did when it got its error, or what it does."""
    return KINDS.get(rank.phase(rank.error[1] if rank.error else None)[0], "")


def bound(fault, rank, survivors=()):
    """Seconds after the fault, or after its own call, within which the rank must have its error,
    and the statuses that it may have. `survivors` are the ranks that are not lost for this one."""
    timeout, slow = fault.timeout_ms() / 1000 * STOP_SHARE + STOP_EXTRA, 40 * fault.weather[0] + (3.0 if fault.weather[1] else 0.0)
    kind = kind_of(rank)
    slow += GIVE_BACK if kind == "joining" else 0.0
    if fault.ended() and (fault.phase != "join" or kind != "joining"):
        return NOTICE + slow, {"PEER_LOST", "STORE"} if fault.victim == 0 else {"PEER_LOST"}
    if fault.how in ("cut", "part") and kind == "in a collective":
        # A survivor that is not in a collective waits for the store until its deadline. If this
        # rank waits for that survivor alone, it learns of the fault when the survivor leaves.
        if any(kind_of(other) != kind for other in survivors):
            return timeout + ASK + slow, {"PEER_LOST", "TIMEOUT", "STORE"}
        return min(timeout, SILENCE_S + NOTICE) + slow, {"PEER_LOST", "TIMEOUT", "STORE"}
    return timeout + slow, {"PEER_LOST", "TIMEOUT", "STORE"}


def judge(job, fault, moment, starved):
    """Complaints about the ranks that are left, and the slowest notice in seconds."""
    complaints, slowest = [], 0.0
    for number, rank in sorted(job.ranks.items()):
        lost = fault.lost_for(number)
        if number in lost and not fault.lost_hosts():
            continue
        who = f"rank {number} on {fault.places[number]}"
        if rank.other:
            complaints.append(f"{who} wrote {rank.other}")
        if rank.error is None:
            complaints.append(f"{who} has no error; its last phase is {rank.phase()}, exit code {rank.process.returncode}")
            continue
        status, at, message = rank.error
        status = status.removeprefix("DM_STATUS_")
        survivors = [other for other in job.ranks.values() if other.number not in lost]
        notice = at - max(moment, last_arrival(survivors if fault.how == "stop" else [rank], at))
        slowest = max(slowest, notice)
        most, statuses = bound(fault, rank, survivors)
        line = f"{who} in {rank.phase(at)[0]}: {status} {notice:.3f} s after the fault: {message}"
        if at < moment:
            complaints.append(f"{line}: before the fault")
        elif status not in statuses:
            complaints.append(f"{line}: expected {' or '.join(sorted(statuses))}")
        elif notice > most + starved:
            complaints.append(f"{line}: later than {most:.2f} s and {starved:.2f} s of waiting for processors")
        told = any(leads_to(job, rank, victim, set()) for victim in lost)
        # The first rank to meet its deadline aborts its communicator. Another one may tell all
        # ranks of this abort before the first one has told why, and then the first one reads that
        # itself.
        told = told or fault.how == "stop" and (cut_short(job, rank) or number in named(message))
        # Rank 0, which serves the store, has met its deadline first and has left, before this rank
        # could ask the store which of the ranks got no further.
        server = job.ranks[0].error
        unknown = any(words in message for words in ("all were here", "the store does not say which"))
        unknown = unknown and server is not None and server[1] <= at
        if status != "STORE" and not told and not unknown:
            complaints.append(f"{line}: names {sorted(named(message)) or 'nobody'}, and none of {sorted(lost)}")
    return complaints, slowest


def ends_well(job, what, patience, outcome):
    """Waits until all ranks of a job have come to its end."""
    job.pump(lambda: not any(rank.open for rank in job.ranks.values()), time.monotonic() + patience)
    for rank in job.ranks.values():
        if rank.open:
            outcome.complaints += [f"{what}: rank {rank.number} hangs: {rank.phase()}", job.stacks(rank.number)]
        elif not rank.done or rank.process.wait(timeout=10) != 0 or rank.other:
            outcome.complaints.append(
                f"{what}: rank {rank.number} ended with {rank.process.wait(timeout=10)}: {rank.error or rank.phase()} {rank.other}"
            )


def suffer(program, fault, folder, seed, again):
    """Runs one fault and judges everything about it. `again`: whether a new job follows on the same
    hosts and port."""
    outcome = Outcome()
    with Network(HOSTS, folder) as lab:
        lab.weather(*fault.weather, seed)
        if fault.how == "weather":
            with started(program, fault, lab, rounds=1) as job:
                outcome.phase = "all_reduce"
                ends_well(job, "the job", 4 * PATIENCE, outcome)
            return outcome
        with started(program, fault, lab) as job:
            before = waits(lab.pids())
            moment = strike(job, fault, lab, outcome)
            if moment is None:
                return outcome
            left = [rank for rank in job.ranks.values() if fault.lost_hosts() or rank.number != fault.victim]
            longest = max(bound(fault, rank)[0] for rank in left)
            longest = max(longest, fault.timeout_ms() / 1000 * STOP_SHARE if fault.timeout_ms() == SHORT_MS else 0)
            if not job.pump(lambda: not any(rank.open for rank in left), moment + longest + LEAVE + 5):
                for rank in [rank for rank in left if rank.open][:2]:
                    outcome.complaints += [f"rank {rank.number} still runs: {rank.phase()}, error {rank.error}", job.stacks(rank.number)]
            starved = starvation(before, lab.pids())
            job.end()
            outcome.phase, outcome.survivors = job.ranks[fault.victim].phase(moment)[0], len(left)
            complaints, outcome.notice = judge(job, fault, moment, starved)
            outcome.complaints += complaints
            remain = marked(job.mark, MARK)
            if remain:
                outcome.complaints.append(f"still running: {remain}")
        if again:
            began = time.monotonic()
            lab.heal(*HOSTS)
            lab.part()
            with started(program, fault, lab, rounds=1) as job:
                ends_well(job, "the next job", 2 * PATIENCE + 4 * PATIENCE * bool(fault.weather[1]), outcome)
            outcome.again = time.monotonic() - began
    return outcome
