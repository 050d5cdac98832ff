"""One death: a job runs, one rank is lost at some point, the others are judged, and a new job
starts on the same port."""

import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from support.processes import marked, state_and_parent

from .job import MARK, Job
from .verdict import LEAVE, NOTICE, STARVATION, STOP_EXTRA, STOP_SHARE, judge

# LONG_MS is the timeout where no result may depend on it. SHORT_MS is the timeout where only the
# deadline tells that the rank is lost.
LONG_MS, SHORT_MS = 30_000, 3_000
# How long a healthy job may take for one step here, on a busy machine.
PATIENCE = 30.0
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


@dataclass
class Death:
    """The way in which one rank of a job is lost."""

    # How many ranks the job has.
    size: int
    # The rank that is lost.
    victim: int
    # kill (SIGKILL), stop (SIGSTOP) or exit.
    how: str
    # The phase of phases.c in which the rank is lost.
    phase: str
    # Seconds after the rank has announced the phase; negative: before the phase's first call.
    delay: float = -1.0
    # Whether another process sends the signal.
    outside: bool = False
    # How often the phase is announced before the signal, when it comes from outside.
    occurrence: int = 1
    # A rank that is never started (-1: none). The victim waits for it when the victim is lost.
    absent: int = -1
    # Whether the ranks meet in a file; otherwise rank 0 serves the store.
    file: bool = False
    # The timeout in milliseconds where only the deadline can tell that the rank is lost.
    short_ms: int = SHORT_MS

    def timeout_ms(self):
        waits_for_deadline = self.how == "stop" or (self.phase == "join" and self.absent < 0)
        return self.short_ms if waits_for_deadline else LONG_MS

    def __str__(self):
        when = "before the first call" if self.delay < 0 else f"{1000 * self.delay:.2f} ms later"
        source = f"from outside, occurrence {self.occurrence}" if self.outside else "by itself"
        absent = f", rank {self.absent} never started" if self.absent >= 0 else ""
        file = ", file://" if self.file else ""
        return f"{self.size} ranks{absent}{file}, rank {self.victim}: {self.how} at {self.phase}, {when}, {source}"


@dataclass
class Outcome:
    """The result of a death."""

    # A line for each thing that is wrong.
    complaints: list = field(default_factory=list)
    # Seconds from the death, or from a survivor's own later call, to the last survivor's error.
    notice: float = 0.0
    # The last phase that the victim announced.
    phase: str = ""
    # Seconds that the next job on the same port took.
    again: float = 0.0
    # How many ranks had to notice the death.
    survivors: int = 0


def waits_in_the_store(job, number):
    """Whether the rank is connected to the store and sleeps there."""
    pid = job.ranks[number].process.pid
    sockets = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
        except OSError:
            continue
    lines = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    connected = any(words[2].endswith(f":{job.port:04X}") and words[3] == "01" and words[9] in sockets for words in lines)
    return connected and state_and_parent(pid)[0] == "S"


def strike(job, death):
    """Lets the rank be lost. Gives the moment, or None and a complaint."""
    victim = job.ranks[death.victim]
    others = [rank for rank in job.ranks.values() if rank is not victim]
    until = time.monotonic() + PATIENCE

    def failed():
        return victim.error is not None or not victim.open

    if death.absent >= 0:
        calm = 0
        while calm < 10:
            if time.monotonic() > until or not victim.running():
                return None, f"rank {death.victim} did not come to wait in the store"
            job.pump(lambda: False, time.monotonic() + 0.01)
            calm = calm + 1 if waits_in_the_store(job, death.victim) else 0
    elif not death.outside:
        def dies():
            if victim.dying is not None or failed():
                return True
            job.begin_watch()
            return False
        if not job.pump(dies, until) or victim.dying is None:
            return None, f"rank {death.victim} did not come to {death.phase}: {victim.phase()}, error {victim.error}"
        return victim.dying, ""
    else:
        there = lambda: sum(name == death.phase for name, _ in victim.phases) >= death.occurrence
        if not job.pump(lambda: there() or failed(), until) or not there():
            return None, f"rank {death.victim} did not come to {death.phase}: {victim.phase()}, error {victim.error}"
        time.sleep(max(death.delay, 0.0))
    early = [(rank.number, rank.error) for rank in others if rank.error]
    if early:
        return None, f"errors before the death: {early}"
    job.begin_watch()
    moment = time.monotonic()
    victim.process.send_signal(SIGNALS[death.how])
    return moment, ""


