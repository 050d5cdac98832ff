"""Operations on cuda and the streams of torch, CuPy, JAX and others, on one process without a GPU
(stream_stand_ins.py)."""

import gc
import types
import unittest
import weakref
from unittest import mock

import numpy

from devicemesh import InvalidArgumentError, UnsupportedError, World, _operands, _streams, init_device_mesh
from devicemesh._library import library

from .stream_stand_ins import Case, Interface, JaxArray, Ndarray, Stream, Tensor


class Torchs(Case):
    def test_the_current_stream(self):
        tensor = self.tensor()
        with self.within(self.side):
            self.side.put("produced")
            self.group.all_reduce(tensor)
        ((stream, before),) = self.ran
        self.assertEqual((stream, tensor.asked, tensor.on), (0x77, [0x77], [0x77]))
        self.assertIn("produced", before)
        self.assertIn("operation 0", self.side.before)
        self.assertNotIn("operation 0", self.default.before)

    def test_the_default_stream(self):
        tensor = self.tensor()
        self.group.all_reduce(tensor)
        self.assertEqual((self.ran[0][0], tensor.asked, tensor.on), (0, [1], [0]))

    def test_a_stream_that_is_named(self):
        """It waits for the current stream, which then waits for the result."""
        for stream in (self.side, 0x77):
            tensor = self.tensor()
            self.default.put("produced")
            self.group.all_reduce(tensor, stream=stream)
            stream, before = self.ran[-1]
            self.assertEqual((stream, tensor.on), (0x77, [0x77]))
            self.assertIn("produced", before)
            self.assertIn(f"operation {len(self.ran) - 1}", self.default.before)

    def test_a_named_default_stream(self):
        with self.within(self.side):
            self.side.put("produced")
            for stream in (0, 1):
                self.group.all_reduce(self.tensor(), stream=stream)
                self.assertIn("produced", self.ran[-1][1])
                self.assertEqual(self.ran[-1][0], 0)
        self.assertIn("operation 1", self.side.before)

    def test_an_asynchronous_operation(self):
        """The current stream waits in wait(), whichever it is then."""
        work = self.group.all_reduce(self.tensor(), stream=self.side, async_op=True)
        self.side.put("later")
        self.assertNotIn("operation 0", self.default.before)
        self.assertTrue(work.wait())
        self.assertIn("operation 0", self.default.before)
        self.assertNotIn("later", self.default.before)
        other = Stream(0x55)
        with self.within(other):
            work.wait()
        self.assertIn("operation 0", other.before)
        work = self.group.all_reduce(self.tensor(), async_op=True)
        with self.within(other):
            work.wait()
        self.assertIn("operation 1", other.before)

    def test_a_group(self):
        for is_async in (False, True):
            operations = len(self.ran)
            with mock.patch.object(library, "dm_group_start", lambda *_: 0), mock.patch.object(library, "dm_group_end", lambda *_: 0), \
                    mock.patch.object(type(self.group), "handle", 1), self.group.mesh.group(async_op=is_async) as group:
                self.default.put(f"produced {is_async}")
                tensor = self.tensor()
                self.group.all_reduce(tensor, stream=self.side)
                self.group.all_reduce(self.tensor())
                self.assertEqual(len(self.ran), operations)
            self.assertEqual(tensor.on, [0x77])
            self.assertIn(f"produced {is_async}", self.ran[-2][1])
            self.assertEqual(f"operation {operations}" in self.default.before, not is_async)
            group.work.wait()
            self.assertIn(f"operation {operations}", self.default.before)

    def test_a_thread_with_another_current_device(self):
        self.device = 5
        self.group.all_reduce(self.tensor())
        self.assertEqual((self.ran[0][0], self.device), (0, 5))

    def test_lists(self):
        with self.within(self.side):
            parts = [self.tensor(1) for _ in range(4)]
            self.group.all_gather(parts, self.tensor(1))
        self.assertEqual((self.ran[0][0], [part.on for part in parts]), (0x77, [[0x77]] * 4))

    def test_rocm(self):
        """There the default stream is 0."""
        self.addCleanup(setattr, Tensor, "is_rocm", False)
        Tensor.is_rocm = True
        tensor = self.tensor()
        self.group.all_reduce(tensor)
        self.assertEqual((self.ran[0][0], tensor.asked), (0, [0]))
        with self.assertRaisesRegex(InvalidArgumentError, "unsupported stream"):
            self.group.all_reduce(tensor, stream=2)

    def test_memory_elsewhere(self):
        for wrong, says in (
            (Tensor(numpy.zeros(4, "float32"), is_cuda=False), "buffer lies in cpu memory, but the mesh is on cuda"),
            (numpy.zeros(4), "buffer lies in cpu memory"),
            (Tensor(numpy.zeros(4, "float32"), index=3), "buffer lies on device 3, but this rank's communicators are on device 0: move"),
        ):
            with self.assertRaisesRegex(InvalidArgumentError, says):
                self.group.all_reduce(wrong)
        self.assertEqual(self.ran, [])

    def test_an_error_of_the_operation(self):
        with mock.patch.object(library, "dm_all_reduce", lambda *_: 1), self.assertRaises(InvalidArgumentError):
            self.group.all_reduce(self.tensor(), stream=self.side)


