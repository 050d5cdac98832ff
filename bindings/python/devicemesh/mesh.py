"""DeviceMesh, with the interface of PyTorch's DeviceMesh, over the C library."""

from __future__ import annotations

import contextlib
import ctypes
import json
import threading
from ctypes import byref
from functools import partial
from typing import Any, Dict, List, NoReturn, Optional, Sequence, Tuple

from . import _declarations as declarations
from . import _interrupt as interrupt
from ._arguments import init_options, labels, nested, only_two, refused_options, telling_init
from ._beside import has_ended, mesh_changes
from ._exit import meshes
from ._library import Deadline, Timeout, check, flag, library, listed, listing, milliseconds, optional_text, rank_counts, string, telling
from ._library import text as as_text
from ._open_groups import outside_groups
from ._queries import Dim, Root
from ._streams import stream_handle, stream_of_device
from ._views import MeshViews, new_handle, world_end
from .communicator import Collectives, adopted_handle, is_process_group, process_group_ranks, refuse_other_ranks
from .errors import DeviceMeshError, InvalidArgumentError, InvalidHandleError, UnsupportedError
from .group import Group
from .options import DimOptionsLike
from .work import after_all_of
from .world import UNKNOWN_WORLD, MeshWorld, World

__all__ = ["Communicator", "DeviceMesh", "deserialize", "init_device_mesh", "lookup", "unregister"]


class Stack(threading.local):
    """The meshes of the ``with mesh:`` that this thread is in, the outermost first."""

    def __init__(self) -> None:
        self.meshes: List[DeviceMesh] = []


stack = Stack()


