"""Tests that need one process: views, answers and refusals in offline worlds."""

import copy
import ctypes
import logging
import os
import pickle
import select
import subprocess
import sys
import tempfile
import threading
import unittest
from datetime import datetime, timezone
from pathlib import Path
from unittest import mock

import numpy

import devicemesh
from devicemesh import (DeviceMesh, DeviceMeshError, DimOptions, EventKind, InvalidArgumentError, InvalidHandleError, LibraryError,
                        MeshTimeoutError, NotFoundError, NotMemberError, Partial, Replicate, Shard, UnsupportedError,
                        World, init_device_mesh)
from devicemesh import __main__, _beside, _interrupt, _library, logs, work


def offline(rank, shape, names=None, world_size=None, device="cpu", **options):
    size = world_size or int(numpy.prod(shape))
    return init_device_mesh(device, shape, mesh_dim_names=names, world=World(device, world_size=size, rank=rank, offline=True), **options)


class Views(unittest.TestCase):
    def setUp(self):
        self.mesh = offline(6, (2, 4), ("dp", "tp"))

    def test_the_shape_of_pytorchs_api(self):
        mesh = self.mesh
        self.assertEqual(repr(mesh), "DeviceMesh((dp=2, tp=4), 'cpu', stride=(4, 1))")
        self.assertEqual((mesh.shape, mesh.ndim, mesh.size(), mesh.size(0), mesh.size("tp")), ((2, 4), 2, 8, 2, 4))
        self.assertEqual((mesh.device_type, mesh.mesh_dim_names), ("cpu", ("dp", "tp")))
        self.assertEqual((mesh.is_member(), mesh.slice_range("tp", range(2)).is_member()), (True, False))
        self.assertEqual((mesh.get_rank(), mesh.get_coordinate(), mesh.get_local_rank("tp"), mesh.get_local_rank(-2)), (6, (1, 2), 2, 1))
        self.assertEqual(mesh.mesh.tolist(), [[0, 1, 2, 3], [4, 5, 6, 7]])
        self.assertEqual(mesh.mesh.dtype, numpy.int32)
        self.assertEqual([group.ranks for group in mesh.get_all_groups()], [(2, 6), (4, 5, 6, 7)])
        group = mesh.get_group("tp")
        self.assertEqual((group.rank, group.size, group.name, group.mesh), (2, 4, "tp", mesh))
        self.assertIs(mesh.get_group(1), group)
        self.assertIs(mesh["dp", "tp"], mesh)
        self.assertEqual(mesh["tp"].get_group().ranks, (4, 5, 6, 7))
        self.assertEqual(mesh["tp"].group_ranks(), (4, 5, 6, 7))

    def test_views(self):
        mesh = self.mesh
        self.assertEqual(mesh["tp", "dp"].mesh.tolist(), [[0, 4], [1, 5], [2, 6], [3, 7]])
        self.assertEqual(mesh.flatten().mesh_dim_names, ("dp_tp",))
        split = mesh.unflatten("tp", (2, 2), ("cp", "tp2"))
        self.assertEqual((split.shape, split.get_coordinate()), ((2, 2, 2), (1, 1, 0)))
        self.assertEqual(mesh.unflatten(-1, (2, 2), ("cp", "tp2")), split)
        self.assertEqual(mesh.reshape((4, 2), ("a", "b")).group_ranks("b"), (6, 7))
        self.assertEqual(mesh.slice_range("tp", range(2, 4)).mesh.tolist(), [[2, 3], [6, 7]])
        self.assertEqual(mesh.slice_range("tp", slice(None, None, 2)).ranks, (0, 2, 4, 6))
        self.assertIsNone(mesh.slice_range("tp", range(0, 2)).get_coordinate())
        self.assertEqual(DeviceMesh.concatenate([mesh["tp"], mesh["dp"]]), mesh["tp", "dp"])
        self.assertEqual(mesh["tp"].root(), mesh)
        self.assertEqual([each.ranks for each in mesh.submeshes("dp")], [(0, 4), (1, 5), (2, 6), (3, 7)])
        self.assertEqual(mesh.submesh_count(("dp",)), 4)
        self.assertEqual(mesh.replica_groups("tp"), [[0, 1, 2, 3], [4, 5, 6, 7]])
        self.assertEqual((mesh.translate_rank("tp", 0), mesh.translate_rank("dp", 0)), (4, 2))
        self.assertEqual((mesh.neighbor("tp", 1), mesh.neighbor("tp", 2), mesh.neighbor("tp", 2, wrap=True)), (3, None, 0))
        self.assertEqual((mesh.translate_world_rank("tp", 4), mesh.translate_rank("tp", mesh.neighbor("tp", 1))), (0, 7))
        self.assertEqual((mesh.coordinate_of(3), mesh["tp"].coordinate_of(3)), ((0, 3), None))

    def test_values_hashes_copies_and_pickles(self):
        same, other = offline(1, (2, 4), ("dp", "tp")), offline(6, (2, 4), ("dp", "cp"))
        self.assertEqual((self.mesh, hash(self.mesh)), (same, hash(same)))
        self.assertNotEqual(self.mesh, other)
        self.assertNotEqual(self.mesh, "a mesh")
        self.assertEqual(len({self.mesh, same, other}), 2)
        # Unpickling finds a view that is alive, so the test keeps the view.
        view = self.mesh["tp"]
        pickled = [pickle.loads(pickle.dumps(mesh)) for mesh in (self.mesh, view)]
        for made in (copy.copy(self.mesh), copy.deepcopy(self.mesh), *pickled):
            self.assertIn(made, (self.mesh, view))
            self.assertEqual(made.get_rank(), 6)
        world = World("cpu", world_size=8, rank=3, offline=True)
        self.assertEqual(devicemesh.deserialize(self.mesh.serialize(), world=world), self.mesh)
        wishes = {"tp": DimOptions(own_comm=True)}
        self.assertEqual(devicemesh.deserialize(self.mesh.serialize(), world=world, dim_options=wishes).get_coordinate(), (0, 3))
        for text in ("", "{}", self.mesh.serialize().replace("tp", "dp")):
            with self.assertRaises(InvalidArgumentError):
                devicemesh.deserialize(text, world=world, dim_options=wishes)
        with self.assertRaisesRegex(TypeError, "pickle its mesh"):
            pickle.dumps(self.mesh.get_group("tp"))
        with self.assertRaisesRegex(TypeError, "cannot be pickled"):
            pickle.dumps(world)

    def test_the_current_mesh_is_the_threads(self):
        with self.assertRaisesRegex(RuntimeError, "No device mesh is currently active"):
            devicemesh.get_current_mesh()
        with self.mesh as outer, self.mesh["tp"] as inner:
            self.assertIs(devicemesh.get_current_mesh(), inner)
            self.assertIs(outer, self.mesh)
        with self.assertRaises(RuntimeError):
            devicemesh.get_current_mesh()

    def test_names_in_the_process(self):
        self.mesh["tp"].register("here")
        self.assertEqual(devicemesh.lookup("here"), self.mesh["tp"])
        devicemesh.unregister("here")
        with self.assertRaises(NotFoundError):
            devicemesh.lookup("here")

    def test_sharding_and_planning(self):
        mesh = offline(6, (2, 4), ("fsdp", "tp"))
        self.assertEqual(devicemesh.local_shard(mesh, (16, 8), (Shard(0), Shard(0))), ((2, 8), (12, 0)))
        self.assertEqual(mesh.local_shard((16, 8), (Shard(0, order=1), Shard(0))), ((2, 8), (10, 0)))
        self.assertEqual(mesh.local_shard((16, 8), (Replicate(), Shard(-1)), rank=1), ((16, 2), (0, 2)))
        self.assertEqual(mesh.local_shard((16, 8), (Partial(), Shard(-1)), rank=1), ((16, 2), (0, 2)))
        for shape, placements, rank in (((16, ), (Shard(0), ), None), ((16, ), (Shard(1), Replicate()),
                                                                       None), ((16, ), (Shard(-2), Replicate()), None),
                                        ((-1, ), (Shard(0), Replicate()), None), ((16, ), (Shard(0), Replicate()), -1)):
            with self.assertRaises(InvalidArgumentError):
                mesh.local_shard(shape, placements, rank)
        with self.assertRaises(NotMemberError):
            mesh.local_shard((16,), (Shard(0), Replicate()), 8)
        locations = [f"host{rank % 2}" for rank in range(8)]
        plan = devicemesh.plan_ranks(locations, (2, 4))
        self.assertEqual(plan.ranks, (0, 2, 4, 6, 1, 3, 5, 7))
        self.assertEqual((plan.report["cost"], plan.report["identity_cost"], plan.report["even"]), (64, 256, True))
        self.assertEqual(offline(2, (2, 4), ("dp", "tp"), ranks=plan.ranks).get_group("tp").ranks, (0, 2, 4, 6))
        self.assertEqual(len(devicemesh.plan_ranks([f"r{n}/h{n}" for n in range(2048)], (2,) * 11).report["dimensions"]), 11)
        for arguments in ((locations, (3, 4)), (["a//b"], (1, )), ([], (1, )), (locations, (2, 4), (1, )),
                          (locations, (2, 4), (-1, 1)), (locations, (2**40, ))):
            with self.assertRaises(InvalidArgumentError):
                devicemesh.plan_ranks(*arguments)


