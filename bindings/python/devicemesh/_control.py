"""Bytes between the ranks of a dimension."""

from __future__ import annotations

import array
from typing import Any, List

from ._library import Timeout


def barrier(group: Any, timeout: Timeout) -> None:
    all_gather(group, b"", timeout)


def all_gather(group: Any, data: bytes, timeout: Timeout) -> List[bytes]:
    lengths = array.array("q", [0] * group.size)
    group.all_gather(array.array("q", [len(data)]), lengths)
    whole = bytearray(sum(lengths))
    group.all_gather(data, whole, counts=lengths)
    ends = [sum(lengths[: rank + 1]) for rank in range(group.size)]
    return [bytes(whole[end - length : end]) for end, length in zip(ends, lengths)]


def broadcast(group: Any, data: bytes, root: int, timeout: Timeout) -> bytes:
    return all_gather(group, data, timeout)[root]
