"""Asynchronous operations, lists and counts: under `devicemesh run -n N -- python -m unittest
tests/test_async.py`, for any N. Every rank runs every test."""

import gc
import os
import threading
import time
import unittest
from unittest import mock

import numpy

from devicemesh import (AbortedError, DimOptions, InvalidArgumentError, InvalidStateError, MeshTimeoutError, Work, _beside, _library,
                        init_device_mesh, lookup, unregister, work)

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Case(unittest.TestCase):
    def setUp(self):
        self.mesh = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("x",), dim_options=[DimOptions(own_comm=True)], timeout=60)
        self.group = self.mesh.get_group("x")
        self.right, self.left = (RANK + 1) % SIZE, (RANK - 1) % SIZE

    def tearDown(self):
        self.mesh.finalize()


class Asynchronous(Case):
    def test_a_handle(self):
        values = numpy.full(1000, RANK + 1.0)
        handle = self.group.all_reduce(values, async_op=True)
        self.assertIsInstance(handle, Work)
        self.assertTrue(handle.wait())
        self.assertTrue(handle.wait(timeout=1), "a handle can be asked again")
        self.assertEqual(values[0], SIZE * (SIZE + 1) / 2)
        self.assertEqual((handle.is_completed(), handle.is_success(), handle.exception()), (True, True, None))
        self.assertEqual(repr(handle), "Work(all_reduce along x, done)")
        blocking = self.group.all_reduce(values)
        self.assertTrue(blocking.is_completed() and blocking.wait())

    def test_operations_keep_the_order_in_which_they_were_issued(self):
        """Each rank adds, multiplies and adds again, with blocking calls in between; another order
        gives another number."""
        also = self.mesh["x"].flatten("x").get_group()  # another object for the same communicator
        for blocking in (False, True):
            value, handles = numpy.array([1.0]), []
            for step in range(30):
                group = (self.group, also)[step % 2]
                op = ("sum", "max")[step % 3 == 0]
                handles.append(group.all_reduce(value, op=op, async_op=True))
                if blocking and step % 7 == 0:
                    group.all_reduce(value, op="avg")
            handles[-1].wait()
            self.assertTrue(all(handle.is_success() for handle in handles))
            self.assertEqual(value[0], float(SIZE) ** 20)

    def test_a_package_that_is_imported_while_operations_run(self):
        """It learns of the groups that are open and of the operations that run, so the ends that it
        is told later have beginnings."""
        go_on, groups, queued = threading.Event(), [], []
        running = work.submit([self.group], Work("a wait of this test"), go_on.wait)
        follow = lambda key, change: queued.append(change) if key == self.group._key else None
        with self.mesh.group():
            _beside.follow_groups(groups.append)
            work.follow_queues(follow)
        go_on.set()
        running.wait()
        until = time.monotonic() + 60
        while len(queued) < 2 and time.monotonic() < until:
            time.sleep(0.001)
        _beside.group_changes.remove(groups.append)
        work.queue_changes.remove(follow)
        self.assertEqual((groups, queued), ([1, -1], [1, -1]))

    def test_the_ranks_wait_at_different_times(self):
        """Rank 0 waits at once, and the others have issued all their operations by then."""
        buffers = [numpy.full(5, RANK + number) for number in range(10)]
        handles = []
        for buffer in buffers:
            handles.append(self.group.all_reduce(buffer, async_op=True))
            if RANK == 0:
                handles[-1].wait()
        for handle in handles:
            handle.wait()
        self.assertEqual([buffer[0] for buffer in buffers], [sum(rank + number for rank in range(SIZE)) for number in range(10)])

    def test_an_operation_through_a_view_that_nobody_keeps(self):
        """The view of the second operation is collected before that operation begins, because the
        last rank comes late to the first one."""
        first, second = numpy.ones(1), numpy.ones(1)
        if RANK == SIZE - 1:
            time.sleep(0.3)
        handles = [self.group.all_reduce(first, async_op=True),
                   self.mesh.root().get_group().all_reduce(second, async_op=True)]
        gc.collect()
        for handle in handles:
            handle.wait()
        self.assertEqual((first[0], second[0]), (SIZE, SIZE))

    def test_every_operation(self):
        me, ones = RANK, numpy.ones(SIZE)
        gathered, scattered, swapped = numpy.zeros(SIZE), numpy.zeros(1), numpy.zeros(SIZE)
        reduced, sent = numpy.ones(1), numpy.array([float(me)])
        handles = [
            self.group.all_gather(sent, gathered, async_op=True),
            self.group.reduce_scatter(ones, scattered, async_op=True),
            self.group.all_to_all(numpy.full(SIZE, float(me)), swapped, async_op=True),
            self.group.reduce(reduced, root=SIZE - 1, async_op=True),
            self.group.broadcast(sent, root=0, async_op=True)
        ]
        for handle in handles:
            handle.wait()
        self.assertEqual((gathered.tolist(), scattered[0], swapped.tolist()), (list(range(SIZE)), SIZE, list(range(SIZE))))
        self.assertEqual((reduced[0], sent[0]), (SIZE if me == SIZE - 1 else 1, 0))

    def test_a_group(self):
        value, got, total = numpy.array([RANK]), numpy.zeros(1, "int64"), numpy.ones(1)
        with self.mesh.group(async_op=True) as group:
            queued = self.group.send(value, self.right)
            self.group.recv(got, self.left)
            with self.assertRaisesRegex(InvalidStateError, "wait after the `with` block"):
                queued.wait()
            with self.mesh.group() as inner:
                self.group.all_reduce(total)
        after = self.group.all_reduce(numpy.ones(1), async_op=True)
        for handle in (queued, group.work, inner.work, after):
            handle.wait()
        self.assertEqual((got[0], total[0]), (self.left, SIZE))
        with self.mesh.group() as group:
            queued = self.group.all_reduce(total)
        self.assertIs(queued, group.work)
        self.assertTrue(queued.wait())
        self.assertEqual(total[0], SIZE * SIZE)

    def test_a_group_over_two_communicators(self):
        other = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("y",), dim_options=[DimOptions(own_comm=True)], timeout=60)
        value, second = numpy.ones(1), numpy.ones(1)
        handles = [self.group.all_reduce(value, async_op=True), other.get_group().all_reduce(second, async_op=True)]
        with self.mesh.group(async_op=True) as group:
            other.get_group().all_reduce(second)
            self.group.all_reduce(value)
        handles += [group.work, other.get_group().all_reduce(second, async_op=True)]
        self.group.all_reduce(value)
        for handle in handles:
            handle.wait()
        self.assertEqual((value[0], second[0]), (SIZE**3, SIZE**3))
        other.finalize()

    def test_what_is_refused(self):
        value = numpy.ones(1)
        with self.assertRaisesRegex(InvalidArgumentError, "mesh.group.async_op=True"), self.mesh.group():
            self.group.all_reduce(value, async_op=True)
        with self.assertRaisesRegex(
                InvalidArgumentError,
                "give async_op to the outer one"), self.mesh.group(), self.mesh.group(async_op=True):
            pass
        with self.assertRaisesRegex(TypeError, "not True or False"):
            self.group.all_reduce(value, async_op="yes")
        with self.assertRaises(KeyError), self.mesh.group(async_op=True) as group:
            self.group.all_reduce(value)
            raise KeyError
        self.assertIsInstance(group.work.exception(), KeyError)
        self.assertEqual(value[0], 1)

    def test_a_buffer_is_held_until_the_end(self):
        if SIZE == 1:
            self.skipTest("nobody to wait for")
        value, asked = bytearray(8), bytearray(4)
        if RANK == 0:
            handle = self.group.all_reduce(value, async_op=True)
            with self.assertRaises(BufferError):
                value.append(1)
            with self.assertRaisesRegex(MeshTimeoutError, "is not over after 0.01 s"):
                handle.wait(timeout=0.01)
            self.assertEqual((handle.is_completed(), handle.is_success(), handle.exception()), (False, False, None))
            self.world_says_go()
            handle.wait()
            value.append(1)
        else:
            self.world_says_go()
            self.group.all_reduce(value)
        self.group.broadcast(asked)

    def world_says_go(self):
        self.mesh.flatten("go")

    def test_errors_come_with_the_handle(self):
        mesh = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("z",), dim_options=[DimOptions(own_comm=True)], timeout=60)
        group = mesh.get_group()
        if SIZE > 1 and RANK == 0:
            handles = [group.all_reduce(numpy.ones(1), async_op=True) for _ in range(3)]
            mesh.abort()
            for handle in handles:
                with self.assertRaises(AbortedError):
                    handle.wait()
                self.assertIsInstance(handle.exception(), AbortedError)
                self.assertFalse(handle.is_success())
            self.assertIn("failed", repr(handles[0]))
        self.world_says_go()
        mesh.abort()

    def test_finalize_comes_after_the_operations(self):
        mesh = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("f",), dim_options=[DimOptions(own_comm=True)], timeout=60)
        value = numpy.ones(100000)
        handles = [mesh.get_group().all_reduce(value, op="avg", async_op=True) for _ in range(20)]
        mesh.finalize()
        self.assertTrue(all(handle.is_success() for handle in handles))

    def test_one_deadline_for_all_waits(self):
        """An operation that is under way does not hold up a call beyond the call's timeout, and the
        other ranks are told."""
        mesh = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("d",), dim_options=[DimOptions(own_comm=True)], timeout=60)
        group = mesh.get_group()
        for call in (mesh.finalize, group.barrier, lambda **options: group.all_gather_object(1, **options)):
            go = threading.Event()
            if RANK == 0:
                handle = work.submit((group,), Work("slow"), go.wait)
                began = time.monotonic()
                with self.assertRaisesRegex(MeshTimeoutError, "slow was issued before and is not over by the deadline"):
                    call(timeout=0.2)
                self.assertLess(time.monotonic() - began, 30)
                go.set()
                handle.wait()
            else:
                with self.assertRaisesRegex(InvalidArgumentError, "rank 0"):
                    call()
            group.barrier()
        mesh.finalize(timeout=50)

    def test_a_call_without_a_communicator_makes_none(self):
        """Rank 0 alone has a queue, and the others do not make the communicator."""
        until = time.monotonic() + 60
        while work.queues and time.monotonic() < until:  # those of the tests before
            time.sleep(0.01)
        lazy = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("x",), lazy=True, dim_options=[DimOptions(own_comm=True)], timeout=60)
        self.group.all_reduce(numpy.ones(1), async_op=RANK == 0).wait()
        group = lazy.get_group()
        with mock.patch.object(_library.library, "dm_get_comm", side_effect=AssertionError("makes the communicator")):
            group.barrier(timeout=30)
            self.assertEqual(group.all_gather_object(RANK, timeout=30), list(range(SIZE)))
            self.assertEqual(group.broadcast_bytes(b"bytes", timeout=30), b"bytes")
        lazy.finalize()

    def both_kinds(self):
        """A lazy mesh and one that is not, which share their communicators with no other mesh."""
        for lazy in (False, True):
            yield init_device_mesh("cpu", (SIZE,), mesh_dim_names=("x",), lazy=lazy, dim_options=[DimOptions(own_comm=True)], timeout=60)

    def assert_waits(self, group, handle, go):
        """A barrier waits for the operation, which is over when `go` is set."""
        finish = work.WorkQueue.finish

        def finished(queue, deadline, call):
            go.set()
            finish(queue, deadline, call)

        try:
            with mock.patch.object(work.WorkQueue, "finish", finished):
                group.barrier(timeout=30)
            self.assertTrue(handle.is_completed())
        finally:
            # The end of the mesh waits for the operation.
            go.set()

    def test_a_barrier_comes_after_operations_of_another_view(self):
        """The communicator of the other view is known, or not. The view of the operations may be
        closed."""
        for mesh in self.both_kinds():
            value, other = numpy.ones(1), mesh.root()
            for closes in (False, False, True):
                go, view = threading.Event(), mesh.root()
                handle = work.submit((view.get_group(),), Work("slow"), go.wait)
                if closes:
                    view.close()
                self.assert_waits(mesh.root().get_group() if closes else other.get_group(), handle, go)
                other.get_group().all_reduce(value)
            self.assertEqual(value[0], SIZE**3)
            mesh.finalize()

    def test_a_barrier_does_not_wait_for_another_communicator(self):
        """The two meshes are equal. Another rank may begin with the barrier."""
        for mesh, other in zip(self.both_kinds(), self.both_kinds()):
            go, value = threading.Event(), numpy.ones(1)
            handle = work.submit((mesh.get_group(),), Work("slow"), go.wait)
            try:
                other.get_group().barrier(timeout=20)
                self.assertFalse(handle.is_completed())
            finally:
                go.set()
            mesh.get_group().all_reduce(value)
            self.assertEqual(value[0], SIZE)
            other.finalize()
            mesh.finalize()

    def test_a_barrier_along_a_mesh_from_lookup(self):
        for mesh in self.both_kinds():
            mesh.register("found")
            found, go = lookup("found"), threading.Event()
            unregister("found")
            handle = work.submit((mesh.get_group(),), Work("slow"), go.wait)
            self.assert_waits(found.get_group(), handle, go)
            mesh.finalize()

    def test_threads_end_when_there_is_nothing_to_do(self):
        self.addCleanup(setattr, work, "IDLE", work.IDLE)
        work.IDLE = 0.05
        self.group.all_reduce(numpy.ones(1), async_op=True).wait()
        (thread,) = [thread for thread in threading.enumerate() if thread.name == "devicemesh x" and thread.is_alive()][-1:]
        thread.join(30)
        self.assertFalse(thread.is_alive())
        self.assertNotIn(self.group._key, work.queues)
        self.group.all_reduce(numpy.ones(1), async_op=True).wait()

    def test_a_forked_child(self):
        value = numpy.ones(1)
        handle = self.group.all_reduce(value, async_op=True)
        handle.wait()
        child = os.fork()
        if child == 0:
            os._exit(0 if handle.is_success() and not work.queues else 1)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)


