"""One exception class per status of the C library, each also the built-in class that a Python
programmer would catch.

Each exception has the library's message, its status and the codes of the layers below.
"""

from __future__ import annotations

from typing import Dict, Optional, Tuple, Type

__all__ = [
    "AbortedError", "BufferTooSmallError", "CclError", "DeviceError", "DeviceMeshError", "ExhaustedError",
    "InternalError", "InvalidArgumentError", "InvalidHandleError", "InvalidStateError", "LibraryError",
    "MeshTimeoutError", "MismatchError", "NotFoundError", "NotMemberError", "PeerLostError", "StoreError",
    "UnsupportedError",
]


class DeviceMeshError(RuntimeError):
    """The failure of a call of the library. The subclasses say in which way it failed.

    ``status`` is the DM_STATUS_ number of the class. ``ccl_result`` (ncclResult_t),
    ``device_error`` (CUresult) and ``os_error`` (errno) are the codes of the layers below, 0 where
    those were not involved.

    ``ranks`` are the world ranks that the failure is about: those that were lost, aborted, did not
    come, failed, or made another call than the others. ``lost_ranks`` are those of them that are
    lost; DeviceMesh.shrink takes them. ``dimension`` is the name of the dimension along which the
    call was made, or None. ``waited`` says how many seconds the call waited for other ranks, None
    when it did not wait. ``call`` is the number of the collective call ("as call 7"), or None.
    """

    status: int = 0
    ccl_result: int = 0
    device_error: int = 0
    os_error: int = 0
    ranks: Tuple[int, ...] = ()
    lost_ranks: Tuple[int, ...] = ()
    dimension: Optional[str] = None
    waited: Optional[float] = None
    call: Optional[int] = None

    def __str__(self) -> str:
        # KeyError and OSError print their arguments in ways of their own.
        return str(self.args[0]) if self.args else ""


class InvalidArgumentError(DeviceMeshError, ValueError):
    """An argument is out of range, repeated or contradicts another."""

    status = 1


class InvalidHandleError(DeviceMeshError):
    """The mesh or world was closed already."""

    status = 2


class NotFoundError(DeviceMeshError, KeyError):
    """No dimension, symbol or registered mesh has that name."""

    status = 3


class NotMemberError(DeviceMeshError):
    """The calling rank is not part of this mesh."""

    status = 4


class BufferTooSmallError(DeviceMeshError):
    """The answer is longer than the buffer for it."""

    status = 5


class MismatchError(DeviceMeshError):
    """Ranks disagree about a collective call, or two threads of this rank are in operations along
    one dimension at once. The message says who asked for what."""

    status = 6


class MeshTimeoutError(DeviceMeshError, TimeoutError):
    """A deadline passed; the message names the ranks that never came."""

    status = 7


class StoreError(DeviceMeshError):
    """The rendezvous store is unreachable, broke the protocol or refused this rank."""

    status = 8


class CclError(DeviceMeshError):
    """The communicator library failed; ``ccl_result`` has its code."""

    status = 9


class DeviceError(DeviceMeshError):
    """The device driver failed; ``device_error`` has its code."""

    status = 10


class LibraryError(DeviceMeshError):
    """There is no usable communicator library. The message lists what was tried."""

    status = 11


class UnsupportedError(DeviceMeshError, NotImplementedError):
    """The call is not available for this device type, world or library version. The message says
    what to do instead."""

    status = 12


class AbortedError(DeviceMeshError):
    """The mesh was aborted or finalized, or its world aborted."""

    status = 13


class PeerLostError(DeviceMeshError):
    """A rank died or left; the message names it where known."""

    status = 14


class InternalError(DeviceMeshError):
    """The library has a bug (a caught panic)."""

    status = 15


class ExhaustedError(DeviceMeshError):
    """This process has no more handles, memory, descriptors or threads. The message names the
    limit."""

    status = 16


class InvalidStateError(DeviceMeshError):
    """The arguments are right, but the call may not be made now. The message says what to do
    first."""

    status = 17


BY_STATUS: Dict[int, Type[DeviceMeshError]] = {kind.status: kind for kind in DeviceMeshError.__subclasses__()}
