#!/usr/bin/env python3
"""torch.distributed.init_device_mesh beside dm_init on the same ranks, in turn; then a mesh over
PyTorch's own communicators. One rank of a job that run.sh starts; needs PyTorch, with CUDA unless
DM_DEVICE=cpu (gloo beside the host engine; nothing to adopt there)."""

import ctypes
import faulthandler
import os
import statistics
import sys
import time

from nccl_copy import follow_loaded

try:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
except ImportError as error:
    print(f"WHY=no PyTorch in {sys.executable}: {error}")
    sys.exit(77)

faulthandler.enable()  # a crash says in which call it was
ROUNDS = 5
DEVICE = os.environ.get("DM_DEVICE", "cpu")
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FLOAT32, SUM = 7, 0


class Library:
    """libdevicemesh through ctypes, as far as it is needed here."""

    def __init__(self, path):
        self.calls = ctypes.CDLL(path)
        self.calls.dm_last_error.restype = ctypes.c_char_p

    def __call__(self, name, *arguments):
        status = getattr(self.calls, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name} gives {status}: {self.calls.dm_last_error().decode()}")

    def mesh(self, shape, names, comms=None):
        mesh = ctypes.c_void_p()
        sizes = (ctypes.c_int32 * len(shape))(*shape)
        texts = (ctypes.c_char_p * len(names))(*(name.encode() for name in names))
        device, count = DEVICE.encode(), ctypes.c_size_t(len(shape))
        if comms is None:
            self("dm_init", device, sizes, count, texts, None, ctypes.byref(mesh))
        else:
            handles = (ctypes.c_void_p * len(comms))(*comms)
            self("dm_from_comms", device, sizes, count, texts, handles, None, ctypes.byref(mesh))
        return mesh

    def sum_over(self, mesh, name, tensor):
        stream = torch.cuda.current_stream().cuda_stream if DEVICE == "cuda" else None
        data = ctypes.c_void_p(tensor.data_ptr())
        self("dm_all_reduce", mesh, name.encode(), data, data, ctypes.c_size_t(tensor.numel()), FLOAT32, SUM, ctypes.c_void_p(stream))
        settle()


def settle():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def expect(what, tensor, value):
    if tensor.tolist() != [float(value)] * tensor.numel():
        raise AssertionError(f"{what}: {tensor.tolist()[:4]}, expected {value}")


def main():
    if DEVICE == "cuda" and not torch.cuda.is_available():
        print(f"WHY=PyTorch {torch.__version__} sees no GPU")
        return 77
    if DEVICE == "cuda":
        # PyTorch's communicators are valid in PyTorch's copy of NCCL only.
        follow_loaded()
    dm = Library(os.environ["DM_LIBRARY"])
    shape, names = {2: ((2,), ("tp",)), 4: ((2, 2), ("dp", "tp"))}.get(SIZE, ((2, 2, SIZE // 4), ("dp", "cp", "tp")))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()) if DEVICE == "cuda" else torch.device("cpu")
    if DEVICE == "cuda":
        torch.cuda.set_device(device)
    ones = torch.ones(1024, device=device)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)

    def ours():
        mesh = dm.mesh(shape, names)
        made = time.monotonic()
        for name, size in zip(names, shape):
            tensor = ones.clone()
            dm.sum_over(mesh, name, tensor)
            expect(f"dm_all_reduce over {name}", tensor, size)
        used = time.monotonic()
        dm("dm_finalize", mesh, None)
        dm.calls.dm_free(mesh)
        return made, used

    def pytorch(number):
        # With a device PyTorch makes communicators at once. The split_group by which it makes those
        # of several dimensions crashes in PyTorch 2.11 (seen on an H100 with four ranks).
        at_once = DEVICE == "cuda" and len(shape) == 1
        dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo", store=dist.PrefixStore(f"torch{number}", store), rank=RANK,
                                world_size=SIZE, device_id=device if at_once else None)
        mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=names)
        made = time.monotonic()
        for name, size in zip(names, shape):
            tensor = ones.clone()
            dist.all_reduce(tensor, group=mesh.get_group(name))
            settle()
            expect(f"dist.all_reduce over {name}", tensor, size)
        used = time.monotonic()
        if number == ROUNDS and DEVICE == "cuda":
            adopt(mesh)
        dist.destroy_process_group()
        return made, used

    def adopt(mesh):
        comms = [mesh.get_group(name)._get_backend(device)._comm_ptr() for name in names]
        adopted = dm.mesh(shape, names, comms)
        for name, size in zip(names, shape):
            tensor = ones.clone()
            settle()
            dm.sum_over(adopted, name, tensor)
            expect(f"adopted: dm_all_reduce over {name}", tensor, size)
        dm.calls.dm_free(adopted)
        if RANK == 0:
            print(f"adopted PyTorch's communicators {[hex(comm) for comm in comms]}")

    times = {"ours": [], "torch": []}
    for number in range(ROUNDS + 1):  # the first is not counted
        for which in ("ours", "torch") if number % 2 == 0 else ("torch", "ours"):
            # Beginnings are lined up through the store, which both use.
            store.add(f"lined/{number}/{which}", 1)
            while store.add(f"lined/{number}/{which}", 0) < SIZE:
                time.sleep(0.002)
            began = time.monotonic()
            made, used = ours() if which == "ours" else pytorch(number)
            if number > 0:
                times[which].append((made - began, used - began))
    if RANK == 0:
        for which, call in (("ours", "dm_init"), ("torch", "init_process_group and init_device_mesh")):
            made, used = (1e3 * statistics.median(column) for column in zip(*times[which]))
            print(f"FIGURE|mesh {shape}, from Python: {call}|{made:.4g}|ms")
            print(f"FIGURE|mesh {shape}, from Python: {call}, and an all-reduce on each dimension|{used:.4g}|ms")
        print(f"TORCH={torch.__version__}")
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.exit(code)
