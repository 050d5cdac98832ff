"""Tests that need several processes. They run under `devicemesh run -n N -- python -m unittest
tests/test_ranks.py`, for any N. Every rank runs every test."""

import array
import math
import os
import pickle
import shutil
import tempfile
import threading
import time
import unittest
from unittest import mock

import numpy

import devicemesh
from devicemesh import AbortedError, DimOptions, InvalidArgumentError, InvalidStateError, MeshTimeoutError, MismatchError, NotFoundError, PeerLostError, ReduceOp, World, _interrupt, init_device_mesh

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def two_dimensions():
    rows = 1 if SIZE == 1 else 2
    return rows, SIZE // rows


class Ranks(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.mesh = init_device_mesh("cpu", two_dimensions(), mesh_dim_names=("dp", "tp"))
        cls.dp, cls.tp = cls.mesh.get_all_groups()
        # A folder of this run, whose name rank 0 chooses.
        name = bytearray((tempfile.mkdtemp(prefix="devicemesh-").encode() if RANK == 0 else b"").ljust(1000, b"\0"))
        cls.mesh.flatten("everybody").get_group().broadcast(name)
        cls.folder = name.rstrip(b"\0").decode()

    @classmethod
    def tearDownClass(cls):
        cls.mesh.flatten("done")
        # A thread of the library may still write to a store in the folder, on any rank: the world
        # of a test ends there, or a note says that a mesh was aborted.
        until = time.monotonic() + 10
        while RANK == 0 and os.path.exists(cls.folder):
            shutil.rmtree(cls.folder, ignore_errors=time.monotonic() < until)

    def test_mesh(self):
        rows, columns = two_dimensions()
        self.assertEqual(self.mesh.mesh.tolist(), numpy.arange(SIZE).reshape(rows, columns).tolist())
        self.assertEqual(self.mesh.get_coordinate(), divmod(RANK, columns))
        self.assertEqual((self.dp.rank, self.tp.rank), divmod(RANK, columns))
        self.assertGreater(self.tp.handle, 0)
        self.assertGreater(self.mesh.get_proc("ncclAllReduce"), 0)
        world = self.mesh["dp"].world
        self.assertIs(self.mesh.world, self.mesh.world)
        for world in (self.mesh.world, self.mesh["dp"].world, World.default("cpu"), World.default("cpu", timeout=30)):
            self.assertEqual((world.rank, world.size, world.local_rank, world.local_size), (RANK, SIZE, RANK, SIZE))
            self.assertEqual((world.host, world.num_hosts, world.device, world.device_type), (0, 1, None, "cpu"))
            self.assertEqual(repr(world), f"World(rank={RANK}, size={SIZE})")
            self.assertIn("host engine", world.library)
            self.assertGreater(world.ccl_version, (2, 20))
            world.barrier()
            self.assertEqual(init_device_mesh("cpu", (SIZE,), world=world, lazy=True).world, world)
        with self.assertRaises(devicemesh.NotFoundError):
            self.mesh.get_proc("ncclNoSuchThing")
        self.tp.check()
        self.mesh.check("dp")
        self.mesh.check()
        self.assertTrue(self.mesh.is_member())
        self.mesh.wait()
        self.mesh.wait(mesh_dim="tp", timeout=50)
        self.tp.wait()
        with self.assertRaises(InvalidArgumentError):
            self.tp.wait(stream=7)

    def test_all_reduce_over_each_dimension(self):
        for group in (self.dp, self.tp):
            for op, expected in (("sum", sum), (ReduceOp.MAX, max), ("Min", min), (1, math.prod)):
                values = numpy.full((3, 5), RANK + 1.5)
                group.all_reduce(values, op=op)
                self.assertEqual(values.tolist(), numpy.full((3, 5), expected([rank + 1.5 for rank in group.ranks])).tolist())
            for name in ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64"):
                send, out = numpy.full(7, group.rank + 1, name), numpy.zeros(7, name)
                group.all_reduce(send, out)
                self.assertEqual(out.tolist(), [group.size * (group.size + 1) / 2] * 7)
                self.assertEqual(send.tolist(), [group.rank + 1] * 7)
        with self.assertRaisesRegex(InvalidArgumentError, "'median', not one of sum, prod"):
            self.tp.all_reduce(bytearray(1), op="median")

    def test_without_numpy(self):
        values = array.array("f", [RANK, 1])
        self.tp.all_reduce(values)
        self.assertEqual(list(values), [sum(self.tp.ranks), self.tp.size])
        values.append(1)  # no longer held

    def test_the_other_collectives(self):
        group, me = self.tp, self.tp.rank
        out = numpy.zeros((group.size, 2), "int32")
        group.all_gather(numpy.array([me, 7], "int32"), out)
        self.assertEqual(out.tolist(), [[rank, 7] for rank in range(group.size)])
        out = numpy.full(group.size, -1)
        out[me] = me
        group.all_gather(None, out)
        self.assertEqual(out.tolist(), list(range(group.size)))
        block = numpy.zeros(2)
        whole = numpy.arange(2.0 * group.size)
        group.reduce_scatter(whole, block, op="avg")
        self.assertEqual(block.tolist(), [2.0 * me, 2.0 * me + 1])
        group.reduce_scatter(whole)
        self.assertEqual(whole[2 * me : 2 * me + 2].tolist(), [2.0 * me * group.size, (2.0 * me + 1) * group.size])
        out = numpy.zeros(group.size, "int64")
        group.all_to_all(numpy.array([10 * me + rank for rank in range(group.size)]), out)
        self.assertEqual(out.tolist(), [10 * rank + me for rank in range(group.size)])
        root = group.size - 1
        value = numpy.array([me])
        group.broadcast(value, root=root)
        self.assertEqual(value[0], root)
        out = numpy.array([-1])
        group.broadcast(numpy.array([5]) if me == root else None, out, root=root)
        self.assertEqual(out[0], 5)
        out = numpy.array([-1])
        group.reduce(numpy.array([me + 1]), out if me == root else None, root=root)
        self.assertEqual(out[0], group.size * (group.size + 1) // 2 if me == root else -1)

    def test_sends_and_receives_in_a_group(self):
        group = self.tp
        right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        received = bytearray(4)
        with self.mesh.group():
            group.send(array.array("i", [100 + group.rank]), right)
            group.recv(memoryview(received).cast("i"), left)
            with self.assertRaises(BufferError):
                received.append(0)  # held until the group's end
        received.append(0)
        self.assertEqual(int.from_bytes(received[:4], "little"), 100 + left)
        with self.assertRaises(ZeroDivisionError):
            with self.mesh.group():
                raise ZeroDivisionError
        self.test_without_numpy()

    def test_wrong_sizes(self):
        group, n = self.tp, self.tp.size
        for wrong in (lambda: group.all_reduce(bytearray(4), bytearray(5)),
                      lambda: group.all_gather(bytearray(4), bytearray(4 * n + 1)),
                      lambda: group.reduce_scatter(bytearray(4 * n + 1), bytearray(4)),
                      lambda: group.all_reduce(bytearray(4), array.array("i", [1] * 4)),
                      lambda: group.broadcast(bytearray(1), root=2**31), lambda: group.send(bytearray(1), n),
                      lambda: group.broadcast(bytearray(1), root=-1), lambda: group.all_reduce(numpy.zeros((4, 4)).T),
                      ):
            with self.assertRaises(ValueError):
                wrong()
        if n > 1:
            with self.assertRaisesRegex(InvalidArgumentError, "do not share evenly"):
                group.all_to_all(bytearray(n + 1), bytearray(n + 1))

    def test_flattened_and_other_views(self):
        flat = self.mesh.flatten("all")
        value = numpy.array([RANK])
        self.mesh.get_group("all").all_reduce(value)
        self.assertEqual(value[0], SIZE * (SIZE - 1) // 2)
        self.assertEqual(self.mesh["all"], flat)
        own = self.mesh["tp"].flatten("own", options=DimOptions(own_comm=True, comm_name="mine"))
        self.assertNotEqual(own.get_group().handle, self.tp.handle)
        other = self.mesh.reshape((SIZE, 1), ("ep", "one"))
        self.assertEqual(other.get_group("ep").handle, flat.get_group().handle)
        last = self.mesh.slice_range("tp", range(self.tp.size - 1, self.tp.size))
        self.assertEqual(last.get_coordinate() is None, self.tp.rank != self.tp.size - 1)

    def test_lazy_and_adopted(self):
        lazy = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("x",), lazy=True)
        value = bytearray([1])
        lazy.get_group().all_reduce(value)
        self.assertEqual(value[0], SIZE)
        adopted = devicemesh.DeviceMesh.from_group(lazy.get_group(), "cpu", mesh_dim_names=("y",))
        adopted.get_group("y").all_reduce(value)
        self.assertEqual(value[0], SIZE * SIZE)
        both = devicemesh.DeviceMesh.from_group([self.dp.handle, self.tp], "cpu", self.mesh.mesh, mesh_dim_names=("dp", "tp"))
        self.assertEqual(both, self.mesh)
        # The communicators and the array must tell of the same ranks.
        with self.assertRaisesRegex(InvalidArgumentError, r"group 0 has the ranks .*, but the mesh has along dimension 0: \["):
            devicemesh.DeviceMesh.from_group(self.tp, "cpu", [rank + 1 for rank in self.tp.ranks])
        with self.assertRaisesRegex(InvalidArgumentError, r"group 1 has the ranks .*, but the mesh has along dimension 1: \["):
            devicemesh.DeviceMesh.from_group([self.dp.handle, self.tp], "cpu", self.mesh.mesh + 1)
        # The default world is one world, however the program has got it.
        for world in (self.mesh.world, self.mesh["dp"].world, World.default("cpu")):
            with self.assertRaisesRegex(InvalidArgumentError, "group 0 has the ranks"):
                devicemesh.DeviceMesh.from_group(self.tp, "cpu", [rank + 1 for rank in self.tp.ranks], world=world)
        # Without a world the ranks of a mesh are 0 .. n-1, whatever they are in another world.
        worldless = devicemesh.DeviceMesh.from_group(self.tp.handle, "cpu", list(self.tp.ranks))
        again = devicemesh.DeviceMesh.from_group(worldless.get_group(), "cpu", list(self.tp.ranks), world=self.mesh.world)
        self.assertEqual(again.get_group().ranks, self.tp.ranks)
        with self.assertRaisesRegex(InvalidArgumentError, "1 groups"):
            devicemesh.DeviceMesh.from_group([self.tp], "cpu", [[0]])
        with self.assertRaisesRegex(InvalidArgumentError, "mesh is needed"):
            devicemesh.DeviceMesh.from_group(self.tp.handle, "cpu")
        with self.assertRaises(TypeError):
            devicemesh.DeviceMesh.from_group("nccl", "cpu", [0])

    def test_the_timeout_of_an_adopted_mesh(self):
        own = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("x",), dim_options=[DimOptions(own_comm=True)])
        adopted = devicemesh.DeviceMesh.from_group(own.get_group(), "cpu", timeout=0.2)
        if RANK == 0 and SIZE > 1:
            with self.assertRaisesRegex(MeshTimeoutError, "200 ms"):
                adopted.get_group().all_reduce(bytearray(1))
        self.mesh.world.barrier()
        own.abort()

    def test_texts_and_pickles(self):
        made = devicemesh.deserialize(self.mesh.serialize())
        self.assertEqual(made, self.mesh)
        text = pickle.dumps(made)
        self.assertEqual(pickle.loads(text), made)
        made.finalize()
        with self.assertRaises(AbortedError):
            made.get_group("tp").all_reduce(bytearray(1))
        with self.assertRaises(AbortedError):
            made.flatten("more")

    def test_disagreement(self):
        if SIZE > 1:
            with self.assertRaises(MismatchError) as caught:
                init_device_mesh("cpu", (SIZE, 1) if RANK else (1, SIZE), mesh_dim_names=("a", "b"))
            self.assertIn("rank 0 called dm_init(shape=(1,", str(caught.exception))

    def test_a_peer_that_does_not_come(self):
        if SIZE > 1:
            # The mesh must be made in this time, on a busy machine, too.
            mesh = init_device_mesh("cpu", (SIZE,), timeout=2, dim_options=[DimOptions(own_comm=True)])
            if RANK == 0:
                with self.assertRaises(TimeoutError) as caught:
                    mesh.get_group().all_reduce(bytearray(1))
                self.assertIsInstance(caught.exception, MeshTimeoutError)
            self.mesh.flatten("here_again")
            mesh.abort()

    def test_the_lock_is_let_go_of(self):
        if SIZE == 1:
            return
        mesh = init_device_mesh("cpu", (SIZE,))
        counted = f"{self.folder}/counted"
        if RANK == 0:
            def count():
                for _ in range(100):
                    time.sleep(0.001)
                open(counted, "w").close()

            # The others come when the thread has run for a while, so it must run while this one is
            # blocked.
            thread = threading.Thread(target=count)
            thread.start()
            mesh.get_group().all_reduce(bytearray(1))
            thread.join()
        else:
            until = time.monotonic() + 60
            while not os.path.exists(counted):
                self.assertLess(time.monotonic(), until, "another thread runs while one is blocked")
                time.sleep(0.01)
            mesh.get_group().all_reduce(bytearray(1))
        mesh.finalize()

    def test_abort_from_another_thread(self):
        if SIZE == 1:
            return
        mesh = init_device_mesh("cpu", (SIZE,), dim_options={0: DimOptions(own_comm=True)})
        if RANK == 0:
            timer = threading.Timer(0.2, mesh.abort)
            timer.start()
            with self.assertRaises(AbortedError):
                mesh.get_group().all_reduce(bytearray(1))
            timer.join()
        self.mesh.flatten("after_abort")
        mesh.abort()

    def test_going_on_without_a_rank(self):
        if SIZE == 1:
            return
        # In a world of its own: the meshes of one world share communicators, and these end.
        world = World("cpu", world_size=SIZE, rank=RANK, init_method=f"file://{self.folder}/shrinks", timeout=60)
        mesh = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("x",), world=world)
        with self.assertRaises(NotFoundError):
            mesh["x"].shrink("y", [SIZE - 1])
        if RANK < SIZE - 1:
            try:
                left = mesh.shrink("x", [SIZE - 1])
            except PeerLostError:
                left = mesh.shrink("x", [SIZE - 1])  # as its documentation says: on the same mesh
            value = bytearray([1])
            left.get_group().all_reduce(value)
            self.assertEqual((value[0], left.ranks), (SIZE - 1, tuple(range(SIZE - 1))))
            with self.assertRaises(AbortedError):
                mesh.get_group().all_reduce(value)
        self.mesh.flatten("after_shrink")

    def test_a_refused_shrink_is_told(self):
        if SIZE < 3:
            return
        world = World("cpu", world_size=SIZE, rank=RANK, init_method=f"file://{self.folder}/refuses", timeout=60)
        mesh = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("x",), world=world)
        for lost in ([SIZE - 1], None):
            if RANK == 0:
                with self.assertRaisesRegex(InvalidArgumentError, "timeout is 0 seconds"):
                    mesh.shrink("x", lost, timeout=0)
            elif lost is None or RANK not in lost:
                with self.assertRaisesRegex(InvalidArgumentError, "rank 0 refused"):
                    mesh.shrink("x", lost)
        mesh.abort()

    def test_recovering_without_a_rank(self):
        world = World("cpu", world_size=SIZE, rank=RANK, init_method=f"file://{self.folder}/recovers", timeout=60)
        mesh = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("x",), world=world)
        told = mesh.recovery
        self.assertEqual((told.epoch, told.lost_ranks, told.new_coordinate, told.has_joined), (0, (), (RANK,), False))
        with self.assertRaisesRegex(InvalidStateError, "nothing to recover"):
            mesh.recover()
        if SIZE == 1:
            return
        self.mesh.flatten("before_recovery")
        gone = SIZE - 1
        if RANK == gone:
            world.abort()
        else:
            with self.assertRaises(PeerLostError):
                world.barrier()
            mesh = mesh.recover("x", replace=0.01, min_size=1, dim_options={"x": DimOptions(own_comm=True)}, timeout=50)
            self.assertEqual(mesh.ranks, tuple(range(gone)))
            told = mesh.recovery
            self.assertEqual((told.epoch, told.previous_epoch, told.lost_ranks, told.joined_ranks), (1, 0, (gone,), ()))
            self.assertEqual((told.old_coordinate, told.new_coordinate, told.state_root), ((RANK,), (RANK,), 0))
            value = bytearray([1])
            mesh.get_group().all_reduce(value)
            self.assertEqual(value[0], gone)
            world.finalize()
        self.mesh.flatten("after_recovery")

    def test_a_rank_that_leaves_the_world_is_named_as_data(self):
        if SIZE == 1:
            return
        world = World("cpu", world_size=SIZE, rank=RANK, init_method=f"file://{self.folder}/leaves", timeout=60)
        mesh = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("x",), world=world)
        gone = SIZE - 1
        if RANK == gone:
            world.abort()
        else:
            with self.assertRaises(PeerLostError) as caught:
                mesh.get_group().all_reduce(bytearray(1))
            # Another rank that has ended its mesh after the loss may be met first.
            self.assertTrue(caught.exception.ranks)
            self.assertEqual(caught.exception.dimension, "x")
            # The loss may have been known before the call.
            self.assertTrue(caught.exception.waited is None or caught.exception.waited >= 0)
            again = pickle.loads(pickle.dumps(caught.exception))
            self.assertEqual((again.ranks, again.dimension), (caught.exception.ranks, "x"))
            until = time.monotonic() + 60
            while mesh.lost_ranks() != (gone,) and time.monotonic() < until:
                time.sleep(0.01)
            self.assertEqual(mesh.lost_ranks(), (gone,))
            left = mesh.shrink(dim_options={"x": DimOptions(own_comm=True)}, timeout=50)
            self.assertEqual(left.ranks, tuple(range(gone)))
        self.mesh.flatten("after_leaving")

    def test_the_end_of_a_world(self):
        world = World("cpu", world_size=SIZE, rank=RANK, init_method=f"file://{self.folder}/ends", timeout=60)
        mesh = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("x",), world=world)
        value = numpy.ones(1)
        handle = mesh.get_group().all_reduce(value, async_op=True)
        with self.assertRaisesRegex(InvalidStateError, "1 operation is queued"), self.mesh.group():
            self.tp.all_reduce(value.copy())
            world.finalize()
        world.finalize(timeout=50)
        self.assertTrue(handle.is_success())
        for ask in (world.barrier, world.finalize, mesh.finalize, lambda: mesh.get_group().all_reduce(value)):
            with self.assertRaises(AbortedError):
                ask()

    def test_timeouts_of_calls(self):
        self.assertEqual(self.mesh["dp"].flatten("timely", timeout=30).shape, (self.dp.size,))
        self.assertEqual(self.mesh.unflatten("dp", (1, self.dp.size), ("one", "rest"), timeout=30).ndim, 3)
        self.assertEqual(self.mesh.reshape((SIZE,), ("all",), timeout=30).shape, (SIZE,))
        self.assertEqual(self.mesh.slice_range("dp", range(1), timeout=30, options=DimOptions()).shape, (1, self.tp.size))
        world = World("cpu", world_size=SIZE, rank=RANK, init_method=f"file://{self.folder}/late", timeout=60)
        mesh = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("x",), world=world)
        over = os.path.join(self.folder, "late is over")
        if SIZE > 1 and RANK == 0:
            with self.assertRaises(MeshTimeoutError) as caught:
                mesh.finalize(timeout=0.2)
            self.assertIn(1, caught.exception.ranks)
            self.assertGreater(caught.exception.waited, 0.1)
            self.assertIsInstance(caught.exception.call, int)
            os.mkdir(over)
        while SIZE > 1 and not os.path.exists(over):
            time.sleep(0.01)
        mesh.abort()
        for wrong in (-1, "1", True):
            with self.assertRaises((TypeError, ValueError)):
                self.mesh.flatten("f", timeout=wrong)

    def test_a_world_of_its_own_and_a_store_in_python(self):
        with World("cpu", world_size=SIZE, rank=RANK, init_method=f"file://{self.folder}/file", timeout=60) as world:
            self.assertEqual((world.rank, world.size, repr(world)), (RANK, SIZE, f"World(rank={RANK}, size={SIZE})"))
            self.assertEqual((world.local_rank, world.local_size, world.num_hosts), (RANK, SIZE, 1))
            world.barrier()
            self.assertEqual(world.locations(f"rack{RANK % 2}/host{RANK}"), [f"rack{rank % 2}/host{rank}" for rank in range(SIZE)])
            self.assertEqual(len(set(world.locations())), 1)
            # The world grows after the list was made.
            with mock.patch.object(World, "size", property(lambda world: SIZE + 1000 * len(listed))):
                listed, call = [], _interrupt.call

                def growing(*arguments):
                    listed.append(call(*arguments))
                    return listed[0]

                with mock.patch.object(_interrupt, "call", growing):
                    self.assertEqual(len(world.locations()), SIZE)
            mesh = init_device_mesh("cpu", (SIZE,), world=world)
            self.assertIs(mesh.flatten("f").world, world)
            mesh.finalize()
        del mesh
        store = FileStore(os.path.join(self.folder, "store"))
        world = World("cpu", world_size=SIZE, rank=RANK, store=store, timeout=60)
        mesh = init_device_mesh("cpu", (SIZE,), world=world)
        value = bytearray([2])
        mesh.get_group().all_reduce(value)
        self.assertEqual(value[0], 2 * SIZE)
        mesh.finalize()
        world.close()
        mesh.close()
        with self.assertRaises(devicemesh.StoreError) as caught:
            World("cpu", world_size=SIZE, rank=RANK, store=Broken(), timeout=5)
        self.assertIsInstance(caught.exception.__cause__, ZeroDivisionError)


