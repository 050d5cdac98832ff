"""The end of the interpreter.

When the interpreter ends, threads of the program may be in calls of the library. Threads of the
library itself may write the last notes of a rank. These threads must not call a store in Python
any more when the interpreter has ended. So the worlds with such a store are aborted first, which
ends the calls.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import time
import weakref
from typing import Any

from ._library import library
from .stores import Callbacks

__all__ = ["end_at_exit", "meshes"]

# How many seconds the interpreter's exit waits for the end of these worlds.
LONGEST = 1.0
# The meshes of this process by handle.
meshes: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
# The worlds with a store in Python.
worlds: "weakref.WeakSet[Any]" = weakref.WeakSet()
# The process that made the last of these worlds.
owner = 0


def end_at_exit(world: Any) -> None:
    """Ends this world at the interpreter's exit, unless it has ended before. The world has a
    finalizer already, so weakref has registered its own exit function, which frees the handles.
    Exit functions run in the reverse order, so `stop` finds the handles alive."""
    global owner
    worlds.add(world)
    if owner == 0:
        atexit.register(stop)
    owner = os.getpid()


def stop() -> None:
    if os.getpid() != owner or not Callbacks.alive:
        return
    # Nobody knows whether the world of a mesh from lookup() has such a store.
    theirs = [mesh for mesh in list(meshes.values()) if mesh._world in worlds or getattr(mesh._world, "_is_default", True) is None]
    for world in list(worlds):
        library.dm_world_abort(world._handle)
    for mesh in theirs:  # the World may be closed
        handle = ctypes.c_void_p()
        if library.dm_get_world(mesh._handle, ctypes.byref(handle)) == 0:
            library.dm_world_abort(handle)
            library.dm_world_free(handle)
    for each in [*theirs, *worlds]:
        each.close()
    until = time.monotonic() + LONGEST
    while Callbacks.alive and time.monotonic() < until:
        time.sleep(0.001)
