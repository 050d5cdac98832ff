"""The primitives whose blocks have a length for each rank. Lengths count rows: steps along the first
axis.

all_gatherv and reduce_scatterv are each other's transposes, and have lengths that are known when
they are traced. The lengths and offsets of all_to_allv are arrays, because an exchange of tokens
between experts knows them at run time only. It writes what it receives into its second operand.
"""

from __future__ import annotations

from typing import Any, List, Sequence, Tuple

import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from . import _order
from ._operators import SUM
from ._primitives import first_axis_kept, make, outside_jit, register_handler, share, without

Params = Any


def transpose_all_gatherv(cotangent: Any, params: Params) -> Any:
    return reduce_scatterv_p.bind(cotangent, op=SUM, **params)


def transpose_reduce_scatterv(cotangent: Any, params: Params) -> Any:
    return share(all_gatherv_p.bind(cotangent, **without(params, "op")), params)


all_gatherv_p = make(
    "all_gatherv", lambda shape, size, counts, **_: (sum(counts), *shape[1:]), transpose_all_gatherv, first_axis_kept, all_params=True)
reduce_scatterv_p = make("reduce_scatterv", lambda shape, size, counts, rank, **_: (counts[rank], *shape[1:]),
                         transpose_reduce_scatterv, first_axis_kept, all_params=True)

all_to_allv_p = Primitive("devicemesh_all_to_allv")


def abstract(operand: Any, output: Any, *numbers: Any, **params: Any) -> Any:
    return ShapedArray(output.shape, output.dtype), {_order.collective}


def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    result = all_to_allv_p.bind(*primals, **params)
    if all(type(tangent) is ad.Zero for tangent in tangents[:2]):
        return result, ad.Zero(ShapedArray(result.shape, result.dtype).to_tangent_aval())
    moved = [ad.instantiate_zeros(tangent) for tangent in tangents[:2]]
    return result, all_to_allv_p.bind(*moved, *primals[2:], **params)


def transpose(cotangent: Any, operand: Any, output: Any, *numbers: Any, **params: Any) -> List[Any]:
    """What was received goes back to where it came from. Rows of the output that were not written
    over keep their cotangents."""
    send_offsets, send_sizes, recv_offsets, recv_sizes = numbers
    given = ad.instantiate_zeros(cotangent)
    to_operand = to_output = None
    if ad.is_undefined_primal(operand):
        zeros = jnp.zeros(operand.aval.shape, operand.aval.dtype)
        to_operand = all_to_allv_p.bind(given, zeros, recv_offsets, recv_sizes, send_offsets, send_sizes, **params)
    if ad.is_undefined_primal(output):
        rows = lax.iota(recv_offsets.dtype, given.shape[0])[:, None]
        written = jnp.any((rows >= recv_offsets) & (rows < recv_offsets + recv_sizes), axis=1)
        to_output = jnp.where(written.reshape(-1, *[1] * (given.ndim - 1)), jnp.zeros((), given.dtype), given)
    return [to_operand, to_output, None, None, None, None]


def batched(operands: Sequence[Any], axes: Sequence[Any], **params: Any) -> Tuple[Any, int]:
    """One exchange moves the whole batch, whose lengths are alike."""
    if any(axis is not None for axis in axes[2:]):
        raise NotImplementedError("an exchange with other sizes or offsets for each element of a batch (jax.vmap): call it for one element at a time (jax.lax.map)")
    size = next(operand.shape[axis] for operand, axis in zip(operands, axes) if axis is not None)
    second = [
        jnp.broadcast_to(operand[:, None], (operand.shape[0], size, *operand.shape[1:])) if axis is None else jnp.moveaxis(operand, axis, 1)
        for operand, axis in zip(operands[:2], axes)]
    return all_to_allv_p.bind(*second, *operands[2:], **params), 1


all_to_allv_p.def_impl(outside_jit(all_to_allv_p, "all_to_allv"))
all_to_allv_p.def_effectful_abstract_eval(abstract)
ad.primitive_jvps[all_to_allv_p] = jvp
ad.primitive_transposes[all_to_allv_p] = transpose
batching.primitive_batchers[all_to_allv_p] = batched
register_handler(all_to_allv_p, "all_to_allv", zeros=False, passed=6)
