"""Recovery over a recorder in NCCL's place (tests/nccl/recovering.c, tests/support/nccl.py)."""

import re

import pytest

from support.nccl import check, job_of

run = job_of("recovering")


@pytest.mark.parametrize("lacks", [(), ("SHRINK",)], ids=["", "without ncclCommShrink"])
def test_going_on_without_a_lost_rank(run, lacks):
    """All communicators of the mesh are aborted. The next ones come from a fresh id: one over all
    ranks, from which the dimensions are split, as in dm_init. So every release of NCCL will do."""
    for rank, lines in run("lose", library=run.recorder(*lacks))[1].items():
        if rank == 7:
            continue
        after = lines[lines.index("# lose") + 1:]
        recovered = after[:after.index("# gone on")]
        made = [line for line in recovered if line.startswith(("init", "split"))]
        first = recovered.index(made[0]) if made else len(recovered)
        aborted = [line for line in recovered if line.startswith("abort")]
        check(len(aborted) == 4 and all(line.startswith("abort") for line in recovered[:4]) and first >= 4, f"rank {rank}: {recovered}")
        if rank == 6:
            check(not made, f"rank 6, whose replica goes, makes nothing: {recovered}")
            continue
        root = re.search(r"init (c\d+)", made[0])
        check(root and "size=6" in made[0] and "blocking=0" in made[0], f"rank {rank}: {made}")
        # Nothing is shrunk, also where the library can: docs/recovery.md says why.
        check(not any(line.startswith("shrink") for line in recovered), f"rank {rank}: {recovered}")
        splits = made[1:]
        check(
            len(splits) == 3 and all(line.startswith(f"split {root.group(1)} ") and "blocking=1" in line for line in splits),
            f"rank {rank}: {made}")
        check("name=replicas" in splits[0] and "name=mesh_all" in splits[2], f"rank {rank}: {splits}")


def test_a_spare_takes_the_place(run):
    """The mesh is lazy before and after, so each dimension's communicator is made at its first
    use."""
    for rank, lines in run("spare", ranks=5)[1].items():
        made = [line for line in lines if line.startswith("init")]
        check(len(made) == {0: 2, 4: 2}.get(rank, 4) and all("size=2" in line for line in made), f"rank {rank}: {lines}")


def test_a_job_grows(run, tmp_path):
    """The grown mesh comes from a fresh id, too, on all ranks: nothing is made by ncclCommGrow
    (docs/recovery.md says why)."""
    # The ranks 4 and 5 begin when the job of the others runs.
    script = f'test $RANK -lt 4 && export WORLD_SIZE=4 LOCAL_WORLD_SIZE=4 || {{ until test -e {tmp_path}/grows; do sleep 0.02; done; export DM_JOIN=running; }}; exec "$@"'
    for rank, lines in run("grow", ranks=6, wrapper=("sh", "-c", script, "sh"), RECORDER_GROWS=tmp_path / "grows")[1].items():
        before, after = lines[:lines.index("# grow")] if rank < 4 else [], lines[lines.index("# grow") + 1:] if rank < 4 else lines
        aborted = [line for line in after[:after.index("# grown")] if line.startswith("abort")]
        check(len(aborted) == (3 if rank < 4 else 0), f"rank {rank}: {lines}")
        made = [line for line in after if line.startswith(("init", "split", "grow"))]
        root = re.search(r"init (c\d+)", made[0])
        check(root and "size=6" in made[0], f"rank {rank}: {made}")
        check(len(made) == 3 and all(line.startswith(f"split {root.group(1)} ") for line in made[1:]), f"rank {rank}: {made}")
        check(rank >= 4 or any("size=4" in line for line in before), f"rank {rank}: {lines}")


def test_a_newcomer_that_fails_comes_again(run):
    """A newcomer's communicator fails, and so the recovery fails on all ranks. The newcomer stays a
    member of the job. Its next dm_init takes part in the next recovery."""
    script = 'test $RANK = 3 || exec "$@"; "$@" && export DM_JOIN=running RECORDER_FAIL="3 1 3" && exec "$@"'
    for rank, lines in run("come again", ranks=4, wrapper=("sh", "-c", script, "sh"))[1].items():
        made = [line for line in lines if line.startswith("init c")]
        # The failed init of rank 3 has no number in the log. The other ranks have made a
        # communicator in that recovery, and abort it.
        check(len(made) == (2 if rank == 3 else 3) and all("size=4" in line for line in made), f"rank {rank}: {lines}")
        check(("failing init with 3" in lines) == (rank == 3), f"rank {rank}: {lines}")
