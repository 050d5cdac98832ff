"""DeviceMesh: PyTorch's, over the C library."""

from __future__ import annotations

import ctypes
import json
import operator
import re
import weakref
from ctypes import byref
from functools import partial
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Tuple, Union

from . import _declarations as declarations
from . import _interrupt as interrupt
from ._arguments import Timeout, as_many, as_tuple, init_options, labels, nested, split
from ._library import check, int32, library, listed, optional_text, sizes, string, text as as_text, texts
from .communicator import Communicator, Group, adopted_handle
from .current import stack
from .errors import DeviceMeshError, InvalidArgumentError, InvalidHandleError, NotMemberError
from .options import DimOptions, DimOptionsLike
from .sharding import Placement, local_shard
from .world import World, abort_default_worlds

if TYPE_CHECKING:
    import numpy
    import numpy.typing

__all__ = ["DeviceMesh", "deserialize", "init_device_mesh", "lookup", "unregister"]

Dim = Union[None, int, str]
# Every mesh of this process, by handle, for those that are unpickled.
alive: "weakref.WeakValueDictionary[int, DeviceMesh]" = weakref.WeakValueDictionary()
DEVICE = re.compile(r"'([^']*)', stride=[^']*$")


class DeviceMesh:
    """One rank's view of an n-dimensional array of ranks, with a communicator for every dimension: PyTorch's DeviceMesh.

    Collective over the world, also for ranks outside a mesh that is smaller than it. Before any communicator is made the ranks agree that they all asked
    for the same; who asked for something else is named in a MismatchError.

    Args:
        device_type: "cuda" or "cpu"; None is the world's, or what this machine has.
        mesh: world ranks, nested in lists or as an array: ``[[0, 1], [2, 3]]``.
        mesh_dim_names: a name per dimension. Without names they are dim_0, dim_1 ... where one is asked for.
        world: None is the process's default world, joined from the launcher's environment.
        lazy: make a dimension's communicator at its first use.
        timeout: how long each collective call of the mesh may take, in seconds or as a timedelta; None is as long as the world's.
        dim_options: wishes for the communicators, a DimOptions per dimension or a dict of them by name or index.
    """

    def __init__(
        self,
        device_type: Optional[str],
        mesh: Any,
        *,
        mesh_dim_names: Optional[Sequence[str]] = None,
        world: Optional[World] = None,
        lazy: bool = False,
        timeout: Timeout = None,
        dim_options: DimOptionsLike = None,
    ) -> None:
        shape, numbers = nested(mesh)
        self._init(device_type, shape, numbers, mesh_dim_names, world, lazy, timeout, dim_options)

    def _init(
        self, device_type: Optional[str], shape: Sequence[int], numbers: Optional[Sequence[int]], names: Optional[Sequence[str]],
        world: Optional[World], lazy: bool, timeout: Timeout, wishes: DimOptionsLike,
    ) -> None:
        lengths, names_array = sizes("mesh_shape", shape), labels(names, len(shape))
        options, _kept = init_options(world, numbers, len(lengths), names, timeout, wishes)
        options.flags = declarations.INIT_LAZY if lazy else 0
        as_many(shape, numbers)
        end = abort_default_worlds if world is None else world._end
        handle = ctypes.c_void_p()
        check(interrupt.call(
            end, library.dm_init, optional_text("device_type", device_type), lengths, len(lengths), names_array, byref(options), byref(handle)))
        self._adopt(handle, world)

    def _adopt(self, handle: ctypes.c_void_p, world: Optional[World]) -> None:
        number = handle.value or 0
        self._handle = number
        self._world = world
        self._free = weakref.finalize(self, library.dm_free, number)
        self._end = partial(library.dm_abort, number)
        self._shape: Tuple[int, ...] = tuple(listed(ctypes.c_size_t, lambda *out: int(library.dm_shape(number, *out))))
        self._names: Tuple[str, ...] = tuple(library.dm_dim_name(number, index).decode() for index in range(len(self._shape)))
        printed = repr(self)
        self._named = bool(self._shape) and not printed.startswith(f"DeviceMesh({self._shape!r}, '")
        found = DEVICE.search(printed)
        self._device_type = found.group(1) if found else ""
        # What from_group was given, which must outlive the mesh.
        self._adopted_groups: List[Any] = []
        self._groups: Dict[str, Communicator] = {}
        alive[number] = self

    def _view(self, function: Any, *arguments: Any) -> "DeviceMesh":
        """A mesh that function(arguments, mesh_out) makes of this one."""
        handle = ctypes.c_void_p()
        check(interrupt.call(self._end, function, *arguments, byref(handle)))
        return _adopted(handle, self._world)

    # --- what it is ---

    @property
    def device_type(self) -> str:
        """ "cuda" or "cpu"."""
        return self._device_type

    @property
    def shape(self) -> Tuple[int, ...]:
        """The sizes of the dimensions."""
        return self._shape

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return int(library.dm_ndim(self._handle)) if self._free.alive else len(self._shape)

    @property
    def mesh_dim_names(self) -> Optional[Tuple[str, ...]]:
        """The names of the dimensions; None for a mesh without names."""
        return self._names if self._named else None

    @property
    def world(self) -> Optional[World]:
        """The world it was made in; None for the process's default world."""
        return self._world

    @property
    def ranks(self) -> Tuple[int, ...]:
        """The world ranks, row-major."""
        count = self.size()
        return tuple(listed(ctypes.c_int32, lambda *out: int(library.dm_ranks(self._handle, *out)), count))

    @property
    def mesh(self) -> "numpy.typing.NDArray[numpy.int32]":
        """The world ranks as a numpy array in the mesh's shape."""
        try:
            import numpy
        except ImportError as error:
            raise ImportError("DeviceMesh.mesh is a numpy array, and numpy is not installed; DeviceMesh.ranks and .shape say the same") from error
        return numpy.array(self.ranks, dtype=numpy.int32).reshape(self._shape)

    def size(self, mesh_dim: Dim = None) -> int:
        """The number of ranks, of the mesh or along one dimension."""
        answer = ctypes.c_size_t()
        check(library.dm_size(self._handle, self._dim(mesh_dim), byref(answer)))
        return answer.value

    def get_rank(self) -> int:
        """This process's rank in the world."""
        answer = ctypes.c_int32()
        check(library.dm_rank(self._handle, byref(answer)))
        return answer.value

    def get_local_rank(self, mesh_dim: Dim = None) -> int:
        """This rank's coordinate along a dimension, which is its rank in that dimension's group. ``mesh_dim`` may be left out of a 1-D mesh."""
        answer = ctypes.c_int32()
        check(library.dm_get_local_rank(self._handle, self._dim(mesh_dim), byref(answer)))
        return answer.value

    def get_coordinate(self) -> Optional[Tuple[int, ...]]:
        """This rank's place, one number per dimension; None when it is not in the mesh."""
        try:
            return tuple(listed(ctypes.c_size_t, lambda *out: int(library.dm_get_coordinate(self._handle, *out))))
        except NotMemberError:
            return None

    def group_ranks(self, mesh_dim: Dim = None) -> Tuple[int, ...]:
        """The world ranks of this rank's group along a dimension."""
        dim = self._dim(mesh_dim)
        return tuple(listed(ctypes.c_int32, lambda *out: int(library.dm_group_ranks(self._handle, dim, *out))))

    def replica_groups(self, mesh_dim: Dim = None) -> List[List[int]]:
        """All groups along a dimension, as XLA wants them; every rank of the root mesh is in one."""
        dim = self._dim(mesh_dim)
        flat = listed(ctypes.c_int64, lambda *out: int(library.dm_replica_groups(self._handle, dim, *out)))
        length = self.size(self._names[0] if mesh_dim is None else mesh_dim)
        return [flat[start : start + length] for start in range(0, len(flat), length)]

    def translate_rank(self, mesh_dim: Dim, local_rank: int) -> int:
        """The world rank of member local_rank of this rank's group along a dimension."""
        answer = ctypes.c_int32()
        check(library.dm_translate_rank(self._handle, self._dim(mesh_dim), int32("local_rank", local_rank), byref(answer)))
        return answer.value

    def neighbor(self, mesh_dim: Dim, offset: int, *, wrap: bool = False) -> Optional[int]:
        """The world rank offset steps along a dimension: 1 is the next stage of a pipeline, -1 the one before. Past the edge None, or around it."""
        answer = ctypes.c_int32()
        check(library.dm_neighbor(self._handle, self._dim(mesh_dim), operator.index(offset), wrap, byref(answer)))
        return None if answer.value < 0 else answer.value

    def local_shard(
        self, tensor_shape: Sequence[int], placements: Sequence[Placement], rank: Optional[int] = None
    ) -> Tuple[Tuple[int, ...], Tuple[int, ...]]:
        """The shape and the offsets of a rank's block of a tensor; see devicemesh.local_shard."""
        return local_shard(self, tensor_shape, placements, rank)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, DeviceMesh):
            return NotImplemented
        answer = ctypes.c_bool()
        check(library.dm_equal(self._handle, other._handle, byref(answer)))
        return answer.value

    def __hash__(self) -> int:
        answer = ctypes.c_uint64()
        check(library.dm_hash(self._handle, byref(answer)))
        return hash(answer.value)

    def __repr__(self) -> str:
        try:
            return string(lambda *out: int(library.dm_describe(self._handle, *out)))
        except InvalidHandleError:
            return "DeviceMesh(closed)"

    # --- groups ---

    def get_group(self, mesh_dim: Dim = None) -> Communicator:
        """The communicator of this rank's group along a dimension, by name (of a flattened one too) or index; of the only one of a 1-D mesh."""
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

    def group(self) -> Group:
        """``with mesh.group():`` runs the operations of its body together, so that no order of sends and receives blocks."""
        return Group(self)

    def get_proc(self, symbol: str) -> int:
        """The address of the function of that name ("ncclAllReduce") in the library that made the communicators."""
        answer = ctypes.c_void_p()
        check(library.dm_get_proc(self._handle, as_text("symbol", symbol), byref(answer)))
        return answer.value or 0

    # --- views ---

    def __getitem__(self, mesh_dim_names: Union[str, Tuple[str, ...]]) -> "DeviceMesh":
        """A view of the named dimensions, in the order given: ``mesh["dp"]``, ``mesh["dp", "cp"]``. Local; it shares the communicators."""
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        if names == self._names and self._free.alive:
            return self
        array = texts("mesh_dim_names", names)
        return self._view(library.dm_slice, self._handle, array, len(array))

    def flatten(self, mesh_dim_name: Optional[str] = None, *, options: Optional[DimOptions] = None) -> "DeviceMesh":
        """One dimension out of all of this view's. Collective over the root mesh. The name defaults to the dimensions' names joined with "_"."""
        struct = None if options is None else byref(options.struct())
        return self._view(library.dm_flatten, self._handle, optional_text("mesh_dim_name", mesh_dim_name), struct)

    def unflatten(
        self, dim: Union[int, str], mesh_sizes: Sequence[int], mesh_dim_names: Sequence[str], *, dim_options: DimOptionsLike = None
    ) -> "DeviceMesh":
        """The view with one dimension replaced by several, whose sizes multiply to its size. Collective over the root mesh."""
        lengths, array, wishes = split(mesh_sizes, mesh_dim_names, dim_options)
        return self._view(library.dm_unflatten, self._handle, self._dim(dim), lengths, array, len(lengths), wishes)

    def reshape(self, mesh_sizes: Sequence[int], mesh_dim_names: Sequence[str], *, dim_options: DimOptionsLike = None) -> "DeviceMesh":
        """All ranks of this view under another shape. Collective over the root mesh. A name that exists already must mean the same groups."""
        lengths, array, wishes = split(mesh_sizes, mesh_dim_names, dim_options)
        return self._view(library.dm_reshape, self._handle, lengths, array, len(lengths), wishes)

    def slice_range(self, dim: Dim, indices: Union[range, slice]) -> "DeviceMesh":
        """The view with a dimension restricted to some of its indices: ``mesh.slice_range("pp", range(2, 4))``. Collective over the root mesh, also for
        the ranks at other indices, whose handle raises NotMemberError where membership matters."""
        if isinstance(indices, slice):
            indices = range(self.size(self._names[0] if dim is None else dim))[indices]
        if indices.step < 0 or (len(indices) and indices[0] < 0):
            raise InvalidArgumentError(f"indices are {indices!r}; they must ascend from 0 on")
        return self._view(library.dm_slice_range, self._handle, self._dim(dim), indices.start if len(indices) else 0, len(indices), indices.step)

    @staticmethod
    def concatenate(meshes: Sequence["DeviceMesh"]) -> "DeviceMesh":
        """Views of one root mesh side by side: a view with the dimensions of all of them, in order. Local."""
        handles = (ctypes.c_void_p * len(meshes))(*(mesh._handle for mesh in meshes))
        handle = ctypes.c_void_p()
        check(library.dm_concatenate(handles, len(meshes), byref(handle)))
        return _adopted(handle, meshes[0]._world)

    def root(self) -> "DeviceMesh":
        """The mesh that this is a view of."""
        return self._view(library.dm_root, self._handle)

    def submesh_count(self, mesh_dim_names: Union[str, Sequence[str]]) -> int:
        """How many parallel copies of the named dimensions there are over the ranks of the root mesh."""
        array, answer = texts("mesh_dim_names", as_tuple(mesh_dim_names)), ctypes.c_size_t()
        check(library.dm_submesh_count(self._handle, array, len(array), byref(answer)))
        return answer.value

    def submeshes(self, mesh_dim_names: Union[str, Sequence[str]]) -> List["DeviceMesh"]:
        """All of them, ordered by their first rank's place; the one that holds this rank equals mesh[names]."""
        array = texts("mesh_dim_names", as_tuple(mesh_dim_names))
        count = self.submesh_count(mesh_dim_names)
        return [self._view(library.dm_submesh, self._handle, array, len(array), index) for index in range(count)]

    # PyTorch's names for these.
    _flatten = flatten
    _unflatten = unflatten
    _concatenate = concatenate
    _get_root_mesh = root
    _get_all_submeshes = submeshes

    @staticmethod
    def from_group(
        group: Any,
        device_type: str,
        mesh: Any = None,
        *,
        mesh_dim_names: Optional[Sequence[str]] = None,
        world: Optional[World] = None,
        own: bool = False,
    ) -> "DeviceMesh":
        """A mesh over communicators that exist already: one group, or a list with one per dimension. Local.

        A group is a Communicator, the address of an ncclComm_t, or a torch ProcessGroup whose backend is NCCL. ``mesh`` has the ranks (their shape for several
        groups); a single Communicator or ProcessGroup knows its own. They stay the caller's and must outlive the mesh, unless ``own``. Without a world only
        local calls and collectives on the mesh work, and its ranks are 0 .. n-1.
        """
        groups = list(group) if isinstance(group, (list, tuple)) else [group]
        if mesh is not None:
            shape, numbers = nested(mesh)
        elif len(groups) == 1 and isinstance(groups[0], Communicator):
            shape, numbers = (groups[0].size,), list(groups[0].ranks)
        elif len(groups) == 1 and hasattr(groups[0], "_get_backend"):
            import torch.distributed  # type: ignore[import-not-found, unused-ignore]

            numbers = list(torch.distributed.get_process_group_ranks(groups[0]))
            shape = (len(numbers),)
        else:
            raise InvalidArgumentError("mesh is needed: the ranks of the groups, one dimension per group")
        if len(shape) != len(groups):
            raise InvalidArgumentError(f"mesh has {len(shape)} dimensions, but there are {len(groups)} groups")
        if world is None:
            world = next((each._mesh._world for each in groups if isinstance(each, Communicator)), None)
        lengths, array = sizes("mesh", shape), labels(mesh_dim_names, len(shape))
        options, _kept = init_options(world, numbers if world is not None else None, len(shape), mesh_dim_names, None, None)
        options.flags = declarations.INIT_OWN_COMMS if own else 0
        comms = (ctypes.c_void_p * len(groups))(*(adopted_handle(each, device_type) for each in groups))
        handle = ctypes.c_void_p()
        check(library.dm_from_comms(as_text("device_type", device_type), lengths, len(shape), array, comms, byref(options), byref(handle)))
        made = _adopted(handle, world)
        made._adopted_groups = groups
        return made

    # --- life ---

    def __enter__(self) -> "DeviceMesh":
        """Makes this the thread's current mesh (get_current_mesh)."""
        stack.meshes.append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        stack.meshes.pop()

    def check(self, mesh_dim: Dim = None) -> None:
        """Raises the asynchronous error of a dimension's communicator, if it has one. Does not wait."""
        check(library.dm_check(self._handle, self._dim(mesh_dim)))

    def abort(self) -> None:
        """Ends the root mesh on this rank at once: wakes every call that is blocked in any of its views. Local, from any thread."""
        check(library.dm_abort(self._handle))

    def finalize(self) -> None:
        """Waits for outstanding work and destroys the communicators of the root mesh. Collective over it; every view raises AbortedError from then on."""
        check(interrupt.call(self._end, library.dm_finalize, self._handle))

    def close(self) -> None:
        """Frees the handle; communicators and other views live on. Done by itself when nothing refers to the mesh any more."""
        self._free()

    def register(self, name: str) -> None:
        """Keeps the view under a name for lookup() anywhere in this process, other languages included."""
        check(library.dm_register(self._handle, as_text("name", name)))

    def serialize(self) -> str:
        """The view as one line of JSON, from which deserialize() makes it again: in a checkpoint, in another job, in another language."""
        return string(lambda *out: int(library.dm_serialize(self._handle, *out)))

    def __reduce__(self) -> Tuple[Any, ...]:
        # A pickle has the text. Where this process has that view already, unpickling gives it, without communication, as PyTorch's finds its groups by
        # name; elsewhere it is deserialize() in the default world, which is collective.
        return _unpickled, (self.serialize(),)

    def __copy__(self) -> "DeviceMesh":
        return self._view(library.dm_clone, self._handle)

    def __deepcopy__(self, memo: Dict[int, Any]) -> "DeviceMesh":
        return self.__copy__()

    def _dim(self, mesh_dim: Dim) -> Optional[bytes]:
        """A dimension as C takes it: a name. Indices may count from the end."""
        if mesh_dim is None:
            return None
        if isinstance(mesh_dim, str):
            return as_text("mesh_dim", mesh_dim)
        index = operator.index(mesh_dim)
        if not -len(self._names) <= index < len(self._names):
            raise IndexError(f"mesh dimension {index} is out of range: the mesh has {len(self._names)}")
        return self._names[index].encode()


