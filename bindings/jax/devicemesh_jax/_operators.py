"""Reduction operators and element types by JAX's names."""

from __future__ import annotations

from typing import Any

import numpy

SUM, PROD, MAX, MIN, AVG = range(5)  # dm_op
NAMES = ("sum", "prod", "max", "min", "avg")
DTYPES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16")


def operator(op: str) -> int:
    if op not in NAMES:
        raise ValueError(f"op is {op!r}; it is one of {', '.join(NAMES)}")
    return NAMES.index(op)


def check_dtype(what: str, dtype: Any) -> None:
    name = numpy.dtype(dtype).name
    if name not in DTYPES:
        raise TypeError(f"{what} of {name} elements: communicator libraries know {', '.join(DTYPES)}; convert with astype, or view, or send parts")
