"""The collectives as JAX primitives with one operand and one result. This file says how each is
compiled, batched, differentiated and transposed.

The primitives work on the first axis, which runs along the mesh dimension: all_gather adds it and
reduce_scatter removes it. collectives.py builds the functions for users from them.

A derivative is the derivative of the sum of all ranks' results, as for jax.lax.psum: the
cotangents of one value on several ranks are summed. So these are each other's transposes:

    all_reduce (sum, avg)  <->  itself                     all_to_all     <->  itself
    all_gather             <->  reduce_scatter             shift by k     <->  shift by -k
    reduce to a root       <->  broadcast from it          gather to one  <->  scatter from it

all_reduce has a second convention, transpose="identity", in which its transpose is the identity
and the identity's transpose is all_reduce. _messages.py has the messages between two ranks.

Parameters are the same on all ranks, so all ranks compile the same program. The exceptions are
`rank` (_ragged.py) and `dest` and `source` (_messages.py).
"""

from __future__ import annotations

import functools
import sys
from typing import Any, Callable, Dict, List, Sequence, Tuple

import jax
import jax.numpy as jnp
import numpy
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

try:
    from jax.ffi import abstract_token  # type: ignore[attr-defined,unused-ignore]  # JAX 0.11 and later
except ImportError:
    from jax._src.core import abstract_token  # the one object that jax.core deprecates in 0.10

from . import _devices, _native, _order
from ._operators import AVG, NAMES, SUM

Params = Dict[str, Any]
Batch = Callable[[Any, int], Tuple[Any, int]]
# Parameters that a handler does not read.
OF_JAX_ALONE = ("transpose", "what", "rank")


def refuse_a_rerun(name: str) -> None:
    """Refuses to run again under jax_debug_nans and jax_debug_infs. When these find an error in a
    result, they call the program again, on this rank alone."""
    if type(sys.exc_info()[1]).__name__ == "InternalFloatingPointError":
        raise FloatingPointError(
            f"JAX found nan or inf in the result of {name}, or of a jitted program with it, and calls it again without jit to find the place. {name} is not made a second "
            "time, because the other ranks do not make it again; print its operand and its result with jax.debug.print to see where the value is from")


@functools.lru_cache(maxsize=None)
def compiled(primitive: Primitive, params: Tuple[Tuple[str, Any], ...]) -> Any:
    """The primitive alone as a jitted function, for a call outside jax.jit."""
    return jax.jit(lambda *operands: primitive.bind(*operands, **dict(params)))


def outside_jit(primitive: Primitive, name: str) -> Callable[..., Any]:
    """The function that runs a primitive outside jax.jit."""

    def run(*operands: Any, **params: Any) -> Any:
        refuse_a_rerun(name)
        with jax.disable_jit(False):  # a handler is always called from compiled code
            return compiled(primitive, tuple(params.items()))(*operands)

    return run


def lowering(name: str, platform: str, zeros: bool, in_place: bool, passed: int) -> Any:
    """The lowering rule of a handler: a custom call whose operands and results end with the
    token. The handler gets the first operands, as many as passed says; others give a shape alone.
    The result takes the memory of the second of several operands."""
    call = jax.ffi.ffi_lowering(
        f"devicemesh_{name}", has_side_effect=True, operand_output_aliases={1: 0} if zeros or passed > 1 else {0: 0} if in_place else None)

    def lower(context: Any, operand: Any, *shaped: Any, **params: Any) -> List[Any]:
        refuse_a_rerun(name)
        _devices.check_one(context, name)
        if platform != "cpu":
            _devices.check_ordinal(context, name, params["mesh"])
        (made,) = context.avals_out
        operands, avals = [operand, *shaped][:passed], list(context.avals_in[:passed])
        if zeros:
            # The handler writes into these zeros. They stay the result on a rank to which nothing
            # is sent.
            operands.append(mlir.ir_constant(numpy.broadcast_to(numpy.zeros((), made.dtype), made.shape)))
            avals.append(made)
        whole = context.replace(avals_in=[*avals, abstract_token], avals_out=[made, abstract_token])
        result, token = call(whole, *operands, _order.take(context), platform=platform, **attributes(params))
        _order.give(context, token)
        return [result]

    return lower


def attributes(params: Params) -> Params:
    """The parameters that a handler reads. Lists of numbers become arrays of 64-bit integers."""
    read = without(params, *OF_JAX_ALONE)
    return {name: numpy.array(value, "int64") if isinstance(value, tuple) else value for name, value in read.items()}


