#!/usr/bin/env python3
"""Writes torch_dtensor_shards.jsonl: which block of a tensor each rank of a DTensor holds, as
PyTorch says. Run with a Python that has PyTorch:

    python tests/vectors/generate_dtensor_shards.py > tests/vectors/torch_dtensor_shards.jsonl

One line is one case: world, shape and names of the root mesh, ranks (its rank array, or null),
view (names of dimensions; "a+b" is the flattened one), tensor (shape), placements (null, or
[tensor_dim, order]) and answers, each [rank, local shape, offsets].

Where an answer comes from: the data. A tensor that holds its own indices is distributed with
DTensor (fake process group, no communication) and the rank's local tensor is looked at: its shape,
and its first element, after checking that it is that contiguous block. Splits in another order than
the mesh's go through DTensorSpec.shard_order. An empty block has no first element: its offsets are
those of PyTorch's compute_local_shape_and_global_offset, which must agree about every other block
too. It splits from left to right, so for another order it is asked about the mesh with its
dimensions in that order.

PyTorch can also write a split order into placements, as _StridedShard. For some uneven sizes that
is a different split: the answer then has a fourth element, [local shape, offsets] as that function
gives them for such placements.
"""

import json
import math
import random
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset, compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

SEED = 7


def mesh_of(case):
    names = tuple(case["names"])
    ranks = torch.tensor(case["ranks"] if case["ranks"] else range(math.prod(case["shape"]))).view(case["shape"])
    root = DeviceMesh("cpu", ranks, mesh_dim_names=names)
    for name in case["view"]:
        if "+" in name:
            root[tuple(name.split("+"))]._flatten(name.replace("+", "_"))
    return root[tuple(name.replace("+", "_") for name in case["view"])]


def shard_order(placements):
    """(tensor_dim, mesh dims in the order in which they split it), for each tensor dimension that
    is split."""
    dims = sorted({placement[0] for placement in placements if placement})
    order = lambda dim: sorted((p[1], index) for index, p in enumerate(placements) if p and p[0] == dim)
    return tuple(ShardOrderEntry(tensor_dim=dim, mesh_dims=tuple(index for _, index in order(dim))) for dim in dims)


def answer(case, rank):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=case["world"])
    try:
        mesh = mesh_of(case)
        full = torch.arange(math.prod(case["tensor"])).view(case["tensor"])
        plain = tuple(Shard(placement[0]) if placement else Replicate() for placement in case["placements"])
        order = shard_order(case["placements"])
        default = order == DTensorSpec.compute_default_shard_order(plain)
        if default:
            local = distribute_tensor(full, mesh, plain, src_data_rank=None).to_local()
            written = plain
        else:
            meta = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)._spec.tensor_meta
            source = DTensorSpec(mesh, tuple(Replicate() for _ in plain), tensor_meta=meta, use_strided_shard_as_shard_order=False)
            target = DTensorSpec(mesh, plain, tensor_meta=meta, shard_order=order, use_strided_shard_as_shard_order=False)
            local = redistribute_local_tensor(full, source, target, use_graph_based_transform=True)
            written = DTensorSpec._convert_shard_order_to_StridedShard(order, plain, mesh)
        # Tensor dimensions do not meddle with each other, so one order of all mesh dimensions does
        # for all of them.
        by_order = sorted(range(mesh.ndim), key=lambda index: (case["placements"][index] or [0, 0])[1])
        pick = lambda values: [values[index] for index in by_order]
        said = _compute_local_shape_and_global_offset(torch.Size(case["tensor"]), pick(mesh.shape),
                                                      pick(mesh.get_coordinate()), pick(plain))
        said = [list(part) for part in said]
        assert list(local.shape) == said[0], (case, rank, said, local.shape)
        if local.numel() > 0:
            at = [int(index) for index in torch.unravel_index(local.flatten()[0], case["tensor"])]
            block = full[tuple(slice(start, start + size) for start, size in zip(at, local.shape))]
            assert torch.equal(local, block) and at == said[1], (case, rank, said, local)
        strided = [list(part) for part in compute_local_shape_and_global_offset(torch.Size(case["tensor"]), mesh, written)]
        assert not default or strided == said, (case, rank, said, strided)
        return [rank, *said] if strided == said else [rank, *said, strided]
    finally:
        dist.destroy_process_group()


def cases(random):
    fixed = [
        # FSDP x TP: the default order, and the one in which tensor parallelism splits first.
        ([2, 4], [16, 6], [[0, 0], [0, 0]]),
        ([2, 4], [16, 6], [[0, 1], [0, 0]]),
        # Fewer rows than ranks, none at all, one.
        ([8], [5], [[0, 0]]),
        ([4], [0, 3], [[0, 0]]),
        ([4], [1], [[0, 0]]),
        ([2, 4], [5], [[0, 0], [0, 0]]),
        ([2, 4], [5], [[0, 1], [0, 0]]),
        # PyTorch's _StridedShard is another split here.
        ([3, 2], [13], [[0, 1], [0, 0]]),
        ([2, 3], [7, 9], [[1, 0], [0, 0]]),
        ([2, 2, 2], [9, 4], [[0, 2], [0, 0], [0, 1]]),
        ([2, 2], [], [None, None]),
        ([1, 3], [4], [[0, 0], None]),
    ]
    for shape, tensor, placements in fixed:
        names = [f"d{index}" for index in range(len(shape))]
        yield {
            "world": math.prod(shape), "shape": shape, "names": names, "ranks": None, "view": names, "tensor": tensor,
            "placements": placements
        }
    for number in range(240):
        shape = [random.choice([1, 2, 2, 3, 4, 5]) for _ in range(random.choice([1, 2, 2, 3, 3]))]
        size = math.prod(shape)
        names = [f"d{index}" for index in range(len(shape))]
        world = size + random.choice([0, 0, 3])
        ranks = random.sample(range(world), size) if random.random() < 0.4 else None
        view = list(names)
        what = random.random()
        if what < 0.2:
            view = [name for name in names if random.random() < 0.6] or names[:1]
        elif what < 0.5 and len(names) > 1:
            start = random.randrange(len(names) - 1)
            joined = "+".join(names[start:start + 2])
            view = [*names[:start], joined, *names[start + 2:]]
        tensor = [random.choice([0, 1, 2, 3, 5, 6, 7, 8, 9, 11, 12, 13, 16, 24, 31]) for _ in range(random.choice([1, 1, 2, 3]))]
        placements = [None if random.random() < 0.2 else [random.randrange(len(tensor)), random.choice([0, 0, 0, 1, 2, -1])] for _ in view]
        yield {"world": world, "shape": shape, "names": names, "ranks": ranks, "view": view, "tensor": tensor, "placements": placements}


def main():
    print(f"PyTorch {torch.__version__}, seed {SEED}", file=sys.stderr)
    chosen = random.Random(SEED)
    for number, case in enumerate(cases(chosen)):
        members = case["ranks"] or list(range(math.prod(case["shape"])))
        asked = members if number < 12 else sorted(chosen.sample(members, min(5, len(members))))
        case["answers"] = [answer(case, rank) for rank in asked]
        print(json.dumps({"case": number, "torch": torch.__version__, **case}, separators=(",", ":")))


main()
