"""Operations that run while the program goes on (``async_op=True``), and the handle to wait for
them.

On cuda every operation is asynchronous, and its stream keeps the order (_streams.py). On cpu a
thread of this package runs the operations. Each dimension name of a communicator has a queue of its
own with one such thread, so the operations of a queue run in the order in which they were issued. A
blocking operation first waits until the operations that are in its queue by then are over. A thread
without work ends after IDLE seconds.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from functools import partial
from typing import Any, Callable, Deque, Dict, List, Optional, Protocol, Sequence, Set, Tuple

from ._library import Deadline, Timeout, milliseconds
from .errors import DeviceMeshError, InvalidStateError, MeshTimeoutError, UnsupportedError

__all__ = ["Work"]

IDLE = 2.0
# The address of the communicator and the name of the dimension. Queues are per dimension name, even
# where two dimensions share a communicator. The library serialises their calls.
Key = Tuple[int, str]


class Work:
    """The handle of an operation, as torch.distributed's Work.

    Every operation returns one. That of a blocking operation is over already. That of an operation
    inside ``with mesh.group():`` is over when the group is. On cuda it is over when the operation
    is enqueued. There wait() makes the current streams of the arrays' libraries wait for it.
    """

    __slots__ = ("_what", "_over", "_error", "_unissued", "_joins", "_passes")

    def __init__(self, what: str, *, unissued: bool = False) -> None:
        self._what = what
        self._over = threading.Event()
        self._error: Optional[BaseException] = None
        # Whether this operation waits for the end of a group.
        self._unissued = unissued
        # On cuda: each makes the current stream of an array's library wait for the operation.
        self._joins: Sequence[Callable[[], Any]] = ()
        # On cuda: each waits, within a deadline, until the operation's stream has passed it.
        self._passes: Sequence[Callable[[Deadline], Any]] = ()

    def _on_streams(self, joins: Sequence[Callable[[], Any]], passes: Sequence[Callable[[Deadline], Any]]) -> "Work":
        """Notes the streams on which the operation was put."""
        self._joins, self._passes = joins, passes
        return self

    def wait(self, timeout: Timeout = None) -> bool:
        """Returns True when the operation is over, and raises its error if it has failed.

        None waits until the end, which the mesh's timeout brings. With a timeout in seconds a
        MeshTimeoutError says that the operation is not over; it continues. Ctrl-C ends the wait
        and not the operation.

        On cuda None makes the current streams wait, and returns at once. With a timeout this thread
        waits too, until the stream has done its work, as DeviceMesh.wait does.
        """
        if not self._over.is_set():
            if self._unissued:
                raise InvalidStateError(
                    f"{self._what} is queued in an open group, and runs when the group ends: wait after the `with` block"
                )
            if not self._over.wait(None if timeout is None else min(milliseconds(timeout) / 1000, threading.TIMEOUT_MAX)):
                raise MeshTimeoutError(
                    f"{self._what} is not over after {milliseconds(timeout) / 1000:g} s; it continues, and ends by the mesh's timeout"
                )
        if self._error is not None:
            raise self._error
        for join in self._joins:
            join()
        if timeout is not None and self._passes:
            deadline = Deadline(timeout)
            for passes in self._passes:
                passes(deadline)
        return True

    def is_completed(self) -> bool:
        """Whether the operation is over. Does not wait."""
        return self._over.is_set()

    def is_success(self) -> bool:
        """Whether the operation is over and has not failed. Does not wait."""
        return self._over.is_set() and self._error is None

    def exception(self) -> Optional[BaseException]:
        """The error of an operation that has failed; None for any other. Does not wait."""
        return self._error if self._over.is_set() else None

    def _finish(self, error: Optional[BaseException] = None) -> None:
        if not self._over.is_set():
            self._error, self._unissued = error, False
            self._over.set()

    def __repr__(self) -> str:
        state = "running" if not self._over.is_set() else "done" if self._error is None else f"failed: {self._error}"
        return f"Work({self._what}, {state})"


DONE = Work("operation")
DONE._finish()


class Member(Protocol):
    """The part of a communicator that this file needs."""

    @property
    def _key(self) -> Key:
        """The key of its queue."""

    @property
    def _mesh(self) -> Any:
        """The mesh of the communicator."""

    _ranks: Tuple[int, ...]


class Dimension(Member, Protocol):
    """A communicator of which this file also finds the queue without the key."""

    _name: str
    # The key of its queue, where it is known by now.
    _queue_key: Optional[Key]


class WorkQueue:
    """The operations of one queue (Key) that are still to run, and the thread that runs them."""

    __slots__ = ("key", "mesh", "ranks", "roots", "tasks", "ready", "last", "works")

    def __init__(self, key: Key, mesh: Any, ranks: Tuple[int, ...]) -> None:
        # The first operation is of this mesh, along a dimension with these ranks.
        self.key, self.mesh, self.ranks = key, mesh, ranks
        # The root meshes of all operations. Root meshes may share a communicator.
        self.roots: Set[Any] = set()
        self.tasks: Deque[Callable[[], Any]] = deque()
        self.ready = threading.Condition(lock)
        # The operation that was issued last.
        self.last: Work = DONE
        # The operations that are not over.
        self.works: Deque[Work] = deque()

    def serve(self) -> None:
        """Runs the operations in order, until there has been none for some time."""
        while True:
            with lock:
                while not self.tasks:
                    if not self.ready.wait(IDLE) and not self.tasks:
                        queues.pop(self.key, None)
                        return
                task = self.tasks.popleft()
            task()
            with lock:
                self.works.popleft()
                tell(self.key, -1)
            del task  # a thread without work keeps no array alive

    def finish(self, deadline: Optional[Deadline], call: str) -> None:
        """Returns when the operations that were issued so far are over."""
        last, left = self.last, None if deadline is None else deadline.seconds()
        if not last._over.wait(None if left is None else min(left, threading.TIMEOUT_MAX)):
            raise MeshTimeoutError(
                f"{call}: {last._what} was issued before and is not over by the deadline; it continues, and ends by the mesh's timeout"
            )


lock = threading.Lock()
queues: Dict[Key, WorkQueue] = {}
# The functions of follow_queues.
queue_changes: List[Callable[[Key, int], Any]] = []


def follow_queues(changed: Callable[[Key, int], Any]) -> None:
    """For a package that works beside this one, as those in _beside.py. Calls changed with the key
    of each queue and the number of its operations that are not over, and from then on with a key
    and 1 when an operation was put into a queue, or -1 when one is over."""
    with lock:
        for key, queue in queues.items():
            changed(key, len(queue.works))
        queue_changes.append(changed)


def tell(key: Key, change: int) -> None:
    """Tells other packages that a queue has one operation more or less. The caller holds the
    lock."""
    for changed in queue_changes:
        changed(key, change)


def forget() -> None:
    """In a forked child: the threads are not there, so the operations never end here."""
    global lock
    unfinished = [work for queue in list(queues.values()) for work in list(queue.works)]
    lock = threading.Lock()
    queues.clear()
    for work in unfinished:
        work._over = threading.Event()
        work._finish(UnsupportedError(f"{work._what} was issued by the parent of this forked process, and is not over here"))


os.register_at_fork(after_in_child=forget)


def submit(members: Sequence[Member], work: Work, run: Callable[[], Any]) -> Work:
    """Puts an operation of these communicators at the end of their queues. It runs on the thread of
    the first one, when each queue has come to it."""
    keys = {member._key: member for member in members}
    with lock:
        each: List[WorkQueue] = []
        for key, member in keys.items():
            queue = queues.get(key)
            if queue is None:
                queue = WorkQueue(key, member._mesh, member._ranks)
                threading.Thread(target=queue.serve, name=f"devicemesh {key[1]}", daemon=True).start()
                queues[key] = queue
            queue.roots.add(member._mesh._of_root)
            each.append(queue)
        earlier = [queue.last for queue in each[1:]]
        for queue in each:
            queue.tasks.append(partial(perform, work, run, earlier) if queue is each[0] else work._over.wait)
            queue.works.append(work)
            queue.last = work
            tell(queue.key, 1)
            queue.ready.notify()
    return work


def perform(work: Work, run: Callable[[], Any], earlier: Sequence[Work]) -> None:
    for other in earlier:
        other._over.wait()
    try:
        run()
    except BaseException as error:
        work._finish(error)
    else:
        work._finish()


def after_earlier(member: Member, deadline: Optional[Deadline] = None, call: str = "") -> None:
    """Returns when the asynchronous operations along this communicator are over. So a blocking
    operation comes after those that were issued before it. Without a deadline of the call, those
    operations end by the mesh's timeout."""
    queue = queues.get(member._key)
    if queue is not None:
        queue.finish(deadline, call)


