"""The few functions of the CUDA driver that this package calls itself: events, for arrays whose
library has no Python functions for streams (JAX's, Numba's), and the current device of a thread.

NCCL's work is put on streams by the C library. Nothing here waits for a device.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from ctypes import POINTER, byref, c_int, c_uint, c_void_p
from functools import partial
from typing import Any, Callable, Dict, Iterator, Optional, Tuple

from .errors import DeviceError

__all__ = ["Driver", "carried_device", "driver"]

NOT_READY = 600
DISABLE_TIMING, RELAXED = 2, 2
# The functions for events. A driver that lacks one of them has no events.
EVENTS: Dict[str, Tuple[Any, ...]] = {
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventDestroy_v2": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuStreamIsCapturing": (c_void_p, POINTER(c_int)),
    "cuThreadExchangeStreamCaptureMode": (POINTER(c_int),),
}


class Driver:
    """libcuda.so.1."""

    def __init__(self, path: str = "libcuda.so.1") -> None:
        self._cuda = ctypes.CDLL(path)
        self._contexts: Dict[int, c_void_p] = {}
        self.has_events = all(hasattr(self._cuda, name) for name in EVENTS)
        for name, arguments in EVENTS.items():
            if hasattr(self._cuda, name):
                getattr(self._cuda, name).argtypes = arguments

    def _do(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            error = DeviceError(f"{name} of the CUDA driver failed with {code}")
            error.status, error.device_error = DeviceError.status, code
            raise error

    @contextlib.contextmanager
    def on(self, device: int) -> Iterator[None]:
        """The device is current on this thread within the block. A capture of a CUDA graph
        elsewhere in the process allows the calls of the block."""
        context, mode = self._contexts.get(device), c_int(RELAXED)
        if context is None:
            context = c_void_p()
            self._do("cuDevicePrimaryCtxRetain", byref(context), device)
            self._contexts[device] = context
        self._do("cuCtxPushCurrent_v2", context)
        try:
            self._do("cuThreadExchangeStreamCaptureMode", byref(mode))
            try:
                yield
            finally:
                self._do("cuThreadExchangeStreamCaptureMode", byref(mode))
        finally:
            self._do("cuCtxPopCurrent_v2", byref(c_void_p()))

    def is_capturing(self, stream: int) -> bool:
        """Whether the work on the stream goes into a CUDA graph."""
        answer = c_int()
        self._do("cuStreamIsCapturing", stream, byref(answer))
        return answer.value != 0


class Event:
    """The place on a stream that the work before it has reached. The calls are made in
    Driver.on(device)."""

    __slots__ = ("driver", "device", "number")

    def __init__(self, driver: Driver, device: int, stream: int) -> None:
        self.driver, self.device, self.number = driver, device, c_void_p()
        driver._do("cuEventCreate", byref(self.number), DISABLE_TIMING)
        driver._do("cuEventRecord", self.number, stream)

    def hold_back(self, stream: int) -> None:
        """The later work on the stream begins after the event."""
        self.driver._do("cuStreamWaitEvent", stream, self.number, 0)

    def is_over(self) -> bool:
        """Whether the device has passed the event. An event of a device that has failed is over,
        because nothing runs there any more."""
        return bool(self.driver._cuda.cuEventQuery(self.number) != NOT_READY)

    def __del__(self) -> None:
        # Destroying an event on which a stream still waits is allowed.
        if self.number:
            self.driver._cuda.cuEventDestroy_v2(self.number)


_driver: Optional[Driver] = None
_looked = False


def driver() -> Optional[Driver]:
    """The CUDA driver of this machine, or None."""
    global _driver, _looked
    if not _looked:
        with contextlib.suppress(OSError):
            _driver = Driver()
        _looked = True
    return _driver


def carried_device() -> Callable[[], None]:
    """A function that makes the current device of this thread the current one of the thread that
    calls the function. It does nothing where this process has not loaded the CUDA driver, or where
    this thread has no current device."""
    try:
        ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except OSError:
        return lambda: None
    found, context = driver(), c_void_p()
    if found is None or found._cuda.cuCtxGetCurrent(byref(context)) or not context:
        return lambda: None
    return partial(found._do, "cuCtxSetCurrent", context)
