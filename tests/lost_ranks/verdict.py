"""Judges the survivors of a death: which errors they may have, and when."""

import re

# From the death to the error of each survivor.
NOTICE = 2.0
# A stopped rank still exists, so only the deadline tells. A call may take its timeout, 10 % and 250
# ms. STARVATION is for a machine whose processors others use.
STOP_SHARE, STOP_EXTRA, STARVATION = 1.1, 0.25, 0.5
# From its error to the end of a survivor that aborts and frees what it has.
LEAVE = 2.0

COLLECTIVES = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "exchange")
MAKING = ("init", "flatten", "unflatten", "lazy", "second", "part")
# The kinds of phases that the tables show.
KINDS = {"join": "joining", "barrier": "agreeing", **dict.fromkeys(MAKING, "agreeing and making communicators"),
         **dict.fromkeys(COLLECTIVES, "in a collective"), "finalize": "finalizing", "free": "after finalizing"}

# The statuses that a survivor may get, by how the rank was lost and the survivor's own phase.
# "absent"   Only the deadline tells, because the lost rank may not have reached the store: it was
#            never there.
# "served"   The ranks still look for the store, and the rank that serves it (rank 0) is the lost
#            one or has left because of its own error.
# A rank that was stopped gives TIMEOUT at the deadline, or PEER_LOST where another survivor met its
# deadline first and left.
ENDED, STOPPED = "ended", "stopped"
ALLOWED = {
    (ENDED, "joining"): {"PEER_LOST": "", "TIMEOUT": "absent", "STORE": "served"},
    (ENDED, "agreeing"): {"PEER_LOST": ""},
    (ENDED, "agreeing and making communicators"): {"PEER_LOST": ""},
    (ENDED, "in a collective"): {"PEER_LOST": ""},
    (ENDED, "finalizing"): {"PEER_LOST": ""},
    (ENDED, "after finalizing"): {},
    (STOPPED, "joining"): {"TIMEOUT": "", "PEER_LOST": "", "STORE": "served"},
    (STOPPED, "agreeing"): {"TIMEOUT": "", "PEER_LOST": ""},
    (STOPPED, "agreeing and making communicators"): {"TIMEOUT": "", "PEER_LOST": ""},
    (STOPPED, "in a collective"): {"TIMEOUT": "", "PEER_LOST": ""},
    (STOPPED, "finalizing"): {"TIMEOUT": "", "PEER_LOST": ""},
    (STOPPED, "after finalizing"): {},
}


def named(message):
    """The world ranks that a message blames. The rank that reports is not among them, nor are
    the numbers inside a communicator."""
    message = re.sub(r"^(rank \d+ failed in dm_\w+\(.*?\): )+", "", message)
    message = re.sub(r"\(ranks? \d[\d, -]* of .*", "", message)
    ranks = set()
    for text in re.findall(r"\branks? (\d[\d, -]*)", message):
        for part in re.findall(r"\d+-\d+|\d+", text):
            first, _, last = part.partition("-")
            ranks.update(range(int(first), int(last or first) + 1))
    reporter = re.search(r"rank (\d+) failed in dm_\w+\(.*?\): (it was aborted there)", message)
    return ranks | ({int(reporter.group(1))} if reporter else set())


def last_arrival(survivors, at):
    """When the last of these ranks began its last call before the moment `at`. A rank may come
    late to a call because it still waited for a stopped rank in the call before: rank 0, which
    serves the store, stays until all have read the verdict. The time of those who wait for it
    begins anew then."""
    return max(rank.phase(at)[1] for rank in survivors)


def judge(job, death, moment, absent, starved):
    """Complaints about the survivors of a job, and the slowest notice in seconds. `absent`:
    whether the lost rank may not have reached the store. `starved`: the seconds for which the
    ranks waited for a processor, by which they may be later."""
    complaints, slowest, victim = [], 0.0, death.victim
    timeout = death.timeout_ms() / 1000
    lost = STOPPED if death.how == "stop" else ENDED
    survivors = [rank for number, rank in sorted(job.ranks.items()) if number != victim]
    for rank in survivors:
        who = f"rank {rank.number}"
        if rank.other:
            complaints.append(f"{who} wrote {rank.other}")
        if rank.error is None:
            if not (rank.done and rank.process.returncode == 0):
                complaints.append(f"{who} has no error; its last phase is {rank.phase()}, exit code {rank.process.returncode}")
            continue
        if rank.process.returncode != 3:
            complaints.append(f"{who} ended with code {rank.process.returncode} after its error, expected 3")
        status, at, message = rank.error
        status = status.removeprefix("DM_STATUS_")
        phase, began = rank.phase(at)
        if lost == STOPPED:
            began = last_arrival(survivors, at)
        notice = at - max(moment, began)
        slowest = max(slowest, notice)
        condition = ALLOWED[lost, KINDS[phase]].get(status)
        bound = NOTICE
        if lost == STOPPED or (absent and (status == "TIMEOUT" or victim == 0)):
            bound = timeout * STOP_SHARE + STOP_EXTRA + STARVATION
        line = f"{who} in {phase}: {status} {notice:.3f} s after the death: {message}"
        if at < moment:
            complaints.append(f"{line}: before the death")
        elif condition is None or (condition == "served" and not store_gone(job, death, at)) or (condition == "absent" and not absent):
            complaints.append(f"{line}: this status is not allowed there")
        elif notice > bound + starved:
            complaints.append(f"{line}: later than {bound:.2f} s and {starved:.2f} s of waiting for processors")
        if not (leads_to(job, rank, victim, set()) or lost == STOPPED and cut_short(job, rank)):
            complaints.append(f"{line}: names {sorted(named(message)) or 'nobody'}, not rank {victim}")
    return complaints, slowest


def cut_short(job, rank):
    """Whether the error names another survivor that has had its own. All meet the deadline within
    milliseconds. The rank that meets its deadline first leaves. A rank that waited for it then
    blames that rank, and not the stopped one."""
    others = [job.ranks.get(number) for number in named(rank.error[2])]
    return any(other and other is not rank and other.error for other in others)


def store_gone(job, death, at):
    server = job.ranks.get(0)
    return not death.file and (death.victim == 0 or bool(server and server.error and server.error[1] <= at))


def leads_to(job, rank, victim, seen):
    """Whether the error names the lost rank, or one that has left because of it (which may print
    its own error a little later)."""
    blamed = named(rank.error[2])
    if victim in blamed:
        return True
    for number in blamed - seen - {rank.number}:
        other = job.ranks.get(number)
        if other and other.error and leads_to(job, other, victim, seen | {rank.number}):
            return True
    return False