class Broken:
    def set(self, key, value):
        raise ZeroDivisionError

    def get(self, key, timeout):
        raise ZeroDivisionError

    def add(self, key, amount):
        raise ZeroDivisionError


class FileStore:
    """A store for the test, in a folder that all ranks see."""

    def __init__(self, folder):
        os.makedirs(folder, exist_ok=True)
        self.folder = folder

    def path(self, key):
        return os.path.join(self.folder, key.encode().hex())

    def set(self, key, value):
        draft = f"{self.path(key)}.{os.getpid()}.{threading.get_ident()}"
        with open(draft, "wb") as file:
            file.write(value)
        os.replace(draft, self.path(key))

    def get(self, key, timeout):
        until = time.monotonic() + timeout
        while True:
            try:
                with open(self.path(key), "rb") as file:
                    return file.read()
            except FileNotFoundError:
                if time.monotonic() > until:
                    return None
                time.sleep(0.01)

    def add(self, key, amount):
        import fcntl

        with open(os.path.join(self.folder, "lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            value = int(self.get(key, 0) or 0) + amount
            self.set(key, str(value).encode())
            return value

    def compare_set(self, key, expected, value):
        import fcntl

        with open(os.path.join(self.folder, "lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (self.get(key, 0) or b"") == expected:
                self.set(key, value)
            return self.get(key, 0) or b""


if __name__ == "__main__":
    unittest.main()
