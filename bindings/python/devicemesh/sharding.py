"""Computes which block of a tensor a rank holds, from PyTorch's placements."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Optional, Protocol, Sequence, Tuple, Union

from . import _declarations as declarations
from ._library import check, int32, library, sizes
from .errors import InvalidArgumentError

__all__ = ["Partial", "Placement", "Replicate", "Shard", "local_shard"]


@dataclass(frozen=True)
class Replicate:
    """Every rank along the mesh dimension holds the same block."""


@dataclass(frozen=True)
class Shard:
    """The mesh dimension splits dimension ``dim`` of the tensor.

    Among the mesh dimensions that shard one tensor dimension, the one with the lowest ``order``
    splits first. Equal orders split in the order of the mesh. With all orders 0 the split is
    PyTorch's.
    """

    dim: int
    order: int = 0


@dataclass(frozen=True)
class Partial:
    """Every rank along the mesh dimension holds a part of a sum (or of another reduction) that is
    still to be made. Each part has the whole shape, so Partial cuts nothing."""


Placement = Union[Replicate, Shard, Partial]


class MeshHandle(Protocol):
    """The part of a mesh that this module needs."""

    _handle: int

    @property
    def ndim(self) -> int:
        """The number of dimensions."""


def local_shard(
    mesh: MeshHandle, tensor_shape: Sequence[int], placements: Sequence[Placement], rank: Optional[int] = None
) -> Tuple[Tuple[int, ...], Tuple[int, ...]]:
    """The shape and the offsets of one rank's block of a tensor, as PyTorch's DTensor answers.
    Local.

    ``placements`` has one element per dimension of the mesh; ``rank`` is a world rank, this
    process's by default. On a mesh (fsdp=2, tp=4) rank 6 has

        >>> local_shard(mesh, (16, 8), (Shard(0), Shard(0)))               # fsdp first
        ((2, 8), (12, 0))
        >>> local_shard(mesh, (16, 8), (Shard(0, order=1), Shard(0)))      # tp first
        ((2, 8), (10, 0))
    """
    shape = sizes("tensor_shape", tensor_shape)
    asked = -1 if rank is None else int32("rank", rank)
    if rank is not None and asked < 0:
        raise InvalidArgumentError(f"rank is {rank}; a world rank is not negative")
    structs = (declarations.Placement * len(placements))(*(_struct(placement, len(shape)) for placement in placements))
    local, offset = (ctypes.c_size_t * len(shape))(), (ctypes.c_size_t * len(shape))()
    check(library.dm_local_shard(mesh._handle, structs, len(structs), shape, len(shape), asked, local, offset))
    return tuple(local), tuple(offset)


def _struct(placement: Placement, ndim: int) -> declarations.Placement:
    if isinstance(placement, Replicate):
        return declarations.Placement(kind=declarations.REPLICATE)
    if isinstance(placement, Partial):
        return declarations.Placement(kind=declarations.PARTIAL)
    if isinstance(placement, Shard):
        # A negative dimension counts from the end, as in Python. The library refuses one that is
        # still negative.
        dim = int32("Shard.dim", placement.dim)
        return declarations.Placement(declarations.SHARD, dim + ndim if -ndim <= dim < 0 else dim, int32("Shard.order", placement.order))
    raise TypeError(f"a placement is a {type(placement).__name__}, not Replicate(), Shard(dim) or Partial()")
