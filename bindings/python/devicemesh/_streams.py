"""On which stream an operation on cuda runs, and what it is ordered with.

The operation runs on the stream that the program names. When the program names none, the operation
runs on the current stream of the library that made the array: PyTorch's or CuPy's, or else the
stream that __cuda_array_interface__ names. The order around it is this:

- The operation comes after what its arrays' libraries have put on their streams. DLPack's exchange
  (__dlpack__(stream=...)) makes the operation's stream wait for that.
- What these libraries put on their current streams afterwards comes after the operation. With
  async_op=True, only work enqueued after Work.wait() is ordered after the operation.
- The memory is not used for anything else until the operation's stream has passed it. PyTorch's
  allocator is told (record_stream). Other arrays are held until an event on the stream has passed.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, Deque, Dict, List, Optional, Protocol, Sequence, Tuple

from ._cuda import Driver, Event, driver
from ._library import within
from .errors import DeviceError, UnsupportedError

if TYPE_CHECKING:
    from .buffers import Memory

__all__ = ["Join", "current_stream", "follow", "keep", "owner", "stream_handle", "stream_of_device"]

# Makes the current stream of an array's library wait for an operation.
Join = Callable[[], None]
# The number of the default stream in __dlpack__ and __cuda_array_interface__ of CUDA.
LEGACY = 1


def stream_handle(stream: Any) -> int:
    """A cudaStream_t from an integer, torch.cuda.Stream, cupy's Stream or an object with
    __cuda_stream__. None is the default stream, which is 0."""
    if stream is None:
        return 0
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        _, stream = protocol() if callable(protocol) else protocol
    else:
        for name in ("cuda_stream", "ptr"):
            if hasattr(stream, name):
                stream = getattr(stream, name)
                break
    handle = within("stream", stream, 0, 2**64 - 1)
    return 0 if handle == LEGACY else handle


class Owner(Protocol):
    """The library of an array, with the device of the array."""

    # Two arrays with equal keys have one current stream.
    key: Tuple[Any, ...]
    # The device on which this package holds the memory until its stream has passed it. None where
    # the array's library holds the memory itself.
    holds_on: Optional[int]

    def current(self) -> Optional[int]:
        """The stream on which the library uses the array next; None where nobody knows it."""

    def before(self, array: Any, stream: int) -> None:
        """Tells the library that the array is going to be used on the stream, and makes the stream
        wait for it, where __dlpack__ does not do so."""

    def record(self, stream: int) -> Any:
        """An event on the stream."""

    def follow(self, event: Any) -> None:
        """Makes the current stream wait for the event."""


class Torch:
    """PyTorch."""

    holds_on: Optional[int] = None  # record_stream does it

    def __init__(self, cuda: Any, device: Any) -> None:
        self._cuda, self._device, self.key = cuda, device, ("torch", device)

    def current(self) -> int:
        return stream_handle(self._cuda.current_stream(self._device))

    def _stream(self, handle: int) -> Any:
        current = self._cuda.current_stream(self._device)
        if stream_handle(current) == handle:
            return current
        return self._cuda.ExternalStream(handle, device=self._device) if handle else self._cuda.default_stream(self._device)

    def before(self, array: Any, stream: int) -> None:
        array.record_stream(self._stream(stream))

    def record(self, stream: int) -> Any:
        return self._stream(stream).record_event()

    def follow(self, event: Any) -> None:
        self._cuda.current_stream(self._device).wait_event(event)


class CuPy:
    """CuPy."""

    def __init__(self, cuda: Any, device: int) -> None:
        self._cuda, self._device, self.key = cuda, device, ("cupy", device)
        self.holds_on: Optional[int] = device

    def _current(self) -> Any:
        return self._cuda.get_current_stream(self._device)

    def current(self) -> int:
        return stream_handle(self._current())

    def before(self, array: Any, stream: int) -> None:
        pass

    def record(self, stream: int) -> Any:
        with self._cuda.Device(self._device):
            current = self._current()
            at = current if stream_handle(current) == stream else \
                self._cuda.ExternalStream(stream, self._device) if stream else self._cuda.Stream.null
            return at.record()

    def follow(self, event: Any) -> None:
        with self._cuda.Device(self._device):
            self._current().wait_event(event)


class Other:
    """A library without a known current stream. __cuda_array_interface__ may name the stream on
    which the array is being written."""

    def __init__(self, stream: Optional[int], device: Optional[int]) -> None:
        self._stream, self._device, self.key = stream, device, ("other", stream, device)
        self.holds_on: Optional[int] = device

    def current(self) -> Optional[int]:
        return self._stream

    def _driver(self, why: str) -> Driver:
        found = driver()
        if found is None or not found.has_events or self._device is None:
            raise UnsupportedError(f"{why} needs events of the CUDA driver, and they are not here: pass an array of torch or cupy")
        return found

    def before(self, array: Any, stream: int) -> None:
        if self._device is not None:
            self._driver("an array that is neither of torch nor of cupy has to be held until its stream has passed it, which")
        if self._stream is not None and self._stream != stream:
            cuda = self._driver(f"an array that is being written on stream {self._stream:#x} (pass stream={self._stream:#x}), in an operation on stream {stream:#x},")
            with cuda.on(self._device or 0):
                Event(cuda, self._device or 0, self._stream).hold_back(stream)

    def record(self, stream: int) -> Optional[Event]:
        if self._stream is None:
            return None
        cuda = self._driver("the order of two streams")
        with cuda.on(self._device or 0):
            return Event(cuda, self._device or 0, stream)

    def follow(self, event: Optional[Event]) -> None:
        if event is not None:
            with event.driver.on(event.device):
                event.hold_back(self._stream or 0)


def owner(array: Any, device: Optional[int]) -> Owner:
    """The library of an array on a device. ``device`` is the number of the mesh's device."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(array, getattr(torch, "Tensor", ())):
        return Torch(torch.cuda, array.device)
    cupy: Any = sys.modules.get("cupy")
    if cupy is not None and isinstance(array, getattr(cupy, "ndarray", ())):
        return CuPy(cupy.cuda, int(array.device.id))
    jax: Any = sys.modules.get("jax")
    if jax is not None and isinstance(array, getattr(jax, "Array", ())):
        # JAX has no current stream. __dlpack__ orders the operation behind XLA.
        return Other(None, device)
    interface = getattr(array, "__cuda_array_interface__", None)
    named = interface.get("stream") if isinstance(interface, dict) else None
    return Other(None if named is None else stream_handle(named), device)


