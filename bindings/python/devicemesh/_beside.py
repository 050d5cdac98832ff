"""Hooks for a package that works beside this one. devicemesh_jax uses them to wait for the
collectives that were given to JAX first.

A jitted program runs on threads of XLA while Python goes on. A host call that did not wait for it
would meet the other ranks' jitted collective on the same communicator, and add up different
arrays.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any, Callable, List, Protocol

__all__ = ["after_outstanding", "after_outstanding_success", "before_call", "follow_groups", "group_changed", "has_ended", "mesh_changes"]

# Each function runs on the calling thread before a call of the library that can wait for other
# ranks. It returns when the outstanding work of this process is over, and raises when that work has
# failed.
before_call: List[Callable[[], Any]] = []
# The functions of follow_groups.
group_changes: List[Callable[[int], Any]] = []
# The number of groups that all threads of this process have open. `lock` guards it and the list. A
# collected generator may end a group on a thread that has the lock, so the lock is reentrant.
open_groups = 0
lock = threading.RLock()
# Each function is called with a mesh object that was made, and with None when a mesh of this
# process has ended. So a name can pass from a mesh that has ended to an equal one.
mesh_changes: List[Callable[[Any], Any]] = []


def follow_groups(changed: Callable[[int], Any]) -> None:
    """Calls changed with the number of groups that are open now, and from then on with 1 when a
    thread has opened a group and with -1 when a group has ended."""
    with lock:
        # A collected generator may end a group here, on this thread. So the function is in the list
        # before the number is read.
        group_changes.append(changed)
        changed(open_groups)


class Counted(Protocol):
    """A group that is counted."""

    # Whether the number of open groups includes this one.
    is_counted: bool


def group_changed(change: int, group: Counted) -> None:
    """Tells that a thread has opened a group (1) or that a group has ended (-1). It tells each of
    these once, also where Ctrl-C makes the caller repeat the call."""
    global open_groups
    with lock:
        if group.is_counted == (change > 0):
            return
        # Python runs no handler of a signal between these two lines, because neither calls.
        group.is_counted = change > 0
        open_groups += change
        for changed in group_changes:
            changed(change)


def forget() -> None:
    """In a forked child: the thread that had the lock is not there."""
    global lock
    lock = threading.RLock()


os.register_at_fork(after_in_child=forget)


def has_ended() -> None:
    """Tells that a mesh of this process has ended."""
    for changed in mesh_changes:
        changed(None)


def after_outstanding(function: Callable[..., int], *arguments: Any) -> int:
    """Calls function(*arguments) when the outstanding work is over. A failure of that work is
    ignored here, because the call itself finds out which ranks take part."""
    for wait in before_call:
        with contextlib.suppress(Exception):
            wait()
    return function(*arguments)


def after_outstanding_success(function: Callable[..., int], *arguments: Any) -> int:
    """Calls function(*arguments) when the outstanding work is over. Raises the error of that work,
    because the ranks are then no longer in step."""
    for wait in before_call:
        wait()
    return function(*arguments)
