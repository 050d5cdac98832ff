"""The functions that programs call: collectives on arrays, or pytrees of them, along one dimension
of a mesh.

_order.py keeps them in order. The ranks of a mesh must call them in the same order, as in any
program with communicators.
"""

from __future__ import annotations

from typing import Any, Callable, Optional, Tuple, Union

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from . import _primitives as primitives
from ._meshes import MeshOrName, along
from ._messages import NOBODY, sendrecv_p
from ._operators import AVG, MAX, MIN, PROD, SUM, WIDENED, check_moved, check_reduced, integer, is_key, operator

Dim = Union[None, int, str]
__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "scan",
    "scatter",
    "send",
    "sendrecv",
    "shift",
]
TRANSPOSES = ("all_reduce", "identity")


def call(what: str, x: Any, mesh: MeshOrName, dim: Dim, body: Callable[..., Any], op: Optional[int] = None) -> Any:
    """Calls body(array, mesh=, dim=, size=) for every leaf of x, in the order of the leaves. op is
    the operator of a reduction."""
    name, label, size = along(mesh, dim)

    def one(leaf: Any) -> Any:
        array = jnp.asarray(leaf)
        if op is None:
            check_moved(what, array.dtype)
        else:
            check_reduced(what, array.dtype, op)
        return body(array, mesh=name, dim=label, size=size)

    return jax.tree.map(one, x)


def move(primitive: Primitive, array: Any, **params: Any) -> Any:
    """Runs a collective that moves elements. Random keys travel as the numbers behind them."""
    if is_key(array.dtype):
        return jax.random.wrap_key_data(primitive.bind(jax.random.key_data(array), **params), impl=jax.random.key_impl(array))
    return primitive.bind(array, **params)


def reduce_by(primitive: Primitive, blocks_of: Primitive, array: Any, op: int, **params: Any) -> Any:
    """Runs a collective that reduces elements. blocks_of moves the operands of that reduction to
    the rank that gets the result, for products of complex numbers, which no library makes."""
    if op == PROD and jnp.issubdtype(array.dtype, jnp.complexfloating):
        params.pop("transpose", None)
        return jnp.prod(blocks_of.bind(array, **params), axis=0)
    wide = WIDENED.get(array.dtype.name, array.dtype)
    return primitive.bind(array.astype(wide), op=op, **params).astype(array.dtype)


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
        raise ValueError(
            f"axis {axis} ({name}) of shape {array.shape} is not as long as the dimension, {size} ranks; tiled=True splits a longer one"
        )
    return jnp.moveaxis(array, axis, 0)


def join(array: Any, axis: int, tiled: bool) -> Any:
    """Moves the first axis, which counts the ranks along a dimension, to a new axis, or (tiled)
    joins the blocks along an existing axis."""
    array = jnp.moveaxis(array, 0, axis)
    if tiled:
        array = array.reshape(*array.shape[:axis], array.shape[axis] * array.shape[axis + 1], *array.shape[axis + 2 :])
    return array


def all_reduce(x: Any, mesh: MeshOrName, dim: Dim = None, op: str = "sum", *, transpose: str = "all_reduce") -> Any:
    """Reduces over all ranks, as jax.lax.psum. op is "sum", "avg", "prod", "max" or "min", or a
    devicemesh.ReduceOp ("sum" and "avg" can be differentiated). x has any shape.

    transpose says what happens to cotangents. "all_reduce": they are reduced in the same way, so a
    gradient is the derivative of the sum of all ranks' losses. "identity": they pass as they are
    (with "avg" divided by the number of ranks), as in mpi4jax. So a gradient is the derivative of
    one loss, which all ranks compute alike from the result.
    """
    code = operator(op)
    if transpose not in TRANSPOSES:
        raise ValueError(f"transpose is {transpose!r}; it is one of {', '.join(TRANSPOSES)}")

    def body(array: Any, **where: Any) -> Any:
        return reduce_by(primitives.all_reduce_p, primitives.all_gather_p, array, code, transpose=transpose, **where)

    return call("all_reduce", x, mesh, dim, body, code)


