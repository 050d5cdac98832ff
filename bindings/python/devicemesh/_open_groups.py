"""The groups that a thread has open, and the task that began each of them. Calls that would not
wait for their operations are refused. So are the calls of another task of the thread, which runs
while the group's task awaits something."""

from __future__ import annotations

import sys
import threading
from typing import Any, List, Optional, Protocol, Sequence

from .errors import InvalidStateError


class OpenGroup(Protocol):
    """The part of a group that this file needs."""

    _queue: List[Any]
    _task: Any


class Open(threading.local):
    """The groups that this thread has open, the outermost first."""

    def __init__(self) -> None:
        self.groups: List[Any] = []


opened = Open()


def current_task() -> Any:
    """The task of asyncio or trio that this thread runs now, or None outside of tasks."""
    for name, find in (("asyncio", "current_task"), ("trio", "lowlevel.current_task")):
        module: Any = sys.modules.get(name)
        if module is None:
            continue
        for part in find.split("."):
            module = getattr(module, part, None)
        try:
            task = module() if module is not None else None
        except RuntimeError:  # this thread runs no event loop
            continue
        if task is not None:
            return task
    return None


def open_group(call: str) -> Optional[Any]:
    """The innermost open group of this thread, or None. Raises where another task has begun it: an
    operation of this task must not become a part of it."""
    groups = opened.groups
    if not groups:
        return None
    if groups[-1]._task is not current_task():
        raise InvalidStateError(
            f"{call}: another task of this thread awaits inside `with mesh.group():`, and until that group ends no other task of the thread can call: "
            "do not await inside a group")
    return groups[-1]


def outside_groups(call: str) -> None:
    """Raises where this thread has operations queued in an open group, because the call would end
    or wait without them."""
    open_group(call)
    groups: Sequence[OpenGroup] = opened.groups
    queued = sum(len(group._queue) for group in groups)
    if queued:
        operations = "1 operation is" if queued == 1 else f"{queued} operations are"
        raise InvalidStateError(
            f"{call}: this thread has not left a `with mesh.group():`; {operations} queued in it and not done: leave the group first"
        )
