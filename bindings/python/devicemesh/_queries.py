"""The questions about a mesh that need no other rank."""

from __future__ import annotations

import ctypes
import weakref
from ctypes import byref
from typing import TYPE_CHECKING, Any, Callable, List, Optional, Sequence, Tuple, Union

from . import _declarations as declarations
from ._library import check, flag, int32, integer, library, listed, string
from ._library import text as as_text
from .errors import InvalidHandleError, NotMemberError
from .sharding import Placement, local_shard
from .world import MeshWorld, World

if TYPE_CHECKING:
    import numpy
    import numpy.typing

__all__ = ["Dim", "MeshQueries", "Root"]

Dim = Union[None, int, str]


class Root:
    """A root mesh, which all its views name. It outlives the handles."""

    __slots__ = ("is_lazy",)

    def __init__(self, is_lazy: Optional[bool]) -> None:
        # Whether dimensions get their communicators at their first use. None: nobody knows, because
        # the mesh came from lookup(), so this object may be one of several for the root mesh.
        self.is_lazy = is_lazy


class MeshQueries:
    """A mesh handle and the questions about it. DeviceMesh adds the methods that make and end
    meshes and that move data."""

    # Ends each call of this handle.
    _end: Callable[[], Any]

    def __init__(self, handle: int, world: MeshWorld, of_root: Root) -> None:
        self._handle = handle
        self._world = world
        self._of_root = of_root
        # The World that `world` has made, where the program named none.
        self._found_world: Optional[World] = None
        self._free: "weakref.finalize[Any, Any]" = weakref.finalize(self, library.dm_free, handle)
        self._shape: Tuple[int, ...] = tuple(listed(ctypes.c_int32, lambda *out: int(library.dm_shape(handle, *out))))
        self._names: Tuple[str, ...] = tuple(library.dm_dim_name(handle, index).decode() for index in range(len(self._shape)))
        # No other function tells whether the program gave the names.
        self._named = bool(self._shape) and not repr(self).startswith(f"DeviceMesh({self._shape!r}, '")
        self._device_type: str = (library.dm_device_type(handle) or b"").decode()

    @property
    def device_type(self) -> str:
        """ "cuda" or "cpu"."""
        return self._device_type

    def is_member(self) -> bool:
        """Whether this process's rank is in the mesh. It answers also when the mesh has ended."""
        answer = ctypes.c_bool()
        check(library.dm_is_member(self._handle, byref(answer)))
        return answer.value

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
    def world(self) -> World:
        """The world it was made in. UnsupportedError where from_group was given none."""
        if isinstance(self._world, World):
            return self._world
        if self._found_world is None:
            handle = ctypes.c_void_p()
            check(library.dm_get_world(self._handle, byref(handle)))
            self._found_world = World._of(handle.value or 0, True if self._world is None else self._world._is_default)
        return self._found_world

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
            raise ImportError(
                "DeviceMesh.mesh is a numpy array, and numpy is not installed; DeviceMesh.ranks and .shape say the same"
            ) from error
        return numpy.array(self.ranks, dtype=numpy.int32).reshape(self._shape)

    def size(self, mesh_dim: Dim = None) -> int:
        """The number of ranks, of the mesh or along one dimension."""
        answer = ctypes.c_int32()
        check(library.dm_size(self._handle, self._dim(mesh_dim), byref(answer)))
        return answer.value

    def get_rank(self) -> int:
        """This process's rank in the world."""
        answer = ctypes.c_int32()
        check(library.dm_rank(self._handle, byref(answer)))
        return answer.value

    def get_local_rank(self, mesh_dim: Dim = None) -> int:
        """This rank's coordinate along a dimension, which is its rank in that dimension's group.
        ``mesh_dim`` may be left out of a 1-D mesh."""
        answer = ctypes.c_int32()
        check(library.dm_get_local_rank(self._handle, self._dim(mesh_dim), byref(answer)))
        return answer.value

    def get_coordinate(self) -> Optional[Tuple[int, ...]]:
        """This rank's coordinates, one per dimension. None when it is not in the mesh."""
        try:
            return tuple(listed(ctypes.c_int32, lambda *out: int(library.dm_get_coordinate(self._handle, *out))))
        except NotMemberError:
            return None

    def coordinate_of(self, world_rank: int) -> Optional[Tuple[int, ...]]:
        """The coordinates of any rank of the mesh, by its world rank. None when that rank is not
        in the mesh."""
        asked = int32("world_rank", world_rank)
        try:
            return tuple(listed(ctypes.c_int32, lambda *out: int(library.dm_coordinate_of(self._handle, asked, *out))))
        except NotMemberError:
            return None

    def group_ranks(self, mesh_dim: Dim = None) -> Tuple[int, ...]:
        """The world ranks of this rank's group along a dimension."""
        dim = self._dim(mesh_dim)
        return tuple(listed(ctypes.c_int32, lambda *out: int(library.dm_group_ranks(self._handle, dim, *out))))

    def replica_groups(self, mesh_dim: Dim = None) -> List[List[int]]:
        """All groups along a dimension, as XLA's replica groups. Every rank of the root mesh is in
        one."""
        dim = self._dim(mesh_dim)
        flat = listed(ctypes.c_int32, lambda *out: int(library.dm_replica_groups(self._handle, dim, *out)))
        length = self.size(self._names[0] if mesh_dim is None else mesh_dim)
        return [flat[start : start + length] for start in range(0, len(flat), length)]

    def translate_rank(self, mesh_dim: Dim, dim_rank: int) -> int:
        """The world rank of the rank that is dim_rank along a dimension, in this rank's group."""
        answer = ctypes.c_int32()
        check(library.dm_translate_rank(self._handle, self._dim(mesh_dim), int32("dim_rank", dim_rank), byref(answer)))
        return answer.value

    def translate_world_rank(self, mesh_dim: Dim, world_rank: int) -> int:
        """The rank along a dimension of a world rank in this rank's group: the number that send,
        recv and ``root`` take. NotMemberError for a rank of another group."""
        answer = ctypes.c_int32()
        check(library.dm_translate_world_rank(self._handle, self._dim(mesh_dim), int32("world_rank", world_rank), byref(answer)))
        return answer.value

    def neighbor(self, mesh_dim: Dim, offset: int, *, wrap: bool = False) -> Optional[int]:
        """The rank along a dimension that lies offset steps from this one: 1 is the next stage of
        a pipeline, -1 the one before. ``peer`` of send and recv takes it as it is; translate_rank
        makes a world rank of it. Past the end it is None, or with ``wrap`` the count continues from
        the other end."""
        answer = ctypes.c_int32()
        check(library.dm_neighbor(self._handle, self._dim(mesh_dim), int32("offset", offset), flag("wrap", wrap), byref(answer)))
        return None if answer.value == declarations.RANK_NONE else answer.value

    def local_shard(
        self, tensor_shape: Sequence[int], placements: Sequence[Placement], rank: Optional[int] = None
    ) -> Tuple[Tuple[int, ...], Tuple[int, ...]]:
        """The shape and the offsets of a rank's block of a tensor; see devicemesh.local_shard."""
        return local_shard(self, tensor_shape, placements, rank)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, MeshQueries):
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

    def _dim(self, mesh_dim: Dim) -> Optional[bytes]:
        """The name of a dimension, for C. Indices may count from the end."""
        if mesh_dim is None:
            return None
        if isinstance(mesh_dim, str):
            return as_text("mesh_dim", mesh_dim)
        index = integer("mesh_dim", mesh_dim)
        if not -len(self._names) <= index < len(self._names):
            raise IndexError(f"mesh dimension {index} is out of range: the mesh has {len(self._names)}")
        return self._names[index].encode()
