"""The primitive for messages between two ranks, which every rank chooses for itself.

Its operands are what is sent, and an array that gives the shape and the type of what is received.
"""

from __future__ import annotations

from typing import Any, Sequence, Tuple

import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from . import _order
from ._primitives import outside_jit, register_handler

NOBODY = -1
sendrecv_p = Primitive("devicemesh_sendrecv")


def abstract(operand: Any, like: Any, **params: Any) -> Any:
    return ShapedArray(like.shape, like.dtype), {_order.collective}


def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    operand, like = primals
    tangent = tangents[0]
    constant = type(tangent) is ad.Zero
    if params["what"] == "send" and not constant:
        raise NotImplementedError(
            "send cannot be differentiated, because nothing flows back from its result; use sendrecv or shift on both ranks, or say that no derivative is wanted with "
            "jax.lax.stop_gradient around the operand")
    received = sendrecv_p.bind(operand, like, **params)
    if constant:
        return received, ad.Zero(ShapedArray(like.shape, like.dtype).to_tangent_aval())
    return received, sendrecv_p.bind(tangent, jnp.zeros(like.shape, like.dtype), **params)


def transpose(cotangent: Any, operand: Any, like: Any, **params: Any) -> Any:
    if not ad.is_undefined_primal(operand):
        return [None, None]
    # A rank that does not use what it received sends zeros back, because the other rank waits.
    back = sendrecv_p.bind(ad.instantiate_zeros(cotangent), jnp.zeros(operand.aval.shape, operand.aval.dtype),
                           **{**params, "dest": params["source"], "source": params["dest"]})
    return [back, None]


def batched(operands: Sequence[Any], axes: Sequence[Any], **params: Any) -> Tuple[Any, int]:
    """One message has the whole batch. The batch axis is first on both ranks, so that they agree
    on the order of the elements."""
    size = next(operand.shape[axis] for operand, axis in zip(operands, axes) if axis is not None)
    first = [
        jnp.broadcast_to(operand, (size, *operand.shape)) if axis is None else jnp.moveaxis(operand, axis, 0)
        for operand, axis in zip(operands, axes)
    ]
    return sendrecv_p.bind(*first, **params), 0


sendrecv_p.def_impl(outside_jit(sendrecv_p, "sendrecv"))
sendrecv_p.def_effectful_abstract_eval(abstract)
ad.primitive_jvps[sendrecv_p] = jvp
ad.primitive_transposes[sendrecv_p] = transpose
batching.primitive_batchers[sendrecv_p] = batched
register_handler(sendrecv_p, "sendrecv", zeros=True)
