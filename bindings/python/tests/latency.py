"""The time that the package adds to an all-reduce of 4 bytes: `devicemesh run -n 1 -- python
latency.py`. Medians in microseconds of processor time; one rank alone, since with others it is the
waiting for them that takes the time.

Three ways in turn, so that they meet the same machine: the C function through bare ctypes, the same
under the Ctrl-C watch, and Communicator.all_reduce.
"""

import ctypes
import os
import statistics
import time

from devicemesh import _interrupt, init_device_mesh
from devicemesh._library import library

BLOCK, ROUNDS = 200, 60
mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
group = mesh.get_group()
value = bytearray(4)
address = ctypes.addressof((ctypes.c_char * 4).from_buffer(value))
arguments = (mesh._handle, b"dim_0", address, address, 1, 7, 0, None)
ways = {
    "bare ctypes": lambda: library.dm_all_reduce(*arguments),
    "with the Ctrl-C watch": lambda: _interrupt.call(group._end, library.dm_all_reduce, *arguments),
    "Communicator.all_reduce": lambda: group.all_reduce(value),
}
times = {name: [] for name in ways}
for _ in range(ROUNDS):
    for name, way in ways.items():
        began = time.thread_time()
        for _ in range(BLOCK):
            way()
        times[name].append((time.thread_time() - began) / BLOCK * 1e6)
if group.rank == 0:
    for name, found in times.items():
        print(f"{group.size} ranks, 4 bytes, {name}: {statistics.median(found):.1f}", flush=True)
