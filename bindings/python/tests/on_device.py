"""Operations on cuda by way of the C library, in the order of streams: `devicemesh run -n 2 --
python tests/on_device.py FOLDER`, with tests/nccl/recorder in NCCL's place and
tests/nccl/device.c and events.c in the driver's. The stand-in writes into the log of each rank what
is put on which stream, and this program compares the log with what it expects.

A module that has the few functions of torch that the package calls stands in torch's place. Its
streams and events are the stand-in's.
"""

import contextlib
import ctypes
import os
import sys
import threading
import types

import numpy

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LOG = os.path.join(sys.argv[1], os.environ["RANK"])
os.environ["CUDA_LOG"] = LOG
open(LOG, "a").close()
cuda = ctypes.CDLL("libcuda.so.1")


def call(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    assert code == 0, (name, code)


class Event:
    def __init__(self, stream):
        self.number = ctypes.c_void_p()
        call("cuEventCreate", ctypes.byref(self.number), 0)
        call("cuEventRecord", self.number, ctypes.c_void_p(stream))


class Stream:
    def __init__(self, handle=None):
        made = ctypes.c_void_p()
        if handle is None:
            call("cuStreamCreate", ctypes.byref(made), 1)
        self.cuda_stream = handle if handle is not None else made.value

    def record_event(self):
        return Event(self.cuda_stream)

    def wait_event(self, event):
        call("cuStreamWaitEvent", ctypes.c_void_p(self.cuda_stream), event.number, 0)


class Tensor:
    is_cuda, device = True, types.SimpleNamespace(index=RANK)

    def __init__(self, values):
        self.values, self.streams = values, []

    def __dlpack_device__(self):
        return 2, RANK

    def __dlpack__(self, *, stream, max_version=None):
        handle = 0 if stream == 1 else stream
        if handle != state.current.cuda_stream:
            Stream(handle).wait_event(state.current.record_event())
        capsule = self.values.__dlpack__()
        tensor = buffers.DLTensor.from_address(buffers._capsule_pointer(capsule, b"dltensor"))
        tensor.device_type, tensor.device_id = 2, RANK
        return capsule

    def record_stream(self, stream):
        self.streams.append(stream.cuda_stream)


class Interface:
    """An array that has __cuda_array_interface__ alone."""

    def __init__(self, values, stream):
        self.values = values
        self.__cuda_array_interface__ = {
            "shape": values.shape, "typestr": values.dtype.str, "data": (values.ctypes.data, False), "version": 3,
            "stream": stream
        }


default = Stream(0)
state = types.SimpleNamespace(current=default)
torch = types.ModuleType("torch")
torch.Tensor, torch.autograd = Tensor, types.SimpleNamespace(graph=None)
torch.cuda = types.SimpleNamespace(current_device=lambda: RANK, current_stream=lambda device: state.current,
                                   default_stream=lambda device: default,
                                   ExternalStream=lambda handle, device: Stream(handle), is_initialized=lambda: True)
sys.modules["torch"] = torch

from devicemesh import AbortedError, DimOptions, InvalidArgumentError, MeshTimeoutError, PeerLostError, World, buffers, finalize_default_worlds, init_device_mesh  # noqa: E402

mesh = init_device_mesh("cuda", (SIZE,), mesh_dim_names=("x",), timeout=60)
group = mesh.get_group()
assert mesh.world.device == RANK and group._device_number == RANK
side = Stream()


@contextlib.contextmanager
def expect(*lines):
    """What is put on streams within the block. Events have the numbers of their order there."""
    with open(LOG) as file:
        before = len(file.readlines())
    yield
    with open(LOG) as file:
        found = [line.split() for line in file.readlines()[before:] ]
    events = {}
    for words in found:
        if words[-2] in ("records", "waits"):
            words[-1] = f"event {events.setdefault(words[-1], len(events))}"
    found = [" ".join(words) for words in found]
    assert found == list(lines), f"\n{found}\n{list(lines)}"


def values():
    return numpy.full(4, RANK + 1.0)


right = SIZE * (SIZE + 1) / 2
tensor = Tensor(values())
with expect("stream 0 runs ncclAllReduce"):
    group.all_reduce(tensor)
assert tensor.values.tolist() == [right] * 4 and tensor.streams == [0]
tensor, state.current = Tensor(values()), side
with expect("stream 1 runs ncclAllReduce"):
    group.all_reduce(tensor)
assert tensor.streams == [side.cuda_stream]
mesh.wait()
state.current = default
# On another stream than the current one: the operation comes between what is before and after it.
with expect("stream 0 records event 0", "stream 1 waits event 0", "stream 1 runs ncclAllReduce",
            "stream 1 records event 1", "stream 0 waits event 1"):
    group.all_reduce(Tensor(values()), stream=side)
with expect("stream 0 records event 0", "stream 1 waits event 0", "stream 1 runs ncclAllReduce", "stream 1 records event 1"):
    work = group.all_reduce(Tensor(values()), stream=side, async_op=True)
with expect("stream 0 waits event 0"):
    work.wait()
with expect("stream 0 waits event 0"):
    work.wait(timeout=5)
os.environ["CUDA_BUSY"] = "1"
with expect("stream 0 waits event 0"):
    try:
        work.wait(timeout=0.2)
        raise AssertionError("the device is busy")
    except MeshTimeoutError:
        pass
del os.environ["CUDA_BUSY"]
with expect("stream 0 records event 0", "stream 1 waits event 0", "stream 1 runs ncclSend", "stream 1 runs ncclRecv",
            "stream 1 records event 1", "stream 0 waits event 1"):
    received = Tensor(numpy.zeros(4))
    with mesh.group():
        state.current = side
        group.send(Tensor(values()), (RANK + 1) % SIZE)
        state.current = default
        group.recv(received, (RANK - 1) % SIZE, stream=side)
assert received.values.tolist() == [(RANK - 1) % SIZE + 1.0] * 4
# Blocks that overlap are refused before anything of the group is put on a stream.
whole, other = numpy.zeros(3 * SIZE), numpy.zeros(3 * SIZE)
counts, mine = [3] * SIZE, slice(3 * RANK, 3 * RANK + 3)
for refused in (lambda: group.all_gather(Tensor(whole[1:4]), Tensor(whole), counts=counts),
                lambda: group.all_gather(Tensor(other[:3]), [Tensor(whole[rank:rank + 3]) for rank in range(SIZE)]),
                lambda: group.reduce_scatter(Tensor(whole), Tensor(whole[1:4]), counts=counts),
                lambda: group.all_to_all(Tensor(whole), Tensor(whole), send_counts=counts, recv_counts=counts)):
    with expect():
        try:
            with mesh.group():
                group.all_reduce(Tensor(values()))
                refused()
            raise AssertionError("the blocks overlap")
        except InvalidArgumentError as error:
            assert "overlap" in str(error), error
# In place and apart they may run.
with expect("stream 0 runs ncclAllReduce", *["stream 0 runs ncclBroadcast"] * SIZE, *["stream 0 runs ncclReduce"] * SIZE):
    with mesh.group():
        group.all_reduce(Tensor(values()))
        group.all_gather(Tensor(whole[mine]), Tensor(whole), counts=counts)
        group.reduce_scatter(Tensor(other), Tensor(other[mine]), counts=counts)
# The package's own events: an array that is being written on a stream, and that is held.
array = Interface(values(), side.cuda_stream)
with expect("stream 1 runs ncclAllReduce", "stream 1 records event 0"):
    group.all_reduce(array)
assert array.values.tolist() == [right] * 4
with expect("stream 1 records event 0", "stream 0 waits event 0", "stream 0 runs ncclAllReduce",
            "stream 0 records event 1", "stream 1 waits event 1", "stream 0 records event 2"):
    group.all_reduce(Interface(values(), side.cuda_stream), stream=0)
mesh.wait(side, timeout=5)
group.wait()


def refused_late():
    """The library refuses the second operation when the group ends, because another thread has
    ended its mesh. The first operation does not run alone, so its mesh ends, too."""
    first, second = (init_device_mesh("cuda", (SIZE,), mesh_dim_names=("x",), dim_options=[DimOptions(own_comm=True)], timeout=60)
                     for _ in range(2))
    reduced = Tensor(values())

    def end_second():
        group.barrier()  # the other rank has queued its operations, too
        second.abort()

    try:
        with first.group():
            first.get_group().all_reduce(reduced)
            second.get_group().all_reduce(Tensor(values()))
            ending = threading.Thread(target=end_second)
            ending.start()
            ending.join()
        raise AssertionError("the second mesh has ended")
    except (AbortedError, PeerLostError):
        pass
    try:
        first.check()
        raise AssertionError("the first operation was issued")
    except (AbortedError, PeerLostError):  # the other rank may be quicker
        outcome.append(reduced.values.tolist())
    first.abort()  # where the group has found the other rank's abort


# NCCL cannot end the group of that thread any more.
outcome = []
thread = threading.Thread(target=refused_late)
thread.start()
thread.join()
assert outcome == [[RANK + 1.0] * 4], outcome
mesh.finalize()
# A join on the main thread is made on another thread, which takes over the current device.
finalize_default_worlds()
call("cuCtxSetCurrent", ctypes.c_void_p(0x1000 + 5 - RANK))
with World("cuda", timeout=60) as world:
    assert world.device == 5 - RANK, world.device
default_world = World.default("cuda", timeout=60)
assert default_world.device == 5 - RANK, default_world.device
finalize_default_worlds()
print("fine", flush=True)
