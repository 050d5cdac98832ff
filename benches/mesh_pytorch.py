"""PyTorch's part of benches/mesh.py: the same calls on its DeviceMesh with its fake backend, so
that no other process is needed.

Arguments: the shape. Prints JSON: the version, seconds of processor time for each call, and the
bytes by which memory grew at most while the mesh was made."""

import json
import logging
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

ONCE = 2.0
BUDGET = 0.3


def resident(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field)) * 1024


def timed(call):
    """The median over repeated calls, in seconds; what takes longer than two seconds is called
    once."""
    began = time.thread_time()
    call()
    first = time.thread_time() - began
    if first > ONCE:
        return first
    batch = max(1, int(1e-3 / first))
    times, until = [], time.thread_time() + BUDGET
    while len(times) < 3 or time.thread_time() < until:
        began = time.thread_time()
        for _ in range(batch):
            call()
        times.append((time.thread_time() - began) / batch)
    return statistics.median(times)


def main():
    logging.disable(logging.WARNING)
    shape = tuple(map(int, sys.argv[1:]))
    ranks = torch.Size(shape).numel()
    rank = ranks * 3 // 4 + 1
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    # What the first mesh of a process imports is not counted.
    small = DeviceMesh("cpu", torch.arange(rank - 7, rank + 1).view(2, 2, 2), mesh_dim_names=("a", "b", "c"))
    small["a", "b"]._flatten("a_b")
    names = iter(f"name{number}" for number in range(1 << 62))
    make = lambda: init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "cp", "tp"))
    result = {"version": torch.__version__}
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")
    before = resident("VmRSS:")
    began = time.thread_time()
    mesh = make()
    seconds = time.thread_time() - began
    result["memory"] = resident("VmHWM:") - before
    result["dm_init"] = seconds if seconds > ONCE else timed(make)
    pair = mesh["dp", "cp"]
    flat = pair._flatten("dp_cp")
    result["dm_slice"] = timed(lambda: mesh["dp", "cp"])
    result["dm_flatten"] = timed(lambda: pair._flatten(next(names)))
    result["dm_unflatten"] = timed(lambda: flat._unflatten(0, (shape[2], shape[1]), (next(names), next(names))))
    result["dm_get_local_rank"] = timed(lambda: mesh.get_local_rank("cp"))
    result["dm_get_coordinate"] = timed(mesh.get_coordinate)
    result["dm_get_comm"] = timed(lambda: mesh.get_group("cp"))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
