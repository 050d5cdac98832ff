"""The log of the library, through Python's logging."""

from __future__ import annotations

import atexit
import ctypes
import logging
from typing import Any, List, Optional, Union

from . import _declarations as declarations
from . import _interrupt as interrupt
from ._library import check, is_bool, library
from .errors import InvalidArgumentError

__all__ = ["use_logging"]

# Python's level for each of the library's.
LEVELS = {
    declarations.LOG_ERROR: logging.ERROR, declarations.LOG_WARN: logging.WARNING, declarations.LOG_INFO: logging.INFO,
    declarations.LOG_DEBUG: logging.DEBUG}
# The callbacks that the library may use. None is ever taken out, see use_logging.
_used: List[Any] = []


def use_logging(level: Union[None, int, str] = None, *, logger: Optional[logging.Logger] = None) -> None:
    """Passes what the library logs to ``logging.getLogger("devicemesh")``, or to the logger that is
    given, in place of what DM_LOG says.

    ``level`` is one of Python's ("INFO", logging.DEBUG ...) or "OFF"; None is the logger's level
    now. Records that the library does not make cost nothing. The logger is called from any thread,
    also from threads of the library. Its handlers may ask a mesh and abort it, but make no
    collective call.
    """
    target = logger or logging.getLogger("devicemesh")
    wanted = library_level(target.getEffectiveLevel() if level is None else level)

    def log(_: Any, number: int, message: bytes) -> None:
        try:
            target.log(LEVELS.get(number, logging.ERROR), "%s", message.decode(errors="replace"))
        except Exception:
            # Nothing could take this exception. A handler of logging shows its own errors.
            pass

    callback = declarations.Log(log) if wanted else declarations.Log()
    # dm_set_log waits for the threads that are inside an earlier callback, but for 5 s at most. It
    # does not wait where a logger calls use_logging. So all callbacks are kept.
    _used.append(callback)
    interrupt.expect_callbacks()
    check(library.dm_set_log(wanted, callback, None))


def library_level(level: Union[int, str]) -> int:
    """The library's level that makes all records from this level of Python's on."""
    if isinstance(level, str):
        number = 1000 if level.upper() == "OFF" else logging.getLevelName(level.upper())
    else:
        number = level
    if not isinstance(number, int) or is_bool(number):
        raise InvalidArgumentError(f"level is {level!r}, not a level of logging: DEBUG, INFO, WARNING, ERROR, OFF, or a number")
    return max((ours for ours, theirs in LEVELS.items() if theirs >= number), default=declarations.LOG_OFF)


@atexit.register
def stop() -> None:
    """Threads of the library must not call into an interpreter that ends."""
    if _used:
        library.dm_set_log(declarations.LOG_OFF, declarations.Log(), None)
