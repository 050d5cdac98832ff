"""Python objects and bytes between ranks: seeds, file names, configuration, handles for other
libraries. They travel through the store, not through a communicator, so they work on every device
type, and are for small things."""

from __future__ import annotations

import pickle
from typing import Any, List, NoReturn, Optional, Tuple

from ._control import Refusals
from ._library import Deadline, Timeout, int32
from .errors import InvalidArgumentError

__all__ = ["ObjectCollectives"]

# The first byte of a message: a pickled object follows, or the reason why there is none.
OBJECT, REFUSED = b"\0", b"\1"


class ObjectCollectives:
    """The collectives of a group or a world that carry bytes and objects. The classes below it
    have the methods that carry the bytes.

    An object is pickled, and unpickling runs code that the sender chose: the ranks of a job trust
    each other. A rank gives at most 8 MiB, and all ranks together 64 MiB. ``timeout`` None is as
    long as the other calls of the mesh or world.
    """

    def all_gather_bytes(self, data: bytes, *, timeout: Timeout = None) -> List[bytes]:
        """The bytes of all ranks, in rank order. They may have different lengths."""
        with self._refusals.gather():
            deadline = self._begin("all_gather_bytes", timeout)
            mine = as_bytes(data)
        return self._gather(mine, deadline)

    def broadcast_bytes(self, data: Optional[bytes] = None, *, root: int = 0, timeout: Timeout = None) -> bytes:
        """The bytes of rank root, on every rank. The others pass None."""
        with self._refusals.broadcast():
            deadline, root = self._begin("broadcast_bytes", timeout), int32("root", root)
            mine = as_bytes(data) if root == self.rank else b""
        return self._cast(mine, root, deadline)

    def all_gather_object(self, obj: Any, *positional: NoReturn, timeout: Timeout = None) -> List[Any]:
        """The objects of all ranks, in rank order: any that can be pickled."""
        with self._refusals.gather():
            if positional:
                raise TypeError("all_gather_object returns the list: write objects = group.all_gather_object(obj)")
            deadline = self._begin("all_gather_object", timeout)
        # A rank whose object cannot be pickled takes part, so that the others need not wait for it.
        mine, failure = pickled(obj)
        messages = self._gather(mine, deadline)
        if failure is not None:
            raise failure
        return [unpickled("all_gather_object", message, rank) for rank, message in enumerate(messages)]

    def broadcast_object(self, obj: Any = None, *, root: int = 0, timeout: Timeout = None) -> Any:
        """The object of rank root, on every rank. What the others pass is not used."""
        with self._refusals.broadcast():
            deadline, root = self._begin("broadcast_object", timeout), int32("root", root)
        is_root = root == self.rank
        mine, failure = pickled(obj) if is_root else (b"", None)
        message = self._cast(mine, root, deadline)
        if failure is not None:
            raise failure
        return obj if is_root else unpickled("broadcast_object", message, root)

    @property
    def rank(self) -> int:
        """This process's rank in the group or the world."""
        raise NotImplementedError

    @property
    def _refusals(self) -> Refusals:
        """Tells the other ranks of calls that this class refuses."""
        raise NotImplementedError

    def _begin(self, call: str, timeout: Timeout) -> Deadline:
        """Waits or refuses before a call. Returns the deadline of the call."""
        raise NotImplementedError

    def _gather(self, data: bytes, deadline: Deadline) -> List[bytes]:
        raise NotImplementedError

    def _cast(self, data: bytes, root: int, deadline: Deadline) -> bytes:
        raise NotImplementedError


def pickled(obj: Any) -> Tuple[bytes, Optional[Exception]]:
    """The message for an object, and None; or the message that there is none, and the reason."""
    try:
        return OBJECT + pickle.dumps(obj, protocol=4), None
    except Exception as error:
        return REFUSED + f"{type(error).__name__}: {error}".encode(errors="replace")[:1000], error


def unpickled(call: str, message: bytes, rank: int) -> Any:
    if message[:1] == REFUSED:
        raise InvalidArgumentError(f"{call}: the object of rank {rank} cannot be pickled: {message[1:].decode(errors='replace')}")
    return pickle.loads(message[1:])


def as_bytes(data: Any) -> bytes:
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise TypeError(f"data is a {type(data).__name__}, not bytes; all_gather_object and broadcast_object take any object")
    return bytes(data)