class Refusals(unittest.TestCase):
    def setUp(self):
        self.mesh = offline(6, (2, 4), ("dp", "tp"))

    def refuses(self, kind, text, ask):
        with self.assertRaises(kind) as caught:
            ask()
        self.assertIn(text, str(caught.exception))
        return caught.exception

    def test_positional_arguments_are_pytorchs(self):
        for make in (lambda: init_device_mesh("cpu", (2, 4), ("dp", "tp")), lambda: DeviceMesh("cpu", [[0, 1]], ("dp", "tp"))):
            self.refuses(TypeError, "pass the others by name (mesh_dim_names=('dp', 'tp'))", make)
        self.refuses(TypeError, "write mesh['dp']", lambda: self.mesh[0])

    def test_ranks_of_two_kinds(self):
        self.refuses(NotMemberError, "3", lambda: self.mesh.translate_world_rank("tp", 3))
        self.refuses(ValueError, "4", lambda: self.mesh.translate_rank("tp", 4))
        self.refuses(ValueError, "-1", lambda: self.mesh.translate_rank("tp", -1))
        self.refuses(TypeError, "world_rank is", lambda: self.mesh.coordinate_of("3"))

    def test_unknown_dimensions(self):
        for ask in (lambda: self.mesh["pp"], lambda: self.mesh.get_group("pp"), lambda: self.mesh.size("pp"),
                    lambda: self.mesh["tp", "pp"]):
            error = self.refuses(KeyError, "pp", ask)
            self.assertIsInstance(error, NotFoundError)
            self.assertIn("dp, tp", str(error))
        for index in (2, -3):
            self.refuses(IndexError, "the mesh has 2", lambda: self.mesh.get_group(index))
        self.refuses(TypeError, "float", lambda: self.mesh.get_group(1.5))
        self.refuses(ValueError, "dimension", lambda: self.mesh.get_group())
        self.refuses(ValueError, "NUL", lambda: self.mesh.get_group("tp\0"))
        self.refuses(TypeError, "not a str", lambda: self.mesh[("dp", 1)])

    def test_sizes_names_and_ranks(self):
        self.refuses(ValueError, "-1", lambda: offline(0, (-1, 2), world_size=8))
        self.refuses(ValueError, "16", lambda: offline(0, (4, 4), world_size=8))
        self.refuses(ValueError, "3 names", lambda: offline(0, (2, 4), ("a", "b", "c")))
        self.refuses(ValueError, "a", lambda: offline(0, (2, 4), ("a", "a")))
        self.refuses(ValueError, "num_ranks is 3, but the shape (2, 4) has 8 ranks", lambda: offline(0, (2, 4), ranks=[0, 1, 2]))
        self.refuses(ValueError, "rank", lambda: offline(0, (2,), ranks=[2**31, 0], world_size=8))
        self.refuses(ValueError, "ragged", lambda: DeviceMesh("cpu", [[0, 1], [2]]))
        self.refuses(ValueError, "cpu:0", lambda: offline(0, (2,), device="cpu:0"))
        self.refuses(ValueError, "pass cpu", lambda: World("cpu:1"))
        self.refuses(TypeError, "", lambda: offline(0, (2.5,), world_size=8))
        self.refuses(TypeError, "one str", lambda: offline(0, (2,), "dp"))
        self.refuses(ValueError, "dim_options", lambda: offline(0, (2, 4), ("dp", "tp"), dim_options={"pp": DimOptions()}))
        self.refuses(ValueError, "dim_options", lambda: offline(0, (2, 4), ("dp", "tp"), dim_options=[DimOptions()]))
        self.refuses(ValueError, "timeout", lambda: offline(0, (2, 4), timeout=-1))
        self.refuses(ValueError, "give both", lambda: World("cpu", rank=1))
        self.refuses(ValueError, "ascend", lambda: self.mesh.slice_range("tp", range(3, 0, -1)))
        self.refuses(ValueError, "4", lambda: self.mesh.slice_range("tp", range(2, 5)))
        self.refuses(
            ValueError, "different root",
            lambda: DeviceMesh.concatenate([self.mesh["dp"], offline(0, (2, 4), ("dp", "tp"))["tp"]]))
        self.refuses(ValueError, "at least one mesh", lambda: DeviceMesh.concatenate([]))

    def test_closed_and_offline_ones(self):
        group = self.mesh.get_group("tp")
        self.refuses(UnsupportedError, "offline", lambda: group.handle)
        self.refuses(NotImplementedError, "offline", lambda: group.all_reduce(bytearray(4)))
        self.refuses(UnsupportedError, "offline", lambda: self.mesh.get_proc("ncclAllReduce"))
        self.mesh.close()
        self.mesh.close()
        self.assertEqual(repr(self.mesh), "DeviceMesh(closed)")
        for ask in (self.mesh.get_rank, self.mesh.flatten, lambda: self.mesh.ranks, lambda: self.mesh["tp"], lambda: self.mesh["dp", "tp"],
                    lambda: group.all_reduce(bytearray(4)), lambda: self.mesh.get_group("dp"), lambda: hash(self.mesh), self.mesh.abort):
            self.refuses(InvalidHandleError, "not a live dm_mesh", ask)
        world = World("cpu", world_size=2, rank=0, offline=True)
        world.close()
        self.refuses(InvalidHandleError, "not a live dm_world", lambda: world.rank)
        self.assertEqual(repr(world), "World(closed)")
        for ask in (lambda: world.local_rank, lambda: world.library, lambda: world.epoch, world.locations):
            self.refuses(InvalidHandleError, "not a live dm_world", ask)

    def test_a_close_while_an_answer_is_read(self):
        """The library's answers lie in the world and the mesh, so these must live until the answers
        are read, also where another thread calls close() meanwhile."""
        lives = []

        def closing(of, name, rank_of):
            """Makes a function of the library close the World or DeviceMesh before it returns."""
            function, ask = getattr(_library.library, name), getattr(_library.library, rank_of)

            def call(handle, *arguments):
                status = function(handle, *arguments)
                of.close()
                lives.append(ask(handle, ctypes.byref(ctypes.c_int32())) == 0)
                return status

            return mock.patch.object(_library.library, name, call)

        for name in ("library", "epoch"):
            world = World("cpu", world_size=2, rank=0, offline=True)
            with closing(world, "dm_world_get_info", "dm_world_rank"):
                getattr(world, name)
            self.refuses(InvalidHandleError, "not a live dm_world", lambda: world.rank)
        with closing(self.mesh, "dm_get_recovery", "dm_rank"):
            self.assertEqual(self.mesh.recovery.epoch, 0)
        self.assertEqual((lives, repr(self.mesh)), ([True, True, True], "DeviceMesh(closed)"))

    def test_ranks_outside_the_mesh(self):
        mesh = offline(7, (2, 2), ("dp", "tp"), world_size=8)
        self.assertIsNone(mesh.get_coordinate())
        self.refuses(NotMemberError, "rank 7", lambda: mesh.get_group("tp"))

    def test_errors_carry_their_status(self):
        error = self.refuses(NotFoundError, "pp", lambda: self.mesh["pp"])
        self.assertEqual((error.status, devicemesh.status_name(error.status), error.ccl_result), (3, "DM_STATUS_NOT_FOUND", 0))
        self.assertEqual(devicemesh.last_error(), str(error))
        again = pickle.loads(pickle.dumps(error))
        self.assertEqual((type(again), str(again), again.status), (NotFoundError, str(error), 3))
        self.assertTrue(issubclass(MeshTimeoutError, TimeoutError))
        for kind in devicemesh.errors.BY_STATUS.values():
            self.assertEqual(str(kind("what went wrong")), "what went wrong")
            self.assertTrue(issubclass(kind, DeviceMeshError))


