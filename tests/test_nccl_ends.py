"""Ending meshes and going on without lost ranks, over a recorder in NCCL's place
(tests/nccl/ending.c, tests/support/nccl.py)."""

import re

import pytest

from support.nccl import LEAST, between, check, job_of

run = job_of("ending")


def test_a_finalize_that_does_not_return(run):
    output, records = run("stuck", RECORDER_STUCK=6)
    said = re.findall(r"finalize (DM_\w+) (.*)", output)
    check(len(said) == 8 and {status for status, _ in said} == {"DM_STATUS_TIMEOUT"}, output)
    check("ncclCommFinalize of" in output and "was not done after 3000 ms" in output and "captured CUDA graph" in output, output)
    # All but the one they were split from, whose finalize returns.
    stuck = [line.split()[-1] for line in records[6] if line.startswith("split")]
    touched = [line for line in records[6] if line.split()[0] in ("destroy", "abort") and line.split()[1] in stuck]
    check(stuck and not touched, f"a communicator in which a thread is blocked is left alone: {records[6]}")


def test_a_destroy_that_does_not_return(run):
    """From NCCL 2.31.2 on ncclCommDestroy waits for the other ranks of the node without a
    deadline. No rank waits for it beyond its own."""
    output, records = run("stuck", RECORDER_STUCK_DESTROY=6)
    said = re.findall(r"finalize (DM_\w+) (.*)", output)
    check(len(said) == 8 and {status for status, _ in said} == {"DM_STATUS_TIMEOUT"}, output)
    check("ncclCommDestroy of" in output and "was not done after 3000 ms" in output, output)
    stuck = [line.split()[-1] for line in records[6] if line.startswith("stuck")]
    check(stuck and not any(f"abort {comm}" in records[6] for comm in stuck),
          f"a communicator in which a thread is blocked is left alone: {records[6]}")


def test_a_finalize_without_a_device_aborts(run):
    """No thread is inside NCCL, so nothing keeps the communicators from being aborted."""
    for rank, lines in run("without device")[1].items():
        check(any(line.startswith("abort c") for line in lines), f"rank {rank}: {lines}")


def test_the_other_ranks_are_told_before_an_abort(run, tmp_path):
    """NCCL's abort returns when all ranks of the host abort. They learn of the first one's from the
    store, so it must have told them before it aborts."""
    (tmp_path / "peers").mkdir()
    run("local peers", ranks=3, PEERS=tmp_path / "peers")


def test_a_log_callback_that_ends_the_mesh(run):
    """An operation's failure is logged when the thread has left the communicator."""
    run("log callback", ranks=2)


@pytest.mark.parametrize("micros", [0, 300])
def test_an_abort_waits_for_calls_that_are_inside(run, micros):
    """The recorder marks an abort while a thread is inside a call on the communicator, and a call
    that begins after the abort."""
    run("beside", ranks=8, RECORDER_INSIDE=micros)


@pytest.mark.long
def test_an_abort_gives_up_a_call_that_stays_inside(run):
    """The call lasts longer than the five seconds that dm_abort waits. The thread that made the
    call ends the communicator when it returns."""
    for rank, lines in run("inside", RECORDER_INSIDE=9_000_000)[1].items():
        check(sum(line.startswith("abort c") for line in lines[lines.index("# gave up"):]) == 1, f"rank {rank}: {lines}")


def test_the_world_ends_with_all_its_meshes(run):
    for rank, lines in run("finalize world")[1].items():
        ends = lines[lines.index("# finalize"):]
        made = [re.search(r"-> (c\d+)|init (c\d+)", line) for line in lines if line.startswith(("init", "split"))]
        check(not any(line.startswith("abort") for line in ends), f"rank {rank}: {ends}")
        check(sum(line.startswith("destroy") for line in lines) == len(made), f"rank {rank}: {lines}")
        parent = lines.index(next(line for line in ends if re.fullmatch("destroy c1", line)))
        split = [f"destroy {line.split()[-1]}" for line in lines if line.startswith("split c1 ")]
        check(split and all(lines.index(line) < parent for line in split if line in lines), f"rank {rank}: {lines}")


def test_aborts_end_together(run):
    """The work of one communicator may lie on a stream behind another's, so that an abort of one
    alone would wait for ever."""
    for rank, lines in run("together")[1].items():
        check(sum(line.startswith("abort c") for line in lines) == 9, f"rank {rank}: {lines}")
        check(not any("ALONE" in line for line in lines), f"rank {rank}: an abort waited for one that did not come\n" + "\n".join(lines))


