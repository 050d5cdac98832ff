"""Stand-ins for torch, CuPy, JAX, the CUDA driver and the collectives, which keep the order as CUDA
does: each stream knows what comes before its next work. So a test can ask whether an operation
comes after what was put on another stream."""

import contextlib
import ctypes
import sys
import types
import unittest
from unittest import mock

import numpy

from devicemesh import World, _streams, buffers, init_device_mesh
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
        self._cuda = types.SimpleNamespace(cuEventQuery=lambda event: 600 if self.is_busy else 0,
                                           cuEventDestroy_v2=lambda event: self.events.pop(event.value))

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
            current_device=lambda: self.device, device=self.on_device, current_stream=lambda device: self.current,
            default_stream=lambda device: self.default, ExternalStream=lambda handle, device: of(handle))
        cupy = types.ModuleType("cupy")
        cupy.ndarray = Ndarray
        cupy.cuda = types.SimpleNamespace(
            get_current_stream=lambda device: self.cupys, ExternalStream=lambda handle, device: of(handle),
            Stream=types.SimpleNamespace(null=self.default), Device=lambda device: contextlib.nullcontext())
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
