"""Events of this process: slow calls, lost ranks, aborts and recoveries; and its counters."""

from __future__ import annotations

import atexit
import ctypes
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import IntEnum
from types import TracebackType
from typing import Any, Callable, Iterator, List, Optional, Tuple, Type

from . import _declarations as declarations
from ._library import Timeout, check, library, milliseconds, string

__all__ = ["Event", "EventKind", "Events", "metrics", "set_event_handler"]

# How many seconds one wait for an event lasts at most. Python handles Ctrl-C between two of them.
SLICE = 0.1
# The callbacks that the library may use.
_used: List[Any] = []


class EventKind(IntEnum):
    """What has happened."""

    JOINED = declarations.EVENT_JOINED
    SLOW = declarations.EVENT_SLOW
    LOST = declarations.EVENT_LOST
    ABORTED = declarations.EVENT_ABORTED
    RECOVERED = declarations.EVENT_RECOVERED


@dataclass(frozen=True)
class Event:
    """One event.

    Attributes:
        kind: what has happened, an EventKind. A newer library may give other numbers.
        rank: this process's rank in the world; for a slow call that belongs to no world, in its
            communicator.
        world_size: the number of ranks of the world, or of that communicator.
        epoch: the epoch of the world, or of the mesh that the event is about.
        time: when this process has noticed it, in UTC.
        ranks: the world ranks that the event is about: those that have joined, for which the call
            waits (as far as this host shows it), that are lost, that have aborted, or that were
            lost or left out in a recovery.
        group: the group of a slow call ("mesh/tp"), or the mesh; None where the event is about the
            world.
        dimension: the dimension of a slow call, or None.
        operation: what a slow call does, "all-reduce" and the like or the text of a call like
            flatten; None otherwise.
        call: the number of a slow call in its group, from 1, or None.
        waited: how many seconds a slow call has waited, or None.
        dropped: how many events were left out before this one because the queue was full.
        message: all of it in one line.
    """

    kind: int
    rank: int
    world_size: int
    epoch: int
    time: datetime
    ranks: Tuple[int, ...]
    group: Optional[str]
    dimension: Optional[str]
    operation: Optional[str]
    call: Optional[int]
    waited: Optional[float]
    dropped: int
    message: str


def event_of(told: Any) -> Event:
    """A copy of a dm_event."""

    def text(words: Optional[bytes]) -> Optional[str]:
        return None if words is None else words.decode(errors="replace")

    kinds = set(EventKind)
    return Event(
        kind=EventKind(told.kind) if told.kind in kinds else told.kind, rank=told.rank, world_size=told.world_size, epoch=told.epoch,
        time=datetime.fromtimestamp(told.time_ns / 1e9, timezone.utc), ranks=tuple(told.ranks[:told.num_ranks]), group=text(told.group),
        dimension=text(told.dim), operation=text(told.operation), call=None if told.call < 0 else told.call,
        waited=None if told.waited_seconds < 0 else told.waited_seconds, dropped=told.dropped, message=text(told.message) or "")


def event_options(slow: Timeout) -> Any:
    """Makes dm_event_options."""
    return ctypes.byref(declarations.EventOptions(struct_size=ctypes.sizeof(declarations.EventOptions), slow_ms=milliseconds(slow)))


def set_event_handler(handler: Optional[Callable[[Event], object]], *, slow: Timeout = None) -> None:
    """Makes the library call ``handler(event)`` for each event of this process, in place of an
    earlier handler. None removes the handler.

    A call that has waited for ``slow`` (seconds or a timedelta; 10 s if you give none) gives an
    event, and another one whenever the time that it has waited has doubled. A thread of the
    library calls the handler with one event at a time. The handler may ask a mesh and abort it,
    but must make no collective call. An exception of the handler is printed to stderr. At exit the
    interpreter waits at most 5 s for a handler that runs. A handler that still runs then may end
    the process by a fatal error, so let it return soon.
    """
    if handler is not None and not callable(handler):
        raise TypeError(f"handler is {handler!r} (a {type(handler).__name__}), not a function or None")

    def call(_: Any, told: Any) -> None:
        try:
            handler(event_of(told.contents))  # type: ignore[misc]  # the callback is used for a handler alone
        except Exception:
            print("devicemesh: the event handler failed:", file=sys.stderr)
            traceback.print_exc()

    callback = declarations.EventHandler(call) if handler is not None else declarations.EventHandler()
    # The library may still be inside an earlier callback, so all of them are kept.
    _used.append(callback)
    check(library.dm_set_event_handler(callback, None, event_options(slow)))


class Events:
    """A queue of this process's events, for programs with a loop of their own:

        with devicemesh.Events(slow=30) as events:
            for event in events:
                print(event.message)

    The loop waits for the next event without end. ``next(timeout)`` waits for a time, and
    ``fileno()`` is readable while there are events (select, selectors, asyncio). The queue holds 256
    events; ``Event.dropped`` says how many were left out.
    """

    def __init__(self, *, slow: Timeout = None) -> None:
        self._handle: Optional[int] = None
        handle = ctypes.c_void_p()
        check(library.dm_events_open(event_options(slow), ctypes.byref(handle)))
        self._handle = handle.value

    def next(self, timeout: float = 0.0) -> Optional[Event]:
        """The next event; None where none comes within so many seconds. 0 does not wait."""
        if timeout is None:
            raise TypeError("timeout is None; give seconds (0 does not wait), or iterate over the events to wait without an end")
        told = declarations.Event(struct_size=ctypes.sizeof(declarations.Event))
        left = 0 if timeout == 0 else milliseconds(timeout)
        until = time.monotonic() + left / 1000
        while True:
            check(library.dm_events_next(self._handle, min(left, round(SLICE * 1000)), ctypes.byref(told)))
            if told.kind != declarations.EVENT_NONE:
                return event_of(told)
            seconds = until - time.monotonic()
            if left == 0 or seconds <= 0:
                return None
            left = max(1, round(seconds * 1000))

    def fileno(self) -> int:
        """The descriptor that is readable while there are events. Read nothing from it."""
        descriptor = ctypes.c_int32()
        check(library.dm_events_fd(self._handle, ctypes.byref(descriptor)))
        return descriptor.value

    def close(self) -> None:
        """Frees the queue, and closes its descriptor."""
        handle, self._handle = self._handle, None
        library.dm_events_free(handle)

    def __iter__(self) -> Iterator[Event]:
        while True:
            event = self.next(SLICE)
            if event is not None:
                yield event

    def __enter__(self) -> Events:
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException], place: Optional[TracebackType]) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self.close()


def metrics() -> str:
    """The counters of this process as text for Prometheus: its worlds, and for each group of ranks
    how many calls this rank has begun and for how long the oldest one runs."""
    return string(library.dm_metrics)


@atexit.register
def stop() -> None:
    """The thread of the library must not call into an interpreter that ends."""
    if _used:
        library.dm_set_event_handler(declarations.EventHandler(), None, None)
