"""libdevicemesh alone on four ranks, the mesh (2, 2). The first attempt ends when the mesh
stands: rank 1 leaves with an error and the others wait, so an agent that has lost no rank
restarts its own without counting it in TORCHELASTIC_RESTART_COUNT. DM_MARKER: a file that says
whether there was an attempt before."""

import os
import time

from ours import Mesh, say

rank, marker = int(os.environ["RANK"]), os.environ["DM_MARKER"]
first = not os.path.exists(marker)
mesh = Mesh(2, 2)
assert mesh.sum("tp", rank) == 2 * (rank // 2 * 2) + 1
assert mesh.sum("dp", rank) == 2 * (rank % 2) + 2
if first and rank == 1:
    open(marker, "w").close()
    os._exit(1)
if first:
    time.sleep(300)  # the agent ends it
mesh.finalize()
say(f"mesh fine: rank {rank} of 4, restart count {os.environ['TORCHELASTIC_RESTART_COUNT']}")