def after_earlier_along(member: Dimension, deadline: Deadline, call: str) -> None:
    """Does what after_earlier does, for a call that makes no communicator. On a lazy mesh the key
    would make it, which the other ranks need not do. Where the key is not known there, the name,
    the ranks and the root mesh tell whether a queue is this dimension's."""
    root = member._mesh._of_root
    if member._queue_key is not None or root.is_lazy is False:
        return after_earlier(member, deadline, call)
    for queue in list(queues.values()):
        if queue.key[1] == member._name and queue.ranks == member._ranks and not queue.last.is_completed() and has_root(queue, root, member):
            queue.finish(deadline, call)


def has_root(queue: WorkQueue, root: Any, member: Dimension) -> bool:
    """Whether operations of this root mesh are in the queue. Where a mesh came from lookup(), an
    equal root mesh counts."""
    roots = list(queue.roots)
    if root in roots:
        return True
    if root.is_lazy is not None and all(each.is_lazy is not None for each in roots):
        return False
    # A mesh that has ended has no root any more.
    with contextlib.suppress(DeviceMeshError):
        return bool(queue.mesh.root() == member._mesh.root())
    return False


def after_all_of(root: Callable[[], Any], deadline: Deadline, call: str) -> None:
    """Returns when the asynchronous operations on all views of this root mesh are over."""
    for queue in list(queues.values()):
        is_its = False
        # A mesh that has ended has no root any more. Equal root meshes share their communicators.
        with contextlib.suppress(DeviceMeshError):
            is_its = not queue.last.is_completed() and bool(queue.mesh.root() == root())
        if is_its:
            queue.finish(deadline, call)


def after_all_in(world: Any, deadline: Deadline, call: str) -> None:
    """Returns when the asynchronous operations on the meshes of this world are over. None is the
    default world. A mesh from lookup() may be in any world, so its operations are always waited
    for."""
    for queue in list(queues.values()):
        its = queue.mesh._world
        defaults = [True if each is None else each._is_default for each in (its, world)]
        if its is world or None in defaults or all(defaults):
            queue.finish(deadline, call)
