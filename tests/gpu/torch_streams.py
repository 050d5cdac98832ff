"""PyTorch's streams and the collectives of the Python package: results are right inside
torch.cuda.stream(s) without any wait of the program's, tensors may be freed right after a call, and
memory that is not of this GPU is refused. Point 4 of the list in docs/gpu-results.md."""

import os
import sys

from nccl_copy import follow_loaded, seen, skip

try:
    import torch
except ImportError as error:
    skip(f"no PyTorch in {sys.executable}: {error}")
if not torch.cuda.is_available():
    skip(f"PyTorch {torch.__version__} sees no GPU")
import torch.distributed  # noqa: E402, F401  # loads NCCL

follow_loaded()
import devicemesh  # noqa: E402

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
torch.cuda.set_device(device)
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ROUNDS, LENGTH, CYCLES = 20, 1 << 20, 20_000_000
mesh = devicemesh.init_device_mesh("cuda", (SIZE,), mesh_dim_names=("all",))
group = mesh.get_group("all")
group.all_reduce(torch.ones(8, device=device))  # connects
torch.cuda.synchronize()
wanted = float(SIZE * (SIZE + 1) // 2)
failures = []


def rounds(what, once):
    """How often one round gives a wrong sum."""
    wrong = sum(not bool((once(number) == wanted).all()) for number in range(ROUNDS))
    seen(what, f"{wrong} of {ROUNDS} wrong")
    if wrong:
        failures.append(what)


def producer_on_side_stream(_):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        tensor = torch.zeros(LENGTH, device=device)
        torch.cuda._sleep(CYCLES)  # what the tensor holds is written late
        tensor += RANK + 1
        group.all_reduce(tensor)
        result = tensor.clone()  # on the same stream, behind the collective or not
    stream.synchronize()
    return result


def consumer_on_side_stream(_):
    stream = torch.cuda.Stream()
    tensor = torch.full((LENGTH,), float(RANK + 1), device=device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        gathered = torch.full((LENGTH,), -1.0, device=device)
        torch.cuda._sleep(CYCLES if RANK == 0 else 0)
        gathered.copy_(tensor)
        group.all_reduce(gathered)
        result = gathered * 1
    stream.synchronize()
    return result


def freed_at_once(_):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        tensor = torch.full((LENGTH,), float(RANK + 1), device=device)
    torch.cuda.current_stream().wait_stream(stream)
    result = torch.empty(LENGTH, device=device)
    torch.cuda._sleep(CYCLES)
    group.all_gather(tensor[:1].clone(), torch.empty(SIZE, device=device))
    group.all_reduce(tensor)
    result.copy_(tensor)
    del tensor  # PyTorch may give the memory to the next allocation of `stream`
    with torch.cuda.stream(stream):
        torch.full((LENGTH,), -7.0, device=device)
    torch.cuda.synchronize()
    return result


rounds("all-reduce inside torch.cuda.stream, written late", producer_on_side_stream)
rounds("all-reduce inside torch.cuda.stream, read at once", consumer_on_side_stream)
rounds("tensor freed right after its collective", freed_at_once)
for what, tensor in (("host memory", torch.zeros(4)), ("pinned host memory", torch.zeros(4).pin_memory())):
    try:
        group.all_reduce(tensor)
        torch.cuda.synchronize()
        failures.append(what)
        seen(f"all-reduce of {what}", "was accepted")
    except (ValueError, devicemesh.DeviceMeshError) as error:
        seen(f"all-reduce of {what}", f"{type(error).__name__}: {error}")
mesh.finalize()
if failures:
    print("not so:", failures, flush=True)
os.write(1, f"TORCH={torch.__version__}\n".encode())
sys.stdout.flush()
os._exit(1 if failures else 0)