class Communicator(Collectives):
    __doc__ = Collectives.__doc__

    _mesh: DeviceMesh

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh to which this dimension belongs."""
        return self._mesh


def is_one_world(one: World, other: World) -> bool:
    """Whether two World objects are known to be one world. Their handles do not show it, because
    the library gives a new handle each time it is asked for a world."""
    return one is other or (bool(one._is_default and other._is_default) and one.device_type == other.device_type)


def ranks_in(world: Optional[World], group: Any) -> Optional[List[int]]:
    """The ranks of this world that are in a group. None where the group has another numbering or
    does not know its ranks."""
    if world is None:
        return None
    if is_process_group(group):
        import torch.distributed  # type: ignore[import-not-found, unused-ignore]

        theirs = torch.distributed.get_rank(), torch.distributed.get_world_size()
        return process_group_ranks(group) if theirs == (world.rank, world.size) else None
    if isinstance(group, Communicator):
        # A mesh that from_group made without a world has none.
        with contextlib.suppress(UnsupportedError):
            return list(group.ranks) if is_one_world(group.mesh.world, world) else None
    return None


class DeviceMesh(MeshViews):
    """One rank's view of an n-dimensional array of ranks, with a communicator for every dimension:
    PyTorch's DeviceMesh.

    Collective over the world: ranks outside a smaller mesh call it too. Before any communicator is
    made, the ranks compare their calls. If the calls differ, all ranks get a MismatchError, which
    says which rank asked for what.

    Args:
        device_type: "cuda" or "cpu"; None is the world's, or what this machine has.
        mesh: world ranks, nested in lists or as an array: ``[[0, 1], [2, 3]]``.
        mesh_dim_names: a name per dimension. Without names they are dim_0, dim_1 ... where one is
            asked for.
        world: None is the process's default world, joined from the launcher's environment
            (World.default()).
        lazy: make a dimension's communicator at its first use.
        timeout: how long each collective call of the mesh may take, in seconds or as a timedelta;
            None is as long as the world's. It bounds this call too, with the join of the default
            world in it.
        dim_options: wishes for the communicators, a DimOptions per dimension or a dict of them by
            name or index.
    """

    def __init__(
        self,
        device_type: Optional[str],
        mesh: Any,
        *positional: NoReturn,
        mesh_dim_names: Optional[Sequence[str]] = None,
        world: Optional[World] = None,
        lazy: bool = False,
        timeout: Timeout = None,
        dim_options: DimOptionsLike = None,
    ) -> None:
        with telling_init(device_type, world):
            only_two("DeviceMesh", positional)
            if mesh is None:
                raise TypeError("mesh is None; pass its ranks in nested lists or an array, or call init_device_mesh with a shape")
            shape, numbers = nested(mesh)
        self._init(device_type, shape, numbers, mesh_dim_names, world, lazy, timeout, dim_options)

    def _init(
        self, device_type: Optional[str], shape: Sequence[int], numbers: Optional[Sequence[int]], names: Optional[Sequence[str]],
        world: Optional[World], lazy: bool, timeout: Timeout, wishes: DimOptionsLike,
    ) -> None:
        with telling_init(device_type, world):
            lengths, names_array = rank_counts("mesh_shape", shape), labels(names, len(shape))
            options, _kept = init_options(world, numbers, len(lengths), names, timeout, wishes)
            options.flags = declarations.INIT_LAZY if flag("lazy", lazy) else 0
            kind = optional_text("device_type", device_type)
        with new_handle() as handle:
            check(interrupt.call(
                world_end(world), library.dm_init, kind, lengths, len(lengths), names_array, byref(options), byref(handle)))
        self._adopt(handle, world, Root(lazy))

    def _adopt(self, handle: ctypes.c_void_p, world: MeshWorld, of_root: Root) -> None:
        number = handle.value or 0
        super().__init__(number, world, of_root)
        self._end = partial(library.dm_abort, number)
        # The groups that from_group was given. They must outlive the mesh.
        self._adopted_groups: List[Any] = []
        self._groups: Dict[str, Communicator] = {}
        meshes[number] = self
        for changed in mesh_changes:
            changed(self)

    @staticmethod
    def _adopted(handle: ctypes.c_void_p, world: MeshWorld, of_root: Root) -> "DeviceMesh":
        made = DeviceMesh.__new__(DeviceMesh)
        made._adopt(handle, world, of_root)
        return made

    # --- groups ---

    def get_group(self, mesh_dim: Dim = None) -> Communicator:
        """The communicator of this rank's group along a dimension, by its name (also a flattened
        one's) or index. The argument may be left out of a 1-D mesh."""
        dim = self._dim(mesh_dim)
        if dim is None:
            self.get_local_rank()  # says what is wrong when there is not one dimension
        name = self._names[0] if dim is None else dim.decode()
        found = self._groups.get(name)
        if found is None:
            found = self._groups.setdefault(name, Communicator(self, name))
        return found

    def get_all_groups(self) -> List[Communicator]:
        """The communicators of all dimensions, in order."""
        return [self.get_group(name) for name in self._names]

    def group(self, *, async_op: bool = False) -> Group:
        """``with mesh.group():`` runs the operations of its body together, so that no order of
        sends and receives blocks. With ``async_op`` they run while the program goes on, and
        ``group.work.wait()`` waits for them."""
        return Group(self, async_op)

    def get_proc(self, symbol: str) -> int:
        """The address of the function of that name ("ncclAllReduce") in the library that made the
        communicators."""
        answer = ctypes.c_void_p()
        check(library.dm_get_proc(self._handle, as_text("symbol", symbol), byref(answer)))
        return answer.value or 0

    # --- meshes over communicators that exist ---

    @staticmethod
    def from_group(
        group: Any,
        device_type: str,
        mesh: Any = None,
        *,
        mesh_dim_names: Optional[Sequence[str]] = None,
        world: Optional[World] = None,
        own: bool = False,
        timeout: Timeout = None,
    ) -> "DeviceMesh":
        """A mesh over communicators that exist already: one group, or a list with one per
        dimension. Local.

        A group is a Communicator, the address of an ncclComm_t, or a torch ProcessGroup whose
        backend is NCCL. ``mesh`` has the ranks, and for several groups their shape. A Communicator
        or ProcessGroup knows its ranks: a single one needs no ``mesh``. A Communicator of this world,
        and a ProcessGroup where this world numbers the processes as PyTorch does, must have the ranks
        that ``mesh`` has along its dimension. Without ``own`` the groups stay the caller's
        and must outlive the mesh. A Communicator brings the world of its mesh. Without a world
        only local calls and collectives on the mesh work, and its ranks are 0 .. n-1. ``timeout`` is
        how long each collective call of the mesh may take.
        """
        groups = list(group) if isinstance(group, (list, tuple)) else [group]
        if mesh is not None:
            shape, numbers = nested(mesh)
        elif len(groups) == 1 and isinstance(groups[0], Communicator):
            shape, numbers = (groups[0].size,), list(groups[0].ranks)
        elif len(groups) == 1 and is_process_group(groups[0]):
            numbers = process_group_ranks(groups[0])
            shape = (len(numbers),)
        else:
            raise InvalidArgumentError("mesh is needed: the ranks of the groups, one dimension per group")
        if len(shape) != len(groups):
            raise InvalidArgumentError(f"mesh has {len(shape)} dimensions, but there are {len(groups)} groups")
        known: MeshWorld = world
        given = next((each._mesh for each in groups if isinstance(each, Communicator)), None)
        if world is None and given is not None:
            # A mesh that from_group made without a world has none.
            with contextlib.suppress(UnsupportedError):
                world, known = given.world, given._world
        for index, each in enumerate(groups):
            ranks = ranks_in(world, each)
            if ranks is not None:
                refuse_other_ranks(index, ranks, numbers, shape)
        lengths, array = rank_counts("mesh", shape), labels(mesh_dim_names, len(shape))
        options, _kept = init_options(world, numbers if world is not None else None, len(shape), mesh_dim_names, timeout, None)
        options.flags = declarations.INIT_OWN_COMMS if flag("own", own) else 0
        comms = (ctypes.c_void_p * len(groups))(*(adopted_handle(each, device_type) for each in groups))
        handle = ctypes.c_void_p()
        check(library.dm_from_comms(as_text("device_type", device_type), lengths, len(shape), array, comms, byref(options), byref(handle)))
        made = DeviceMesh._adopted(handle, known, Root(False))
        made._adopted_groups = groups
        return made

    # --- life ---

    def __enter__(self) -> "DeviceMesh":
        """Makes this the thread's current mesh (get_current_mesh)."""
        stack.meshes.append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        if not stack.meshes or stack.meshes[-1] is not self:
            raise RuntimeError(
                f"{self!r} is not this thread's current mesh: each `with mesh:` ends once, in the thread that began it, and the innermost one first")
        stack.meshes.pop()

    def check(self, mesh_dim: Dim = None) -> None:
        """Raises the asynchronous error of a dimension's communicator, if it has one. Without a
        dimension it looks at the communicators of all dimensions that exist by now. Does not
        wait."""
        check(library.dm_check(self._handle, self._dim(mesh_dim)))

    def wait(self, stream: Any = None, mesh_dim: Dim = None, *, timeout: Timeout = None) -> None:
        """Waits until the work on a stream is done, as torch.cuda.Stream.synchronize() does, but
        not for ever. Local, on cuda.

        It raises PeerLostError when a rank is lost, for which the work may wait, MeshTimeoutError
        at the deadline (None: the mesh's timeout), and the error of a communicator that has failed.
        The work stays on the stream then; abort() ends it. ``stream`` None is the current stream of
        torch or CuPy on this rank's device, or the default stream. With ``mesh_dim`` only the ranks
        and the communicator of that dimension are asked about.
        """
        outside_groups("wait")
        here = stream is None and self.device_type == "cuda"
        handle = stream_of_device(self.get_group(self._names[0])._device_number) if here and self._names else stream_handle(stream)
        check(interrupt.call(self._end, library.dm_stream_wait, self._handle, self._dim(mesh_dim), handle or None, milliseconds(timeout)))

    def lost_ranks(self) -> Tuple[int, ...]:
        """The world ranks of the mesh that are known to be lost by now, for shrink(). Local; it
        asks the store and the communicators, for half a second at most. The mesh may have been
        aborted."""
        return tuple(listed(ctypes.c_int32, lambda *out: interrupt.local(library.dm_lost_ranks, self._handle, *out)))

    def abort(self) -> None:
        """Ends the root mesh on this rank at once, and wakes every call that is blocked in any of
        its views. Local, from any thread."""
        check(library.dm_abort(self._handle))
        has_ended()

    def finalize(self, *, timeout: Timeout = None) -> None:
        """Waits for outstanding work and destroys the communicators of the root mesh. Collective
        over the root mesh. From then on every view raises AbortedError. ``timeout`` bounds all of
        it. When an asynchronous operation is not over by then, nothing has ended yet."""
        with telling(library.dm_finalize, self._handle, refused_options()):
            outside_groups("finalize")
            deadline = Deadline(timeout)
            after_all_of(self.root, deadline, "finalize")
        options = declarations.CallOptions(struct_size=ctypes.sizeof(declarations.CallOptions), timeout_ms=deadline.milliseconds())
        check(interrupt.call(self._end, library.dm_finalize, self._handle, byref(options)))
        has_ended()

    def close(self) -> None:
        """Frees the handle. Communicators and other views live on. The garbage collector does this
        when nothing refers to the mesh any more. While the main thread is blocked in a call of the
        mesh, the handle is freed when that call returns."""
        interrupt.after_blocked(self._end, self._free)
        if self._world is UNKNOWN_WORLD:
            # This World has a handle, which would keep this process in the world.
            self._found_world = None

    def register(self, name: str) -> None:
        """Keeps the view under a name for lookup() anywhere in this process, other languages
        included."""
        check(library.dm_register(self._handle, as_text("name", name)))

    def serialize(self) -> str:
        """The view as one line of JSON, from which deserialize() makes it again: in a checkpoint,
        in another job, in another language."""
        return string(lambda *out: int(library.dm_serialize(self._handle, *out)))

    def __reduce__(self) -> Tuple[Any, ...]:
        # A pickle holds the mesh's text. If this process has that view already, unpickling gives
        # it without communication, as PyTorch finds its groups by name. Otherwise unpickling calls
        # deserialize() in the default world, which is collective.
        if not self._free.alive:
            raise InvalidHandleError(
                "this mesh was closed (close()), so it cannot be pickled: pickle it before, or pickle a mesh that it was made from"
            )
        return _unpickled, (self.serialize(),)

    def __copy__(self) -> "DeviceMesh":
        return self._local_view(library.dm_clone, self._handle)

    def __deepcopy__(self, memo: Dict[int, Any]) -> "DeviceMesh":
        return self.__copy__()


