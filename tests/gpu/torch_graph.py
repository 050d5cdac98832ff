"""torch.cuda.graph around collectives of the Python package: captured, replayed, and the mesh ended
while the graph lives, which must end by a deadline with an error that names the graph."""

import os
import sys
import threading
import time

from nccl_copy import follow_loaded, seen, skip

try:
    import torch
except ImportError as error:
    skip(f"no PyTorch in {sys.executable}: {error}")
if not torch.cuda.is_available():
    skip(f"PyTorch {torch.__version__} sees no GPU")
import torch.distributed  # noqa: E402, F401  # loads NCCL

follow_loaded()
import devicemesh  # noqa: E402

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
torch.cuda.set_device(device)
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
mesh = devicemesh.init_device_mesh("cuda", (SIZE,), mesh_dim_names=("all",))
group = mesh.get_group("all")
source, result = torch.ones(1024, device=device), torch.zeros(1024, device=device)
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):  # PyTorch asks for a warm-up before a capture
    for _ in range(3):
        result.copy_(source)
        group.all_reduce(result)
side.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, capture_error_mode="thread_local"):
    result.copy_(source)
    group.all_reduce(result)
for value in (1.0, 2.0, 3.0):
    source.fill_(value)
    graph.replay()
    torch.cuda.synchronize()
    assert result.tolist() == [value * SIZE] * 1024, (value, result[:4])
seen("torch.cuda.graph of an all-reduce", "three replays are right")
ended = []


def finalize():
    began = time.monotonic()
    try:
        mesh.finalize(timeout=5)
        ended.append(f"succeeded after {time.monotonic() - began:.2f} s")
    except devicemesh.DeviceMeshError as error:
        ended.append(f"{type(error).__name__} after {time.monotonic() - began:.2f} s: {error}")


thread = threading.Thread(target=finalize, daemon=True)
thread.start()
thread.join(40)
seen("mesh.finalize while a torch graph lives", ended[0] if ended else "had not returned after 40 s")
good = bool(ended) and ("graph" in ended[0] or "succeeded" in ended[0])
began = time.monotonic()
graph.reset()
seen("graph.reset after that", f"took {time.monotonic() - began:.2f} s")
sys.stdout.flush()
os._exit(0 if good else 1)