def current_stream(arrays: Sequence[Any]) -> int:
    """The stream of an operation for which the program names none: the current stream of the first
    of these arrays that has one. Otherwise it is the default stream."""
    for array in arrays:
        # A tensor of torch in host memory has no stream. Its operation is refused later.
        if array is not None and getattr(array, "is_cuda", True):
            found = owner(array, None).current()
            if found is not None:
                return found
    return 0


def stream_of_device(device: Optional[int]) -> int:
    """The current stream of torch or CuPy on a device. The default stream where neither of them is
    imported."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return stream_handle(torch.cuda.current_stream(device))
    cupy: Any = sys.modules.get("cupy")
    if cupy is not None:
        return stream_handle(cupy.cuda.get_current_stream(device))
    return 0


class Held:
    """The memory that streams have not passed yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # For each device and stream, the events with the memory that they stand for, oldest first.
        self._waiting: Dict[Tuple[int, int], Deque[Tuple[Event, Sequence["Memory"]]]] = {}

    def add(self, memories: Sequence["Memory"], device: int, stream: int) -> None:
        """Keeps the memory until the stream has passed what is on it now."""
        cuda = driver()
        if cuda is None or not cuda.has_events:
            return  # CuPy on ROCm. Other libraries were refused.
        with cuda.on(device):
            if cuda.is_capturing(stream):
                return  # the graph runs later and repeatedly: its arrays are kept by the program
            event = Event(cuda, device, stream)
            with self._lock:
                self._waiting.setdefault((device, stream), deque()).append((event, tuple(memories)))

    def look(self) -> None:
        """Releases the memory that its stream has passed."""
        if not self._waiting:
            return
        over: List[Tuple[Event, Sequence["Memory"]]] = []
        with self._lock:
            for place, queue in list(self._waiting.items()):
                with contextlib.suppress(DeviceError), queue[0][0].driver.on(place[0]):
                    while queue and queue[0][0].is_over():
                        over.append(queue.popleft())
                if not queue:
                    del self._waiting[place]
        # Outside the lock, because releasing calls the deleters of other libraries.
        for _, memories in over:
            for memory in memories:
                memory.release()


held = Held()


def follow(memories: Sequence["Memory"], later: bool) -> List[Join]:
    """Orders the streams of the arrays' libraries behind operations that were just put on their
    streams. With ``later`` that is done by the functions that are returned."""
    joins: List[Join] = []
    seen: List[Tuple[Any, int]] = []
    for memory in memories:
        its, stream = memory.owner, memory.stream
        if its is None or (its.key, stream) in seen:
            continue
        seen.append((its.key, stream))
        if later:
            joins.append(partial(its.follow, its.record(stream)))
        elif its.current() not in (None, stream):
            its.follow(its.record(stream))
    return joins


def keep(memories: Sequence["Memory"]) -> None:
    """Releases the memory of operations that were put on streams, each when its stream has passed
    it. Releases what other streams have passed meanwhile."""
    held.look()
    waiting: Dict[Tuple[int, int], List["Memory"]] = {}
    for memory in memories:
        device = None if memory.owner is None else memory.owner.holds_on
        if device is None:
            memory.release()
        else:
            waiting.setdefault((device, memory.stream), []).append(memory)
    for (device, stream), its in waiting.items():
        # On a device that has failed nothing runs any more.
        with contextlib.suppress(DeviceError):
            held.add(its, device, stream)