class Lists(Case):
    def test_all_gather(self):
        mine = numpy.array([RANK, 7], "int32")
        for order in ("torch", "ours"):
            out = [numpy.zeros(2, "int32") for _ in range(SIZE)]
            self.group.all_gather(out, mine) if order == "torch" else self.group.all_gather(mine, out)
            self.assertEqual([each.tolist() for each in out], [[rank, 7] for rank in range(SIZE)])
        out = [numpy.full(rank + 1, -1.0) for rank in range(SIZE)]
        out[RANK][:] = RANK
        self.group.all_gather(None, out)
        self.assertEqual([each.tolist() for each in out], [[rank] * (rank + 1) for rank in range(SIZE)])
        handle = self.group.all_gather([numpy.zeros(0) for _ in range(SIZE)], numpy.zeros(0), async_op=True)
        handle.wait()
        with self.mesh.group():
            self.group.all_gather(out, numpy.full(RANK + 1, 10.0 * RANK))
        self.assertEqual([each.tolist() for each in out], [[10.0 * rank] * (rank + 1) for rank in range(SIZE)])

    def test_reduce_scatter(self):
        blocks = [numpy.full(rank + 1, float(RANK)) for rank in range(SIZE)]
        out = numpy.zeros(RANK + 1)
        self.group.reduce_scatter(out, blocks, op="max")
        self.assertEqual(out.tolist(), [SIZE - 1.0] * (RANK + 1))
        self.group.reduce_scatter(blocks, op="sum")
        self.assertEqual(blocks[RANK].tolist(), [SIZE * (SIZE - 1) / 2] * (RANK + 1))

    def test_counts(self):
        counts = [rank % 3 for rank in range(SIZE)]
        out = numpy.zeros(sum(counts))
        self.group.all_gather(numpy.full(counts[RANK], RANK + 1.0), out, counts=counts)
        self.assertEqual(out.tolist(), [rank + 1.0 for rank in range(SIZE) for _ in range(counts[rank])])
        block = numpy.zeros(counts[RANK])
        self.group.reduce_scatter(out, block, counts=counts)
        self.assertEqual(block.tolist(), [SIZE * (RANK + 1.0)] * counts[RANK])
        # Rank i sends i + k elements to rank k.
        send = numpy.concatenate([numpy.full(RANK + k, 100 * RANK + k) for k in range(SIZE)])
        receive = numpy.zeros(sum(k + RANK for k in range(SIZE)), "int64")
        self.group.all_to_all(send, receive, send_counts=[RANK + k for k in range(SIZE)], recv_counts=[RANK + k for k in range(SIZE)])
        self.assertEqual(receive.tolist(), [100 * k + RANK for k in range(SIZE) for _ in range(k + RANK)])

    def test_what_is_refused(self):
        def refuses(kind, text, ask):
            with self.assertRaises(kind) as caught:
                ask()
            self.assertIn(text, str(caught.exception))

        one = numpy.zeros(1)
        many = [numpy.zeros(1) for _ in range(SIZE)]
        refuses(ValueError, f"a list of {SIZE + 1} arrays", lambda: self.group.all_gather(many + [one], one))
        refuses(ValueError, "out[0] is read-only", lambda: self.group.all_gather([b"12345678"] * SIZE, one))
        refuses(TypeError, "out[0] is a float", lambda: self.group.all_gather([1.0] * SIZE, one))
        refuses(ValueError, "buffer has 2 elements, but out has 1 for this rank", lambda: self.group.all_gather(many, numpy.zeros(2)))
        refuses(ValueError, "buffer has int64 elements, out has float64", lambda: self.group.all_gather(many, numpy.zeros(1, "int64")))
        refuses(ValueError, "the counts", lambda: self.group.all_gather(one, numpy.zeros(SIZE), counts=[1] * (SIZE + 1)))
        refuses(ValueError, "the counts", lambda: self.group.all_gather(one, numpy.zeros(SIZE + 1), counts=[1] * SIZE))
        refuses(ValueError, "-1", lambda: self.group.all_gather(one, one, counts=[-1] * SIZE))
        refuses(TypeError, "torch has them in the other order", lambda: self.group.all_to_all(many, many))
        refuses(TypeError, "or neither", lambda: self.group.all_to_all(one, one, send_counts=[1]))
        if SIZE > 1:
            mixed = [numpy.zeros(1), *(numpy.zeros(1, "float32") for _ in range(SIZE - 1))]
            refuses(ValueError, "out[1] has float32 elements, out[0] has float64", lambda: self.group.all_gather(mixed, one))
        refuses(TypeError, "write root=", lambda: self.group.broadcast(one, src=0))
        refuses(TypeError, "all_reduce has no group=", lambda: self.group.all_reduce(one, group=None))


if __name__ == "__main__":
    unittest.main()
