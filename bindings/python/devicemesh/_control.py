"""Bytes between the ranks of a dimension or of a world, through the store."""

from __future__ import annotations

import ctypes
from typing import Any, Callable, ContextManager, List

from . import _interrupt as interrupt
from ._library import Deadline, check, library, telling

__all__ = ["Refusals", "all_gather", "barrier", "broadcast", "group_refusals", "world_all_gather", "world_broadcast", "world_refusals"]

# No call of the library takes this timeout.
REFUSED = -1


class Refusals:
    """For each function of the control plane of a group or a world: with it a refusal by this
    package is told to the other ranks (telling)."""

    def __init__(self, barrier: Any, gather: Any, broadcast: Any, *place: Any) -> None:
        self._functions, self._place = (barrier, gather, broadcast), place

    def barrier(self) -> ContextManager[None]:
        return telling(self._functions[0], *self._place, REFUSED)

    def gather(self) -> ContextManager[None]:
        return telling(self._functions[1], *self._place, None, 0, REFUSED, ctypes.byref(ctypes.c_void_p()))

    def broadcast(self) -> ContextManager[None]:
        return telling(self._functions[2], *self._place, None, 0, 0, REFUSED, ctypes.byref(ctypes.c_void_p()))


def group_refusals(group: Any) -> Refusals:
    return Refusals(library.dm_barrier, library.dm_all_gather_bytes, library.dm_broadcast_bytes, group._handle, group._dim)


def world_refusals(world: Any) -> Refusals:
    return Refusals(library.dm_world_barrier, library.dm_world_all_gather_bytes, library.dm_world_broadcast_bytes, world._handle)


def barrier(group: Any, deadline: Deadline) -> None:
    check(interrupt.call(group._end, library.dm_barrier, group._handle, group._dim, deadline.milliseconds()))


def all_gather(group: Any, data: bytes, deadline: Deadline) -> List[bytes]:
    return taken(group._end, library.dm_all_gather_bytes, group._handle, group._dim, data, len(data), deadline.milliseconds())


def broadcast(group: Any, data: bytes, root: int, deadline: Deadline) -> bytes:
    return taken(group._end, library.dm_broadcast_bytes, group._handle, group._dim, data, len(data), root, deadline.milliseconds())[0]


def world_all_gather(world: Any, data: bytes, deadline: Deadline) -> List[bytes]:
    return taken(world._end, library.dm_world_all_gather_bytes, world._handle, data, len(data), deadline.milliseconds())


def world_broadcast(world: Any, data: bytes, root: int, deadline: Deadline) -> bytes:
    return taken(world._end, library.dm_world_broadcast_bytes, world._handle, data, len(data), root, deadline.milliseconds())[0]


def taken(end: interrupt.End, function: Callable[..., int], *arguments: Any) -> List[bytes]:
    """The bytes that function(arguments, buffers_out) gives."""
    buffers = ctypes.c_void_p()
    try:
        check(interrupt.call(end, function, *arguments, ctypes.byref(buffers)))
        return [element(buffers, index) for index in range(library.dm_buffers_count(buffers))]
    finally:
        library.dm_buffers_free(buffers)


def element(buffers: ctypes.c_void_p, index: int) -> bytes:
    data, length = ctypes.c_void_p(), ctypes.c_size_t()
    check(library.dm_buffers_get(buffers, index, ctypes.byref(data), ctypes.byref(length)))
    return ctypes.string_at(data.value or 0, length.value)
