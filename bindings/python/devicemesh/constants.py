"""The numbers of devicemesh.h that callers meet: element types and reductions."""

from __future__ import annotations

from enum import IntEnum
from typing import Union

from .errors import InvalidArgumentError

__all__ = ["DType", "ReduceOp"]


class DType(IntEnum):
    """The type of a buffer's elements; the values of ncclDataType_t."""

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

    @property
    def size(self) -> int:
        """Bytes of one element."""
        return SIZES[self]


class ReduceOp(IntEnum):
    """A reduction; the values of ncclRedOp_t. Wherever one is asked for, its name in any case ("sum") will do."""

    SUM = 0
    PROD = 1
    MAX = 2
    MIN = 3
    AVG = 4


SIZES = (1, 1, 4, 4, 8, 8, 2, 4, 8, 2)
SUPPORTED = ", ".join(kind.name.lower() for kind in DType)


def reduction(op: Union[ReduceOp, str, int]) -> int:
    """The number of a reduction that is given by number or name."""
    if isinstance(op, str):
        found = ReduceOp.__members__.get(op.upper())
        if found is None:
            raise InvalidArgumentError(f"op is {op!r}, not one of {', '.join(name.lower() for name in ReduceOp.__members__)}")
        return int(found)
    return int(op)