def reduce(x: Any, mesh: MeshOrName, dim: Dim = None, root: int = 0, op: str = "sum") -> Any:
    """Reduces as all_reduce does, but only the rank at coordinate root gets the result. The others
    get zeros."""
    code = operator(op)

    def body(array: Any, **where: Any) -> Any:
        return reduce_by(primitives.reduce_p, primitives.gather_p, array, code, root=root_of(root, **where), **where)

    return call("reduce", x, mesh, dim, body, code)


def broadcast(x: Any, mesh: MeshOrName, dim: Dim = None, root: int = 0) -> Any:
    """Gives all ranks the array of the rank at coordinate root. The others pass an array of the
    same shape and type."""
    return call("broadcast", x, mesh, dim, lambda array, **where: move(primitives.broadcast_p, array, root=root_of(root, **where), **where))


def root_of(root: int, dim: str, size: int, **_: Any) -> int:
    return coordinate("root", root, dim, size)


def coordinate(what: str, rank: int, dim: str, size: int) -> int:
    rank = integer(what, rank)
    if not 0 <= rank < size:
        raise ValueError(f"{what} is {rank}; dimension {dim} has ranks 0 to {size - 1}")
    return rank


def all_gather(x: Any, mesh: MeshOrName, dim: Dim = None, *, axis: int = 0, tiled: bool = False) -> Any:
    """Every rank's array, in the order of their coordinates, along a new axis or (tiled) one after
    the other along that axis; as jax.lax.all_gather."""

    def body(array: Any, **where: Any) -> Any:
        place = axis_of("axis", axis, array.ndim + (not tiled))
        return join(move(primitives.all_gather_p, array, **where), place, tiled)

    return call("all_gather", x, mesh, dim, body)


def reduce_scatter(x: Any, mesh: MeshOrName, dim: Dim = None, op: str = "sum", *, scatter_dimension: int = 0, tiled: bool = False) -> Any:
    """Reduces block i of all ranks' arrays, and gives it to rank i, as jax.lax.psum_scatter. The
    axis is as long as the dimension and is removed, or (tiled) its length is a multiple and
    becomes shorter."""
    code = operator(op)

    def body(array: Any, **where: Any) -> Any:
        place = axis_of("scatter_dimension", scatter_dimension, array.ndim)
        blocks = split("scatter_dimension", array, place, where["size"], tiled)
        return reduce_by(primitives.reduce_scatter_p, primitives.all_to_all_p, blocks, code, **where)

    return call("reduce_scatter", x, mesh, dim, body, code)


def all_to_all(x: Any, mesh: MeshOrName, dim: Dim = None, *, split_axis: int = 0, concat_axis: int = 0, tiled: bool = False) -> Any:
    """Sends block i along split_axis to rank i. The block from rank i becomes block i along
    concat_axis. As jax.lax.all_to_all."""

    def body(array: Any, **where: Any) -> Any:
        source, target = axis_of("split_axis", split_axis, array.ndim), axis_of("concat_axis", concat_axis, array.ndim)
        blocks = split("split_axis", array, source, where["size"], tiled)
        return join(move(primitives.all_to_all_p, blocks, **where), target, tiled)

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
        return move(primitives.shift_p, array, offset=steps, wrap=int(bool(wrap)), size=size, **where)

    return call("shift", x, mesh, dim, body)


def gather(x: Any, mesh: MeshOrName, dim: Dim = None, root: int = 0, *, axis: int = 0, tiled: bool = False) -> Any:
    """Gives the rank at coordinate root what all_gather gives. The others get zeros."""

    def body(array: Any, **where: Any) -> Any:
        place = axis_of("axis", axis, array.ndim + (not tiled))
        return join(move(primitives.gather_p, array, root=root_of(root, **where), **where), place, tiled)

    return call("gather", x, mesh, dim, body)


def scatter(x: Any, mesh: MeshOrName, dim: Dim = None, root: int = 0, *, axis: int = 0, tiled: bool = False) -> Any:
    """Gives rank i block i of the array of the rank at coordinate root. The others pass an array
    of the same shape and type. The axis is as long as the dimension and is removed, or (tiled) its
    length is a multiple and becomes shorter."""

    def body(array: Any, **where: Any) -> Any:
        blocks = split("axis", array, axis_of("axis", axis, array.ndim), where["size"], tiled)
        return move(primitives.scatter_p, blocks, root=root_of(root, **where), **where)

    return call("scatter", x, mesh, dim, body)


