"""The functions of the communicator library, before there is a mesh, and how a program that links
its own NCCL passes it."""

from __future__ import annotations

import ctypes
from typing import Any, Callable, List, Optional

from . import _declarations as declarations
from . import _interrupt as interrupt
from ._library import check, library, optional_text, within
from ._library import text as as_text

__all__ = ["get_device_proc", "set_ccl_resolver"]

# The library may call a resolver until the process ends.
_kept: List[Any] = []


def get_device_proc(device_type: Optional[str], symbol: str) -> int:
    """The address of the function of that name ("ncclMemAlloc") in the library that meshes of this
    device type will get. Local. With a mesh, DeviceMesh.get_proc gives that mesh's."""
    answer = ctypes.c_void_p()
    check(library.dm_get_device_proc(optional_text("device_type", device_type), as_text("symbol", symbol), ctypes.byref(answer)))
    return answer.value or 0


def set_ccl_resolver(resolve: Optional[Callable[[str], Optional[int]]]) -> None:
    """Makes the NCCL that an extension module links the library of device type cuda.

    ``resolve`` gives the address of NCCL's function of a name, or None. It is called from any
    thread, until the process ends. None takes an earlier resolver back. Call this before anything
    else of device type cuda or None.
    """
    # The first failure while this function runs. The library may call resolve later too.
    failures: List[BaseException] = []
    is_setting = True

    def found(_: Any, name: bytes) -> Optional[int]:
        try:
            address = resolve(name.decode()) if resolve is not None else None
            # ctypes would ignore the error of a value that is no address, and give C an arbitrary one.
            return None if address is None else within(f"what the resolver gave for {name.decode()}", address, 0, 2**64 - 1)
        except BaseException as error:
            if is_setting and not failures:
                failures.append(error)
            return None

    callback = declarations.CclResolver() if resolve is None else declarations.CclResolver(found)
    _kept.append(callback)
    interrupt.expect_callbacks()
    try:
        check(library.dm_set_ccl_resolver(callback, None))
    except Exception as error:
        raise error from (failures[0] if failures else None)
    finally:
        is_setting = False
        failures.clear()
