"""Operations on cuda and the streams of torch, CuPy, JAX and others, on one process without a GPU.

Stand-ins for these libraries, for the CUDA driver and for the collectives keep the order as CUDA
does: each stream knows what comes before its next work. So a test can ask whether an operation
comes after what was put on another stream.
"""

import contextlib
import ctypes
import gc
import sys
import types
import unittest
import weakref
from unittest import mock

import numpy

from devicemesh import InvalidArgumentError, UnsupportedError, World, _operands, _streams, buffers, init_device_mesh
from devicemesh._cuda import Driver
from devicemesh._library import library

OUR_DEVICE = 0


class Stream:
    """A stream, with the names of what comes before its next work."""

    all = {}

    def __init__(self, handle):
        self.handle, self.before, self.used_by = handle, set(), []
        Stream.all[handle] = self

    def put(self, name):
        self.before.add(name)

    # torch's
    @property
    def cuda_stream(self):
        return self.handle

    def record_event(self):
        return types.SimpleNamespace(before=frozenset(self.before))

    def wait_event(self, event):
        self.before |= event.before

    # CuPy's
    record = record_event


class CupyStream(Stream):
    ptr = Stream.cuda_stream
    cuda_stream = property()

    def __getattribute__(self, name):
        if name == "cuda_stream":
            raise AttributeError(name)
        return super().__getattribute__(name)


def of(handle):
    return Stream.all[0 if handle in (None, 1) else handle]


class Tensor:
    """torch.Tensor. Its __dlpack__ makes the consumer's stream wait for the current one, and
    refuses what torch's refuses."""

    is_rocm = False

    def __init__(self, values, is_cuda=True, index=OUR_DEVICE):
        self.values, self.is_cuda, self.on, self.asked = values, is_cuda, [], []
        self.device = types.SimpleNamespace(index=index)

    def __dlpack_device__(self):
        return (10 if self.is_rocm else 2, self.device.index) if self.is_cuda else (1, 0)

    def __dlpack__(self, *, stream=None, max_version=None):
        if self.is_cuda:
            self.asked.append(stream)
            if self.device.index != torch.cuda.current_device():
                raise BufferError("Can't export tensors on a different CUDA device index")
            assert stream not in (1, 2) if self.is_rocm else stream != 0, f"unsupported stream on cuda: {stream}"
            current = torch.cuda.current_stream(self.device)
            if of(stream) is not current:
                of(stream).wait_event(current.record_event())
        capsule = self.values.__dlpack__()
        if self.is_cuda:  # the device stands in the capsule's tensor, too
            tensor = buffers.DLTensor.from_address(buffers._capsule_pointer(capsule, b"dltensor"))
            tensor.device_type, tensor.device_id = self.__dlpack_device__()
        return capsule

    def record_stream(self, stream):
        self.on.append(stream.handle)


class Ndarray:
    """cupy.ndarray, which has __dlpack__ and __cuda_array_interface__."""

    device = types.SimpleNamespace(id=OUR_DEVICE)

    def __init__(self, values):
        self.values, self.asked = values, []

    def __dlpack_device__(self):
        return (2, 0)

    def __dlpack__(self, *, stream=None, max_version=None):
        self.asked.append(stream)
        current = cupy.cuda.get_current_stream(0)
        if of(stream) is not current:
            of(stream).wait_event(current.record())
        return self.values.__dlpack__()


class JaxArray:
    """An array that has __dlpack__ alone, with the stream that computes it."""

    def __init__(self, values, stream):
        self.values, self.stream, self.asked = values, stream, []

    def __dlpack_device__(self):
        return (2, 0)

    def __dlpack__(self, *, stream=None, max_version=None):
        self.asked.append(stream)
        of(stream).wait_event(self.stream.record_event())
        return self.values.__dlpack__()