class Others(Case):
    def test_cupys_current_stream(self):
        array = Ndarray(numpy.zeros(4))
        self.cupys.put("produced")
        self.group.all_reduce(array)
        ((stream, before),) = self.ran
        self.assertEqual((stream, array.asked), (0x99, [0x99]))
        self.assertIn("produced", before)
        self.group.all_reduce(array, stream=0x77)
        self.assertIn("produced", self.ran[1][1])
        self.assertIn("operation 1", self.cupys.before)
        work = self.group.all_reduce(array, stream=0, async_op=True)
        self.assertNotIn("operation 2", self.cupys.before)
        work.wait()
        self.assertIn("operation 2", self.cupys.before)

    def test_the_output_decides(self):
        computed = Stream(0x42)
        computed.put("computed")
        mine, out = JaxArray(numpy.zeros(1, "float32"), computed), self.tensor(4)
        with self.within(self.side):
            self.group.all_gather(mine, out)
        ((stream, before),) = self.ran
        self.assertEqual((stream, mine.asked), (0x77, [0x77]))
        self.assertIn("computed", before)
        with self.within(self.side):
            self.group.all_gather(Ndarray(numpy.zeros(1, "float32")), out)
        self.assertIn("operation 1", self.cupys.before, "CuPy may write into its array next")

    def test_the_stream_of_an_interface(self):
        writing = Stream(0x33)
        writing.put("produced")
        array = Interface(numpy.zeros(4), stream=0x33)
        self.group.all_reduce(array)
        self.assertEqual(self.ran[0][0], 0x33)
        self.assertIn("produced", self.ran[0][1])
        self.group.all_reduce(array, stream=0x77)
        self.assertIn("produced", self.ran[1][1])
        self.assertIn("operation 1", writing.before)
        self.group.all_reduce(Interface(numpy.zeros(4), stream=1))
        self.group.all_reduce(Interface(numpy.zeros(4)))
        self.assertEqual([stream for stream, _ in self.ran[2:]], [0, 0])

    def test_memory_is_held_until_the_stream_has_passed(self):
        array = JaxArray(numpy.zeros(1, "float32"), self.default)
        held = weakref.ref(array.values)
        self.driver.is_busy = True
        self.group.all_gather(array, self.tensor())
        del array
        gc.collect()
        self.assertIsNotNone(held())
        self.group.all_reduce(self.tensor())
        self.assertIsNotNone(held(), "the device is not there yet")
        self.driver.is_busy = False
        self.group.all_reduce(self.tensor())
        gc.collect()
        self.assertIsNone(held())
        self.assertEqual(self.driver.events, {}, "no event is left")

    def test_a_capture_holds_nothing(self):
        array = Ndarray(numpy.zeros(4))
        self.driver.capturing, self.driver.is_busy = {0x99}, True
        self.group.all_reduce(array)
        self.assertEqual(_streams.held._waiting, {})

    def test_no_driver(self):
        self.driver.has_events = False
        with self.assertRaisesRegex(UnsupportedError, "pass an array of torch or cupy"):
            self.group.all_reduce(Interface(numpy.zeros(4)))
        self.group.all_reduce(self.tensor())

    def test_a_stream_by_any_protocol(self):
        class Cuda:
            def __cuda_stream__(self):
                return (0, 0x77)

        for stream in (0x77, Cuda(), self.side, types.SimpleNamespace(ptr=0x77)):
            self.group.all_reduce(self.tensor(), stream=stream)
            self.assertEqual(self.ran[-1][0], 0x77)


class Buffers(unittest.TestCase):
    """Exported buffers are given back whatever goes wrong, while the error is still there."""

    def test_errors(self):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"), world=World("cpu", world_size=8, rank=0, offline=True))
        self.addCleanup(mesh.close)
        group = mesh.get_group("tp")
        values, other = bytearray(8), bytearray(8)

        def breaks(*_):
            raise KeyError("autograd")

        for call in (
            lambda: group.all_reduce(values, async_op="yes"),
            lambda: group.all_reduce(values),  # offline
            lambda: group.all_reduce(values, async_op=True),
            lambda: group.all_reduce(values, 5),
            lambda: group.all_gather(values, other, counts="no"),
            lambda: group.all_gather(values, other, counts=[2, 2, 2, -1]),
            lambda: group.all_gather([other, 5, other, other], values),
            lambda: group.all_gather([other] * 4, values[:3]),
            lambda: group.reduce(values, 5, root=1),
            lambda: group.all_to_all(values, other, send_counts=[2] * 4, recv_counts=[2] * 5),
            lambda: group.send(values, 1, async_op=None),
        ):
            try:
                call()
                self.fail("an error was expected")
            except Exception as error:
                values.append(1)
                other.append(1)
                del values[8:], other[8:], error
        with mock.patch.object(_operands, "changed", breaks):
            try:
                group.all_reduce(values)
                self.fail("an error was expected")
            except KeyError:
                values.append(1)

    def test_an_array_that_makes_an_operation_of_its_own(self):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"), world=World("cpu", world_size=8, rank=0, offline=True))
        self.addCleanup(mesh.close)
        group = mesh.get_group("tp")
        inner, outer = bytearray(4), bytearray(4)

        class Nested:
            def __dlpack_device__(self):
                try:
                    group.all_reduce(inner)
                except UnsupportedError:
                    inner.append(0)
                with self.test.assertRaises(BufferError):
                    outer.append(0)
                return (1, 0)

            def __dlpack__(self, **_):
                return numpy.zeros(4, "uint8").__dlpack__()

        Nested.test = self
        try:
            group.all_reduce(outer, Nested())
        except UnsupportedError:
            outer.append(0)
