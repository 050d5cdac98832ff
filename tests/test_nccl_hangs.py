"""Functions of NCCL that do not return, each on one rank of a job (tests/nccl/hanging.c,
tests/support/nccl.py). Takes 20 seconds, because ranks wait for deadlines of one to five seconds,
in jobs that run at the same time."""

import re
from concurrent.futures import ThreadPoolExecutor

from support.nccl import Job, check, job_of
from support.paths import ROOT

run = job_of("hanging")

# The calls of ours that must fail, by the function that does not return on one rank. All others
# must succeed there.
MAKING = {"dm_init", "dm_get_comm"}
HANGS = {
    "ncclGetUniqueId": MAKING, "ncclCommInitRankConfig": MAKING, "ncclCommSplit": MAKING,
    "ncclCommGetAsyncError": MAKING | {"dm_check", "dm_finalize", "dm_world_finalize"},
    # A lazy communicator is split from one that is ended at once.
    "ncclCommFinalize": {"dm_get_comm", "dm_finalize", "dm_world_finalize"},
    "ncclCommDestroy": {"dm_get_comm", "dm_finalize", "dm_world_finalize"},
    "ncclCommAbort": {"dm_abort", "dm_world_abort"},
    "ncclCommCount": {"dm_from_comms"}, "ncclCommUserRank": {"dm_from_comms"},
    "ncclCommShrink": {"dm_shrink"},
    "ncclGroupEnd": {"dm_abort"}, "ncclAllReduce": {"dm_abort"},
}
# The functions that have no such case, and why.
NO_HANG = {
    "ncclCommInitRankScalable": "above 128 ranks it takes the place of ncclCommInitRankConfig in one match, "
                                "on the same thread with the same wait",
    "ncclGetVersion": "it returns a constant, before there is anything to wait for",
    "ncclGetErrorString": "it looks a code up in a table", "ncclGetLastError": "it gives a text that is there already",
    "ncclCommCuDevice": "it reads a number that the communicator keeps, on the program's own thread within an operation",
    "ncclGroupStart": "it counts in a variable of the calling thread, whose group it begins",
    "ncclReduce": "as ncclAllReduce", "ncclBroadcast": "as ncclAllReduce", "ncclAllGather": "as ncclAllReduce",
    "ncclReduceScatter": "as ncclAllReduce", "ncclAlltoAll": "as ncclAllReduce", "ncclSend": "as ncclAllReduce",
    "ncclRecv": "as ncclAllReduce",
}


def steps(output, rank):
    """What the calls of a rank gave: the status, the seconds and the message by the call."""
    found = re.findall(rf"\[rank {rank}\] step (\S+) (DM_\w+) (\S+) (.*)", output)
    return {name: (status, float(seconds), message) for name, status, seconds, message in found}


def test_functions_that_do_not_return(run, programs, tmp_path):
    """Each function of NCCL that the library calls does not return, on one rank of two. Every call
    of ours ends all the same, and its error names the function. An operation and the end of a group
    run on the program's own thread, as NCCL's rules for streams and groups need it, so that thread
    stays; but dm_abort on another thread ends, and says that a call is inside. The jobs run at the
    same time, because each of them mostly waits for deadlines of a second."""
    table = (ROOT / "src/ccl/functions.rs").read_text()
    called = set(re.findall(r'symbol!\("(nccl\w+)"', table)) | {"ncclGetVersion"}
    check(called == set(HANGS) | set(NO_HANG), f"not decided: {called ^ (set(HANGS) | set(NO_HANG))}")
    library, driver = run.recorder(), run.driver()

    def job(function):
        rank, shrinks = 0 if function == "ncclGetUniqueId" else 1, HANGS[function] == {"dm_shrink"}
        folder = tmp_path / function
        folder.mkdir()
        ranks, what = (4, "hang in shrink") if shrinks else (2, "hang")
        return rank, Job(programs, folder, "hanging")(what, ranks=ranks, library=library, cuda=driver,
                                                      HANG=f"{rank} {function} 0", HANG_FAILS=",".join(HANGS[function]))

    with ThreadPoolExecutor(len(HANGS)) as pool:
        jobs = dict(zip(HANGS, pool.map(job, HANGS)))
    for function, (rank, (output, records)) in jobs.items():
        here, there = steps(output, rank), steps(output, 1 - rank)
        failed = {name for name, (status, _, _) in here.items() if status != "DM_STATUS_OK"}
        check(failed == HANGS[function], f"{function}: {sorted(failed)} fail, expected {sorted(HANGS[function])}\n{output}")
        named = "inside a call of" if function in ("ncclGroupEnd", "ncclAllReduce") else function
        for name in failed:
            status, _, message = here[name]
            check(status == "DM_STATUS_TIMEOUT" and named in message, f"{function}: {name} gives {status} {message}\n{output}")
        slow = [(name, seconds) for name, (_, seconds, _) in [*here.items(), *there.items()] if seconds > 15]
        check(not slow, f"{function}: {slow} took long\n{output}")
        # dm_lost_ranks waits half a second at most for NCCL, also while an earlier question to
        # NCCL hangs.
        check("dm_lost_ranks" not in here or here["dm_lost_ranks"][1] < 2, f"{function}: dm_lost_ranks took long\n{output}")
        check(set(here) == set(there), f"{function}: the ranks made other calls\n{output}")
        check(any(line == f"hang in {function}" for line in records[rank]), f"{function} was not called\n{output}")


def test_a_call_that_returns_late_gives_back_what_it_held(run):
    """An abort that does not return in time ends the communicator later, and a second dm_abort
    waits for it. An initialisation that does not return in time is aborted when it returns."""
    output, _ = run("late", ranks=2)
    said = steps(output, 1)
    check(said["dm_abort"][0] == "DM_STATUS_TIMEOUT" and "a captured CUDA graph" in said["dm_abort"][2], output)
    check(said["dm_init"][0] == "DM_STATUS_TIMEOUT" and "ncclCommInitRankConfig" in said["dm_init"][2], output)


def test_making_that_the_environment_makes_block(run):
    """With NCCL_COMM_BLOCKING=1 every call that makes a communicator blocks. The calls of ours have
    their deadlines all the same."""
    run("chosen", ranks=4, NCCL_COMM_BLOCKING=1)
    output, _ = run("hang", ranks=2, NCCL_COMM_BLOCKING=1, HANG="1 ncclCommInitRankConfig 0", HANG_FAILS=",".join(MAKING))
    said = steps(output, 1)
    check({name for name, (status, _, _) in said.items() if status != "DM_STATUS_OK"} == MAKING, output)
    check("NCCL_COMM_BLOCKING" in said["dm_init"][2], output)
