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


def operator(op: Any) -> int:
    """The dm_op of an operator's name, or of a devicemesh.ReduceOp."""
    if isinstance(op, ReduceOp):
        return int(op)
    if not isinstance(op, str) or op not in NAMES:
        raise ValueError(f"op is {op!r}; it is one of {', '.join(NAMES)}")
    return NAMES.index(op)


def check_dtype(what: str, dtype: Any) -> None:
    if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
        raise TypeError(f"{what} of random keys ({dtype}): send jax.random.key_data(key), and make a key of it again with jax.random.wrap_key_data")
    name = numpy.dtype(dtype).name
    if name not in DTYPES:
        raise TypeError(f"{what} of {name} elements: communicator libraries know {', '.join(DTYPES)}; convert with astype, or view, or send parts")


def integer(what: str, value: Any) -> int:
    """value as an integer, which must be known when the call is traced. A bool or a fraction is
    refused."""
    if not isinstance(value, (bool, numpy.bool_)):
        try:
            return python_operator.index(value)
        except (TypeError, jax.errors.ConcretizationTypeError):
            pass
    kind = "value inside jax.jit" if isinstance(value, jax.core.Tracer) else type(value).__name__
    raise TypeError(f"{what} is a {kind}{'' if isinstance(value, jax.core.Tracer) else f', {value!r}'}; an integer was expected, the same on every rank")
