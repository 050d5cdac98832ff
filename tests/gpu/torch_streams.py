"""PyTorch's streams and the Python package, on a GPU: under devicemesh run or torchrun, with two
ranks or more. Processes may share a GPU where NCCL lets them (NCCL_HOSTID, see run.sh).

Every case makes the GPU busy before the data is there, so that an operation on the wrong stream, or
one for which nobody waits, gives wrong numbers. Each rank prints a line "ok NAME" or "failed NAME:
why" for each case, which run.sh keeps as seen. It exits with 1 when a case has failed.
"""

import os
import sys
import threading
import traceback

from nccl_copy import follow_loaded, seen, skip

# JAX would take three quarters of the GPU's memory, which other ranks may share.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
try:
    import torch
    import torch.distributed  # noqa: F401  # loads NCCL
except ImportError as error:
    skip(f"no PyTorch in {sys.executable}: {error}")
if not torch.cuda.is_available():
    skip(f"PyTorch {torch.__version__} sees no GPU")
follow_loaded()
import devicemesh  # noqa: E402

device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
torch.cuda.set_device(device)
mesh = devicemesh.init_device_mesh("cuda", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("x",), timeout=120)
group = mesh.get_group()
rank, size = group.rank, group.size
COUNT, BUSY = 1 << 20, 200_000_000  # elements; cycles, about a tenth of a second
RIGHT = size * (size + 1) / 2
cases = []


def case(function):
    cases.append(function)
    return function


def busy():
    """The current stream is busy for some time. What is put on it afterwards is late."""
    torch.cuda._sleep(BUSY)


def produced():
    """A tensor of this rank that gets its numbers late, on the current stream."""
    tensor = torch.zeros(COUNT, device=device)
    busy()
    return tensor.fill_(rank + 1)


def expect(tensor, right, what="the result"):
    found = tensor.unique().tolist()
    assert found == [right], f"{what} is {found[:8]}, not {right}"


@case
def the_default_stream():
    tensor = produced()
    group.all_reduce(tensor)
    expect(tensor.clone(), RIGHT)


@case
def the_current_stream():
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        tensor = produced()
        group.all_reduce(tensor)
        copy = tensor.clone()
    stream.synchronize()
    expect(copy, RIGHT)


@case
def a_stream_that_is_named():
    side = torch.cuda.Stream(device)
    tensor = produced()
    group.all_reduce(tensor, stream=side)
    expect(tensor.clone(), RIGHT)


@case
def asynchronous_on_a_named_stream():
    side = torch.cuda.Stream(device)
    tensor = produced()
    with torch.cuda.stream(side):
        busy()
    work = group.all_reduce(tensor, stream=side, async_op=True)
    work.wait()
    expect(tensor.clone(), RIGHT)


@case
def waited_for_on_another_stream():
    first, second = torch.cuda.Stream(device), torch.cuda.Stream(device)
    with torch.cuda.stream(first):
        tensor = produced()
        work = group.all_reduce(tensor, async_op=True)
    with torch.cuda.stream(second):
        work.wait()
        copy = tensor.clone()
    second.synchronize()
    expect(copy, RIGHT)


@case
def memory_that_is_freed_early():
    """The allocator must not give the memory to another tensor before the operation has read it."""
    side = torch.cuda.Stream(device)
    gathered = torch.zeros(size * COUNT, device=device)
    with torch.cuda.stream(side):
        busy()
    tensor = torch.full((COUNT,), float(rank), device=device)
    work = group.all_gather(tensor, gathered, stream=side, async_op=True)
    address = tensor.data_ptr()
    del tensor
    others = [torch.full((COUNT,), -1.0, device=device) for _ in range(4)]
    assert address not in [other.data_ptr() for other in others], "the memory was given away while the stream was busy"
    work.wait()
    for each in range(size):
        expect(gathered[each * COUNT : (each + 1) * COUNT], each, f"the block of rank {each}")


