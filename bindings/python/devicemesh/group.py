"""Groups of operations. All operations of a group run together, or none runs."""

from __future__ import annotations

import ctypes
import functools
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, List, Optional, Protocol, Sequence, Tuple, TypeVar, cast

from . import _interrupt as interrupt
from ._beside import before_call, group_changed
from ._library import Deadline, check, exception, flag, library
from ._open_groups import current_task, open_group, opened
from ._queries import MeshQueries
from ._streams import follow, keep
from .errors import AbortedError, DeviceMeshError, InvalidArgumentError, InvalidHandleError, InvalidStateError
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
    _ranks: Tuple[int, ...]

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


class LibraryGroup:
    """A group of the library on this thread, with a handle of its own.

    The handler of a signal can raise right behind a call of the library, and the status of the
    call is then lost. So this notes when a call has begun and when it is over.
    """

    def __init__(self) -> None:
        self.handle = ctypes.c_void_p()
        # How many times the group was begun and not ended.
        self.depth = 0
        # Whether a call that begins or ends the group has begun and is not known to be over.
        self.is_unsure = False
        # Whether operations were passed to the library that it has not run and not dropped.
        self.is_full = False
        # Whether other packages were told of the group, and not of its end.
        self.is_counted = False

    def start(self) -> int:
        """Begins the group, or another one in it. Returns the status."""
        self.is_unsure = True
        status = int(library.dm_group_start(self.handle))
        self.depth += status == 0
        self.is_unsure = False
        return status

    def end(self) -> int:
        """Ends the group that was begun last. Returns the status."""
        self.is_unsure = True
        status = int(library.dm_group_end(self.handle))
        self.depth -= 1
        self.is_full, self.is_unsure = False, False
        return status

    def end_inner(self) -> None:
        """Ends the groups inside the first one."""
        while self.depth > 1:
            self.end()

    def abort(self) -> None:
        """Ends the mesh, and by that the groups of this thread. The library drops their
        operations."""
        library.dm_abort(self.handle)

    def give_up(self) -> None:
        """Ends what is still open, and frees the handle. The mesh ends where the library has
        operations that must not run, or where nobody knows whether a group is open. A second call
        does what an interrupted first one has left."""
        if self.is_full or self.is_unsure:
            self.abort()
        while self.depth > 0:
            self.depth -= 1
            library.dm_group_end(self.handle)
        library.dm_free(self.handle)
        self.handle = ctypes.c_void_p()


class Group:
    """``with mesh.group():`` runs the operations of its body together, so that no order of sends
    and receives blocks.

    Arguments are checked at once. The operations run when the outermost group of the thread ends.
    When the body raises, or an operation was refused, no operation runs and the exception is
    raised. So no exchange is half done. The other ranks then wait for this one until their
    deadline, unless they raised too. An operation that was refused in a group inside this one
    counts, also when the program has caught its exception. An abort or a recovery in the body ends
    the group: no operation runs, and the group raises AbortedError.

    ``work`` is the handle of the operations. After ``with mesh.group(async_op=True) as group:``
    they run on a thread of this package, and ``group.work.wait()`` waits for them.
    """

    def __init__(self, mesh: MeshQueries, async_op: bool = False) -> None:
        self._mesh = mesh
        self._async = flag("async_op", async_op)
        self.work = Work("a group", unissued=True)
        # The handles of the groups inside this one. They are over when this one is.
        self._inner: List[Work] = []
        # The library's group; None while this group is not open.
        self._begun: Optional[LibraryGroup] = None
        self._queue: List[Queued] = []
        self._refused: Optional[Exception] = None
        # The task that began the group: asyncio's or trio's, or None outside of tasks.
        self._task: Any = None

    def __enter__(self) -> "Group":
        outer = open_group("mesh.group")
        begun = LibraryGroup()
        try:
            self._begin(outer, begun)
            self._begun, self._refused, self._task = begun, None, current_task()
            self.work, self._inner, self._queue = Work("a group", unissued=True), [], []
            opened.groups.append(self)
            group_changed(1, begun)
        except BaseException as error:
            # Ctrl-C can come between any two steps.
            if self._begun is begun:
                self._begun = None
            if opened.groups and opened.groups[-1] is self and self._begun is None:
                opened.groups.pop()
            try:
                group_changed(-1, begun)
            finally:
                begun.give_up()
            # The outer group lacks the operations of this one, so the outer group fails, too.
            if outer is not None and isinstance(error, Exception):
                outer.refuse(error)
            raise
        return self

    def _begin(self, outer: Optional["Group"], begun: "LibraryGroup") -> None:
        """Begins the library's group."""
        if self._begun is not None:
            raise RuntimeError("this group is open already; call mesh.group() again for one within it")
        if outer is not None and self._async:
            raise InvalidArgumentError("async_op: a group inside a group runs with it; give async_op to the outer one")
        # The group has a handle of its own, so it can end although the body has closed the mesh.
        check(library.dm_clone(self._mesh._handle, ctypes.byref(begun.handle)))
        # The library's group begins too, for calls through raw communicators that belong to the
        # group. It begins twice: the end of the inner one tells whether the group is still open.
        check(interrupt.issue(begun.abort, begun.start))
        check(begun.start())

    def __exit__(self, _: Any, raised: Optional[BaseException], __: Any) -> None:
        begun = self._begun
        if begun is None:
            raise RuntimeError("this group is not open: each `with mesh.group():` ends once")
        if not opened.groups or opened.groups[-1] is not self:
            raise RuntimeError("groups end in the reverse order of their beginnings, each in the thread that began it")
        failure, queue, inner = raised, self._queue, self._inner
        outer = opened.groups[-2] if len(opened.groups) > 1 else None
        is_submitted = False
        try:
            opened.groups.pop()
            refusal = self._refused or closed(queue) or ended(begun.end())
            failure = raised or refusal
            if queue and isinstance(raised, GeneratorExit):
                # Python swallows GeneratorExit, and then nobody would hear that operations were
                # dropped.
                failure = RuntimeError(f"a generator was closed inside a group, so the operations queued in it ({len(queue)}) did not run: leave the group before the yield")
            if refusal is not None and outer is not None:
                outer.refuse(refusal)
            later = self._async and bool(queue) and self._mesh.device_type == "cpu"
            if failure is None and outer is None and not later:
                failure = issue(begun, queue)
            # The library's group was begun, so it must end, also when this package has put nothing
            # into it.
            begun.end_inner()
            status = interrupt.call(begun.abort, begun.end)
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
                submit([operation.of for operation in queue], self.work, partial(run, begun, queue, inner))
                is_submitted, queue, inner = True, [], []
        except BaseException as error:
            failure = error
            raise
        finally:
            # Ctrl-C can have come between any two steps.
            if opened.groups and opened.groups[-1] is self:
                opened.groups.pop()
            self._begun, self._task, self._queue, self._inner = None, None, [], []
            is_over = not is_submitted and outer is None or failure is not None
            finished = (self.work, *inner) if is_over else ()
            try:
                leave(begun, queue, finished, failure, is_submitted)
            except BaseException:
                # A handler of a signal that raises, as that of Ctrl-C does, skips a function at
                # whose entry it runs. A second call does what is left.
                leave(begun, queue, finished, failure, is_submitted)
                raise
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


