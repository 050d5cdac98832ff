"""A process's place in the job."""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from functools import partial
from typing import Any, Iterator, List, Optional, Set, Tuple, Union

from . import _declarations as declarations
from . import _control as control
from . import _interrupt as interrupt
from ._beside import has_ended
from ._cuda import carried_device
from ._exit import begin_join, end_at_exit, watch_exit
from ._library import Deadline, Timeout, check, flag, int32, library, milliseconds, optional_text, telling
from ._open_groups import outside_groups
from .errors import InvalidArgumentError
from .objects import ObjectCollectives
from .stores import Callbacks, Store
from .work import after_all_in

__all__ = ["MeshWorld", "UNKNOWN_WORLD", "World", "abort_default_worlds", "finalize_default_worlds"]


class World(ObjectCollectives):
    """This process's rank, the store where the ranks meet, the device and the communicator library.

    ``init_device_mesh`` joins the default world by itself, from the launcher's environment; make a
    World for anything else: explicit ranks, several devices in one process, a store of your own,
    or ``offline=True``: layout and planning for any rank of any world, on one machine.
    ``World.default()`` is the default world, and ``mesh.world`` the world of a mesh.

    When the last reference to a World is dropped, the garbage collector frees it as ``close`` does.
    If no mesh of the world is left then, this process leaves the world at once: the next call of
    the other ranks names this rank as lost, and on rank 0 the collector waits until the store's
    server has ended. So keep a World in a variable for as long as the ranks need each other. The
    process stays in the default world, though, until it finalizes or aborts that world.

    Collective over the world, except for an offline one. Without ``world_size`` everything comes
    from the launcher (torchrun, mpirun, srun, devicemesh run ...).

    Args:
        device_type: "cuda" or "cpu"; None is what this machine has.
        world_size, rank: this process's place, instead of the launcher's word; local_rank then is
            its rank among those of its host, and may be left out on all ranks.
        device: the index of the device for communicators, among those that this process sees. None
            is the current device of this thread, or where it has none, the local rank modulo the
            number of devices.
        init_method: "env://", "tcp://host:port" (rank 0 serves) or "file:///path".
        timeout: how long the joining may take, and after it each call of the world that has no
            timeout of its own; seconds or a timedelta. None is ten minutes. It does not bound work
            on a CUDA stream.
        ccl_library: a communicator library with NCCL's C API, by path or SONAME; "python" is the
            NCCL wheel of the active environment.
        store: where the ranks meet, instead of init_method; TorchStore makes one of PyTorch's.
        offline: no rendezvous and no communicators.
        join: "new" joins a new world, and "running" a running job in place of a lost process of this
            rank, where a job runs. None: the environment variable DM_JOIN says it, or the library
            finds it out.
    """

    def __init__(
        self,
        device_type: Optional[str] = None,
        *,
        world_size: Optional[int] = None,
        rank: Optional[int] = None,
        local_rank: int = 0,
        device: Optional[int] = None,
        init_method: Optional[str] = None,
        timeout: Timeout = None,
        ccl_library: Optional[str] = None,
        store: Optional[Store] = None,
        offline: bool = False,
        join: Optional[str] = None,
    ) -> None:
        if (rank is None) != (world_size is None):
            raise InvalidArgumentError(f"world_size is {world_size} and rank is {rank}: give both or neither")
        ranks = 0 if world_size is None else int32("world_size", world_size)
        if world_size is not None and ranks < 1:
            raise InvalidArgumentError(f"world_size is {world_size}; a world has at least one rank")
        if join is not None and join not in declarations.JOINS:
            raise InvalidArgumentError(f"join is {join!r}: it must be None, 'new' or 'running'")
        callbacks = Callbacks(store) if store is not None else None
        options = declarations.WorldOptions(
            struct_size=ctypes.sizeof(declarations.WorldOptions),
            flags=((declarations.WORLD_OFFLINE if flag("offline", offline) else 0)
                   | (0 if device is None else declarations.WORLD_DEVICE)),
            world_size=ranks, rank=0 if rank is None else int32("rank", rank),
            local_rank=int32("local_rank", local_rank), device=0 if device is None else int32("device", device),
            join=declarations.JOIN_AUTO if join is None else declarations.JOINS[join],
            timeout_ms=milliseconds(timeout), init_method=optional_text("init_method", init_method),
            ccl_library=optional_text("ccl_library", ccl_library))
        if callbacks is not None:
            options.store = ctypes.pointer(callbacks.struct)
        kind = optional_text("device_type", device_type)
        # With this token the main thread can end the joining while another thread is blocked in it.
        joining = ctypes.c_void_p()
        if hasattr(options, "joining_out"):
            options.joining_out = ctypes.pointer(joining)
        # The world, until this object has it.
        made = ctypes.c_void_p()

        def give_up() -> None:
            for each in (joining, made):
                if each.value:
                    library.dm_world_abort(each.value)

        def undo(handle: int) -> None:
            made.value = None
            library.dm_world_free(handle)

        # The join takes the current device of its thread.
        carry = carried_device()

        def joined() -> int:
            carry()
            if callbacks is not None:
                begin_join(callbacks, give_up)
            try:
                check(library.dm_world_init(kind, ctypes.byref(options), ctypes.byref(made)))
            except BaseException:
                # A world that was not made does not drop its callbacks.
                if callbacks is not None:
                    callbacks._drop(None)
                raise
            finally:
                joining.value = None
            return made.value or 0

        if callbacks is not None:
            watch_exit()
        try:
            self._adopt(interrupt.apart(joined, give_up, undo), False)
        except Exception as error:
            if callbacks is not None and callbacks.failure is not None:
                raise error from callbacks.failure
            raise
        if callbacks is not None:
            end_at_exit(self)
        made.value = None

    def _adopt(self, handle: int, is_default: Optional[bool]) -> None:
        self._handle = handle
        self._free = weakref.finalize(self, library.dm_world_free, handle)
        self._end = partial(library.dm_world_abort, handle)
        # Whether this is a default world. None: nobody knows, because a mesh from lookup() gave
        # the world.
        self._is_default = is_default
        self._known: Optional[declarations.WorldInfo] = None
        self._closed = False
        # One object for each call that holds the handle (_held).
        self._holders: Set[object] = set()

    @classmethod
    def _of(cls, handle: int, is_default: Optional[bool]) -> "World":
        made = cls.__new__(cls)
        made._adopt(handle, is_default)
        return made

    @classmethod
    def default(cls, device_type: Optional[str] = None, *, timeout: Timeout = None) -> "World":
        """The world that init_device_mesh joins by itself, from the launcher's environment.

        Collective over the world where this process has not joined it yet, local otherwise. Each
        device type has a default world of its own. ``timeout`` bounds the joining.
        """
        kind, limit, carry = optional_text("device_type", device_type), milliseconds(timeout), carried_device()
        interrupt.begin_default_join()

        def join() -> int:
            carry()
            handle = ctypes.c_void_p()
            check(library.dm_default_world(kind, limit, ctypes.byref(handle)))
            return handle.value or 0

        return cls._of(interrupt.apart(join, library.dm_default_world_abort, library.dm_world_free, is_default=True), True)

    @contextlib.contextmanager
    def _held(self) -> Iterator[Optional[int]]:
        """Gives the handle for a call whose answer belongs to the world. A close() by another
        thread frees the handle when the block has ended. For a closed world this gives None, which
        the library refuses."""
        holder = object()
        # This thread adds a holder and then looks at `_closed`; close() sets that and then looks at
        # the holders. So at least one of the two sees the other.
        self._holders.add(holder)
        try:
            yield None if self._closed else self._handle
        finally:
            self._holders.discard(holder)
            if self._closed:
                self.close()

    def _info(self, anew: bool = False) -> declarations.WorldInfo:
        """What the library knows about the world. Only the epoch changes, so only the
        property epoch asks anew."""
        known = self._known
        if known is None or anew or self._closed:
            known = declarations.WorldInfo(struct_size=ctypes.sizeof(declarations.WorldInfo))
            with self._held() as handle:
                check(library.dm_world_get_info(handle, ctypes.byref(known)))
                # The strings belong to the world. ctypes replaces them by copies that it keeps.
                known.device_type, known.library = known.device_type, known.library
            self._known = known
        return known

    @property
    def local_rank(self) -> int:
        """This rank's number among the ranks of its host, 0 to local_size - 1."""
        return int(self._info().local_rank)

    @property
    def local_size(self) -> int:
        """The number of ranks on this host."""
        return int(self._info().local_size)

    @property
    def host(self) -> int:
        """The number of this host, 0 to num_hosts - 1, in the order of the lowest rank on each."""
        return int(self._info().host)

    @property
    def num_hosts(self) -> int:
        """The number of hosts on which the world's ranks run."""
        return int(self._info().num_hosts)

    @property
    def device(self) -> Optional[int]:
        """The index of this rank's device, among those that this process sees. None on cpu."""
        device = int(self._info().device)
        return None if device < 0 else device

    @property
    def device_type(self) -> str:
        """ "cuda" or "cpu"."""
        return (self._info().device_type or b"").decode()

    @property
    def library(self) -> str:
        """The communicator library: its path or SONAME, or the name of the embedded host engine.
        An offline world has none, which is ""."""
        return (self._info().library or b"").decode(errors="replace")

    @property
    def ccl_version(self) -> Tuple[int, ...]:
        """The version of the communicator library, for example (2, 27, 7). () in an offline
        world."""
        number = int(self._info().ccl_version)
        major = 10000 if number >= 10000 else 1000  # NCCL before 2.9 wrote 2.8.4 as 2804
        return (number // major, number % major // 100, number % 100) if number else ()

    @property
    def ticket(self) -> int:
        """The number of processes that have joined the world under this rank before this one."""
        return int(self._info().ticket)

    @property
    def epoch(self) -> int:
        """The epoch in which this process is: 0 until a recovery has given a mesh."""
        return int(self._info(anew=True).epoch)

    @property
    def waiting(self) -> int:
        """The number of processes that wait to join the running job. Local, and cheap enough for
        every step. The next ``recover`` lets them in where there is a place. Ranks may get different
        numbers for a moment, so they agree before they call it."""
        answer = ctypes.c_int32()
        check(interrupt.local(library.dm_waiting, self._handle, ctypes.byref(answer)))
        return answer.value

    @property
    def rank(self) -> int:
        """This process's rank, 0 to size - 1."""
        answer = ctypes.c_int32()
        check(library.dm_world_rank(self._handle, ctypes.byref(answer)))
        return answer.value

    @property
    def size(self) -> int:
        """The number of ranks."""
        answer = ctypes.c_int32()
        check(library.dm_world_size(self._handle, ctypes.byref(answer)))
        return answer.value

    def barrier(self, timeout: Timeout = None) -> None:
        """Returns when every rank of the world has called it. Collective. It does not wait for
        work on devices."""
        with self._refusals.barrier():
            deadline = self._begin("barrier", timeout)
        check(interrupt.call(self._end, library.dm_world_barrier, self._handle, deadline.milliseconds()))

    def locations(self, location: Optional[str] = None, *, timeout: Timeout = None) -> List[str]:
        """The locations of all ranks, in rank order, for plan_ranks. Collective. ``location`` is
        this rank's own, from far to near ("rack1/host3/nvl0"). None means its host's name."""
        paths = declarations.NAMES()
        with telling(library.dm_world_locations, self._handle, None, control.REFUSED, ctypes.byref(paths)):
            deadline, mine = self._begin("locations", timeout), optional_text("location", location)
        with self._held() as handle:
            # A recovery of another thread can make the world larger after the list was made.
            size = self.size
            check(interrupt.call(self._end, library.dm_world_locations, handle, mine, deadline.milliseconds(), ctypes.byref(paths)))
            return [(paths[rank] or b"").decode() for rank in range(size)]

    @property
    def _refusals(self) -> control.Refusals:
        return control.world_refusals(self)

    def _begin(self, call: str, timeout: Timeout) -> Deadline:
        outside_groups(call)
        return Deadline(timeout)

    def _gather(self, data: bytes, deadline: Deadline) -> List[bytes]:
        return control.world_all_gather(self, data, deadline)

    def _cast(self, data: bytes, root: int, deadline: Deadline) -> bytes:
        return control.world_broadcast(self, data, root, deadline)

    def finalize(self, timeout: Timeout = None) -> None:
        """Waits for the outstanding work of all meshes of the world, destroys their communicators,
        and ends the meshes and the world, as torch.distributed's destroy_process_group() does.
        Collective. Later calls of the world and of its meshes raise AbortedError. ``timeout``
        bounds all of it. When an asynchronous operation is not over by then, nothing has ended
        yet."""
        with telling(library.dm_world_finalize, self._handle, control.REFUSED):
            deadline = self._begin("finalize", timeout)
            after_all_in(self, deadline, "finalize")
        check(interrupt.call(self._end, library.dm_world_finalize, self._handle, deadline.milliseconds()))
        has_ended()

    def abort(self) -> None:
        """Ends this rank's part in the world at once: wakes every blocked call of the world and
        aborts its meshes. Local, from any thread."""
        check(library.dm_world_abort(self._handle))
        has_ended()

    def close(self) -> None:
        """Frees the handle. Meshes keep what they need of the world. If no mesh is left, this
        process leaves the world. While another thread is in locations(), or the main thread is
        blocked in a call of the world, the handle is freed when that call returns. The garbage
        collector does this when nothing refers to the World any more."""
        self._closed = True
        if not self._holders:
            interrupt.after_blocked(self._end, self._free)

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __reduce__(self) -> Tuple[Any, ...]:
        raise TypeError("a World is one process's place in a running job and cannot be pickled; pickle its meshes")

    def __repr__(self) -> str:
        return f"World(rank={self.rank}, size={self.size})" if not self._closed else "World(closed)"


class UnknownWorld:
    """Says that a mesh came from lookup(), which does not tell the mesh's world. Such a mesh holds
    no handle of the world, because closing the mesh must not leave one behind."""

    _is_default: Optional[bool] = None


UNKNOWN_WORLD = UnknownWorld()
# The world that a mesh knows: the one that the program named, or None for the default world.
MeshWorld = Union[None, World, UnknownWorld]


def finalize_default_worlds(timeout: Timeout = None) -> None:
    """Ends the worlds that init_device_mesh joins by itself, with all their meshes, as
    World.finalize does. Collective. A later init_device_mesh joins anew."""
    with telling(library.dm_default_world_finalize, control.REFUSED):
        outside_groups("finalize_default_worlds")
        deadline = Deadline(timeout)
        after_all_in(None, deadline, "finalize_default_worlds")
    check(interrupt.call(library.dm_default_world_abort, library.dm_default_world_finalize, deadline.milliseconds()))
    has_ended()


def abort_default_worlds() -> None:
    """Ends the worlds that init_device_mesh joins by itself, also while one is being joined. A
    later init_device_mesh joins anew."""
    check(library.dm_default_world_abort())
    has_ended()
