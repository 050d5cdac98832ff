"""Runs a plan (plan.py) against a job and judges everything about it."""

import re
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from support.processes import marked, wait_until

from .hosts import HOSTS, HostJob, host_of
from .job import MARK, MESH, Job
from .plan import EPOCHS, PAUSE_MS

# A job must have ended so long after its last strike, on a machine with much other work.
PATIENCE = 120
# The program tries a recovery 5 times (kMostFailed), and a try may last 40 s. On a host that is cut
# off from the store every try lasts until its deadline.
TRIES, RECOVERY = 5, 40
# The errors of dm_recover with which a job may end, and how many ranks must be lost beyond the
# spares.
TOO_FEW, NO_STATE = "replicas along dimension 0 are left", "has the state"
ENDS = ("gives up", "is done", "waited", "came too late")
# The deadline of a collective, the time after which a rank that does not come is left out, and how
# long the others wait for a process that is started again. Ranks that are blocked by a stopped
# rank come to the recovery at their deadlines only, so the second time is longer than the first
# one.
TIMEOUT_MS, SILENT_MS, REPLACE_MS = 3000, 4500, 20000


@dataclass
class Outcome:
    counts: dict = field(default_factory=dict)
    complaints: list = field(default_factory=list)
    said: str = ""


@dataclass
class Process:
    """A process of a rank, and what it said last."""

    rank: int
    pid: int
    words: list = field(default_factory=list)

    def end(self):
        return next((start for start in ENDS for words in self.words if words.startswith(start)), None)

    def last(self, start):
        return next(words for words in reversed(self.words) if words.startswith(start))


def started(tool, program, plan, folder=None):
    arguments = ["--check", "--epochs", EPOCHS, "--pause", PAUSE_MS, "--timeout", TIMEOUT_MS, "--silent", SILENT_MS]
    arguments += ["--replace", REPLACE_MS] if plan and plan.restarts else []
    if plan and plan.on_hosts:
        return HostJob(tool, program, plan.spares, arguments, folder)
    return Job(tool, program, plan.spares if plan else 0, plan.restarts if plan else 0, arguments)


def undisturbed(tool, program):
    """The digest of the losses of a job that nobody disturbs."""
    with started(tool, program, None) as job:
        assert job.end(PATIENCE), job.said()
        found = set(re.findall(r"is done: losses (\w+)$", job.said(), re.M))
        assert len(found) == 1, job.said()
        return found.pop()


def strike(job, plan, hit):
    """Lets the plan happen. `hit` gets the processes that were killed and stopped, with the
    moments."""
    begin, timers = time.monotonic(), []
    for strike in plan.strikes:
        if strike.after == "step":
            job.wait_for(lambda events: any(event.words == f"is at step {strike.step}" for event in events), PATIENCE)
        elif strike.after == "start":
            begin = time.monotonic()
        time.sleep(max(0.0, strike.delay - (time.monotonic() - begin if strike.after == "start" else 0.0)))
        if strike.how == "cut":
            for number in strike.victims:
                hit += [("cut", rank, pid, moment) for rank, pid, moment in job.cut(HOSTS[number])]
            continue
        for rank in strike.victims:
            sent = job.send(rank, signal.SIGSTOP if strike.how == "stop" else signal.SIGKILL)
            if sent:
                hit.append((strike.how, rank, *sent))
                if strike.how == "stop":
                    timers.append(threading.Timer(strike.pause, job.wake, [sent[0]]))
                    timers[-1].start()
    return timers


def processes(job):
    """What each process of each rank has said, in the order in which they began."""
    found, newest = [], {}
    for event in job.events:
        if event.words.startswith("is process "):
            newest[event.rank] = Process(event.rank, int(event.words.split()[-1]))
            found.append(newest[event.rank])
        elif event.rank in newest:
            newest[event.rank].words.append(event.words)
    return found


def stalled():
    """The seconds so far in which some process of the machine has waited for a processor; 0 where
    the kernel does not count them."""
    try:
        return int(re.search(r"some .*total=(\d+)", Path("/proc/pressure/cpu").read_text()).group(1)) / 1e6
    except (OSError, AttributeError):
        return 0.0


def is_starved(ranks, hit, share):
    """Whether the ranks have missed their deadline before anybody was hit, on a machine on which
    processes waited for a processor for nearly all of the time."""
    lasts = [process.words[-1] for process in ranks if process.words]
    return not hit and share > 0.8 and bool(lasts) and all(last.startswith("gives up: DM_STATUS_TIMEOUT: ") for last in lasts)