def scan(x: Any, mesh: MeshOrName, dim: Dim = None, op: str = "sum") -> Any:
    """Reduces the arrays of the ranks up to this one, and its own, as MPI_Scan: a prefix reduction.
    op is "sum", "prod", "max" or "min". It takes log2 of the number of ranks in shifts."""
    code = operator(op)
    if code == AVG:
        raise ValueError("op is 'avg', which scan does not have; divide a scan by 'sum' by the number of ranks up to this one")
    combine = {SUM: jnp.add, PROD: jnp.multiply, MAX: jnp.maximum, MIN: jnp.minimum}[code]

    def body(array: Any, size: int, **where: Any) -> Any:
        # The coordinate comes from a rank, so that all ranks compile the same program.
        here = None if code == SUM else primitives.scatter_p.bind(jnp.arange(size, dtype="int32"), root=0, size=size, **where)
        offset = 1
        while offset < size:
            # Ranks below offset get zeros, which change no sum.
            before = primitives.shift_p.bind(array, offset=offset, wrap=0, size=size, **where)
            array = combine(before, array) if here is None else jnp.where(here >= offset, combine(before, array), array)
            offset *= 2
        return array

    return call("scan", x, mesh, dim, body, code)


def barrier(mesh: MeshOrName, dim: Dim = None) -> None:
    """A collective after the barrier begins only when all ranks have called the barrier. Outside
    jax.jit the function returns when they have come."""
    name, label, size = along(mesh, dim)
    # uint8 with prod is rarely used otherwise, so a rank that makes another call gets a mismatch.
    met = primitives.all_reduce_p.bind(jnp.ones((), "uint8"), op=PROD, transpose=TRANSPOSES[0], mesh=name, dim=label, size=size)
    if not isinstance(met, jax.core.Tracer):
        met.block_until_ready()


def message(what: str, x: Any, like: Any, mesh: MeshOrName, dim: Dim, dest: Optional[int], source: Optional[int]) -> Any:
    """Sends each leaf of x to dest, and gives what source sent, an array like the leaf of like.
    None is nobody."""
    name, label, size = along(mesh, dim)
    to, of = (NOBODY if rank is None else coordinate(which, rank, label, size) for which, rank in (("dest", dest), ("source", source)))

    def one(leaf: Any, shaped: Any) -> Any:
        sent = jnp.asarray(leaf)
        template = jnp.zeros(shaped.shape, shaped.dtype) \
            if isinstance(shaped, jax.ShapeDtypeStruct) and not is_key(shaped.dtype) else jnp.asarray(shaped)
        check_moved(what, sent.dtype)
        check_moved(what, template.dtype)
        numbers = [jax.random.key_data(array) if is_key(array.dtype) else array for array in (sent, template)]
        got = sendrecv_p.bind(*numbers, dest=to, source=of, what=what, mesh=name, dim=label, size=size)
        return jax.random.wrap_key_data(got, impl=jax.random.key_impl(template)) if is_key(template.dtype) else got

    return jax.tree.map(one, x, like)


def sendrecv(x: Any, mesh: MeshOrName, dim: Dim = None, *, dest: Optional[int], source: Optional[int], like: Any = None) -> Any:
    """Sends x to the rank at coordinate dest, and gives what the rank at coordinate source sent.

    Each rank chooses its own dest and source. What one rank sends, the other one must receive, in
    the order of both programs. None sends to nobody, or gives zeros. like has the shapes and types
    of what is received, where these are not those of x.
    """
    return message("sendrecv", x, x if like is None else like, mesh, dim, dest, source)


def send(x: Any, mesh: MeshOrName, dim: Dim = None, *, dest: int) -> None:
    """Sends x to the rank at coordinate dest, which must receive it with recv or sendrecv. It
    cannot be differentiated."""
    message("send", x, jax.tree.map(lambda leaf: jnp.zeros(0, "uint8"), x), mesh, dim, integer("dest", dest), None)


def recv(like: Any, mesh: MeshOrName, dim: Dim = None, *, source: int) -> Any:
    """Gives what the rank at coordinate source sent. like has the shapes and types: an array,
    whose values are not used, a jax.ShapeDtypeStruct, or a pytree of these."""
    return message("recv", jax.tree.map(lambda leaf: jnp.zeros(0, "uint8"), like), like, mesh, dim, None, integer("source", source))
