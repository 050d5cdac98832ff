"""Finds the C library, declares its functions, and turns what they answer into Python's values and
exceptions."""

from __future__ import annotations

import contextlib
import ctypes
import operator
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, List, Optional, Tuple, Union

from . import _declarations as declarations
from .errors import BY_STATUS, DeviceMeshError, InvalidArgumentError

HERE = Path(__file__).resolve().parent
SONAME = "libdevicemesh.so.0.2"
# Below 1.0 a minor version may change the ABI, so this package works with one minor version.
VERSIONS = range(200, 300)
BUFFER_TOO_SMALL = 5
# Seconds or a timedelta. None is the default.
Timeout = Union[None, float, timedelta]


def candidates() -> Iterator[str]:
    """The places where the library may be, the best first: what DM_LIBRARY names, the wheel's
    library, that of the checkout with this file, and the system's."""
    named = os.environ.get("DM_LIBRARY")
    if named:
        yield named
        return
    for path in (HERE / "_native/libdevicemesh.so", HERE.parent.parent.parent / "target/release/libdevicemesh.so"):
        if path.exists():
            yield str(path)
    yield SONAME


def load() -> Tuple[ctypes.CDLL, str]:
    """The library with every function declared, and where it was found."""
    tried: List[str] = []
    for name in candidates():
        try:
            found = ctypes.CDLL(name)
            version = int(found.dm_version())
        except (OSError, AttributeError) as error:
            tried.append(f"{name} ({error})")
            continue
        if version not in VERSIONS:
            tried.append(f"{name} (version {version}, this package is for {VERSIONS.start} to {VERSIONS.stop - 1})")
            continue
        missing = [function for function in declarations.FUNCTIONS if not hasattr(found, function)]
        if missing:
            tried.append(f"{name} (an earlier build of this version, without {missing[0]})")
            continue
        for function, (result, arguments) in declarations.FUNCTIONS.items():
            declared = getattr(found, function)
            declared.restype, declared.argtypes = result, arguments
        return found, name
    raise ImportError(f"no libdevicemesh: tried {', '.join(tried)}; DM_LIBRARY can name it")


library, PATH = load()


def version() -> str:
    """The version of the loaded library, for example "0.2.0"."""
    number = int(library.dm_version())
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def status_name(status: int) -> str:
    """The C name of a status: 7 is "DM_STATUS_TIMEOUT"."""
    name: bytes = library.dm_status_name(int32("status", status))
    return name.decode()


def last_error() -> str:
    """The message of this thread's last failing call, or "" when none has failed. It is for calls
    that are made beside this package, through raw handles."""
    message: bytes = library.dm_last_error()
    return message.decode(errors="replace")


def exception(status: int) -> DeviceMeshError:
    """The exception for a status that a call of this thread has just returned."""
    info = declarations.ErrorInfo(struct_size=ctypes.sizeof(declarations.ErrorInfo))
    library.dm_last_error_info(ctypes.byref(info))
    kind = BY_STATUS.get(status, DeviceMeshError)
    error = kind((info.message or b"").decode(errors="replace"))
    error.status, error.ccl_result, error.device_error, error.os_error = status, info.ccl_result, info.device_error, info.os_error
    error.ranks, error.lost_ranks = tuple(info.ranks[: info.num_ranks]), tuple(info.lost_ranks[: info.num_lost])
    error.dimension = None if info.dim is None else info.dim.decode(errors="replace")
    error.waited = None if info.waited_seconds < 0 else info.waited_seconds
    error.call = None if info.call < 0 else info.call
    return error


def check(status: int) -> None:
    """Raises the exception for a status that is not 0."""
    if status:
        raise exception(status)


def is_bool(value: Any) -> bool:
    """Whether value is a truth value: Python's, or one element of numpy or torch. All of these
    also pass for the integers 0 and 1."""
    return isinstance(value, bool) or (type(value) is not int and str(getattr(value, "dtype", "")) in ("bool", "torch.bool"))


def flag(what: str, value: Any) -> bool:
    """A truth value. Anything else is refused, because "no" and [False] would be true."""
    if not is_bool(value):
        raise TypeError(f"{what} is {value!r} (a {type(value).__name__}), not True or False")
    return bool(value)


def text(what: str, value: str) -> bytes:
    """A string for C."""
    if not isinstance(value, str):
        raise TypeError(f"{what} is a {type(value).__name__}, not a str")
    if "\0" in value:
        raise InvalidArgumentError(f"{what} {value!r} has a NUL in it")
    return value.encode()


def optional_text(what: str, value: Optional[str]) -> Optional[bytes]:
    return None if value is None else text(what, value)


def texts(what: str, values: Iterable[str]) -> Any:
    """A C array of strings."""
    if isinstance(values, str):
        raise TypeError(f"{what} is one str, {values!r}; a tuple of them was expected")
    encoded = [text(what, value) for value in listing(what, values)]
    return (ctypes.c_char_p * len(encoded))(*encoded)


def in_order(what: str, values: Iterable[Any]) -> Iterable[Any]:
    """Values whose order is the same in every process. A set is refused, because its order is
    not."""
    if isinstance(values, (set, frozenset)):
        raise TypeError(f"{what} is a set, which has no order; pass a tuple or a list")
    return values


