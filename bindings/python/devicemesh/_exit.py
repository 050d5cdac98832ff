"""The end of the interpreter.

When the interpreter ends, threads of the program may be in calls of the library. Threads of the
library itself may write the last notes of a rank. These threads must not call a store in Python
any more when the interpreter has ended. So the worlds with such a store are aborted first, which
ends the calls. This includes worlds that are still being joined, because the join may be on a
daemon thread.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import time
import weakref
from typing import Any, Callable

from ._library import library
from .errors import InvalidStateError
from .stores import Callbacks

__all__ = ["begin_join", "end_at_exit", "meshes", "watch_exit"]

# How many seconds the interpreter's exit waits for the end of these worlds. A method of a store
# that takes longer, for example because it ignores its timeout, runs into the end of the
# interpreter.
LONGEST = 1.0
# The meshes of this process by handle.
meshes: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
# The worlds with a store in Python.
worlds: "weakref.WeakSet[Any]" = weakref.WeakSet()
# The process that began the last join of such a world.
owner = 0
# Whether the interpreter's exit has begun. No such world is joined from then on.
is_ending = False


def watch_exit() -> None:
    """Registers `stop` as an exit function. It is called before a world with a store in Python is
    joined."""
    global owner
    if owner == 0:
        # The first finalizer makes weakref register its own exit function, which frees all handles.
        # Exit functions run in the reverse order, so `stop` finds the handles alive.
        weakref.finalize(worlds, int).detach()
        atexit.register(stop)
    owner = os.getpid()


def begin_join(callbacks: Callbacks, give_up: Callable[[], Any]) -> None:
    """Keeps the callbacks for the library, which is going to join a world with them. Until the join
    has ended, the interpreter's exit calls give_up() again and again, because the library ends
    nothing before it has begun the join."""
    callbacks.keep(give_up)
    # Either `stop` finds these callbacks, or this line finds that `stop` runs.
    if is_ending:
        callbacks._drop(None)
        raise InvalidStateError("the interpreter ends, so no world with a store in Python can be joined any more")


def end_at_exit(world: Any) -> None:
    """Ends this world at the interpreter's exit, unless it has ended before."""
    worlds.add(world)


def stop() -> None:
    global is_ending
    is_ending = True
    if os.getpid() != owner or not Callbacks.alive:
        return
    # For a mesh from lookup() we cannot tell whether its world has a Python store, so it is treated
    # as if it had.
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
        for callbacks in list(Callbacks.alive.values()):
            callbacks.give_up()
        time.sleep(0.001)
