"""PyTorch's NCCL communicator, adopted through its pointer by the Python package: under torchrun or
devicemesh run. Processes may share a GPU where NCCL lets them (NCCL_HOSTID, see run.sh).

Tensors go in by DLPack, on PyTorch's current stream, and come out as PyTorch's own all-reduce of
the same group leaves them. DM_CCL_LIBRARY becomes the copy of NCCL that PyTorch has loaded. With
the argument "other" it stays the copy that run.sh chose, which is another one: the package must
then adopt through PyTorch's copy, or refuse with an error that says so.
"""

import os
import sys

from nccl_copy import follow_loaded, loaded, seen, skip

try:
    import torch
except ImportError as error:
    skip(f"no PyTorch in {sys.executable}: {error}")
if not torch.cuda.is_available():
    skip(f"PyTorch {torch.__version__} sees no GPU")
import torch.distributed as dist

OTHER = sys.argv[1:] == ["other"]
if OTHER and os.path.realpath(os.environ["DM_CCL_LIBRARY"]) in map(os.path.realpath, loaded()):
    skip("run.sh chose PyTorch's own copy of NCCL")
if not OTHER:
    follow_loaded()
import devicemesh

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
rank, size = dist.get_rank(), dist.get_world_size()

dist.all_reduce(torch.zeros(1, device=device))  # PyTorch makes its communicator by now
seen("copies of NCCL that PyTorch has loaded", loaded())
try:
    mesh = devicemesh.DeviceMesh.from_group(dist.group.WORLD, "cuda", mesh_dim_names=("all",))
except devicemesh.DeviceMeshError as error:
    seen("adopting with DM_CCL_LIBRARY of another copy", f"{type(error).__name__}: {error}")
    os._exit(0 if OTHER and "copy" in str(error) else 1)
seen("copies of NCCL after the adoption", loaded())
group = mesh.get_group("all")
assert group.handle == dist.group.WORLD._get_backend(device)._comm_ptr(), "it is PyTorch's own communicator"
assert (group.rank, group.size, group.ranks) == (rank, size, tuple(range(size)))
for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
    theirs, ours = (torch.arange(1 << 16, device=device).remainder(7).add(rank).to(dtype) for _ in range(2))
    dist.all_reduce(theirs)
    group.all_reduce(ours, stream=torch.cuda.current_stream())
    assert torch.equal(ours, theirs), (dtype, ours, theirs)
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    gathered = torch.zeros(size, 3, device=device)
    group.all_gather(torch.full((3,), float(rank), device=device), gathered, stream=stream)
stream.synchronize()
assert gathered.tolist() == [[float(each)] * 3 for each in range(size)]
for text, tensor in (("memory", torch.zeros(3)), ("not contiguous", torch.zeros(3, 4, device=device).t())):
    try:
        group.all_reduce(tensor)
        raise AssertionError(f"{text} was expected")
    except (ValueError, devicemesh.DeviceMeshError) as error:
        assert text in str(error), error
mesh.close()
# PyTorch's communicator is still its own to use and to end.
dist.all_reduce(torch.zeros(1, device=device))
torch.cuda.synchronize()
os.write(1, f"adopted fine: rank {rank}\n".encode())
dist.destroy_process_group()