def watch(job, death, moment, outcome):
    """Waits for the survivors' errors and ends. Returns for how many seconds the ranks have waited
    for a processor."""
    survivors = [rank for rank in job.ranks.values() if rank.number != death.victim]
    timeout = death.timeout_ms() / 1000
    limit = max(NOTICE, timeout * STOP_SHARE + STOP_EXTRA + STARVATION if death.timeout_ms() != LONG_MS else 0) + LEAVE
    until = moment + limit + 1.0
    ended = {}

    def all_ended():
        for rank in survivors:
            if not rank.open and rank.number not in ended:
                ended[rank.number] = time.monotonic()
        return len(ended) == len(survivors)

    if not job.pump(all_ended, until):
        job.pump(all_ended, until + job.starved())
    starved = job.starved()
    for rank in [rank for rank in survivors if rank.open]:
        outcome.complaints.append(f"rank {rank.number} still runs {time.monotonic() - moment:.1f} s after the death, of which the ranks waited "
                                  f"{starved:.1f} s for processors: {rank.phase()}, error {rank.error}")
        if sum("stacks" in text for text in outcome.complaints) < 2:
            outcome.complaints.append(job.stacks(rank.number))
    for rank in survivors:
        if rank.open:
            continue
        rank.process.wait(timeout=10)
        if rank.error and ended[rank.number] - rank.error[1] > LEAVE + starved:
            outcome.complaints.append(f"rank {rank.number} took {ended[rank.number] - rank.error[1]:.3f} s to leave after its error")
    return starved


def start_again(program, death, port, file, outcome):
    """A new job goes through all phases on the same port, or with the file that the lost job has
    left."""
    began = time.monotonic()
    with Job(program, death.size, port, LONG_MS, rounds=1, file=file) as job:
        job.pump(lambda: not any(rank.open for rank in job.ranks.values()), began + PATIENCE)
        for rank in job.ranks.values():
            if rank.open:
                outcome.complaints.append(f"the next job on port {port}: rank {rank.number} hangs: {rank.phase()}")
                outcome.complaints.append(job.stacks(rank.number))
            elif not rank.done or rank.process.wait(timeout=10) != 0 or rank.other:
                code, said = rank.process.wait(timeout=10), rank.error or rank.phase()
                outcome.complaints.append(f"the next job on port {port}: rank {rank.number} ended with {code}: {said} {rank.other}")
    outcome.again = time.monotonic() - began


def suffer(program, death, port, folder, again=True):
    """Runs one death and judges everything about it. `again`: whether a new job follows."""
    outcome = Outcome()
    inside = None
    if not death.outside:
        inside = f"{death.victim}:{death.phase}:{death.how}" + (f":{int(1e6 * death.delay)}" if death.delay >= 0 else "")
    rounds = 1 if death.phase == "free" else 0
    held = [death.absent] if death.absent >= 0 else []
    file = folder / "store" if death.file else None
    with Job(program, death.size, port, death.timeout_ms(), rounds=rounds, die=inside, held=held, file=file) as job:
        moment, complaint = strike(job, death)
        if moment is None:
            job.pump(lambda: False, time.monotonic() + 0.5)
            outcome.complaints.append(complaint)
            outcome.complaints += [f"rank {rank.number}: {rank.phase()} {rank.error} {rank.other}" for rank in job.ranks.values()]
            return outcome
        starved = watch(job, death, moment, outcome)
        still = [rank.number for rank in job.ranks.values() if rank.open and rank.number != death.victim]
        job.end()
        victim = job.ranks[death.victim]
        outcome.phase = victim.phase(moment)[0]
        outcome.survivors = len(job.ranks) - 1
        for number in still:
            del job.ranks[number]  # `watch` has complained about it
        maybe_absent = death.absent < 0 and outcome.phase in ("start", "join")
        complaints, outcome.notice = judge(job, death, moment, maybe_absent, starved)
        outcome.complaints += complaints
        left = marked(job.mark, MARK)
    if left:
        outcome.complaints.append(f"still running: {left}")
    if again:
        start_again(program, death, port, file, outcome)
    return outcome