def issue(begun: LibraryGroup, queue: Sequence[Queued]) -> Optional[BaseException]:
    """Passes the operations to the library, whose group collects them. Returns the error, or
    None."""
    # Whether the communicator library has an operation that it cannot drop any more.
    is_streamed = False
    try:
        if queues:
            for operation in queue:
                after_earlier(operation.of)
        begun.is_full = bool(queue)
        for operation in queue:
            check(operation.issue())
            is_streamed = is_streamed or operation.of._mesh.device_type != "cpu"
    except DeviceMeshError as error:
        # NCCL runs nothing of a group in which it has refused an operation itself. Where
        # libdevicemesh has refused it, NCCL would run the operations before it, so their meshes
        # end.
        if is_streamed and error.ccl_result == 0:
            abort_all(queue)
        return error
    except Exception as error:
        return error
    except BaseException as error:
        # Ctrl-C came between two operations. The meshes end, as they do when Ctrl-C ends a call, so
        # that no peer takes half of the group for all of it.
        begun.abort()
        abort_all(queue)
        return error
    return None


def abort_all(queue: Sequence[Queued]) -> None:
    """Ends the meshes of the operations."""
    for handle in {operation.of._mesh._handle for operation in queue}:
        library.dm_abort(handle)


def ended(status: int) -> Optional[Exception]:
    """The error of a group that is not open any more, as the status of its end says, or None."""
    if status == InvalidStateError.status:
        return AbortedError("mesh.group: an abort or a recovery inside has ended it, so none of its operations ran")
    return exception(status) if status else None


def run(begun: LibraryGroup, queue: Sequence[Queued], inner: Sequence[Work]) -> None:
    """Runs the operations of an asynchronous group, and frees what it holds."""
    failure: Optional[BaseException] = None
    try:
        check(begun.start())
        try:
            for operation in queue:
                check(operation.issue())
        finally:
            status = begun.end()
        check(status)
    except BaseException as error:
        failure = error
        raise
    finally:
        begun.give_up()
        keep(memories(queue))
        finish(inner, failure)


def leave(begun: LibraryGroup, queue: Sequence[Queued], works: Sequence[Work], failure: Optional[BaseException], is_submitted: bool) -> None:
    """Takes the last steps of a group. Each is taken also when an earlier one was interrupted, and
    may be taken twice. A group that was submitted still needs what the library has."""
    try:
        if not is_submitted:
            begun.give_up()
    finally:
        try:
            group_changed(-1, begun)
        finally:
            try:
                keep(memories(queue))
            finally:
                finish(works, failure)


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
