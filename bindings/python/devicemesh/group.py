"""Groups of operations. All operations of a group run together, or none runs."""

from __future__ import annotations

import ctypes
import functools
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, List, Optional, Protocol, Sequence, Tuple, TypeVar, cast

from . import _interrupt as interrupt
from ._beside import before_call, group_changed
from ._library import Deadline, check, flag, library
from ._open_groups import current_task, open_group, opened
from ._queries import MeshQueries
from ._streams import follow, keep
from .errors import InvalidArgumentError, InvalidHandleError
from .work import Key, Work, after_earlier, queues, submit

if TYPE_CHECKING:
    from .buffers import Memory

__all__ = ["Group"]

Method = TypeVar("Method", bound=Callable[..., Work])
# The names of arguments of torch.distributed and mpi4py, and what to write here.
RANKS_HERE = "the rank along the dimension; theirs may be a world rank, of which mesh.translate_world_rank makes one"
ELSEWHERE = {
    "src": f"root= (of recv: peer=), {RANKS_HERE}", "dst": f"root= (of send: peer=), {RANKS_HERE}",
    "group_src": "root= (of recv: peer=)", "group_dst": "root= (of send: peer=)", "dest": "peer=", "source": "peer=",
    "group": 'mesh.get_group("tp") and its method', "tensor": "buffer=", "input": "buffer=", "input_tensor": "buffer=",
    "sendbuf": "buffer=", "output": "out=", "output_tensor": "out=", "recvbuf": "out="
}


class Taken(threading.local):
    """The memory that the operation of this thread has taken so far. Whatever it keeps is taken out
    of the list. The rest is released when the operation returns or raises."""

    def __init__(self) -> None:
        self.memories: List["Memory"] = []


taken = Taken()


class Member(Protocol):
    """The part of a communicator that a group needs."""

    _mesh: MeshQueries

    @property
    def _key(self) -> Key:
        """The key of its asynchronous operations."""

    @property
    def handle(self) -> int:
        """The raw communicator. On a lazy mesh this makes it."""

    def _pass(self, stream: int, deadline: Deadline) -> None:
        """Waits until the work on a stream is done."""


class Queued:
    """An operation of a group: its communicator, the call that issues it, and the memory that it
    uses."""

    __slots__ = ("of", "issue", "kept")

    def __init__(self, of: Member, issue: Callable[[], int], kept: Tuple["Memory", ...]) -> None:
        self.of, self.issue, self.kept = of, issue, kept


class Group:
    """``with mesh.group():`` runs the operations of its body together, so that no order of sends
    and receives blocks.

    Arguments are checked at once. The operations run when the outermost group of the thread ends.
    When the body raises, or an operation was refused, no operation runs and the exception is
    raised. So no exchange is half done. The other ranks then wait for this one until their
    deadline, unless they raised too. An operation that was refused in a group inside this one
    counts, also when the program has caught its exception.

    ``work`` is the handle of the operations. After ``with mesh.group(async_op=True) as group:``
    they run on a thread of this package, and ``group.work.wait()`` waits for them.
    """

    def __init__(self, mesh: MeshQueries, async_op: bool = False) -> None:
        self._mesh = mesh
        self._async = flag("async_op", async_op)
        self.work = Work("a group", unissued=True)
        # The handles of the groups inside this one. They are over when this one is.
        self._inner: List[Work] = []
        self._handle = 0
        self._queue: List[Queued] = []
        self._refused: Optional[Exception] = None
        # The task that began the group: asyncio's or trio's, or None outside of tasks.
        self._task: Any = None

    def __enter__(self) -> "Group":
        outer = open_group("mesh.group")
        try:
            own = self._begin(outer)
        except Exception as error:
            # The outer group lacks the operations of this one, so the outer group fails, too.
            if outer is not None:
                outer.refuse(error)
            raise
        self._handle, self._refused, self._task = own, None, current_task()
        self.work, self._inner = Work("a group", unissued=True), []
        opened.groups.append(self)
        group_changed(1)
        return self

    def _begin(self, outer: Optional["Group"]) -> int:
        """Begins the library's group. Returns its handle."""
        if self._handle:
            raise RuntimeError("this group is open already; call mesh.group() again for one within it")
        if outer is not None and self._async:
            raise InvalidArgumentError("async_op: a group inside a group runs with it; give async_op to the outer one")
        # The group has a handle of its own, so it can end although the body has closed the mesh.
        handle = ctypes.c_void_p()
        check(library.dm_clone(self._mesh._handle, ctypes.byref(handle)))
        own = handle.value or 0
        # The library's group begins too, for calls through raw communicators that belong to the
        # group.
        try:
            check(interrupt.issue(partial(library.dm_abort, own), library.dm_group_start, own))
        except BaseException:
            library.dm_free(own)
            raise
        return own

    def __exit__(self, _: Any, raised: Optional[BaseException], __: Any) -> None:
        if not self._handle:
            raise RuntimeError("this group is not open: each `with mesh.group():` ends once")
        if not opened.groups or opened.groups[-1] is not self:
            raise RuntimeError("groups end in the reverse order of their beginnings, each in the thread that began it")
        opened.groups.pop()
        queue, self._queue = self._queue, []
        refusal = self._refused or closed(queue)
        failure = raised or refusal
        if queue and isinstance(raised, GeneratorExit):
            # Python swallows GeneratorExit, and then nobody would hear that operations were
            # dropped.
            failure = RuntimeError(f"a generator was closed inside a group, so the operations queued in it ({len(queue)}) did not run: leave the group before the yield")
        outer = opened.groups[-1] if opened.groups else None
        if refusal is not None and outer is not None:
            outer.refuse(refusal)
        later = self._async and bool(queue) and self._mesh.device_type == "cpu"
        handle, inner = self._handle, self._inner
        self._handle, self._task, self._inner = 0, None, []
        try:
            if failure is None and outer is None and not later:
                failure = issue(handle, queue)
            # The library's group was begun, so it must end, also when this package has put nothing
            # into it.
            status = interrupt.call(partial(library.dm_abort, handle), library.dm_group_end, handle)
            if failure is None:
                check(status)
            if failure is None and outer is None and not later:
                joins = follow(memories(queue), self._async)
                passes = [partial(operation.of._pass, operation.kept[0].stream)
                          for operation in queue] if self._mesh.device_type != "cpu" else []
                for work in (self.work, *inner):
                    work._on_streams(joins, passes)
            if failure is None and outer is not None:
                outer._queue += queue
                outer._inner += [self.work, *inner]
                queue, inner = [], []
            elif failure is None and later:
                for wait in before_call:
                    wait()
                for waiting in (self.work, *inner):
                    waiting._unissued = False
                submit([operation.of for operation in queue], self.work, partial(run, handle, queue, inner))
                handle, queue, inner = 0, [], []
        except BaseException as error:
            failure = error
            raise
        finally:
            group_changed(-1)
            library.dm_free(handle or None)
            keep(memories(queue))
            if handle and outer is None or failure is not None:
                finish((self.work, *inner), failure)
        if failure is not None and failure is not raised:
            raise failure

    def add(self, operation: Queued) -> None:
        """Queues an operation."""
        # Makes the communicator of a lazy mesh, as the operation itself would have done.
        operation.of.handle
        self._queue.append(operation)

    def refuse(self, error: Exception) -> None:
        """Notes that an operation was refused. The others will not run then."""
        self._refused = self._refused or error


