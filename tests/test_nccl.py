"""Which calls of making communicators reach NCCL on every rank, in which order, and what happens
when one of them fails, over a recorder (tests/nccl/making.c, tests/support/nccl.py). Takes half a
minute, because each call of a job fails once in a job of its own."""

import itertools
import re

import pytest

from support.nccl import LEAST, between, check, job_of

run = job_of("making")


class Expected:
    """The record of one rank as it should be, with communicators numbered as they are made."""

    def __init__(self, rank, splits=True, finalizes=True):
        self.rank, self.splits, self.finalizes, self.lines, self.made = rank, splits, finalizes, [], 0

    def note(self, text):
        self.lines.append(f"# {text}")

    def init(self, size, rank, blocking, name, first=None):
        if rank == 0 if first is None else first:
            self.lines.append("id")
        self.made += 1
        self.lines.append(f"init c{self.made} size={size} rank={rank} blocking={blocking} ids=1 name={name} device={self.rank}")
        if not blocking:
            self.lines.append(f"limits c{self.made} {LEAST}")
        return self.made

    def split(self, parent, color, key, name):
        self.made += 1
        self.lines.append(f"split c{parent} color={color} key={key} blocking=1 name={name} -> c{self.made}")
        return self.made

    def group(self, parent, size, color, key, name):
        """A dimension's communicator: split off, or made by an id where there is no split."""
        return self.split(parent, color, key, name) if self.splits else self.init(size, key, 1, name)

    def sum(self, comm):
        self.lines.append(f"ncclAllReduce c{comm}")

    def end(self, *comms):
        for comm in comms:
            self.lines += [f"finalize c{comm}"] if self.finalizes else []
            self.lines.append(f"destroy c{comm}")

    def cube(self):
        """The calls for a mesh (2, 2, 2): one communicator from which the others are split, and
        one each for pp, dp and tp."""
        rank = self.rank
        pp, dp, tp = rank // 4, rank // 2 % 2, rank % 2
        root = self.init(8, rank, 0, "mesh_pp_dp_tp") if self.splits else None
        return [root, self.group(root, 2, rank - 4 * pp, pp, "mesh_pp"), self.group(root, 2, rank - 2 * dp, dp, "mesh_dp"),
                self.group(root, 2, rank - tp, tp, "mesh_tp")]

    def path(self):
        rank = self.rank
        dp, tp = rank // 2 % 2, rank % 2
        root, pp_comm, dp_comm, tp_comm = self.cube()
        self.note("cube")
        self.sum(pp_comm)
        self.sum(tp_comm)
        self.note("flatten")
        flat = self.group(root, 4, rank // 4 * 4, 2 * dp + tp, "mesh_dt")
        self.sum(flat)
        for nothing_new in ("flatten again", "unflatten", "second"):
            self.note(nothing_new)
        self.note("own")
        own = self.group(root, 2, rank - 2 * dp, dp, "mesh_dp")
        self.note("line")
        line = self.group(root, 8, 0, rank, "mesh_all")
        self.sum(line)
        self.note("one")
        self.sum(self.init(1, 0, 1, "mesh_single", first=True))
        self.note("lazy")
        self.note("lazy first use")
        x = rank // 2
        if self.splits:
            seed = self.init(4, x, 0, "-")
            lazy = self.split(seed, 0, x, "mesh_x")
            self.end(seed)
        else:
            lazy = self.init(4, x, 1, "mesh_x")
        self.sum(lazy)
        self.note("adopt")
        self.sum(flat)
        for text, comms in (("leave adopted", []), ("finalize second", []), ("finalize third", [own]), ("finalize lazy", [lazy]),
                            ("finalize line", [line]), ("finalize cube", [flat, tp_comm, dp_comm, pp_comm] + [root] * self.splits)):
            self.note(text)
            self.end(*comms)
        self.note("abort")
        doomed = self.cube()
        self.note("abort now")
        self.lines += [f"abort c{comm}" for comm in doomed if comm]
        self.note("after")
        return self.lines


def same_path(records, **how):
    check(sorted(records) == list(range(8)), f"records of ranks {sorted(records)}")
    for rank, lines in sorted(records.items()):
        wanted = in_any_order(Expected(rank, **how).path())
        lines = in_any_order(lines)
        for number, (line, want) in enumerate(zip(lines + [""] * len(wanted), wanted + [""] * len(lines))):
            if line != want:
                raise AssertionError(f"rank {rank}, line {number + 1}: {line!r}, expected {want!r}\n" + "\n".join(lines))


def in_any_order(lines):
    """The lines, with ends that follow each other sorted by communicator, because communicators end
    at the same time. The one that the others are split from is finalized when they are gone."""
    ended = []
    for is_end, run in itertools.groupby(lines, lambda line: line.startswith(("abort c", "finalize c", "destroy c"))):
        run = list(run)
        parents = {line.split()[1] for line in lines if line.startswith("split")}
        ordered = [line.split()[1] for line in run if is_end and not line.startswith("abort")]
        for parent in parents.intersection(ordered):
            check(set(ordered[ordered.index(parent):]) == {parent}, f"{parent} ends before what was split from it: {run}")
        ended += sorted(run, key=lambda line: line.split()[1]) if is_end else run
    return ended


@pytest.mark.parametrize("lacks, how", [((), {}), (("SPLIT", ), {"splits": False}),
                                        (("FINALIZE", ), {"finalizes": False}), (("SCALABLE", ), {})],
                         ids=["nothing", "split", "finalize", "scalable init"])
def test_every_call_in_order_without(run, lacks, how):
    same_path(run("path", library=run.recorder(*lacks))[1], **how)


def test_a_library_that_takes_its_time(run):
    same_path(run("path", RECORDER_SLOW=30)[1])


def test_many_ranks_without_scalable_init(run):
    for rank, lines in run("chosen", ranks=132, library=run.recorder("SCALABLE"), CUDA_COUNT=132)[1].items():
        check(any(" ids=1 " in line for line in lines), f"rank {rank}: {lines}")


def test_many_ranks_meet_by_several_ids(run):
    records = run("chosen", ranks=132, CUDA_COUNT=132)[1]
    makers = [rank for rank, lines in sorted(records.items()) if "id" in lines]
    check(makers == [0, 66], f"ids are made by ranks {makers}, expected the first of each half")
    for rank, lines in records.items():
        check(f"init c1 size=132 rank={rank} blocking=0 ids=2 name=mesh_dim_0 device={rank}" in lines, f"rank {rank}: {lines}")


def test_communicators_that_are_none(run):
    for rank, lines in run("adopt", ranks=2)[1].items():
        stale = [line for line in lines[:lines.index("# destroyed")] if "STALE" in line]
        check(not stale, f"rank {rank}: {stale}")


CODES = [1, 2, 3, 4, 5, 6, 8, 77]


@pytest.mark.timeout(400)  # some forty jobs, one for each call
@pytest.mark.parametrize("rank, lacks", [
    pytest.param(rank, lacks, id=f"{name}-{rank}", marks=[pytest.mark.long] * ((name, rank) not in {("all", 0), ("without split", 5)}))
    for name, lacks in (("all", ()), ("without split", ("SPLIT",))) for rank in (0, 5, -1)])
def test_every_call_that_can_fail(run, lacks, rank):
    """Each call of a rank (-1: of all ranks) fails once, with one code after the other. All
    ranks get an error from that same call, and nothing is left."""
    failures = 0
    for number in range(1, 40):
        code = CODES[failures % len(CODES)]
        output, records = run("attempt", library=run.recorder(*lacks), RECORDER_FAIL=f"{rank} {number} {code}")
        left = re.findall(r"left (\d+) of", output)
        check(left == ["0"] * 8, f"call {number} fails with {code}: left {left}\n{output}")
        # With -1 one rank may hear of another's failure before it makes its own call.
        lines = records[rank] if rank >= 0 else itertools.chain.from_iterable(records.values())
        victim = [line for line in lines if line.startswith("failing")]
        if not victim:
            break
        failures += 1
        failed = victim[0].split()[1]
        outcome = {call: re.findall(rf"{call} (DM_\w+) (.*)", output) for call in ("init", "flatten", "finalize", "sum")}
        for call, said in outcome.items():
            bad = [status for status, _ in said if status != "DM_STATUS_OK"]
            # An operation fails on the rank that makes it; everything else is agreed on.
            check(call == "sum" or failed == "ncclAllReduce" or len(bad) in (0, 8),
                  f"{failed} fails with {code}: {call} gives {said}\n{output}")
        told = " ".join(message for said in outcome.values() for _, message in said)
        check(f"gives {code} (" in told, f"{failed} fails with {code}, but nobody says so\n{output}")
    check(failures > 6, f"only {failures} failures were tried")


def test_making_and_ending_while_a_graph_is_captured(run):
    """They are refused before NCCL is called. Operations on communicators that exist are not."""
    for rank, lines in run("capture", ranks=8)[1].items():
        check(between(lines, "captures", "captured") == [], f"rank {rank}: {lines}")


def test_names_in_a_configuration_are_copied(run):
    for rank, lines in run("lazy names")[1].items():
        check(any(line.startswith("split") and "name=mine " in line for line in lines) and "net mynet" in lines, f"rank {rank}: {lines}")


def test_meshes_after_a_failure_that_one_rank_knows(run):
    """All ranks make anew only the communicators that have failed: a dimension's by a split, and
    the one from which others are split by a new id."""
    for rank, lines in run("anew")[1].items():
        first, second, third = (lines.index(f"# {name}") for name in ("dimension", "root", "ends"))
        made = [[line.split()[0]
                 for line in part
                 if line.split()[0] in ("init", "split")]
                for part in (lines[first:second], lines[second:third])]
        check(made == [["split"], ["init", "split"]], f"rank {rank}: {made}\n" + "\n".join(lines))
        check(not any("STALE" in line for line in lines), f"rank {rank}: {lines}")