@case
def a_group():
    side = torch.cuda.Stream(device)
    sent, received = produced(), torch.zeros(COUNT, device=device)
    with mesh.group():
        group.send(sent, (rank + 1) % size, stream=side)
        group.recv(received, (rank - 1) % size, stream=side)
    expect(received.clone(), (rank - 1) % size + 1)


@case
def a_thread_of_its_own():
    """The thread has made no CUDA call before."""
    found = []

    def run():
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            tensor = produced()
            group.all_reduce(tensor)
            found.append(tensor.clone())
        stream.synchronize()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    expect(found[0], RIGHT)


@case
def a_cuda_graph():
    tensor, right = torch.full((COUNT,), rank + 1.0, device=device), RIGHT
    group.all_reduce(tensor.clone())  # NCCL connects before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        group.all_reduce(tensor)
    for replay in range(3):
        graph.replay()
        torch.cuda.synchronize()
        expect(tensor, right, f"the result of replay {replay}")
        right *= size
    del graph  # graphs end before their mesh


@case
def other_memory_is_refused():
    wrong = [("cpu memory", torch.zeros(3)), ("cpu memory", torch.zeros(3).pin_memory())]
    if torch.cuda.device_count() > 1:
        wrong.append(("lies on device", torch.zeros(3, device=torch.device("cuda", (device.index + 1) % torch.cuda.device_count()))))
    for text, tensor in wrong:
        try:
            group.all_reduce(tensor)
        except ValueError as error:
            assert text in str(error), error
        else:
            raise AssertionError(f"{text} was expected")


@case
def a_wait_with_a_deadline():
    tensor = produced()
    if rank == 0:
        group.all_reduce(tensor)
        try:
            mesh.wait(timeout=2)
        except devicemesh.MeshTimeoutError:
            pass
        else:
            raise AssertionError("the peers have not called yet")
        mesh.world.barrier()
    else:
        mesh.world.barrier()
        group.all_reduce(tensor)
    mesh.wait(timeout=60)
    expect(tensor, RIGHT)


@case
def cupy():
    try:
        import cupy as cp
    except ImportError:
        return "cupy is not installed"
    with cp.cuda.Device(device.index), cp.cuda.Stream(non_blocking=True) as stream:
        array = cp.full(COUNT, rank + 1, dtype=cp.float32)
        group.all_reduce(array)
        copy = array.copy()
        stream.synchronize()
        assert cp.unique(copy).tolist() == [RIGHT], cp.unique(copy).tolist()[:8]
    return None


@case
def jax():
    """The array is read, and the result is torch's."""
    try:
        import jax as module
        import jax.numpy as jnp
    except ImportError:
        return "jax is not installed"
    mine = [each for each in module.local_devices() if each.platform == "gpu" and each.id == device.index]
    if not mine:
        return "jax sees no such GPU"
    gathered = torch.zeros(size * COUNT, device=device)
    group.all_gather(module.device_put(jnp.full(COUNT, rank, dtype=jnp.float32), mine[0]) * 1, gathered)
    for each in range(size):
        expect(gathered[each * COUNT : (each + 1) * COUNT], each, f"the block of rank {each}")
    return None


failed = 0
for function in cases:
    try:
        skipped = function()
        line = f"skipped {function.__name__}: {skipped}" if skipped else f"ok {function.__name__}"
    except BaseException as error:
        failed += 1
        traceback.print_exc()
        line = f"failed {function.__name__}: {type(error).__name__}: {error}"
    seen("PyTorch's streams", line)
    try:
        # All ranks begin the next case together, also after a failure.
        torch.cuda.synchronize()
        mesh.world.barrier(timeout=60)
    except BaseException as error:
        os.write(1, f"rank {rank}: failed after {function.__name__}: {error}\n".encode())
        mesh.abort()
        sys.exit(1)
mesh.finalize()
sys.exit(1 if failed else 0)