def test_a_group_waits_for_the_communicators_of_all_meshes(run):
    """dm_group_end returns when the operations are on their streams, also those on the non-blocking
    communicator of another mesh than its own."""
    run("group of another", ranks=2, NCCL_COMM_BLOCKING=0)


def test_a_group_is_left_open_by_dm_abort(run):
    """NCCL ends a group without operations. A group that holds an operation of an aborted
    communicator is never handed to ncclGroupEnd."""
    _, records = run("left group")
    for rank, lines in records.items():
        ends = [at for at, line in enumerate(lines) if line == "group end"]
        empty, second, full = (lines.index(f"# {mark}") for mark in ("empty group", "second", "full group"))
        check(len(ends) == 1 and empty < ends[0] < second < full, f"rank {rank}: group ends at {ends}\n" + "\n".join(lines))


def test_going_on_without_a_lost_rank(run):
    """The communicator that dimensions are split from is shrunk, with NCCL_SHRINK_ABORT, after
    all others have ended; then it is a mesh like any other."""
    for rank, lines in run("lose")[1].items():
        if rank == 7:
            continue
        lines = lines[lines.index("# lose") + 1:]
        if rank == 6:
            check(not [line for line in lines if not line.startswith("abort")], f"rank 6, whose replica goes, only ends: {lines}")
            continue
        at = [number for number, line in enumerate(lines) if line.startswith("shrink")]
        check(len(at) == 1 and "without 2 from 6 flags=1 blocking=0" in lines[at[0]], f"rank {rank}: {lines}")
        parent, child = re.search(r"shrink (c\d+) .* -> (c\d+)", lines[at[0]]).groups()
        check(all(line.startswith("abort") and line != f"abort {parent}" for line in lines[:at[0]]), f"rank {rank}: {lines}")
        splits = [line for line in lines if line.startswith("split")]
        check(
            len(splits) == 2 and all(line.startswith(f"split {child} ") and "blocking=1" in line for line in splits),
            f"rank {rank}: {lines}")
        check(f"abort {parent}" in lines[at[0]:], f"rank {rank}: {lines}")
    run("lose without", library=run.recorder("SHRINK"))


def test_what_is_left_inherits_the_options(run):
    """A name and a configuration arrive at the communicators of the smaller mesh, which stays lazy.
    Options of the call replace them."""
    for rank, lines in run("inherit")[1].items():
        if rank > 5:
            continue
        names = [line for line in between(lines, "inherited", "replaced") if line.startswith(("split", "net"))]
        check(
            len(names) == 3 and "name=replicas" in names[0] and names[1] == "net mynet" and "name=shards" in names[2],
            f"rank {rank}: {names}")
        early = [line for line in between(lines, "replaced", "made") if line.startswith(("split", "init"))]
        check(not early, f"rank {rank}: a lazy mesh made {early}")
        later = [line for line in lines[lines.index("# made"):] if "name=" in line]
        check(
            later and all("name=shards" not in line and "name=replicas" not in line for line in later)
            and any("name=others" in line for line in later), f"rank {rank}: {later}")


@pytest.mark.parametrize("variables, expected", [
    ({}, [LEAST]),
    ({"RECORDER_VERSION": 22203}, ["minCTAs=1 maxCTAs=1 collnetEnable=-2147483648 nvlsCTAs=-2147483648"]),
    ({"RECORDER_VERSION": 23203}, [LEAST, "nvlsHostMode=2147483647"]),
    ({"NCCL_COMM_SPLIT_SHARE_RESOURCES": 1}, []),
], ids=["2.27", "2.22", "2.32", "shared resources"])
def test_only_communicators_without_operations_take_the_least(run, variables, expected):
    """Children inherit nothing of the configuration, unless they share their parent's channels."""
    for rank, lines in run("lose", **variables)[1].items():
        limited = [line.split(" ", 2) for line in lines if line.startswith("limits")]
        made = {match for line in lines for match in re.findall(r"^split .* -> (c\d+)", line)}
        check(not [comm for _, comm, _ in limited if comm in made], f"rank {rank}: a child has limits: {lines}")
        roots = [
            re.search(r"init (c\d+)|-> (c\d+)", line)
            for line in lines
            if line.startswith(("init", "shrink")) and "blocking=0" in line
        ]
        roots = [match.group(1) or match.group(2) for match in roots]
        check(roots and all([what for _, one, what in limited if one == comm] == expected for comm in roots),
              f"rank {rank}: {roots} {limited}")
