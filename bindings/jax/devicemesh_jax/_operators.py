"""Reduction operators and element types by JAX's names."""

from __future__ import annotations

import operator as python_operator
from typing import Any

import jax
import numpy

from devicemesh import ReduceOp

SUM, PROD, MAX, MIN, AVG = range(5)  # dm_op
NAMES = ("sum", "prod", "max", "min", "avg")
DTYPES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16",
          "float8_e4m3fn", "float8_e5m2")
# These types travel as other elements (src/elements.h). A complex number travels as two floats.
MOVED = ("bool", "int16", "uint16", "complex64", "complex128")
# The types in which XLA's 16-bit integers are reduced. Their sums and products wrap to the same 16
# bits, and averages do not overflow.
WIDENED = {"int16": "int32", "uint16": "uint32"}


def operator(op: Any) -> int:
    """The dm_op of an operator's name, or of a devicemesh.ReduceOp."""
    if isinstance(op, ReduceOp):
        return int(op)
    if not isinstance(op, str) or op not in NAMES:
        raise ValueError(f"op is {op!r}; it is one of {', '.join(NAMES)}")
    return NAMES.index(op)


def check_moved(what: str, dtype: Any) -> None:
    """Raises TypeError for elements that a collective without an operator cannot move."""
    if is_key(dtype):
        return
    name = numpy.dtype(dtype).name
    if name not in (*DTYPES, *MOVED) and not name.startswith("float8_"):
        raise TypeError(f"{what} of {name} elements: it moves {', '.join((*DTYPES, *MOVED))} and other 8-bit floats; convert with astype")


def check_reduced(what: str, dtype: Any, op: int) -> None:
    """Raises TypeError for elements that a collective cannot reduce with an operator."""
    if is_key(dtype):
        raise TypeError(f"{what} of random keys ({dtype}): keys can be moved (all_gather, broadcast ...) but not reduced; reduce jax.random.key_data(key)")
    name = numpy.dtype(dtype).name
    if name == "bool":
        if op not in (MAX, MIN):
            raise TypeError(f"{what} of bool elements with op {NAMES[op]!r}: use 'max' (true on any rank) or 'min' (true on all), or count with x.astype('int32')")
    elif name.startswith("complex"):
        if op in (MAX, MIN):
            raise TypeError(f"{what} of {name} elements with op {NAMES[op]!r}: complex numbers have no order; 'sum', 'avg' and 'prod' are there, or reduce jnp.abs(x)")
    elif name not in (*DTYPES, *WIDENED):
        raise TypeError(f"{what} of {name} elements: it reduces {', '.join((*DTYPES, *MOVED))}; convert with astype")


def is_key(dtype: Any) -> bool:
    """Whether this is the type of jax.random.key's arrays."""
    return bool(jax.numpy.issubdtype(dtype, jax.dtypes.prng_key))


def integer(what: str, value: Any) -> int:
    """value as an integer, which must be known when the call is traced. A bool or a fraction is
    refused."""
    if not isinstance(value, (bool, numpy.bool_)):
        try:
            return python_operator.index(value)
        except (TypeError, jax.errors.ConcretizationTypeError):
            pass
    kind = "value inside jax.jit" if isinstance(value, jax.core.Tracer) else type(value).__name__
    raise TypeError(
        f"{what} is a {kind}{'' if isinstance(value, jax.core.Tracer) else f', {value!r}'}; an integer was expected, the same on every rank"
    )
