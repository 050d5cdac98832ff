"""Threads of one process along the dimensions of one mesh: right numbers or an error, never wrong
numbers. `devicemesh run -n 2 -- python tests/order.py [ROUNDS]`, 20 by default.

Every round has five threads. Two of them have names that share a communicator, one of them in
groups in every other round. One has an own communicator and issues asynchronous operations. Two
hand one dimension over to each other. Every tenth round two threads are along one dimension at
once, and all their calls are refused.
"""

import sys
import threading
import traceback

import numpy

from devicemesh import DimOptions, MismatchError, World, init_device_mesh

TURNS, COUNT = 8, 300
rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 20
world = World("cpu", timeout=120)
rank = world.rank
assert world.size == 2, "two ranks are needed"
mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("x", "one"), world=world)
flat = mesh.flatten("all")
own = mesh["x"].flatten("own", options=DimOptions(own_comm=True))
assert mesh.get_group("x").handle == flat.get_group("all").handle != own.get_group("own").handle
# How often something was seen.
seen = {"sums": 0, "wrong": 0, "refused": 0, "errors": 0}
lock = threading.Lock()


def note(**numbers):
    with lock:
        for name, number in numbers.items():
            seen[name] += number


def values(name, at, turn):
    """Values of this rank whose sum no other name and turn has, and that sum."""
    mine = name * 100_000 + 10 * turn
    count = 1 + (turn * 37 + at * 11 + name) % COUNT
    return numpy.full(count, mine + rank, "int32"), 2 * mine + 1


def expect(array, right):
    note(sums=1, wrong=int((array != right).any()))


def blocking(which, dim, name, at, in_groups):
    group = which.get_group(dim)
    for turn in range(TURNS):
        first, right = values(name, at, turn)
        if in_groups:
            second = first.copy()
            with which.group():
                group.all_reduce(first)
                group.all_reduce(second, op="max")
            expect(second, (right + 1) // 2)
        else:
            group.all_reduce(first)
        expect(first, right)


def asynchronous(which, dim, name, at):
    """Some operations under way at once, and a blocking one after them."""
    group = which.get_group(dim)
    under_way = []
    for turn in range(TURNS):
        array, right = values(name, at, turn)
        work = group.all_reduce(array, async_op=turn % 4 != 3)
        under_way.append((work, array, right))
        if turn % 4 == 3:
            assert all(work.is_success() for work, _, _ in under_way), "a blocking operation comes after the earlier ones"
    for work, array, right in under_way:
        work.wait()
        expect(array, right)


class Turns:
    """Two threads that take turns, in one order on all ranks."""

    def __init__(self):
        self.changed, self.next = threading.Condition(), 0

    def run(self, which, dim, name, at, mine):
        group = which.get_group(dim)
        for turn in range(mine, TURNS, 2):
            with self.changed:
                assert self.changed.wait_for(lambda: self.next == turn, 120)
            array, right = values(name, at, turn)
            work = group.all_reduce(array, async_op=turn % 4 < 2)
            with self.changed:
                self.next += 1
                self.changed.notify_all()
            work.wait()
            expect(array, right)


def together(*calls):
    """Runs each call on a thread of its own."""

    def run(call):
        try:
            call()
        except BaseException:
            note(errors=1)
            traceback.print_exc()

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def refused(group):
    try:
        group.all_reduce(numpy.ones(1, "int32"))
    except MismatchError as error:
        assert "at the same time" in str(error), error
        note(refused=1)
    else:
        note(wrong=1)


def one_name():
    """Both threads of rank 0 are inside before rank 1 comes, so the overlap is certain."""
    single = init_device_mesh("cpu", (2,), mesh_dim_names=("x",), world=world, dim_options=[DimOptions(own_comm=True)])
    group = single.get_group()
    blocking(single, "x", 5, 0, False)
    if rank == 0:
        together(lambda: refused(group), lambda: refused(group))
    world.barrier()
    if rank == 1:
        refused(group)
    single.abort()


handed = mesh["x"].flatten("handed", options=DimOptions(own_comm=True))
for at in range(rounds):
    turns = Turns()
    calls = [
        lambda: blocking(mesh, "x", 1, at, at % 2 == 1), lambda: blocking(flat, "all", 2, at, at % 4 >= 2),
        lambda: asynchronous(own, "own", 3, at), lambda: turns.run(handed, "handed", 4, at, 0),
        lambda: turns.run(handed, "handed", 4, at, 1)
    ]
    together(*calls[(at + rank) % 5 :], *calls[: (at + rank) % 5])
    if at % 10 == 0:
        one_name()
    if seen["errors"] or seen["wrong"]:
        break
expected = (rounds + 9) // 10 * (2 - rank)
print(f"rank {rank}: {rounds} rounds, {seen}", flush=True)
assert not seen["errors"] and not seen["wrong"] and seen["refused"] == expected, (seen, expected)
world.finalize()