class Worlds(unittest.TestCase):
    def test_an_offline_world(self):
        world = World("cpu", world_size=8, rank=3, offline=True)
        self.assertEqual((world.rank, world.size, world.local_size, world.host, world.num_hosts, world.device), (3, 8, 8, 0, 1, None))
        self.assertEqual((world.device_type, world.library, world.ccl_version), ("cpu", "", ()))
        self.assertIs(init_device_mesh("cpu", (8,), world=world)["dim_0"].world, world)
        with self.assertRaises(InvalidArgumentError):
            World("cpu", world_size=2, rank=0, device=0)
        world.close()
        with self.assertRaises(InvalidHandleError):
            world.local_rank


class LocalCalls(unittest.TestCase):
    """What a package beside this one notices (_beside.py)."""

    def test_local_views_do_not_wait_for_outstanding_work(self):
        mesh, waits = offline(6, (2, 4), ("dp", "tp")), []
        with mock.patch.object(_beside, "before_call", [lambda: waits.append(1)]), mock.patch.object(_interrupt, "before_call", [1]):
            self.assertEqual(mesh["tp"].root(), mesh)
            self.assertEqual((len(mesh.submeshes("tp")), copy.copy(mesh)), (2, mesh))
            self.assertEqual(waits, [])
            mesh.flatten()
            self.assertEqual(waits, [1])

    def test_the_abort_of_a_world_is_told(self):
        told = []
        with mock.patch.object(_beside, "mesh_changes", [told.append]):
            world = World("cpu", world_size=8, rank=3, offline=True)
            world.abort()
            self.assertEqual(told, [None])
            devicemesh.abort_default_worlds()
            self.assertEqual(told, [None, None])

    def test_the_longest_timeouts(self):
        for wait in (lambda operation, queue: operation.wait(1e15), lambda _, queue: queue.finish(_library.Deadline(1e15), "finalize")):
            operation, queue = work.Work("operation"), work.WorkQueue((0, "dp"), None, ())
            queue.last = operation
            threading.Timer(0.01, operation._finish).start()
            wait(operation, queue)
            self.assertTrue(operation.is_success())

    def test_a_world_is_over_after_the_operations_of_meshes_from_lookup(self):
        """Nobody knows in which world they are."""
        mine, other = (World("cpu", world_size=8, rank=3, offline=True) for _ in range(2))
        meshes = [init_device_mesh("cpu", (8,), world=world) for world in (mine, other)]
        meshes[0].register("mine")
        self.addCleanup(devicemesh.unregister, "mine")
        meshes.append(devicemesh.lookup("mine"))
        waited = []

        def queue(number, mesh):
            return mock.Mock(mesh=mesh, finish=lambda *_: waited.append(number))

        queues = {number: queue(number, mesh) for number, mesh in enumerate(meshes)}
        with mock.patch.object(work, "queues", queues):
            for world, expected in ((mine, [0, 2]), (other, [1, 2]), (None, [2]), (meshes[2].world, [0, 1, 2])):
                waited.clear()
                work.after_all_in(world, _library.Deadline(None), "finalize")
                self.assertEqual(waited, expected)


