"""Each of eight ranks runs the programs of PyTorch's DeviceMesh tutorial with PyTorch (gloo) and
with the Python package. Both must have equal groups and ranks, and an all-reduce over each
dimension must give equal results. All ranks meet in one store."""

import pickle

import devicemesh
import torch
import torch.distributed as dist
from ours import say
from torch.distributed.device_mesh import init_device_mesh as torch_mesh

dist.init_process_group("gloo")
RANK = dist.get_rank()


def refuses(kind, text, ask):
    try:
        ask()
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"{text} was expected")


def same_group(theirs, ours):
    assert dist.get_process_group_ranks(theirs) == list(ours.ranks)
    assert (dist.get_rank(theirs), theirs.size()) == (ours.rank, ours.size)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8):
        expected, mine = (torch.arange(12).reshape(3, 4).add(RANK % 5).to(dtype) for _ in range(2))
        out = torch.zeros_like(mine)
        dist.all_reduce(expected, group=theirs)
        ours.all_reduce(mine, out)
        assert torch.equal(out, expected), (ours, dtype, out, expected)
        ours.all_reduce(mine)
        assert torch.equal(mine, expected), (ours, dtype, mine, expected)


def same_mesh(theirs, ours):
    assert repr(theirs) == repr(ours)
    assert theirs.mesh.tolist() == ours.mesh.tolist()
    assert tuple(theirs.shape) == ours.shape and theirs.ndim == ours.ndim and theirs.size() == ours.size()
    assert theirs.mesh_dim_names == ours.mesh_dim_names and theirs.device_type == ours.device_type
    assert tuple(theirs.get_coordinate()) == ours.get_coordinate() and theirs.get_rank() == ours.get_rank()
    for index, name in enumerate(theirs.mesh_dim_names):
        assert theirs.get_local_rank(name) == ours.get_local_rank(name) == ours.get_local_rank(index)
        assert theirs.size(index) == ours.size(index)
        same_group(theirs.get_group(name), ours.get_group(name))
    assert (theirs == pickle.loads(pickle.dumps(theirs))) and (ours == pickle.loads(pickle.dumps(ours)))


# "How to set up 2D communicators with DeviceMesh", and by hand, as the tutorial does it first.
theirs = torch_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
ours = devicemesh.init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
same_mesh(theirs, ours)
shard_groups = ((0, 1, 2, 3), (4, 5, 6, 7))
replicate_groups = ((0, 4), (1, 5), (2, 6), (3, 7))
assert ours.get_group("shard").ranks == next(group for group in shard_groups if RANK in group)
assert ours.get_group(mesh_dim="replicate").ranks == next(group for group in replicate_groups if RANK in group)

# "How to use DeviceMesh for custom parallel solutions": HSDP and tensor parallelism out of one 3-D
# mesh. Ours meets in PyTorch's own store.
store = devicemesh.TorchStore(dist.distributed_c10d._get_default_store())
world = devicemesh.World("cpu", world_size=dist.get_world_size(), rank=RANK, store=store)
their_3d = torch_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
our_3d = devicemesh.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"), world=world)
same_mesh(their_3d, our_3d)
same_mesh(their_3d["replicate", "shard"], our_3d["replicate", "shard"])
for name in ("replicate", "shard", "tp"):
    same_mesh(their_3d[name], our_3d[name])
    assert [list(group) for group in our_3d.replica_groups(name)] == [each.mesh.tolist() for each in their_3d._get_all_submeshes(name)]
same_mesh(their_3d["replicate", "shard"]._flatten("dp"), our_3d["replicate", "shard"]._flatten("dp"))
same_mesh(their_3d._unflatten("shard", (2, 1), ("a", "b")), our_3d._unflatten("shard", (2, 1), ("a", "b")))

# Tensors that cannot be used as they lie.
tp = our_3d.get_group("tp")
refuses(ValueError, "not contiguous", lambda: tp.all_reduce(torch.zeros(3, 4).t()))
refuses(ValueError, "require", lambda: tp.all_reduce(torch.zeros(3, requires_grad=True)))
refuses(TypeError, "complex64", lambda: tp.all_reduce(torch.zeros(3, dtype=torch.complex64)))
refuses(TypeError, "bool", lambda: tp.all_reduce(torch.zeros(3, dtype=torch.bool)))
refuses(ValueError, "float32", lambda: tp.all_reduce(torch.zeros(3), torch.zeros(3, dtype=torch.int32)))
gloo = their_3d.get_group("tp")
refuses(devicemesh.UnsupportedError, "no NCCL communicator", lambda: devicemesh.DeviceMesh.from_group(gloo, "cpu", [0, 1]))
gathered = torch.zeros(2, 3, dtype=torch.bfloat16)
tp.all_gather(torch.full((3,), RANK, dtype=torch.bfloat16), gathered)
assert gathered.tolist() == [[rank] * 3 for rank in tp.ranks]

ours.finalize()
our_3d.finalize()
dist.barrier()
say(f"tutorial fine: rank {RANK}")
dist.destroy_process_group()