def init_device_mesh(
    device_type: Optional[str],
    mesh_shape: Sequence[int],
    *,
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

    Ranks lie row-major: the last dimension is the fastest. ``ranks`` puts others than 0 .. n-1 there, flat, a RankPlan's for example. The rest is as in
    DeviceMesh.
    """
    made = DeviceMesh.__new__(DeviceMesh)
    made._init(device_type, tuple(mesh_shape), ranks, mesh_dim_names, world, lazy, timeout, dim_options)
    return made


def deserialize(
    text: str, *, world: Optional[World] = None, lazy: bool = False, timeout: Timeout = None, dim_options: DimOptionsLike = None
) -> DeviceMesh:
    """The mesh that a text of DeviceMesh.serialize says, as a root mesh. Collective over the world, on init_device_mesh's terms: every rank passes a text
    of the same mesh, or makes that call of init_device_mesh."""
    ndim, names = 0, None
    if dim_options is not None:
        try:
            said = json.loads(text)
            ndim, names = len(said["shape"]), said.get("names")
        except (ValueError, KeyError, TypeError, AttributeError):
            dim_options = None  # the library says what is wrong with the text
    options, _kept = init_options(world, None, ndim, names, timeout, dim_options)
    options.flags = declarations.INIT_LAZY if lazy else 0
    end = abort_default_worlds if world is None else world._end
    handle = ctypes.c_void_p()
    check(interrupt.call(end, library.dm_deserialize, as_text("text", text), byref(options), byref(handle)))
    return _adopted(handle, world)


def _unpickled(text: str) -> DeviceMesh:
    for mesh in list(alive.values()):
        try:
            if mesh.serialize() == text:
                mesh.root()  # raises when it has ended
                return mesh.__copy__()
        except DeviceMeshError:
            continue
    return deserialize(text)


def lookup(name: str) -> DeviceMesh:
    """The view that was registered under that name, in any language of this process."""
    handle = ctypes.c_void_p()
    check(library.dm_lookup(as_text("name", name), byref(handle)))
    return _adopted(handle, None)


def unregister(name: str) -> None:
    """Forgets the name."""
    check(library.dm_register(None, as_text("name", name)))


def _adopted(handle: ctypes.c_void_p, world: Optional[World]) -> DeviceMesh:
    made = DeviceMesh.__new__(DeviceMesh)
    made._adopt(handle, world)
    return made