def init_device_mesh(
    device_type: Optional[str],
    mesh_shape: Sequence[int],
    *positional: NoReturn,
    mesh_dim_names: Optional[Sequence[str]] = None,
    ranks: Optional[Sequence[int]] = None,
    world: Optional[World] = None,
    lazy: bool = False,
    timeout: Timeout = None,
    dim_options: DimOptionsLike = None,
) -> DeviceMesh:
    """Makes a mesh: gives every dimension of this rank a ready communicator.

        >>> mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        >>> mesh.get_group("tp").all_reduce(gradients)

    Ranks lie row-major: the last dimension is the fastest. ``ranks`` is a flat list of world ranks
    instead of 0 .. n-1, for example a RankPlan's. The other arguments are those of DeviceMesh.
    """
    with telling_init(device_type, world):
        only_two("init_device_mesh", positional)
        shape = tuple(listing("mesh_shape", mesh_shape))
    made = DeviceMesh.__new__(DeviceMesh)
    made._init(device_type, shape, ranks, mesh_dim_names, world, lazy, timeout, dim_options)
    return made


def deserialize(
    text: str, *, world: Optional[World] = None, lazy: bool = False, timeout: Timeout = None, dim_options: DimOptionsLike = None
) -> DeviceMesh:
    """Makes a root mesh from a text of DeviceMesh.serialize. Collective over the world, as
    init_device_mesh is: every rank passes a text of one mesh, or calls init_device_mesh for that
    mesh."""
    ndim, names = 0, None
    if dim_options is not None:
        try:
            said = json.loads(text)
            ndim, names = len(said["shape"]), said.get("names")
        except (ValueError, KeyError, TypeError, AttributeError):
            dim_options = None  # the library says what is wrong with the text
    with telling_init(None, world):
        options, _kept = init_options(world, None, ndim, names, timeout, dim_options)
        options.flags = declarations.INIT_LAZY if flag("lazy", lazy) else 0
        described = as_text("text", text)
    with new_handle() as handle:
        check(interrupt.call(world_end(world), library.dm_deserialize, described, byref(options), byref(handle)))
    return DeviceMesh._adopted(handle, world, Root(lazy))


def _unpickled(text: str) -> DeviceMesh:
    for mesh in list(meshes.values()):
        try:
            if mesh.serialize() == text:
                mesh.root()  # raises when it has ended
                copy: DeviceMesh = mesh.__copy__()
                return copy
        except DeviceMeshError:
            continue
    return deserialize(text)


def lookup(name: str) -> DeviceMesh:
    """The view that was registered under that name, in any language of this process."""
    handle = ctypes.c_void_p()
    check(library.dm_lookup(as_text("name", name), byref(handle)))
    return DeviceMesh._adopted(handle, UNKNOWN_WORLD, Root(None))


def unregister(name: str) -> None:
    """Forgets the view that was registered under that name. NotFoundError where there is none."""
    check(library.dm_unregister(as_text("name", name)))
