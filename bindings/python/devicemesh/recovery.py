"""What a recovery from lost ranks has come to."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Optional, Sequence, Tuple

from . import _declarations as declarations
from ._library import Timeout, check, flag, library, milliseconds, optional_text, within
from .options import DimOptionsLike, dim_options

__all__ = ["Recovery"]


@dataclass(frozen=True)
class Recovery:
    """What the recovery that made a mesh has come to (DeviceMesh.recovery).

    Attributes:
        epoch: the epoch of the mesh. The job starts in epoch 0.
        previous_epoch: the epoch of the mesh that this rank had before; None where it had none.
        lost_ranks: the world ranks that were lost or left out since that epoch.
        joined_ranks: the world ranks of the mesh that need the state of the training.
        old_coordinate: this rank's coordinate in the mesh before; None where it had none.
        new_coordinate: this rank's coordinate in the mesh; None where it is not in the mesh.
        state_root: the rank along the dimension of replicas that has the state of this rank's
            shard; None where no rank has it.
        has_joined: whether this rank is one of joined_ranks.
    """

    epoch: int
    previous_epoch: Optional[int]
    lost_ranks: Tuple[int, ...]
    joined_ranks: Tuple[int, ...]
    old_coordinate: Optional[Tuple[int, ...]]
    new_coordinate: Optional[Tuple[int, ...]]
    state_root: Optional[int]
    has_joined: bool


def recovery_of(handle: Any) -> Recovery:
    """The answer of the library for a mesh handle."""
    # The lists of the answer belong to the mesh, and another thread may close its handle.
    own = ctypes.c_void_p()
    check(library.dm_clone(handle, ctypes.byref(own)))
    try:
        told = declarations.Recovery(struct_size=ctypes.sizeof(declarations.Recovery))
        check(library.dm_get_recovery(own, ctypes.byref(told)))

        def coordinate(first: Any) -> Optional[Tuple[int, ...]]:
            return tuple(first[:told.ndim]) if first else None

        return Recovery(
            epoch=told.epoch, previous_epoch=None if told.previous_epoch < 0 else told.previous_epoch,
            lost_ranks=tuple(told.lost_ranks[:told.num_lost]), joined_ranks=tuple(told.joined_ranks[:told.num_joined]),
            old_coordinate=coordinate(told.old_coordinate), new_coordinate=coordinate(told.new_coordinate),
            state_root=None if told.state_root == declarations.RANK_NONE else told.state_root, has_joined=bool(told.has_joined))
    finally:
        library.dm_free(own)


def recover_options(names: Sequence[str], mesh_dim: Any, timeout: Timeout, replace: Timeout, silent: Timeout, min_size: int,
                    has_state: bool, any_state: bool, grow: bool, max_size: int, wishes: DimOptionsLike) -> Any:
    """Makes dm_recover_options. ``names`` are those of the mesh's dimensions."""
    flags = (declarations.RECOVER_HAS_STATE if flag("has_state", has_state) else 0)
    flags |= declarations.RECOVER_ANY_STATE if flag("any_state", any_state) else 0
    flags |= declarations.RECOVER_GROW if flag("grow", grow) else 0
    each = dim_options(wishes, len(names), names)
    # ctypes keeps the array alive that is assigned to the pointer.
    return declarations.RecoverOptions(
        struct_size=ctypes.sizeof(declarations.RecoverOptions), flags=flags, min_size=within("min_size", min_size, 0, 2**31 - 1),
        dim=optional_text("mesh_dim", mesh_dim), timeout_ms=milliseconds(timeout), replace_ms=milliseconds(replace),
        silent_ms=milliseconds(silent), dim_options=each, num_dim_options=len(each or ()),
        max_size=within("max_size", max_size, 0, 2**31 - 1))


def refused_recovery() -> Any:
    """Options that every recovery refuses."""
    return ctypes.byref(declarations.RecoverOptions(struct_size=ctypes.sizeof(declarations.RecoverOptions), timeout_ms=-1))