def issue(handle: int, queue: Sequence[Queued]) -> Optional[BaseException]:
    """Passes the operations to the library, whose group collects them. Returns the error, or
    None."""
    try:
        if queues:
            for operation in queue:
                after_earlier(operation.of)
        for operation in queue:
            check(operation.issue())
    except Exception as error:
        return error
    except BaseException as error:
        # Ctrl-C came between two operations. The mesh ends, as it does when Ctrl-C ends a call, so
        # that no peer takes half of the group for all of it.
        library.dm_abort(handle)
        return error
    return None


def run(handle: int, queue: Sequence[Queued], inner: Sequence[Work]) -> None:
    """Runs the operations of an asynchronous group, and frees what it holds."""
    failure: Optional[BaseException] = None
    try:
        check(library.dm_group_start(handle))
        try:
            for operation in queue:
                check(operation.issue())
        finally:
            status = library.dm_group_end(handle)
        check(status)
    except BaseException as error:
        failure = error
        raise
    finally:
        library.dm_free(handle)
        keep(memories(queue))
        finish(inner, failure)


def finish(works: Sequence[Work], failure: Optional[BaseException]) -> None:
    """Tells those who wait for these groups that they are over."""
    for work in works:
        work._finish(failure)


def operation(method: Method) -> Method:
    """Decorates an operation of a Communicator. Memory that the operation took and does not keep is
    released when it returns or raises. If the operation is refused inside a group, the group
    fails."""

    @functools.wraps(method)
    def noting(*arguments: Any, **named: Any) -> Work:
        group = open_group(method.__name__) if opened.groups else None
        # An array's __dlpack__ could make an operation of its own.
        outer, taken.memories = taken.memories, []
        try:
            return method(*arguments, **named)
        except TypeError as error:
            if group is not None:
                group.refuse(error)
            for name, here in ELSEWHERE.items():
                if name in named:
                    raise TypeError(f"{method.__name__} has no {name}=; write {here}") from None
            raise
        except Exception as error:
            if group is not None:
                group.refuse(error)
            raise
        finally:
            for memory in taken.memories:
                memory.release()
            taken.memories = outer

    return cast(Method, noting)


def closed(queue: Sequence[Queued]) -> Optional[Exception]:
    """The error for a group whose body has closed the mesh of an operation, or None."""
    for each in queue:
        if not each.of._mesh._free.alive:
            return InvalidHandleError(f"{each.of!r}: its mesh was closed before the group ended, so none of the group's operations ran")
    return None


def memories(queue: Sequence[Queued]) -> List["Memory"]:
    """The memory of the operations."""
    return [memory for each in queue for memory in each.kept]