class Interface:
    """An array that has __cuda_array_interface__ alone."""

    def __init__(self, values, stream=None):
        self.values = values
        self.__cuda_array_interface__ = {
            "shape": values.shape, "typestr": values.dtype.str, "data": (values.ctypes.data, False), "version": 3, "stream": stream}


class FakeDriver(Driver):
    """The driver's events over Stream."""

    def __init__(self):
        self.has_events, self.events, self.is_busy, self.pushed = True, {}, False, []
        self.capturing = set()
        self._cuda = types.SimpleNamespace(cuEventQuery=lambda event: 600 if self.is_busy else 0, cuEventDestroy_v2=lambda event: self.events.pop(event.value))

    def _do(self, name, *arguments):
        getattr(self, name)(*arguments)

    def cuEventCreate(self, place, flags):
        self.number = len(self.events) + 1
        while self.number in self.events:
            self.number += 1
        ctypes.cast(place, ctypes.POINTER(ctypes.c_void_p))[0] = self.number

    def cuEventRecord(self, event, stream):
        self.events[event.value] = of(stream).record_event()

    def cuStreamWaitEvent(self, stream, event, flags):
        of(stream).wait_event(self.events[event.value])

    @contextlib.contextmanager
    def on(self, device):
        self.pushed.append(device)
        yield

    def is_capturing(self, stream):
        return stream in self.capturing


class Case(unittest.TestCase):
    def setUp(self):
        global torch, cupy
        Stream.all.clear()
        self.default = Stream(0)
        self.side = Stream(0x77)
        self.current, self.cupys, self.device = self.default, CupyStream(0x99), OUR_DEVICE
        torch = types.ModuleType("torch")
        torch.Tensor, torch.version = Tensor, types.SimpleNamespace(hip=None)
        torch.autograd = types.SimpleNamespace(graph=types.SimpleNamespace())
        torch.cuda = types.SimpleNamespace(
            current_device=lambda: self.device, device=self.on_device, current_stream=lambda device: self.current, default_stream=lambda device: self.default, ExternalStream=lambda handle, device: of(handle))
        cupy = types.ModuleType("cupy")
        cupy.ndarray = Ndarray
        cupy.cuda = types.SimpleNamespace(
            get_current_stream=lambda device: self.cupys, ExternalStream=lambda handle, device: of(handle), Stream=types.SimpleNamespace(null=self.default),
            Device=lambda device: contextlib.nullcontext())
        self.driver = FakeDriver()
        self.ran = []
        for patch in (
            mock.patch.dict(sys.modules, {"torch": torch, "cupy": cupy}), mock.patch.object(_streams, "driver", lambda: self.driver),
            mock.patch.object(_streams, "held", _streams.Held()),
            mock.patch.object(library, "dm_all_reduce", lambda *arguments: self.runs(arguments[-1])),
            mock.patch.object(library, "dm_all_gather", lambda *arguments: self.runs(arguments[-1])),
            mock.patch.object(library, "dm_all_gatherv", lambda *arguments: self.runs(arguments[-1])),
            mock.patch.object(World, "device", OUR_DEVICE),
        ):
            patch.start()
            self.addCleanup(patch.stop)
        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"), world=World("cuda", world_size=8, rank=0, offline=True))
        self.addCleanup(mesh.close)
        self.group = mesh.get_group("tp")

    def runs(self, stream):
        """An operation of the library: it is put on the stream."""
        name = f"operation {len(self.ran)}"
        self.ran.append((stream, set(of(stream).before)))
        of(stream).put(name)
        return 0

    @contextlib.contextmanager
    def within(self, stream):
        """torch.cuda.stream(stream)."""
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextlib.contextmanager
    def on_device(self, device):
        """torch.cuda.device(device)."""
        before, self.device = self.device, device.index
        yield
        self.device = before

    def tensor(self, count=4):
        return Tensor(numpy.zeros(count, "float32"))


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


if __name__ == "__main__":
    unittest.main()
