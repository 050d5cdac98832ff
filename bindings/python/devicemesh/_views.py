"""The views of a mesh, and the meshes that are made from one."""

from __future__ import annotations

import contextlib
import ctypes
from ctypes import byref
from functools import partial
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple, Type, TypeVar, Union, cast

from . import _interrupt as interrupt
from ._arguments import as_tuple, call_options, one_dim, refused_options, split
from ._beside import has_ended
from ._library import Timeout, check, int32, library, listing, optional_text, ranks, telling, texts
from ._queries import Dim, MeshQueries, Root
from .errors import InvalidArgumentError
from .options import DimOptions, DimOptionsLike
from .recovery import Recovery, recover_options, recovery_of, refused_recovery
from .world import MeshWorld, World

__all__ = ["MeshViews", "new_handle", "world_end"]

Mesh = TypeVar("Mesh", bound="MeshViews")


class MeshViews(MeshQueries):
    """A mesh from which other views can be made. DeviceMesh adds how meshes begin, end and move
    data."""

    @staticmethod
    def _adopted(handle: ctypes.c_void_p, world: MeshWorld, of_root: Root) -> Any:
        """A mesh that owns a handle. DeviceMesh has this method."""
        raise NotImplementedError

    def _view(self: Mesh, function: Any, *arguments: Any) -> Mesh:
        """The mesh that function(arguments, mesh_out) makes from this one. Collective."""
        with new_handle() as handle:
            check(interrupt.call(self._end, function, *arguments, byref(handle)))
        return cast(Mesh, self._adopted(handle, self._world, self._of_root))

    def _local_view(self: Mesh, function: Any, *arguments: Any) -> Mesh:
        """Does what _view does, for a function that waits for no other rank. So it need not wait for
        the outstanding work of other packages."""
        with new_handle() as handle:
            check(interrupt.local(function, *arguments, byref(handle)))
        return cast(Mesh, self._adopted(handle, self._world, self._of_root))

    @contextlib.contextmanager
    def _world_end(self) -> Iterator[interrupt.End]:
        """The function that aborts the mesh's world. It works also where the program has closed its
        World, and on a mesh from lookup()."""
        handle = ctypes.c_void_p()
        if library.dm_get_world(self._handle, byref(handle)) != 0:
            yield self._end  # the mesh has no world, and the call itself says what that means
            return
        try:
            yield partial(library.dm_world_abort, handle)
        finally:
            library.dm_world_free(handle)

    def __getitem__(self: Mesh, mesh_dim_names: Union[str, Tuple[str, ...]]) -> Mesh:
        """A view of the named dimensions, in the order given: ``mesh["dp"]``,
        ``mesh["dp", "cp"]``. Local; it shares the communicators."""
        if isinstance(mesh_dim_names, slice) or not hasattr(type(mesh_dim_names), "__iter__"):
            example = self._names[0] if self._names else "dp"
            raise TypeError(
                f"mesh[{mesh_dim_names!r}]: a view is chosen by the names of its dimensions; write mesh[{example!r}] "
                f"(this mesh has {', '.join(self._names)}), or mesh.slice_range({example!r}, range(0, 1)) for some indices of a dimension")
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        if names == self._names and self._free.alive:
            return self
        array = texts("mesh_dim_names", names)
        return self._local_view(library.dm_slice, self._handle, array, len(array))

    def flatten(self: Mesh, mesh_dim_name: Optional[str] = None, *, options: Optional[DimOptions] = None, timeout: Timeout = None) -> Mesh:
        """Makes one dimension out of all dimensions of this view. Collective over the root mesh.
        The name defaults to the dimensions' names joined with "_". ``timeout`` is how long the
        call may take; None is as long as the mesh's calls, here and in the methods below."""
        with telling(library.dm_flatten, self._handle, None, *refused()):
            name, call = optional_text("mesh_dim_name", mesh_dim_name), call_options(timeout, one_dim(options), 1)
        return self._view(library.dm_flatten, self._handle, name, call)

    def unflatten(
        self: Mesh, dim: Union[int, str], mesh_sizes: Sequence[int], mesh_dim_names: Sequence[str], *, dim_options: DimOptionsLike = None,
        timeout: Timeout = None,
    ) -> Mesh:
        """The view with one dimension replaced by several, whose sizes multiply to its size.
        Collective over the root mesh."""
        with telling(library.dm_unflatten, self._handle, None, None, 0, None, *refused()):
            lengths, array, wishes = split(mesh_sizes, mesh_dim_names, timeout, dim_options)
            name = self._dim(dim)
        return self._view(library.dm_unflatten, self._handle, name, lengths, len(lengths), array, wishes)

    def reshape(
        self: Mesh, mesh_sizes: Sequence[int], mesh_dim_names: Sequence[str], *, dim_options: DimOptionsLike = None, timeout: Timeout = None
    ) -> Mesh:
        """All ranks of this view under another shape. Collective over the root mesh. A name that
        exists already must mean the same groups."""
        with telling(library.dm_reshape, self._handle, None, 0, None, *refused()):
            lengths, array, wishes = split(mesh_sizes, mesh_dim_names, timeout, dim_options)
        return self._view(library.dm_reshape, self._handle, lengths, len(lengths), array, wishes)

    def slice_range(
        self: Mesh, dim: Dim, indices: Union[range, slice], *, options: Optional[DimOptions] = None, timeout: Timeout = None
    ) -> Mesh:
        """The view with a dimension restricted to some of its indices:
        ``mesh.slice_range("pp", range(2, 4))``. Collective over the root mesh, also for the ranks
        at other indices, whose handle raises NotMemberError where membership matters."""
        with telling(library.dm_slice_range, self._handle, None, 0, 0, 0, *refused()):
            if isinstance(indices, slice):
                indices = range(self.size(self._names[0] if dim is None else dim))[indices]
            if not isinstance(indices, range):
                raise TypeError(f"indices is a {type(indices).__name__}, not a range or a slice")
            if indices.step < 0 or (len(indices) and indices[0] < 0):
                raise InvalidArgumentError(f"indices are {indices!r}; they must ascend from 0 on")
            start, length, step = (int32("indices", number)
                                   for number in (indices.start if len(indices) else 0, len(indices), indices.step))
            name, call = self._dim(dim), call_options(timeout, one_dim(options), 1)
        return self._view(library.dm_slice_range, self._handle, name, start, length, step, call)

    def shrink(self: Mesh, mesh_dim: Dim = None, lost_ranks: Optional[Sequence[int]] = None, *,
               dim_options: DimOptionsLike = None, timeout: Timeout = None) -> Mesh:
        """The mesh without the indices along a dimension that hold a lost rank, so that a job can
        go on after a rank has died. Whole replicas leave the mesh. This mesh ends.

        Collective over the ranks that are not lost. A rank whose replica leaves also makes the
        call, and gets a mesh that it is not in. Without ``lost_ranks`` (None or empty) the ranks agree
        on those that are lost. When the call fails because another rank died
        meanwhile, make it again on this mesh.
        """
        # A wrong list does not say which ranks stay, so no rank is told that this call was
        # refused.
        lost = None if lost_ranks is None else ranks("lost_ranks", lost_ranks)
        with telling(library.dm_shrink, self._handle, None, lost, len(lost or ()), *refused()):
            dim = self._dim(mesh_dim)
            options = call_options(timeout, dim_options, len(self._names), self._names)
        # The mesh ends at once, so only the world can end the call.
        with self._world_end() as end, new_handle() as handle:
            check(interrupt.call(end, library.dm_shrink, self._handle, dim, lost, len(lost or ()), options, byref(handle)))
        has_ended()
        return cast(Mesh, self._adopted(handle, self._world, Root(self._of_root.is_lazy)))

    def recover(self: Mesh, mesh_dim: Optional[str] = None, *, timeout: Timeout = None, replace: Timeout = None, silent: Timeout = None,
                min_size: int = 0, has_state: bool = False, any_state: bool = False, grow: bool = False, max_size: int = 0,
                dim_options: DimOptionsLike = None) -> Mesh:
        """The mesh with which the job goes on after ranks were lost: in its full shape where spares
        take the places of the lost ranks, and smaller along ``mesh_dim`` (None: the outermost
        dimension) where they cannot. This mesh and all others of its world end.

        Collective over the ranks of the world that live. A rank that is not in the mesh waits in
        the call until it gets a place, and gets an AbortedError when the job ends. ``replace`` is
        how long to wait for processes in the places of lost ranks. After ``silent`` the ranks are
        left out that are not known to be lost and have not called; it needs ``min_size``, the least
        size of the dimension. ``has_state`` says that this rank, which has joined, has received
        the state of the training. With ``grow`` the outermost dimension gets more indices when new
        processes fill them, up to ``max_size`` (0: no limit). ``recovery`` of the result says what
        it has come to.
        """
        with telling(library.dm_recover, self._handle, refused_recovery(), byref(ctypes.c_void_p()), None):
            options = recover_options(self._names, mesh_dim, timeout, replace, silent, min_size, has_state, any_state, grow, max_size,
                                      dim_options)
        # The mesh ends at once, so only the world can end the call.
        with self._world_end() as end, new_handle() as handle:
            check(interrupt.call(end, library.dm_recover, self._handle, byref(options), byref(handle), None))
        has_ended()
        return cast(Mesh, self._adopted(handle, self._world, Root(self._of_root.is_lazy)))

    @property
    def recovery(self) -> Recovery:
        """What the recovery that made this mesh has come to. For a mesh that no recovery made,
        nobody was lost and nobody has joined."""
        return recovery_of(self._handle)

    @classmethod
    def concatenate(cls: Type[Mesh], meshes: Sequence[Mesh]) -> Mesh:
        """Views of one root mesh side by side: a view with the dimensions of all of them, in
        order. Local."""
        for mesh in listing("meshes", meshes):
            if not isinstance(mesh, MeshViews):
                raise TypeError(f"meshes has a {type(mesh).__name__}, not a DeviceMesh")
        handles = (ctypes.c_void_p * len(meshes))(*(mesh._handle for mesh in meshes))
        with new_handle() as handle:
            check(interrupt.local(library.dm_concatenate, handles, len(meshes), byref(handle)))
        return cast(Mesh, cls._adopted(handle, meshes[0]._world, meshes[0]._of_root))

    def root(self: Mesh) -> Mesh:
        """The mesh of which this is a view."""
        return self._local_view(library.dm_root, self._handle)

    def submesh_count(self, mesh_dim_names: Union[str, Sequence[str]]) -> int:
        """How many parallel copies of the named dimensions there are over the ranks of the root
        mesh."""
        array, answer = texts("mesh_dim_names", as_tuple(mesh_dim_names)), ctypes.c_int32()
        check(library.dm_submesh_count(self._handle, array, len(array), byref(answer)))
        return answer.value

    def submeshes(self: Mesh, mesh_dim_names: Union[str, Sequence[str]]) -> List[Mesh]:
        """All parallel copies of the named dimensions, ordered by the position of their first
        rank. The copy that holds this rank equals mesh[names]."""
        array = texts("mesh_dim_names", as_tuple(mesh_dim_names))
        count = self.submesh_count(mesh_dim_names)
        return [self._local_view(library.dm_submesh, self._handle, array, len(array), index) for index in range(count)]

    # PyTorch's names of these methods.
    _flatten = flatten
    _unflatten = unflatten
    _concatenate = concatenate
    _get_root_mesh = root
    _get_all_submeshes = submeshes


@contextlib.contextmanager
def new_handle() -> Iterator[ctypes.c_void_p]:
    """A handle for a call to write. When the call has made a mesh and KeyboardInterrupt is raised
    after it, the mesh's handle is freed, because nobody gets it."""
    handle = ctypes.c_void_p()
    try:
        yield handle
    except BaseException:
        library.dm_free(handle)
        raise


def refused() -> Tuple[Any, Any]:
    """The last two arguments of a call that the library refuses: its options and its result."""
    return refused_options(), byref(ctypes.c_void_p())


def world_end(world: Optional[World]) -> interrupt.End:
    """The function that ends a call that makes a mesh in this world, at the beginning of the call.
    None is the default world."""
    if world is not None:
        return world._end
    interrupt.begin_default_join()
    return library.dm_default_world_abort
