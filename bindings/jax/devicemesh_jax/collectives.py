"""The functions that programs call: collectives on arrays, or pytrees of them, along one dimension
of a mesh.

_order.py keeps them in order. The ranks of a mesh must call them in the same order, as in any
program with communicators.
"""

from __future__ import annotations

from typing import Any, Callable, Tuple, Union

import jax
import jax.numpy as jnp

from . import _primitives as primitives
from ._meshes import MeshOrName, along
from ._operators import check_dtype, integer, operator

Dim = Union[None, int, str]
__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast", "reduce", "reduce_scatter", "shift"]


def call(what: str, x: Any, mesh: MeshOrName, dim: Dim, body: Callable[..., Any]) -> Any:
    """Calls body(array, mesh=, dim=, size=) for every leaf of x, in the order of the leaves."""
    name, label, size = along(mesh, dim)

    def one(leaf: Any) -> Any:
        array = jnp.asarray(leaf)
        check_dtype(what, array.dtype)
        return body(array, mesh=name, dim=label, size=size)

    return jax.tree.map(one, x)


def axis_of(name: str, axis: int, ndim: int) -> int:
    axis = integer(name, axis)
    if not -ndim <= axis < ndim:
        raise ValueError(f"{name} is {axis}, but there are {ndim} axes")
    return axis % ndim


def split(name: str, array: Any, axis: int, size: int, tiled: bool) -> Any:
    """Splits an axis into blocks for the ranks along a dimension. The new first axis counts the
    blocks."""
    length = array.shape[axis]
    if tiled:
        if length % size:
            raise ValueError(f"axis {axis} ({name}) of shape {array.shape} is not a multiple of the dimension's {size} ranks")
        array = array.reshape(*array.shape[:axis], size, length // size, *array.shape[axis + 1 :])
    elif length != size:
        raise ValueError(f"axis {axis} ({name}) of shape {array.shape} is not as long as the dimension, {size} ranks; tiled=True splits a longer one")
    return jnp.moveaxis(array, axis, 0)


def join(array: Any, axis: int, tiled: bool) -> Any:
    """Moves the first axis, which counts the ranks along a dimension, to a new axis, or (tiled)
    joins the blocks along an existing axis."""
    array = jnp.moveaxis(array, 0, axis)
    if tiled:
        array = array.reshape(*array.shape[:axis], array.shape[axis] * array.shape[axis + 1], *array.shape[axis + 2 :])
    return array


def all_reduce(x: Any, mesh: MeshOrName, dim: Dim = None, op: str = "sum") -> Any:
    """Reduces over all ranks, as jax.lax.psum. op is "sum", "avg", "prod", "max" or "min", or a
    devicemesh.ReduceOp ("sum" and "avg" can be differentiated). x has any shape."""
    code = operator(op)
    return call("all_reduce", x, mesh, dim, lambda array, **where: primitives.all_reduce_p.bind(array, op=code, **where))


def reduce(x: Any, mesh: MeshOrName, dim: Dim = None, root: int = 0, op: str = "sum") -> Any:
    """Reduces as all_reduce does, but only the rank at coordinate root gets the result. The others
    get zeros."""
    code = operator(op)
    return call("reduce", x, mesh, dim, lambda array, **where: primitives.reduce_p.bind(array, op=code, root=root_of(root, **where), **where))


def broadcast(x: Any, mesh: MeshOrName, dim: Dim = None, root: int = 0) -> Any:
    """Gives all ranks the array of the rank at coordinate root. The others pass an array of the
    same shape and type."""
    return call("broadcast", x, mesh, dim, lambda array, **where: primitives.broadcast_p.bind(array, root=root_of(root, **where), **where))


def root_of(root: int, dim: str, size: int, **_: Any) -> int:
    root = integer("root", root)
    if not 0 <= root < size:
        raise ValueError(f"root is {root}; dimension {dim} has ranks 0 to {size - 1}")
    return root


def all_gather(x: Any, mesh: MeshOrName, dim: Dim = None, *, axis: int = 0, tiled: bool = False) -> Any:
    """Every rank's array, in the order of their coordinates, along a new axis or (tiled) one after
    the other along that axis; as jax.lax.all_gather."""

    def body(array: Any, **where: Any) -> Any:
        place = axis_of("axis", axis, array.ndim + (not tiled))
        return join(primitives.all_gather_p.bind(array, **where), place, tiled)

    return call("all_gather", x, mesh, dim, body)


def reduce_scatter(x: Any, mesh: MeshOrName, dim: Dim = None, op: str = "sum", *, scatter_dimension: int = 0, tiled: bool = False) -> Any:
    """Reduces block i of all ranks' arrays, and gives it to rank i, as jax.lax.psum_scatter. The
    axis is as long as the dimension and is removed, or (tiled) its length is a multiple and
    becomes shorter."""
    code = operator(op)

    def body(array: Any, **where: Any) -> Any:
        place = axis_of("scatter_dimension", scatter_dimension, array.ndim)
        blocks = split("scatter_dimension", array, place, where["size"], tiled)
        return primitives.reduce_scatter_p.bind(blocks, op=code, **where)

    return call("reduce_scatter", x, mesh, dim, body)


def all_to_all(x: Any, mesh: MeshOrName, dim: Dim = None, *, split_axis: int = 0, concat_axis: int = 0, tiled: bool = False) -> Any:
    """Sends block i along split_axis to rank i. The block from rank i becomes block i along
    concat_axis. As jax.lax.all_to_all."""

    def body(array: Any, **where: Any) -> Any:
        source, target = axis_of("split_axis", split_axis, array.ndim), axis_of("concat_axis", concat_axis, array.ndim)
        blocks = split("split_axis", array, source, where["size"], tiled)
        return join(primitives.all_to_all_p.bind(blocks, **where), target, tiled)

    return call("all_to_all", x, mesh, dim, body)


def shift(x: Any, mesh: MeshOrName, dim: Dim = None, offset: int = 1, *, wrap: bool = True) -> Any:
    """Sends x to the rank at coordinate + offset, and gives what the rank at coordinate - offset
    sent. The coordinates wrap around, or (wrap=False) a rank to which nothing is sent gets zeros.

    A ring is offset=1; a pipeline's next stage is offset=1, wrap=False.
    """
    offset = integer("offset", offset)

    def body(array: Any, size: int, **where: Any) -> Any:
        # Offsets that mean the same shift become one number, so that such programs are equal.
        steps = offset % size if wrap else max(-size, min(size, offset))
        return primitives.shift_p.bind(array, offset=steps, wrap=int(bool(wrap)), size=size, **where)

    return call("shift", x, mesh, dim, body)