class Logs(unittest.TestCase):
    def test_pythons_logging(self):
        code = (
            "import logging, devicemesh\n"
            "logging.basicConfig(level=logging.INFO, format='%(name)s %(levelname)s %(message)s')\n"
            "devicemesh.use_logging()\n"
            "devicemesh.init_device_mesh('cpu', (1,))\n"
            "devicemesh.use_logging('OFF')\n"
            "devicemesh.init_device_mesh('cpu', (1,), lazy=True).flatten('again')\n"
            "devicemesh.use_logging('debug', logger=logging.getLogger('other'))\n")
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = done.stderr.splitlines()
        self.assertTrue(any(line.startswith("devicemesh INFO rank 0: ") for line in lines), lines)
        self.assertFalse(any("DEBUG" in line or "again" in line for line in lines), lines)

    def test_levels(self):
        for level, number in (("info", 3), (logging.WARNING, 2), (25, 2), ("OFF", 0), (60, 0), (1, 4), ("ERROR", 1)):
            self.assertEqual(logs.library_level(level), number)
        for wrong in ("loud", None, 1.5, True):
            with self.assertRaises(InvalidArgumentError):
                logs.library_level(wrong)


class EventsOfOneRank(unittest.TestCase):
    def test_a_handler_and_a_queue_get_each_event(self):
        arrived, handled = threading.Event(), []

        def handler(event):
            handled.append(event)
            if event.kind == EventKind.ABORTED:
                arrived.set()

        devicemesh.set_event_handler(handler, slow=30)
        with devicemesh.Events() as events, tempfile.TemporaryDirectory() as folder:
            self.assertIsNone(events.next())
            self.assertEqual(select.select([events], [], [], 0)[0], [])
            world = World("cpu", world_size=1, rank=0, init_method=f"file://{folder}/store")
            self.assertEqual(select.select([events], [], [], 60)[0], [events])
            joined = events.next()
            self.assertEqual((joined.kind, joined.rank, joined.world_size, joined.ranks), (EventKind.JOINED, 0, 1, (0,)))
            self.assertTrue(joined.message.startswith("rank 0 has joined a world of 1 ranks"), joined)
            self.assertLess(abs((datetime.now(timezone.utc) - joined.time).total_seconds()), 600)
            mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",), world=world)
            mesh.abort()
            aborted = next(iter(events))
            self.assertEqual((aborted.kind, aborted.ranks, aborted.group, aborted.call), (EventKind.ABORTED, (0,), "mesh", None))
            self.assertIsNone(events.next(0.01))
            self.assertTrue(arrived.wait(60))
        self.assertEqual([event.kind for event in handled], [EventKind.JOINED, EventKind.ABORTED])
        devicemesh.set_event_handler(None)
        self.assertIn(f'devicemesh_process_info{{pid="{os.getpid()}",', devicemesh.metrics())
        with self.assertRaises(InvalidHandleError):
            events.next()
        with self.assertRaisesRegex(TypeError, "timeout is None; give seconds"):
            events.next(None)
        with self.assertRaises(TypeError):
            devicemesh.set_event_handler("loud")
        with self.assertRaises(InvalidArgumentError):
            devicemesh.Events(slow=-1)


