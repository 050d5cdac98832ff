"""Four ranks make the mesh (2, 2) without PyTorch. In the first attempt rank 1 then exits with an
error, and the others wait until their agent ends them. An agent that has lost no rank restarts its
own ranks without counting that in TORCHELASTIC_RESTART_COUNT. The file that DM_MARKER names exists
after the first attempt."""

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
