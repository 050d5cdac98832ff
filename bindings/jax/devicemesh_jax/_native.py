"""Finds the library of XLA handlers, connects it to the libdevicemesh that Python has, and
registers its handlers with XLA."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Iterator, List

import jax

from devicemesh import _library as devicemesh_library

HERE = Path(__file__).resolve().parent
NAMES = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "shift", "sendrecv", "gather", "scatter",
         "all_gatherv", "reduce_scatterv", "all_to_allv")
PLATFORMS = {"cpu": "cpu", "cuda": "CUDA"}


def candidates() -> Iterator[str]:
    """The places where the library may be, the best first: what DM_JAX_LIBRARY names, the wheel's
    library, and the one that make built in this checkout."""
    named = os.environ.get("DM_JAX_LIBRARY")
    if named:
        yield named
        return
    yield str(HERE / "_native/libdevicemesh_jax.so")
    yield str(HERE.parent.parent.parent / "target/jax/libdevicemesh_jax.so")


def load() -> ctypes.CDLL:
    tried: List[str] = []
    for path in candidates():
        try:
            found = ctypes.CDLL(path)
            connect = found.devicemesh_jax_connect
        except (OSError, AttributeError) as error:
            tried.append(str(error))
            continue
        connect.restype, connect.argtypes = ctypes.c_char_p, [ctypes.c_char_p]
        found.devicemesh_jax_group.restype, found.devicemesh_jax_group.argtypes = None, [ctypes.c_int]
        found.devicemesh_jax_queued.restype, found.devicemesh_jax_queued.argtypes = None, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int]
        # The handlers must use the copy of libdevicemesh that the package devicemesh uses, because
        # another copy would not know its meshes.
        problem = connect(devicemesh_library.PATH.encode())
        if problem:
            raise ImportError(f"devicemesh_jax: {problem.decode(errors='replace')}")
        return found
    raise ImportError(f"no libdevicemesh_jax.so: {'; '.join(tried)}; `make jax` builds it, DM_JAX_LIBRARY can name it")


def register() -> ctypes.CDLL:
    library = load()
    for name in NAMES:
        for platform in PLATFORMS.values():
            jax.ffi.register_ffi_target(f"devicemesh_{name}", jax.ffi.pycapsule(getattr(library, f"devicemesh_{name}")), platform=platform)
    return library


# The library stays loaded until the process ends, because XLA has addresses in it.
library = register()