def judge(job, plan, hit, expected, outcome, share=0.0):
    ranks, said = processes(job), job.said()
    if is_starved(ranks, hit, share):
        outcome.counts["starved, before anybody was hit"] = 1
        return
    killed = {pid for how, _, pid, _ in hit if how == "kill"}
    stopped = {pid for how, _, pid, _ in hit if how in ("stop", "cut")}
    left = [process for process in ranks if process.pid not in killed]
    ends = {process.pid: process.end() for process in left}
    steady = [process for process in left if process.pid not in stopped]
    for process in left:
        if ends[process.pid] is None:
            outcome.complaints.append(f"rank {process.rank} (process {process.pid}) has ended without a word: {process.words[-1:]}")
    done = [process for process in left if ends[process.pid] == "is done"]
    errors = [process for process in steady if ends[process.pid] == "gives up"]
    full = all("is benched in epoch" not in line for process in ranks for line in process.words)
    full = full and not any(count < MESH for count in sizes(ranks))
    if done:
        outcome.counts["ended right"] = 1
        digests = {process.last('is done').split()[-1] for process in done}
        outcome.complaints += [f"rank {process.rank} gives up while others are done: {process.words[-1]}" for process in errors]
        # On several hosts the order in which a sum is added depends on the places of its ranks,
        # and a spare on another host changes that. The program compares the replicas there.
        if not plan.on_hosts and (len(digests) != 1 or full and digests != {expected}):
            outcome.complaints.append(f"losses {digests} instead of {expected}")
        # The rank that compares may have been killed, when all were done.
        end = min(event.moment for event in job.events if event.words.startswith("is done"))
        late = any(how == "kill" and moment >= end - 1 for how, _, _, moment in hit)
        for line in ("equal bit by bit on all replicas", "check: one process gets the same losses"):
            if line not in said and not late:
                outcome.complaints.append(f"nobody says '{line}'")
        if "the result is wrong" in said:
            outcome.complaints.append("the result is wrong")
        return
    outcome.counts["ended with an error"] = 1
    joined = [process for process in errors if any(words.startswith("is in the mesh") or words == "is a spare" for words in process.words)]
    if len(joined) < len(errors) and not plan.restarts:
        # Somebody was lost before there was a mesh. All others must have the error of it.
        if any(one.after == "start" for one in plan.strikes):
            right = [process for process in errors if is_of_a_loss(process.words[-1]) or is_cut_off(process.rank, plan)]
        else:
            right = joined
        wrong = [process for process in errors if process not in right]
        outcome.complaints += [f"rank {process.rank} has no mesh: {process.words[-1]}" for process in wrong]
        return
    errors = joined
    texts = {reason(process.words[-1]) for process in errors}
    excuse = texts <= {TOO_FEW, NO_STATE} and is_excused({rank for _, rank, _, _ in hit}, plan, texts)
    if not excuse:
        outcome.complaints += [f"rank {process.rank} gives up after {len(hit)} hits: {process.words[-1]}" for process in errors] or ["nobody is left"]


def is_excused(ranks, plan, texts):
    """Whether a job that loses these ranks may end with an error. When the ranks of the mesh have
    given up, those that waited learn that all ranks of the mesh are lost."""
    if any(rank >= MESH for rank in ranks):
        return len(ranks) >= 2  # a spare has any place
    replicas = [{rank % 4 for rank in ranks if rank // 4 == replica} for replica in (0, 1)]
    if plan.restarts:
        # New processes come, so only a state is missing that no replica has.
        return bool(replicas[0] & replicas[1])
    return all(replicas) and (texts == {NO_STATE} or len(ranks) >= plan.spares + 2)


def sizes(ranks):
    """The number of ranks of each epoch that went on."""
    members = {}
    for process in ranks:
        for words in process.words:
            found = re.match(r"is in epoch (\d+):", words)
            if found:
                members.setdefault(int(found.group(1)), set()).add(process.rank)
    return [len(there) for there in members.values()]


def reason(words):
    if "all ranks of the mesh are lost" in words:
        return NO_STATE
    return next((text for text in (NO_STATE, TOO_FEW) if text in words), words)


def is_of_a_loss(words):
    """Whether a rank has given up because others were lost."""
    return reason(words) in (TOO_FEW, NO_STATE) or words.startswith(("gives up: DM_STATUS_PEER_LOST: ", "gives up: DM_STATUS_TIMEOUT: "))


def is_cut_off(rank, plan):
    """Whether the plan cuts the host of this rank off. `hit` lacks a rank whose process has not
    begun when its host is cut off."""
    return any(one.how == "cut" and host_of(rank) in [HOSTS[number] for number in one.victims] for one in plan.strikes)


def suffer(tool, program, plan, expected, folder=None):
    outcome, hit, timers = Outcome(), [], []
    began, waited = time.monotonic(), stalled()
    with started(tool, program, plan, folder) as job:
        try:
            timers = strike(job, plan, hit)
            patience = PATIENCE + (TRIES * RECOVERY if plan.on_hosts else 0)
            if not job.end(patience):
                outcome.complaints.append(f"not done {patience} s after the last strike")
        finally:
            for timer in timers:
                timer.join()
        try:
            wait_until(lambda: not marked(job.mark, MARK), "no process is left", patience=10)
        except AssertionError:
            outcome.complaints.append(f"still running: {marked(job.mark, MARK)}")
        outcome.said = job.said()
        outcome.counts = {"runs": 1, "killed": sum(how == "kill" for how, *_ in hit), "stopped": sum(how == "stop" for how, *_ in hit), "cut off": sum(how == "cut" for how, *_ in hit),
                          "with restarts": int(plan.restarts > 0)}
        judge(job, plan, hit, expected, outcome, (stalled() - waited) / (time.monotonic() - began))
    return outcome