def make(name: str, shape: Callable[..., Tuple[int, ...]], transpose: Callable[..., Any], batch: Batch,
         zeros: bool = False, in_place: bool = False, all_params: bool = False) -> Primitive:
    """A primitive for the handler devicemesh_<name>.

    shape: the result's, from the operand's and the size (all_params: and all parameters). batch:
    from a batched operand and its batch axis, the operand of one call for all of them and the batch
    axis of its result. zeros: the handler does not write its result on every rank. in_place: the
    result takes the operand's memory (XLA copies an operand that is still needed).
    """
    primitive = Primitive(f"devicemesh_{name}")

    def abstract(operand: Any, **params: Any) -> Any:
        known = params if all_params else {"size": params["size"]}
        return ShapedArray(shape(operand.shape, **known), operand.dtype), {_order.collective}

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
        op = params.get("op", SUM)
        if op not in (SUM, AVG) and type(tangents[0]) is not ad.Zero:
            raise NotImplementedError(
                f"{name} with op {NAMES[op]!r} cannot be differentiated, only 'sum' and 'avg' can; where no derivative is wanted, say so with "
                "jax.lax.stop_gradient around the operand")
        return linear(primals, tangents, **params)

    def batched(operands: Sequence[Any], axes: Sequence[int], **params: Any) -> Any:
        operand, axis = batch(operands[0], axes[0])
        return primitive.bind(operand, **params), axis

    primitive.def_impl(outside_jit(primitive, name))
    primitive.def_effectful_abstract_eval(abstract)
    ad.deflinear2(primitive, lambda cotangent, _, **params: [transpose(cotangent, params)])
    linear = ad.primitive_jvps[primitive]
    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = batched
    register_handler(primitive, name, zeros, in_place)
    return primitive


def register_handler(primitive: Primitive, name: str, zeros: bool, in_place: bool = False, passed: int = 1) -> None:
    _devices.ask_for_devices(primitive)
    for platform in _native.PLATFORMS:
        mlir.register_lowering(primitive, lowering(name, platform, zeros, in_place, passed), platform=platform)


def without(params: Params, *names: str) -> Params:
    return {name: value for name, value in params.items() if name not in names}


def same(shape: Tuple[int, ...], size: int) -> Tuple[int, ...]:
    return shape


def elementwise(operand: Any, axis: int) -> Tuple[Any, int]:
    return operand, axis


def first_axis_kept(operand: Any, axis: int) -> Tuple[Any, int]:
    return (jnp.moveaxis(operand, 0, 1), 1) if axis == 0 else (operand, axis)


def first_axis_added(operand: Any, axis: int) -> Tuple[Any, int]:
    return operand, axis + 1


def first_axis_gone(operand: Any, axis: int) -> Tuple[Any, int]:
    operand, axis = first_axis_kept(operand, axis)
    return operand, axis - 1


def transpose_broadcast(cotangent: Any, params: Params) -> Any:
    return reduce_p.bind(cotangent, op=SUM, **params)


def transpose_reduce(cotangent: Any, params: Params) -> Any:
    return share(broadcast_p.bind(cotangent, **without(params, "op")), params)


def transpose_all_gather(cotangent: Any, params: Params) -> Any:
    return reduce_scatter_p.bind(cotangent, op=SUM, **params)


def transpose_reduce_scatter(cotangent: Any, params: Params) -> Any:
    return share(all_gather_p.bind(cotangent, **without(params, "op")), params)


def share(cotangent: Any, params: Params) -> Any:
    """The share of one rank in the cotangent of an averaged result."""
    return cotangent / params["size"] if params["op"] == AVG else cotangent


def transpose_shift(cotangent: Any, params: Params) -> Any:
    return shift_p.bind(cotangent, **{**params, "offset": -params["offset"]})


def transpose_all_reduce(cotangent: Any, params: Params) -> Any:
    if params["transpose"] == "identity":
        return share(identity_p.bind(cotangent, **{**params, "op": SUM}), params)
    return all_reduce_p.bind(cotangent, **params)


def transpose_gather(cotangent: Any, params: Params) -> Any:
    return scatter_p.bind(cotangent, **params)


def transpose_scatter(cotangent: Any, params: Params) -> Any:
    return gather_p.bind(cotangent, **params)


def transpose_all_to_all(cotangent: Any, params: Params) -> Any:
    return all_to_all_p.bind(cotangent, **params)


all_reduce_p = make("all_reduce", same, transpose_all_reduce, elementwise, in_place=True)
reduce_p = make("reduce", same, transpose_reduce, elementwise, zeros=True)
broadcast_p = make("broadcast", same, transpose_broadcast, elementwise, in_place=True)
shift_p = make("shift", same, transpose_shift, elementwise, zeros=True)
all_to_all_p = make("all_to_all", same, transpose_all_to_all, first_axis_kept)
all_gather_p = make("all_gather", lambda shape, size: (size, *shape), transpose_all_gather, first_axis_added)
gather_p = make("gather", lambda shape, size: (size, *shape), transpose_gather, first_axis_added, zeros=True)
scatter_p = make("scatter", lambda shape, size: shape[1:], transpose_scatter, first_axis_gone)
reduce_scatter_p = make("reduce_scatter", lambda shape, size: shape[1:], transpose_reduce_scatter, first_axis_gone)

# The transpose of all_reduce in the convention transpose="identity". Its own transpose is
# all_reduce again.
identity_p = Primitive("devicemesh_identity")
identity_p.def_impl(lambda operand, **params: operand)
identity_p.def_abstract_eval(lambda operand, **params: ShapedArray(operand.shape, operand.dtype))
ad.deflinear2(identity_p, lambda cotangent, _, **params: [all_reduce_p.bind(cotangent, **params)])
batching.primitive_batchers[identity_p] = lambda operands, axes, **params: (identity_p.bind(operands[0], **params), axes[0])
mlir.register_lowering(identity_p, lambda context, operand, **params: [operand])
