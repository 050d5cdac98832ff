"""Python objects and bytes between the ranks of a dimension: seeds, file names, configuration,
handles for other libraries. They travel through the store, not through the communicator, so they
work on every device type, and are for small things."""

from __future__ import annotations

import pickle
from typing import Any, List, NoReturn, Optional

from . import _control as control
from ._library import Timeout
from ._open_groups import outside_groups
from ._operands import Operands
from .errors import InvalidArgumentError
from .work import after_earlier, queues

__all__ = ["ObjectCollectives"]

# The first byte of a message: a pickled object follows, or the reason why there is none.
OBJECT, REFUSED = b"\0", b"\1"


class ObjectCollectives(Operands):
    """The collectives of a dimension that carry bytes and objects.

    An object is pickled, and unpickling runs code that the sender chose: the ranks of a job trust
    each other. Each call comes after the asynchronous operations that were issued before it along
    the dimension. ``timeout`` None is as long as the mesh's calls.
    """

    def barrier(self, *, timeout: Timeout = None) -> None:
        """Returns when every rank of the group has called it. It does not wait for work on
        devices."""
        self._begin("barrier")
        control.barrier(self, timeout)

    def all_gather_bytes(self, data: bytes, *, timeout: Timeout = None) -> List[bytes]:
        """The bytes of all ranks of the group, in rank order. They may have different lengths."""
        self._begin("all_gather_bytes")
        return control.all_gather(self, as_bytes(data), timeout)

    def broadcast_bytes(self, data: Optional[bytes] = None, *, root: int = 0, timeout: Timeout = None) -> bytes:
        """The bytes of rank root of the group, on every rank. The others pass None."""
        self._begin("broadcast_bytes")
        root = self._member("root", root)
        return control.broadcast(self, as_bytes(data) if root == self._rank else b"", root, timeout)

    def all_gather_object(self, obj: Any, *positional: NoReturn, timeout: Timeout = None) -> List[Any]:
        """The objects of all ranks of the group, in rank order: any that can be pickled."""
        if positional:
            raise TypeError("all_gather_object returns the list: write objects = group.all_gather_object(obj)")
        self._begin("all_gather_object")
        # A rank whose object cannot be pickled takes part, so that the others need not wait for it.
        mine, failure = pickled(obj)
        messages = control.all_gather(self, mine, timeout)
        if failure is not None:
            raise failure
        return [self._unpickled("all_gather_object", message, rank) for rank, message in enumerate(messages)]

    def broadcast_object(self, obj: Any = None, *, root: int = 0, timeout: Timeout = None) -> Any:
        """The object of rank root of the group, on every rank. What the others pass is not used."""
        self._begin("broadcast_object")
        root = self._member("root", root)
        mine, failure = pickled(obj) if root == self._rank else (b"", None)
        message = control.broadcast(self, mine, root, timeout)
        if failure is not None:
            raise failure
        return obj if root == self._rank else self._unpickled("broadcast_object", message, root)

    def _begin(self, call: str) -> None:
        outside_groups(call)
        if queues:
            after_earlier(self)

    def _unpickled(self, call: str, message: bytes, rank: int) -> Any:
        if message[:1] == REFUSED:
            raise InvalidArgumentError(f"{call}: the object of rank {rank} along {self._name} (world rank {self._ranks[rank]}) cannot be pickled: "
                                       + message[1:].decode(errors="replace"))
        return pickle.loads(message[1:])


def pickled(obj: Any) -> Any:
    """The message for an object, and None; or the message that there is none, and the reason."""
    try:
        return OBJECT + pickle.dumps(obj, protocol=4), None
    except Exception as error:
        return REFUSED + f"{type(error).__name__}: {error}".encode(), error


def as_bytes(data: Any) -> bytes:
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise TypeError(f"data is a {type(data).__name__}, not bytes; all_gather_object and broadcast_object take any object")
    return bytes(data)