def listing(what: str, values: Any) -> Iterable[Any]:
    """Does what in_order does, and refuses a value that cannot be iterated over."""
    if not hasattr(type(values), "__iter__"):
        written = f": write ({values},)" if type(values) is int else ""
        raise TypeError(f"{what} is {values!r} (a {type(values).__name__}); a tuple or a list was expected{written}")
    return in_order(what, values)


def integer(what: str, value: Any) -> int:
    """An integer from an integer of any type: Python's, numpy's, or a tensor of one element. Truth
    values and fractions are refused."""
    if not is_bool(value):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{what} is {value!r} (a {type(value).__name__}), not an integer")


def within(what: str, value: Any, low: int, high: int) -> int:
    """An integer that fits its C type. ctypes would cut a larger one without an error."""
    number = integer(what, value)
    if not low <= number <= high:
        raise InvalidArgumentError(f"{what} is {number}, not {low} to {high}")
    return number


def int32(what: str, value: Any) -> int:
    return within(what, value, -(2**31), 2**31 - 1)


def size(what: str, value: Any) -> int:
    return within(what, value, 0, 2**63 - 1)


def sizes(what: str, values: Iterable[Any]) -> Any:
    """A C array of size_t."""
    given = list(listing(what, values))
    for value in given:
        if integer(what, value) < 0:
            raise InvalidArgumentError(
                f"{what} is {tuple(given)!r}, and {value} is no size: write every size as a number, because none stands for the rest"
            )
    numbers = [size(what, value) for value in given]
    return (ctypes.c_size_t * len(numbers))(*numbers)


def rank_counts(what: str, values: Iterable[Any]) -> Any:
    """A C array of int32_t, from sizes that count ranks: the shape of a mesh."""
    numbers = [int32(what, number) for number in sizes(what, values)]
    return (ctypes.c_int32 * len(numbers))(*numbers)


def ranks(what: str, values: Iterable[Any]) -> Any:
    """A C array of int32_t."""
    numbers = [int32(what, value) for value in listing(what, values)]
    return (ctypes.c_int32 * len(numbers))(*numbers)


def milliseconds(timeout: Timeout) -> int:
    """Milliseconds from a timeout in seconds or a timedelta, as in PyTorch. None stands for the
    default timeout, which is 0 in C."""
    if timeout is None:
        return 0
    if type(timeout).__name__ == "timedelta64":
        timeout = timeout.item()  # type: ignore[union-attr]  # numpy's; an int when it counts nanoseconds
        if not isinstance(timeout, timedelta):
            raise TypeError(f"timeout is a numpy.timedelta64 of {timeout} units; pass seconds or a datetime.timedelta")
    if (is_bool(timeout) or isinstance(timeout, (str, bytes, bytearray))
            or not (isinstance(timeout, timedelta) or hasattr(type(timeout), "__float__"))):
        raise TypeError(f"timeout is {timeout!r} (a {type(timeout).__name__}); give seconds, a timedelta, or None for the default")
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if seconds >= 2**53:
        raise InvalidArgumentError(f"timeout is {seconds:g} seconds, longer than the library can count; every wait has an end, so give 1e9 for 31 years, or None for the default")
    if not seconds > 0:
        raise InvalidArgumentError(f"timeout is {seconds:g} seconds; give more than 0, or None for the default")
    return max(1, round(seconds * 1000))


class Deadline:
    """The time at which a call with several waits ends: timeout from now. A timeout of None stands
    for the default of the library's function, which is the last wait."""

    def __init__(self, timeout: Timeout) -> None:
        self._milliseconds = milliseconds(timeout)
        self._until = time.monotonic() + self._milliseconds / 1000

    def seconds(self) -> Optional[float]:
        """The seconds that are left, 0 or more; None where the program gave no timeout."""
        return max(0.0, self._until - time.monotonic()) if self._milliseconds else None

    def milliseconds(self) -> int:
        """The time that is left, for C: at least 1, and 0 where the program gave no timeout."""
        left = self.seconds()
        return 0 if left is None else max(1, round(left * 1000))


@contextlib.contextmanager
def telling(function: Callable[..., int], *arguments: Any) -> Iterator[None]:
    """Tells the other ranks when this package refuses a collective call itself. The library does so
    for what it refuses. So function(*arguments) is a call of the same function that the library
    refuses, for example because of a negative timeout. The other ranks then fail at once, and need
    not wait for this rank until their deadline."""
    try:
        yield
    except Exception:
        function(*arguments)
        raise


def listed(element: Any, ask: Callable[[Any, int, Any], int], guess: int = 16) -> List[Any]:
    """Gets a list from the library by ask(buffer, capacity, length_out). Asks again when the list
    is longer than the buffer."""
    length = ctypes.c_size_t()
    while True:
        buffer = (element * guess)()
        status = ask(buffer, guess, ctypes.byref(length))
        if status != BUFFER_TOO_SMALL:
            check(status)
            return list(buffer[: length.value])
        guess = length.value


def string(ask: Callable[[Any, int, Any], int]) -> str:
    """Gets a string from the library by ask(buffer, capacity, length_out)."""
    length, capacity = ctypes.c_size_t(), 256
    while True:
        buffer = ctypes.create_string_buffer(capacity)
        status = ask(buffer, capacity, ctypes.byref(length))
        if status != BUFFER_TOO_SMALL:
            check(status)
            return buffer.value.decode()
        capacity = length.value
