"""Each of four ranks runs PyTorch (gloo) and libdevicemesh in one process. Both make the mesh (2,
2), and both must compute equal sums over its dimensions."""

import os

import torch
import torch.distributed as dist
from ours import Mesh, say

dist.init_process_group("gloo")
theirs = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
mesh = Mesh(2, 2)
rank = dist.get_rank()
for name in ("dp", "tp"):
    ours, expected = torch.full((1000,), rank + 1.5), torch.full((1000,), rank + 1.5)
    mesh.all_reduce(name, ours.data_ptr(), 1000)
    dist.all_reduce(expected, group=theirs.get_group(name))
    assert torch.equal(ours, expected), (name, ours[0], expected[0])
mesh.finalize()
dist.barrier()
say(f"side by side fine: rank {rank}, agent store {os.environ.get('TORCHELASTIC_USE_AGENT_STORE')}")
dist.destroy_process_group()
