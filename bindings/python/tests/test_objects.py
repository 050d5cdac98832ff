"""Objects, bytes and barriers of a dimension: under `devicemesh run -n N -- python -m unittest
tests/test_objects.py`, for any N. Every rank runs every test."""

import os
import tempfile
import threading
import time
import unittest

import numpy

from devicemesh import InvalidArgumentError, InvalidStateError, World, deserialize, finalize_default_worlds, init_device_mesh

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Objects(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        rows = 1 if SIZE == 1 else 2
        cls.mesh = init_device_mesh("cpu", (rows, SIZE // rows), mesh_dim_names=("dp", "tp"), timeout=60)
        cls.dp, cls.tp = cls.mesh.get_all_groups()

    def test_objects_of_all_ranks(self):
        for group in (self.dp, self.tp):
            mine = {"rank": RANK, "name": "x" * (1000 * RANK), "set": {1, 2}}
            self.assertEqual(group.all_gather_object(mine),
                             [{"rank": rank, "name": "x" * (1000 * rank), "set": {1, 2}} for rank in group.ranks])
            self.assertEqual(group.all_gather_object(None), [None] * group.size)

    def test_the_object_of_one_rank(self):
        for root in range(self.tp.size):
            mine = ("seed", self.tp.ranks[root]) if self.tp.rank == root else None
            self.assertEqual(self.tp.broadcast_object(mine, root=root), ("seed", self.tp.ranks[root]))
        self.assertEqual(self.tp.broadcast_object([self.tp.ranks[0]]), [self.tp.ranks[0]])

    def test_bytes(self):
        self.assertEqual(self.tp.all_gather_bytes(bytes([RANK]) * (RANK % 3)), [bytes([rank]) * (rank % 3) for rank in self.tp.ranks])
        self.assertEqual(self.tp.broadcast_bytes(b"\0name" if self.tp.rank == 0 else None), b"\0name")
        self.assertEqual(self.tp.broadcast_bytes(bytearray(b"") if self.tp.rank == 0 else None), b"")

    def test_a_world(self):
        with tempfile.TemporaryDirectory() as mine:
            folder = self.mesh.flatten("everybody").get_group().broadcast_object(mine)
            world = World("cpu", world_size=SIZE, rank=RANK, init_method=f"file://{folder}/world", timeout=60)
            self.assertEqual(world.all_gather_object(RANK), list(range(SIZE)))
            self.assertEqual(world.broadcast_object("name" if RANK == SIZE - 1 else None, root=SIZE - 1), "name")
            self.assertEqual(world.all_gather_bytes(b"x" * RANK), [b"x" * rank for rank in range(SIZE)])
            self.assertEqual(world.broadcast_bytes(b"\0", root=0), b"\0")
            with self.assertRaisesRegex(InvalidArgumentError, "root is -1"):
                world.broadcast_bytes(b"", root=-1)
            world.finalize()
            world.close()
            self.mesh.get_group("everybody").barrier()

    def test_too_many_bytes(self):
        data = bytes(8 * 2**20 + 1) if self.tp.rank == 0 else b""
        with self.assertRaises(InvalidArgumentError):
            self.tp.all_gather_bytes(data)
        self.assertEqual(self.tp.all_gather_object(RANK), list(self.tp.ranks))

    def test_a_barrier_of_a_dimension(self):
        self.tp.barrier()
        self.dp.barrier(timeout=50)

    def test_after_the_asynchronous_operations(self):
        value = numpy.ones(1000)
        handles = [self.tp.all_reduce(value, op="avg", async_op=True) for _ in range(20)]
        self.tp.barrier()
        self.assertTrue(all(handle.is_success() for handle in handles))

    def test_an_object_that_cannot_be_pickled(self):
        """The other ranks are told, and all can go on."""
        mine = threading.Lock() if self.tp.rank == 0 else 1
        with self.assertRaises(TypeError if self.tp.rank == 0 else InvalidArgumentError) as caught:
            self.tp.all_gather_object(mine)
        self.assertIn("cannot pickle", str(caught.exception))
        with self.assertRaises(TypeError if self.tp.rank == 0 else InvalidArgumentError):
            self.tp.broadcast_object(mine)
        self.assertEqual(self.tp.all_gather_object(RANK), list(self.tp.ranks))

    def test_refusals_are_told(self):
        """When this package refuses the call of one rank, the other ranks fail at once, and all go
        on in step."""
        if self.tp.size == 1:
            return
        everybody = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("all",), timeout=60)
        world, group = everybody.world, everybody.get_group()

        def in_a_group():
            with everybody.group():
                group.all_reduce(numpy.ones(1))
                group.barrier()

        def init(names):
            init_device_mesh("cpu", (SIZE,), mesh_dim_names=names, lazy=True).close()

        for wrong, right, kind in (
            (lambda: group.all_gather_bytes("text"), lambda: group.all_gather_bytes(b""), TypeError),
            (lambda: group.all_gather_object(1, 2), lambda: group.all_gather_object(1), TypeError),
            (lambda: group.all_gather_object(1, timeout=-1), lambda: group.all_gather_object(1), InvalidArgumentError),
            (lambda: group.broadcast_bytes(b"", root=SIZE), lambda: group.broadcast_bytes(b""), InvalidArgumentError),
            (lambda: group.broadcast_bytes(None), lambda: group.broadcast_bytes(b""), TypeError),
            (lambda: group.broadcast_object(1, root=2**40), lambda: group.broadcast_object(1), InvalidArgumentError),
            (lambda: group.broadcast_object(1, root="0"), lambda: group.broadcast_object(1), TypeError),
            (lambda: group.barrier(timeout="long"), group.barrier, TypeError),
            (in_a_group, group.barrier, InvalidStateError),
            (lambda: world.barrier(timeout=0), world.barrier, InvalidArgumentError),
            (lambda: world.all_gather_bytes(1), lambda: world.all_gather_bytes(b""), TypeError),
            (lambda: world.broadcast_object(1, root=-1), lambda: world.broadcast_object(1), InvalidArgumentError),
            (lambda: world.locations(5), world.locations, TypeError),
            (lambda: world.locations("a\0"), world.locations, InvalidArgumentError),
            (lambda: world.finalize(timeout=-1), world.finalize, InvalidArgumentError),
            (lambda: finalize_default_worlds(timeout="long"), finalize_default_worlds, TypeError),
            (lambda: everybody.finalize(timeout="long"), everybody.finalize, TypeError),
            (lambda: deserialize(5), lambda: deserialize(everybody.serialize(), lazy=True), TypeError),
            (lambda: everybody.flatten(5), lambda: everybody.flatten("other"), TypeError),
            (lambda: everybody.reshape((SIZE,), ("a", "b")), lambda: everybody.reshape((SIZE,), ("a",)), InvalidArgumentError),
            (lambda: everybody.unflatten("all", 5, ("a",)), lambda: everybody.unflatten("all", (SIZE,), ("a",)), TypeError),
            (lambda: everybody.slice_range("all", 5), lambda: everybody.slice_range("all", range(1)), TypeError),
            (lambda: init(("a", "b")), lambda: init(("a",)), InvalidArgumentError),
            (lambda: init_device_mesh("cpu", SIZE), lambda: init(None), TypeError),
        ):
            began = time.monotonic()
            if RANK == 0:
                with self.assertRaises(kind):
                    wrong()
            else:
                with self.assertRaisesRegex(InvalidArgumentError, "rank 0 refused"):
                    right()
            self.assertLess(time.monotonic() - began, 30)
            self.assertEqual(group.all_gather_object(RANK), list(range(SIZE)))

    def test_what_is_refused(self):
        with self.assertRaisesRegex(TypeError, "write objects = group.all_gather_object"):
            self.tp.all_gather_object([None] * SIZE, 1)
        with self.assertRaisesRegex(TypeError, "not bytes"):
            self.tp.all_gather_bytes("text")
        with self.assertRaisesRegex(InvalidArgumentError, "root is"):
            self.tp.broadcast_object(1, root=self.tp.size)
        with self.assertRaisesRegex(InvalidStateError, "1 operation is queued"), self.mesh.group():
            self.tp.all_reduce(numpy.ones(1))
            self.tp.barrier()


if __name__ == "__main__":
    unittest.main()
