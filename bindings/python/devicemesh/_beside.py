"""Hooks for a package that works beside this one. devicemesh_jax uses them to wait for the
collectives that were given to JAX first.

A jitted program runs on threads of XLA while Python goes on. A host call that did not wait for it
would meet the other ranks' jitted collective on the same communicator, and add up different
arrays.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, List

__all__ = ["after_outstanding", "after_outstanding_success", "before_call", "group_changes", "has_ended", "mesh_changes", "queue_changes"]

# Each function runs on the calling thread before a call of the library that can wait for other
# ranks. It returns when the outstanding work of this process is over, and raises when that work has
# failed.
before_call: List[Callable[[], Any]] = []
# Each function is called with 1 when a thread has opened a group, and with -1 when a group has
# ended.
group_changes: List[Callable[[int], Any]] = []
# Each function is called with the key of a queue of asynchronous operations (work.py), and 1 when
# an operation was put into it or -1 when one is over.
queue_changes: List[Callable[[Any, int], Any]] = []
# Each function is called with a mesh object that was made, and with None when a mesh of this
# process has ended. So a name can pass from a mesh that has ended to an equal one.
mesh_changes: List[Callable[[Any], Any]] = []


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
