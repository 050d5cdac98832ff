"""PyTorch's part of benches/peers: its gloo backend, measured as measure.h says, with the same
arguments and lines."""

import json
import os
import resource
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FEWEST, MOST = 3, 4000


def processor():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def maximum(values):
    """The largest of each value over the ranks."""
    tensor = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


def pattern(ranks, count, kind, start=0):
    """The sum over these ranks of measure.h's pattern, from that element on: it repeats after 1024
    elements."""
    index = torch.arange(start, start + 1024)
    period = sum((index * 7 + rank * 3 + index // 64) % 16 for rank in ranks).to(kind)
    return period.repeat(count // 1024 + 1)[:count]


class Case:
    def __init__(self, operation, dtype, size, rank, ranks):
        self.operation, self.dtype, self.rank, self.ranks = operation, dtype, rank, ranks
        kind = DTYPES[dtype]
        count = size // kind.itemsize
        part = max(1, count // ranks)
        if operation in ("all_gather", "reduce_scatter", "all_to_all"):
            count = part * ranks
        self.count, self.part, self.bytes = count, part, count * kind.itemsize
        self.send = torch.zeros(part if operation == "all_gather" else count, dtype=kind)
        self.recv = self.send if operation in ("all_reduce", "broadcast") else \
            torch.zeros(part if operation == "reduce_scatter" else count, dtype=kind)
        self.run = getattr(self, operation)

    def all_reduce(self):
        dist.all_reduce(self.recv)

    def all_gather(self):
        dist.all_gather_into_tensor(self.recv, self.send)

    def reduce_scatter(self):
        dist.reduce_scatter_tensor(self.recv, self.send)

    def broadcast(self):
        for root in range(self.ranks):
            dist.broadcast(self.recv, root)

    def all_to_all(self):
        dist.all_to_all_single(self.recv, self.send)

    def send_recv(self):
        if self.rank == 0:
            dist.send(self.send, (self.rank + 1) % self.ranks)
        dist.recv(self.recv, (self.rank - 1) % self.ranks)
        if self.rank != 0:
            dist.send(self.send, (self.rank + 1) % self.ranks)

    def expected(self):
        kind, mine, all_ranks = self.recv.dtype, self.rank * self.part, range(self.ranks)
        if self.operation == "all_reduce":
            return pattern(all_ranks, self.count, kind)
        if self.operation == "reduce_scatter":
            return pattern(all_ranks, self.part, kind, mine)
        if self.operation in ("all_gather", "all_to_all"):
            start = mine if self.operation == "all_to_all" else 0
            return torch.cat([pattern([rank], self.part, kind, start) for rank in all_ranks])
        return pattern([0 if self.operation == "broadcast" else (self.rank - 1) % self.ranks], self.count, kind)

    def check(self):
        self.recv.fill_(-1)
        self.send.copy_(pattern([self.rank], self.send.numel(), self.send.dtype))
        self.run()
        if not torch.equal(self.recv, self.expected()):
            sys.exit(f"rank {self.rank}: {self.operation} of {self.count} {self.dtype} is not what it should be")
        self.send.zero_()
        self.recv.zero_()

    def iterate(self, iterations):
        """Their times in seconds, and the processor time of all ranks together."""
        used = [0] * self.ranks
        begins, ends = [0] * iterations, [0] * iterations
        writes = "DM_BENCH_SAME_INPUTS" not in os.environ
        maximum([0])
        before, run, now = processor(), self.run, time.monotonic_ns
        begins[0] = now()
        for index in range(iterations):
            if writes:
                self.send.zero_()
                begins[index] = now()
            elif index > 0:
                begins[index] = ends[index - 1]
            run()
            ends[index] = now()
        used[self.rank] = int((processor() - before) * 1e9)
        used, begins, ends = maximum(used), maximum(begins), maximum(ends)
        return [(end - begin) * 1e-9 for begin, end in zip(begins, ends)], sum(used) * 1e-9

    def measure(self, budget):
        self.check()
        times, used, spent, each = [], 0.0, 0.0, self.iterate(2)[0][1]
        most = sys.maxsize if "DM_BENCH_WHOLE_BUDGET" in os.environ else MOST
        while len(times) < FEWEST or spent < budget and len(times) < most:
            wanted = int((budget - spent) / max(each, 1e-9)) + 1
            block, processors = self.iterate(max(1, min(wanted, 2 * len(times) + 1, most - len(times))))
            times += block
            used += processors
            spent = sum(times)
            each = spent / len(times)
        calls = self.ranks if self.operation in ("broadcast", "send_recv") else 1
        iterations = len(times)
        times.sort()
        return {"operation": self.operation, "dtype": self.dtype, "bytes": self.bytes, "variant": "", "iterations": iterations,
                "median": times[iterations // 2] / calls, "mean": spent / iterations / calls, "least": times[0] / calls,
                "processor": used / iterations / calls}


def say(rank, line):
    if rank == 0:
        print(json.dumps(line), flush=True)


def collectives(rank, ranks, budget, operations, dtypes, sizes):
    for operation in operations.split(","):
        for dtype in dtypes.split(","):
            for size in sizes.split(","):
                say(rank, Case(operation, dtype, int(size), rank, ranks).measure(float(budget) * 1e-3))


def idle(rank, ranks, seconds):
    """The processor time that each of ranks 1, 2 ... uses while it waits in an all-reduce for rank
    0, which sleeps."""
    case = Case("all_reduce", "float32", 4, rank, ranks)
    for _ in range(20):
        case.run()
    before = processor()
    if rank == 0:
        time.sleep(float(seconds))
    case.run()
    used = [0] * ranks
    used[rank] = 0 if rank == 0 else int((processor() - before) * 1e9)
    say(rank, {"idle": sum(maximum(used)) * 1e-9 / max(1, ranks - 1), "seconds": float(seconds)})


def gather(folder, rank, ranks):
    """Waits until every rank has imported what it needs, and gives the moment at which all go
    on."""
    Path(folder, f"ready.{rank}").touch()
    go = Path(folder, "go")
    if rank == 0:
        while len(list(Path(folder).glob("ready.*"))) < ranks:
            time.sleep(0.002)
        Path(folder, "go.new").write_text(str(time.monotonic_ns() + 50_000_000))
        Path(folder, "go.new").rename(go)
    while not go.exists():
        time.sleep(0.005)
    begin = int(go.read_text())
    time.sleep(max(0, begin - time.monotonic_ns()) * 1e-9)
    return begin


def start(rank, ranks):
    """A mesh from nothing but the imports, which take longer than all the rest and are in no
    figure: also not those of a process's first mesh, which is one without communication."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    init_device_mesh("cpu", (ranks, 1, 1), mesh_dim_names=("a", "b", "c"))["a", "b"]._flatten("a_b")
    dist.destroy_process_group()
    begin = gather(os.environ["DM_BENCH_SCRATCH"], rank, ranks)
    dist.init_process_group("gloo")
    marks = [time.monotonic_ns()]
    shape = (max(1, ranks // 4), min(2, ranks), 2 if ranks >= 4 else 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp", "tp"))
    marks.append(time.monotonic_ns())
    mesh["dp", "cp"]._flatten("dp_cp")
    marks.append(time.monotonic_ns())
    times = [begin, *maximum(marks)]
    phases = [(after - before) * 1e-9 for before, after in zip(times, times[1:])]
    say(rank, {"total": sum(phases), "phases": dict(zip(("rendezvous", "root and splits", "flatten"), phases))})


def main():
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if sys.argv[1] == "start":
        start(rank, ranks)
    else:
        dist.init_process_group("gloo")
        {"collectives": collectives, "idle": idle}[sys.argv[1]](rank, ranks, *sys.argv[2:])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
