"""Places ranks in a mesh by their locations in the machine."""

from __future__ import annotations

import ctypes
import json
from dataclasses import dataclass
from typing import Any, Dict, Optional, Sequence, Tuple

from . import _declarations as declarations
from ._library import check, library, rank_counts, texts, within
from .errors import InvalidArgumentError

__all__ = ["RankPlan", "plan_ranks"]


@dataclass(frozen=True)
class RankPlan:
    """A rank array, row-major in the mesh's shape, for ``init_device_mesh(ranks=plan.ranks)``, and
    what each dimension crosses.

    ``report`` has "cost", "identity_cost", "even", "domains" and "dimensions";
    include/devicemesh.h says what they count.
    """

    ranks: Tuple[int, ...]
    report: Dict[str, Any]


def plan_ranks(locations: Sequence[str], shape: Sequence[int], traffic: Optional[Sequence[int]] = None) -> RankPlan:
    """Ranks for a mesh of that shape. The dimensions with the most traffic stay inside the closest
    domains. Local. Equal arguments give equal plans on every rank.

    Args:
        locations: each world rank's path, far to near: "rack1/host3/nvl0".
        shape: the mesh's; its product may be smaller than the number of locations.
        traffic: how much a rank exchanges along each dimension; None: later dimensions talk more.
    """
    paths, lengths = texts("locations", locations), rank_counts("shape", shape)
    weights = None
    if traffic is not None:
        if len(traffic) != len(lengths):
            raise InvalidArgumentError(f"traffic has {len(traffic)} weights for {len(lengths)} dimensions")
        weights = (ctypes.c_uint32 * len(traffic))(*(within("traffic", weight, 0, 2**32 - 1) for weight in traffic))
    options = declarations.PlanOptions(struct_size=ctypes.sizeof(declarations.PlanOptions), world_size=len(paths),
                                       locations=paths, shape=lengths, ndim=len(lengths), traffic=weights)
    count = 1
    for length in lengths:
        count *= length
    # The library refuses a larger one; it must not get there with a buffer of that size.
    ranks = (ctypes.c_int32 * min(count, max(len(paths), 1)))()
    length, capacity = ctypes.c_size_t(), 4096
    while True:
        report = ctypes.create_string_buffer(capacity)
        status = library.dm_plan_ranks(ctypes.byref(options), ranks, report, capacity, ctypes.byref(length))
        if status == 0 or length.value <= capacity:
            check(status)
            return RankPlan(tuple(ranks), json.loads(report.value))
        capacity = length.value
