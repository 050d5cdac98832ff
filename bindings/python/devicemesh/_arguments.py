"""Converts the arguments of a mesh for C."""

from __future__ import annotations

import ctypes
from typing import Any, ContextManager, List, Optional, Sequence, Tuple, Union

from . import _declarations as declarations
from ._library import Timeout, in_order, integer, library, milliseconds, rank_counts, ranks, telling, texts
from .errors import InvalidArgumentError
from .options import DimOptions, DimOptionsLike, dim_options
from .world import World


def as_tuple(names: Union[str, Sequence[str]]) -> Sequence[str]:
    return (names,) if isinstance(names, str) else names


def labels(names: Optional[Sequence[str]], ndim: int) -> Any:
    if names is None:
        return None
    array = texts("mesh_dim_names", names)
    if len(array) != ndim:
        raise InvalidArgumentError(f"mesh_dim_names has {len(array)} names for {ndim} dimensions")
    return array


def call_options(timeout: Timeout, wishes: DimOptionsLike = None, ndim: int = 0, names: Optional[Sequence[str]] = None) -> Any:
    """A dm_call_options, or None when everything is the default. ``wishes`` are those of ndim new
    dimensions with these names."""
    if timeout is None and wishes is None:
        return None
    each = dim_options(wishes, ndim, names)
    # ctypes keeps the array alive that is assigned to the pointer.
    return declarations.CallOptions(struct_size=ctypes.sizeof(declarations.CallOptions),
                                    timeout_ms=milliseconds(timeout), dim_options=each, num_dim_options=len(each or ()))


def one_dim(options: Optional[DimOptions]) -> DimOptionsLike:
    """The options of a call that makes one dimension."""
    if options is not None and not isinstance(options, DimOptions):
        raise TypeError(f"options is a {type(options).__name__}, not a DimOptions")
    return None if options is None else [options]


def refused_options() -> Any:
    """Options that every collective call of a mesh refuses."""
    return ctypes.byref(declarations.CallOptions(struct_size=ctypes.sizeof(declarations.CallOptions), timeout_ms=-1))


def telling_init(device_type: Any, world: Any) -> ContextManager[None]:
    """Tells the other ranks when this package refuses a call that makes a mesh, by a call with a
    size of 0."""
    handle = world._handle if isinstance(world, World) else None
    options = declarations.InitOptions(struct_size=ctypes.sizeof(declarations.InitOptions), world=handle)
    kind = device_type.encode() if device_type in ("cuda", "cpu") else None
    return telling(library.dm_init, kind, (ctypes.c_int32 * 1)(0), 1, None, ctypes.byref(options), ctypes.byref(ctypes.c_void_p()))


def only_two(call: str, positional: Sequence[Any]) -> None:
    """Refuses a third positional argument, as PyTorch does."""
    if positional:
        named = f"mesh_dim_names={positional[0]!r}" if isinstance(positional[0], (str, list, tuple)) else "world=, ranks= ..."
        raise TypeError(
            f"{call} takes two positional arguments, the device type and the mesh, as in PyTorch: pass the others by name ({named})"
        )


def split(mesh_sizes: Sequence[int], names: Sequence[str], timeout: Timeout, wishes: DimOptionsLike) -> Tuple[Any, Any, Any]:
    lengths = rank_counts("mesh_sizes", mesh_sizes)
    return lengths, labels(names, len(lengths)), call_options(timeout, wishes, len(lengths), names)


def init_options(world: Optional[World], numbers: Optional[Sequence[int]], ndim: int, names: Optional[Sequence[str]],
                 timeout: Timeout, wishes: DimOptionsLike) -> Tuple[Any, Any]:
    """Makes dm_init_options. Returns it with the objects to which its pointers point."""
    if world is not None and not isinstance(world, World):
        raise TypeError(f"world is a {type(world).__name__}, not a devicemesh.World")
    places = None if numbers is None else ranks("ranks", numbers)
    each = dim_options(wishes, ndim, names)
    return declarations.InitOptions(struct_size=ctypes.sizeof(declarations.InitOptions),
                                    world=None if world is None else world._handle, ranks=places,
                                    num_ranks=len(places or ()), dim_options=each, num_dim_options=len(each or ()),
                                    timeout_ms=milliseconds(timeout)), (places, each)


def nested(mesh: Any) -> Tuple[Tuple[int, ...], List[int]]:
    """The shape and the elements of nested lists or of an array."""
    if hasattr(mesh, "tolist"):
        mesh = mesh.tolist()
    if not isinstance(in_order("mesh", mesh), (list, tuple, range)):
        return (), [integer("a rank of mesh", mesh)]
    parts = [nested(part) for part in mesh]
    if any(shape != parts[0][0] for shape, _ in parts):
        raise InvalidArgumentError("mesh is ragged: its rows have different lengths")
    return (len(parts), *(parts[0][0] if parts else ())), [number for _, flat in parts for number in flat]