class Libraries(unittest.TestCase):
    def test_functions_before_there_is_a_mesh(self):
        self.assertGreater(devicemesh.get_device_proc("cpu", "ncclAllReduce"), 0)
        with self.assertRaisesRegex(NotFoundError, "ncclNoSuchThing"):
            devicemesh.get_device_proc("cpu", "ncclNoSuchThing")

    def test_a_resolver(self):
        asked = []
        with self.assertRaisesRegex(LibraryError, "ncclGetVersion|nccl"):
            devicemesh.set_ccl_resolver(lambda name: asked.append(name))
        self.assertTrue(asked)
        with self.assertRaises(LibraryError) as caught:
            devicemesh.set_ccl_resolver(lambda name: 1 // 0)
        self.assertIsInstance(caught.exception.__cause__, ZeroDivisionError)
        for wrong, kind in (("0x1000", TypeError), (1.0, TypeError), (True, TypeError), (2**64, InvalidArgumentError), (-1, InvalidArgumentError)):
            with self.assertRaises(LibraryError) as caught:
                devicemesh.set_ccl_resolver(lambda name: wrong)
            self.assertIsInstance(caught.exception.__cause__, kind, wrong)
        devicemesh.set_ccl_resolver(None)


class Package(unittest.TestCase):
    def test_without_numpy_all_but_mesh_works(self):
        code = (
            "import sys; sys.modules['numpy'] = None\n"
            "from devicemesh import *\n"
            "mesh = init_device_mesh('cpu', (2,), world=World('cpu', world_size=2, rank=1, offline=True))\n"
            "assert mesh.get_coordinate() == (1,) and mesh.mesh_dim_names is None\n"
            "try: mesh.mesh\n"
            "except ImportError as error: assert 'numpy' in str(error)\n"
            "else: raise AssertionError\n")
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

    def test_a_library_that_is_not_there(self):
        done = subprocess.run([sys.executable, "-c", "import devicemesh"], capture_output=True, text=True, timeout=60,
                              env={**os.environ, "DM_LIBRARY": "/nowhere/lib.so"})
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("no libdevicemesh: tried /nowhere/lib.so", done.stderr)

    def test_a_package_in_a_folder_of_the_root(self):
        """pip install --target /app puts it there."""
        here = Path("/app/devicemesh")
        with mock.patch.dict(os.environ), mock.patch.object(_library, "HERE", here), mock.patch.object(__main__, "HERE", here), \
                mock.patch.object(__main__.shutil, "which", str):
            os.environ.pop("DM_LIBRARY", None)
            self.assertEqual(list(_library.candidates()), [_library.SONAME])
            self.assertEqual(__main__.tool(), "devicemesh")

    def test_the_tool(self):
        done = subprocess.run([sys.executable, "-m", "devicemesh", "run", "-n", "2", "--", "sh", "-c", "exit 3"],
                              capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 3, done.stderr)

    def test_a_fork_makes_its_own(self):
        offline(0, (2,))  # the parent's watching thread is there
        child = os.fork()
        if child == 0:
            ok = offline(1, (2,), ("x",)).flatten("y").get_coordinate() == (1,)
            os._exit(0 if ok else 1)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)


if __name__ == "__main__":
    unittest.main()
