"""Bytes between the ranks of a dimension or of a world, through the store."""

from __future__ import annotations

import ctypes
from typing import Any, Callable, List

from . import _interrupt as interrupt
from ._library import Timeout, check, library, milliseconds

__all__ = ["all_gather", "barrier", "broadcast", "world_all_gather", "world_broadcast"]


def barrier(group: Any, timeout: Timeout) -> None:
    check(interrupt.call(group._end, library.dm_barrier, group._handle, group._dim, milliseconds(timeout)))


def all_gather(group: Any, data: bytes, timeout: Timeout) -> List[bytes]:
    return taken(group._end, library.dm_all_gather_bytes, group._handle, group._dim, data, len(data), milliseconds(timeout))


def broadcast(group: Any, data: bytes, root: int, timeout: Timeout) -> bytes:
    return taken(group._end, library.dm_broadcast_bytes, group._handle, group._dim, data, len(data), root, milliseconds(timeout))[0]


def world_all_gather(world: Any, data: bytes, timeout: Timeout) -> List[bytes]:
    return taken(world._end, library.dm_world_all_gather_bytes, world._handle, data, len(data), milliseconds(timeout))


def world_broadcast(world: Any, data: bytes, root: int, timeout: Timeout) -> bytes:
    return taken(world._end, library.dm_world_broadcast_bytes, world._handle, data, len(data), root, milliseconds(timeout))[0]


def taken(end: interrupt.End, function: Callable[..., int], *arguments: Any) -> List[bytes]:
    """The bytes that function(arguments, buffers_out) gives."""
    buffers = ctypes.c_void_p()
    check(interrupt.call(end, function, *arguments, ctypes.byref(buffers)))
    try:
        return [element(buffers, index) for index in range(library.dm_buffers_count(buffers))]
    finally:
        library.dm_buffers_free(buffers)


def element(buffers: ctypes.c_void_p, index: int) -> bytes:
    data, length = ctypes.c_void_p(), ctypes.c_size_t()
    check(library.dm_buffers_get(buffers, index, ctypes.byref(data), ctypes.byref(length)))
    return ctypes.string_at(data.value or 0, length.value)
