"""The library through ctypes, as the interop programs use it."""

import ctypes
import os

LIBRARY = ctypes.CDLL(os.environ["DM_LIBRARY"])
LIBRARY.dm_last_error.restype = ctypes.c_char_p
FLOAT32, SUM = 7, 0


def check(status):
    if status != 0:
        raise RuntimeError(f"status {status}: {LIBRARY.dm_last_error().decode()}")


def say(text):
    """One write for the whole line: the ranks share a pipe."""
    os.write(1, f"{text}\n".encode())


class Mesh:
    def __init__(self, dp, tp):
        self.handle = ctypes.c_void_p()
        shape, names = (ctypes.c_int32 * 2)(dp, tp), (ctypes.c_char_p * 2)(b"dp", b"tp")
        check(LIBRARY.dm_init(b"cpu", shape, ctypes.c_size_t(2), names, None, ctypes.byref(self.handle)))

    def all_reduce(self, name, pointer, count):
        check(LIBRARY.dm_all_reduce(self.handle, name.encode(), ctypes.c_void_p(pointer), ctypes.c_void_p(pointer),
                                    ctypes.c_size_t(count), FLOAT32, SUM, None))

    def sum(self, name, value):
        cell = (ctypes.c_float * 1)(value)
        self.all_reduce(name, ctypes.addressof(cell), 1)
        return cell[0]

    def finalize(self):
        check(LIBRARY.dm_finalize(self.handle, None))
        LIBRARY.dm_free(self.handle)
