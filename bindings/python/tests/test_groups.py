"""Groups run whole or not at all: under `devicemesh run -n N -- python -m unittest
tests/test_groups.py`, for any N. Every rank runs every test."""

import asyncio
import contextlib
import gc
import os
import threading
import unittest
from unittest import mock

import numpy

from devicemesh import (AbortedError, DimOptions, InvalidArgumentError, InvalidHandleError, InvalidStateError, NotFoundError,
                        _beside, group, init_device_mesh)
from devicemesh._open_groups import opened

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Mistake(Exception):
    """The exception that the tests raise."""


class Groups(unittest.TestCase):
    def setUp(self):
        self.mesh = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("x",), dim_options=[DimOptions(own_comm=True)], timeout=30)
        self.group = self.mesh.get_group("x")
        self.right, self.left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
        self.mine, self.theirs = numpy.full(1000, RANK + 1.0), numpy.zeros(1000)

    def tearDown(self):
        self.mesh.finalize()

    def exchange(self):
        """A ring, which shows that nothing of an earlier group is still under way: its values would
        arrive in the place of these."""
        sent, got = numpy.full(7, RANK + 100), numpy.zeros(7, "int64")
        with self.mesh.group():
            self.group.send(sent, self.right)
            self.group.recv(got, self.left)
        self.assertEqual(got.tolist(), [self.left + 100] * 7)
        total = numpy.ones(1)
        self.group.all_reduce(total)
        self.assertEqual(total[0], SIZE)

    def test_finalize_inside_a_group_is_refused(self):
        with self.assertRaises(Mistake), self.mesh.group():
            self.group.all_reduce(self.mine)
            with self.assertRaisesRegex(InvalidStateError, "1 operation is queued"):
                self.mesh.finalize()
            raise Mistake
        self.exchange()

    def test_a_wait_inside_a_group_is_refused(self):
        with self.mesh.group():
            self.mesh.wait()  # nothing is queued yet
            self.group.all_reduce(self.theirs)
            for wait in (self.mesh.wait, self.group.wait):
                with self.assertRaisesRegex(InvalidStateError, "^wait: .*1 operation is queued"):
                    wait()
        self.mesh.wait()

    def test_an_abort_ends_the_group(self):
        """The library ends all groups of the thread, so the operations would run one by one."""
        for is_inner in (False, True):
            other = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("x",), dim_options=[DimOptions(own_comm=True)], timeout=30)
            with self.assertRaisesRegex(AbortedError, "an abort or a recovery inside has ended it"), self.mesh.group():
                self.group.send(self.mine, self.right)
                with self.assertRaises(AbortedError) if is_inner else contextlib.nullcontext():
                    with self.mesh.group() if is_inner else contextlib.nullcontext():
                        other.abort()
                self.group.recv(self.theirs, self.left)
            self.assertEqual(self.theirs[0], 0)
            self.exchange()

    def test_ctrl_c_at_each_step(self):
        """Ctrl-C behind each call of the library and behind each function of a group's beginning
        and end, and at the entry of the last ones. The library's group does not stay open, so
        later operations are not just queued, and those who wait for the group return."""
        ends = ["give_up", "group_changed", "keep", "finish"]
        steps = [("dm_group_start", 0), ("dm_group_start", 1), ("dm_group_end", 0), ("dm_group_end", 1), ("dm_free", 0), ("closed", 0),
                 ("issue", 0), ("group_changed", 0), ("follow", 0), ("leave", 0), *((name, int(name == "group_changed")) for name in ends)]
        at_entry = [("group_changed", 0), ("leave", 0), *((name, int(name == "group_changed")) for name in ends)]
        for is_entry, name, number in [(False, *step) for step in steps] + [(True, *step) for step in at_entry]:
            mesh = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("x",), dim_options=[DimOptions(own_comm=True)], timeout=30)
            of = group.library if name.startswith("dm_") else group.LibraryGroup if name == "give_up" else group
            step, calls, whole = getattr(of, name), [], mesh.group()

            def interrupted(*arguments):
                calls.append(name)
                if is_entry and len(calls) == number + 1:
                    raise KeyboardInterrupt
                done = step(*arguments)
                if len(calls) == number + 1:
                    raise KeyboardInterrupt
                return done

            with self.subTest(name=name, number=number, is_entry=is_entry):
                with mock.patch.object(of, name, interrupted), self.assertRaises(KeyboardInterrupt), whole:
                    mesh.get_group().send(self.mine, self.right)
                    mesh.get_group().recv(self.theirs, self.left)
                self.assertEqual((opened.groups, _beside.open_groups), ([], 0))
                if name in ("leave", "dm_free", *ends) and (name, number) != ("group_changed", 0):
                    self.assertTrue(whole.work.is_completed())
            self.exchange()
            mesh.abort()

    def test_a_generator_that_is_closed_inside_a_group_drops_no_operation_silently(self):
        def steps():
            with self.mesh.group():
                yield
        running = steps()
        next(running)
        self.group.all_reduce(self.mine)
        with self.assertRaisesRegex(RuntimeError, "queued in it .1. did not run"):
            running.close()
        self.exchange()

    def test_an_exception_after_the_first_operation(self):
        with self.assertRaises(Mistake):
            with self.mesh.group():
                self.group.send(self.mine, self.right)
                raise Mistake
        self.exchange()
        with self.assertRaises(Mistake):
            with self.mesh.group():
                self.group.all_reduce(self.mine)
                self.group.recv(self.theirs, self.left)
                raise Mistake
        self.assertEqual(self.mine[0], RANK + 1)
        self.exchange()

    def test_a_refused_operation(self):
        for refused, kind in ((lambda: self.group.recv(self.theirs, SIZE), InvalidArgumentError),
                              (lambda: self.group.recv(b"read-only", self.left),
                               InvalidArgumentError), (lambda: self.group.recv("text", self.left), TypeError),
                              (lambda: self.group.all_reduce(self.theirs, op="median"),
                               InvalidArgumentError), (lambda: self.group.all_reduce(self.theirs, root=1), TypeError),
                              (lambda: self.group.all_gather(self.mine, self.theirs[1:]), InvalidArgumentError),
                              (lambda: self.group.all_reduce(self.theirs[:-1], self.theirs[1:]), InvalidArgumentError),
                              (lambda: self.group.all_to_all(self.theirs[:2 * SIZE], self.theirs[1:2 * SIZE + 1]),
                               InvalidArgumentError),
                              ):
            with self.assertRaises(kind):
                with self.mesh.group():
                    self.group.send(self.mine, self.right)
                    refused()
            self.exchange()
            # Its own exception caught, the group still lacks an operation.
            with self.assertRaises(kind):
                with self.mesh.group():
                    self.group.send(self.mine, self.right)
                    with self.assertRaises(kind):
                        refused()
            self.exchange()

    def test_in_place_in_a_group(self):
        whole = numpy.full(3 * SIZE, RANK + 1.0)
        block = whole[3 * RANK : 3 * RANK + 3]
        with self.mesh.group():
            self.group.all_gather(block, whole)
            self.group.all_reduce(self.mine, self.mine[:])
        self.assertEqual(whole.tolist(), [float(rank + 1) for rank in range(SIZE) for _ in range(3)])
        self.assertEqual(self.mine[0], SIZE * (SIZE + 1) / 2)

    def test_groups_in_groups(self):
        with self.mesh.group():
            self.group.send(self.mine, self.right)
            with self.mesh.group():
                self.group.recv(self.theirs, self.left)
            self.assertEqual(self.theirs[0], 0, "nothing runs before the end of the outermost")
        self.assertEqual(self.theirs[0], self.left + 1)
        with self.assertRaises(Mistake):
            with self.mesh.group():
                with self.mesh.group():
                    self.group.send(self.mine, self.right)
                raise Mistake
        self.exchange()
        with self.mesh.group():
            self.group.send(self.mine, self.right)
            with self.assertRaises(Mistake):
                with self.mesh.group():
                    self.group.all_reduce(self.mine)
                    raise Mistake
            self.group.recv(self.theirs, self.left)
        self.assertEqual((self.theirs[0], self.mine[0]), (self.left + 1, RANK + 1))

    def test_a_refused_operation_in_an_inner_group(self):
        with self.assertRaisesRegex(InvalidArgumentError, "read-only"):
            with self.mesh.group():
                self.group.send(self.mine, self.right)
                with self.assertRaises(InvalidArgumentError):
                    with self.mesh.group():
                        self.group.recv(b"read-only", self.left)
        self.exchange()

    def test_arguments_are_those_of_the_call(self):
        def sent():
            self.group.send(numpy.full(5, RANK + 0.5), self.right)  # nobody else holds the array

        got = [numpy.zeros(5)]
        with self.mesh.group():
            sent()
            self.group.recv(got[0], self.left)
            got.append(got.pop())
            gc.collect()
        self.assertEqual(got[0].tolist(), [self.left + 0.5] * 5)

    def test_a_mesh_that_is_closed_in_its_group(self):
        mesh = init_device_mesh("cpu", (SIZE,), timeout=30)
        with self.assertRaisesRegex(InvalidHandleError, "closed before the group ended"):
            with mesh.group():
                mesh.get_group().all_reduce(self.mine)
                mesh.close()
        self.assertEqual(self.mine[0], RANK + 1)
        self.exchange()

    def test_another_task_cannot_call_while_a_task_awaits_inside_a_group(self):
        inside, refused = asyncio.Event(), asyncio.Event()
        others = numpy.ones(1)

        async def exchange():
            with self.mesh.group():
                self.group.send(self.mine, self.right)
                inside.set()
                await refused.wait()
                self.group.recv(self.theirs, self.left)

        async def other():
            await inside.wait()
            for call in (lambda: self.group.all_reduce(others), self.mesh.group().__enter__, self.mesh.finalize):
                with self.assertRaisesRegex(InvalidStateError, "another task of this thread awaits inside"):
                    call()
            refused.set()

        async def both():
            await asyncio.gather(exchange(), other())
            self.group.all_reduce(others)

        asyncio.run(both())
        self.assertEqual((self.theirs[0], others[0]), (self.left + 1, SIZE))
        self.exchange()

    def test_a_group_ends_once(self):
        group = self.mesh.group()
        with group:
            self.group.all_reduce(self.mine)
        with self.assertRaisesRegex(RuntimeError, "not open"):
            group.__exit__(None, None, None)
        self.exchange()

    def test_a_lazy_mesh(self):
        lazy = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("y",), lazy=True, timeout=30, dim_options=[DimOptions(own_comm=True)])
        with self.mesh.group():
            self.group.all_reduce(self.mine)
            lazy.get_group("y").all_reduce(self.theirs)
        self.assertEqual(self.mine[0], SIZE * (SIZE + 1) / 2)
        lazy.finalize()

    def test_other_threads_and_views(self):
        with self.assertRaises(NotFoundError):
            with self.mesh.group():
                self.mesh.get_group("y")
        done = []

        def other():
            # This thread has no group: the call runs at once.
            value = numpy.ones(1)
            self.mesh.flatten("z", options=DimOptions(own_comm=True)).get_group("z").all_reduce(value)
            done.append(value[0])

        with self.mesh.group():
            self.group.all_reduce(self.mine)
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            self.assertEqual((done, self.mine[0]), ([SIZE], RANK + 1))
        self.assertEqual(self.mine[0], SIZE * (SIZE + 1) / 2)

    def test_an_inner_group_that_cannot_begin(self):
        ended = init_device_mesh("cpu", (SIZE,), timeout=30)
        ended.finalize()
        closed = self.mesh.root()
        closed.close()
        for begin, kind, why in ((lambda: self.mesh.group(async_op=True), InvalidArgumentError, "async_op"),
                                 (closed.group, InvalidHandleError, "dm_mesh"), (ended.group, AbortedError, "")):
            with self.assertRaisesRegex(kind, why):
                with self.mesh.group():
                    self.group.send(self.mine, self.right)
                    with self.assertRaisesRegex(kind, why), begin():
                        self.group.recv(self.theirs, self.left)
            self.exchange()
        group = self.mesh.group()
        with self.assertRaisesRegex(RuntimeError, "open already"):
            with group:
                with self.assertRaisesRegex(RuntimeError, "open already"):
                    group.__enter__()
        with group:
            self.group.all_reduce(self.theirs)
        self.assertEqual(self.theirs[0], 0)


if __name__ == "__main__":
    unittest.main()
