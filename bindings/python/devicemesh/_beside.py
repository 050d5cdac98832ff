"""What a package that works beside this one has to do before a call: devicemesh_jax waits here for
the collectives that JAX was given first.

A jitted program runs on threads of XLA while Python goes on. A host call that did not wait for it
would meet the other ranks' jitted collective on the same communicator, and add up different
arrays.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, List

__all__ = ["after_outstanding", "after_outstanding_success", "before_call", "group_changes", "mesh_changes"]

# Each is run, on the calling thread, before a call of the library that can wait for other ranks.
# It returns when the outstanding work of this thread is over, and raises when that work has
# failed.
before_call: List[Callable[[], Any]] = []
# Each is called with 1 when a thread has opened a group, and with -1 when a group has ended.
group_changes: List[Callable[[int], Any]] = []
# Each is called with a mesh object that was made, and with None when a mesh of this process has
# ended, so that a name can pass from a mesh that has ended to an equal one.
mesh_changes: List[Callable[[Any], Any]] = []


def after_outstanding(function: Callable[..., int], *arguments: Any) -> int:
    """function(*arguments), once the outstanding work is over. Its failure is not told here: the
    call has its own way to find out who takes part."""
    for wait in before_call:
        with contextlib.suppress(Exception):
            wait()
    return function(*arguments)


def after_outstanding_success(function: Callable[..., int], *arguments: Any) -> int:
    """function(*arguments), once the outstanding work is over; raises what went wrong in that
    work, because then the ranks are no longer in step."""
    for wait in before_call:
        wait()
    return function(*arguments)
