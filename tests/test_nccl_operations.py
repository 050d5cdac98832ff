"""Which operations reach NCCL, over a recorder in its place (tests/nccl/operations.c,
tests/support/nccl.py)."""

from support.nccl import between, check, job_of

run = job_of("operations")


def test_exchanges_with_a_count_for_each_rank(run):
    _, records = run("ragged")
    for rank, lines in records.items():
        sends = ["ncclSend c2" for peer in range(8) if rank + peer > 0]
        exchanged = between(lines, "all-to-all-v", "all-gather-v")
        check(sorted(exchanged) == sorted(sends + ["ncclRecv c2"] * len(sends) + ["group end"]), f"rank {rank}: {exchanged}")
        # Every rank but the first has a block, and each block is a call in one group.
        gathered = between(lines, "all-gather-v", "reduce-scatter-v")
        check(gathered == ["ncclBroadcast c2"] * 7 + ["group end"], f"rank {rank}: {gathered}")
        reduced = between(lines, "reduce-scatter-v", "end")
        check(reduced == ["ncclReduce c2"] * 7 + ["group end"] * 2, f"rank {rank}: {reduced}")


def test_types_and_operators_that_only_nccl_knows(run):
    _, records = run("unknown")
    for rank, lines in records.items():
        passed = between(lines, "unknown", "refused here")
        check(passed == ["ncclAllReduce c2", "ncclAllGather c2", "ncclAllReduce c2"], f"rank {rank}: {passed}")
        check(between(lines, "refused here", "made") == [], f"rank {rank}: a number out of range reached NCCL")
        check(between(lines, "made", "end") == ["ncclAllReduce c2"], f"rank {rank}: the operator did not reach NCCL")


def test_two_threads_take_turns_on_a_shared_communicator(run):
    _, records = run("gate")
    for rank, lines in records.items():
        sums = [line for line in lines if line.startswith("ncclAllReduce")]
        check(len(sums) == 200 and len(set(sums)) == 1, f"rank {rank}: {len(sums)} sums on {set(sums)}")
