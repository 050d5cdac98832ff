"""The numbers of devicemesh.h that programs use: element types and reduction operators."""

from __future__ import annotations

import sys
from enum import IntEnum
from typing import Any, Callable, Literal, Optional, Protocol, Union

from .errors import InvalidArgumentError

__all__ = ["DType", "ReduceOp"]


class DType(IntEnum):
    """The type of a buffer's elements. The values are those of ncclDataType_t."""

    INT8 = 0
    UINT8 = 1
    INT32 = 2
    UINT32 = 3
    INT64 = 4
    UINT64 = 5
    FLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8
    BFLOAT16 = 9
    FLOAT8E4M3 = 10
    FLOAT8E5M2 = 11

    @property
    def size(self) -> int:
        """Bytes of one element."""
        return SIZES[self]


class ReduceOp(IntEnum):
    """A reduction operator. The values are those of ncclRedOp_t.

    An operator can also be given as its name in any case ("sum"; "mean" is AVG, and "product" is
    PROD), its number as an int, or an operator of torch.distributed or mpi4py. Operators of those
    libraries are known by their names, because their numbers mean other operators. Any operator
    that is not among the five is refused.
    """

    SUM = 0
    PROD = 1
    MAX = 2
    MIN = 3
    AVG = 4


SIZES = (1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1)
SUPPORTED = ", ".join(kind.name.lower() for kind in DType)


class NamedOp(Protocol):
    """An operator of torch.distributed, which this package does not import."""

    @property
    def name(self) -> str:
        """The operator's name there."""


OpName = Literal[
    "sum", "prod", "product", "max", "min", "avg", "mean", "SUM", "PROD", "PRODUCT", "MAX", "MIN", "AVG", "MEAN"]
# The operators of mpi4py are functions of two values.
Op = Union[ReduceOp, OpName, int, NamedOp, Callable[[Any, Any], Any]]
NAMES = {**ReduceOp.__members__, "PRODUCT": ReduceOp.PROD, "MEAN": ReduceOp.AVG}
EXPECTED = f"one of {', '.join(name.lower() for name in NAMES)} (a devicemesh.ReduceOp, its name or number, torch's or mpi4py's of that name)"


def reduction(op: Any) -> int:
    """The ReduceOp for a ReduceOp, a number, a name, or an operator of torch or mpi4py."""
    if type(op) is ReduceOp:
        return op.value
    name = op if isinstance(op, str) else _name_of(op)
    if name is not None:
        found = NAMES.get(name.upper())
        if found is not None:
            return found.value
    elif type(op) is int and 0 <= op < len(ReduceOp):
        return op
    shown = repr(op) if isinstance(op, (str, int, float)) else f"{name or op!r} (a {type(op).__name__})"
    raise InvalidArgumentError(f"op is {shown}, not {EXPECTED}")


def _name_of(op: Any) -> Optional[str]:
    """The name that another library gives its operator, or None. The operator's number is never
    used, because it means another operator there."""
    if type(op) is int:
        return None
    kind = type(op)
    if kind.__module__.partition(".")[0] == "mpi4py":
        # mpi4py's operators are compared one by one, because older releases give them no name. A
        # program that passes one has imported mpi4py already.
        operators = sys.modules.get("mpi4py.MPI")
        return next((name for name in ("SUM", "PROD", "MAX", "MIN")
                     if operators is not None and op == getattr(operators, name, None)), None)
    # torch's dist.ReduceOp.AVG is a member of an enumeration; dist.ReduceOp(...) holds one in its
    # attribute op.
    for member in (op, getattr(op, "op", None)):
        name = getattr(member, "name", None)
        if isinstance(name, str):
            return name
    return None
