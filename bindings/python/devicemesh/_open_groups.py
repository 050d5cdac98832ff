"""The groups that a thread has open. Calls that would not wait for their operations are refused."""

from __future__ import annotations

import threading
from typing import Any, List, Protocol, Sequence

from .errors import InvalidArgumentError


class OpenGroup(Protocol):
    """The part of a group that this file needs."""

    _queue: List[Any]


class Open(threading.local):
    """The groups that this thread has open, the outermost first."""

    def __init__(self) -> None:
        self.groups: List[Any] = []


opened = Open()


def outside_groups(call: str) -> None:
    """Raises where this thread has operations queued in an open group, because the call would end
    or wait without them."""
    groups: Sequence[OpenGroup] = opened.groups
    queued = sum(len(group._queue) for group in groups)
    if queued:
        operations = "1 operation is" if queued == 1 else f"{queued} operations are"
        raise InvalidArgumentError(f"{call}: this thread has not left a `with mesh.group():`; {operations} queued in it and not done: leave the group first")
