"""libdevicemesh alone on four ranks, the mesh (2, 2). In the first attempt rank DM_FAILS leaves when the mesh stands, so torchrun starts all again."""

import os
import sys

from ours import Mesh, say

rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
marker = os.environ.get("DM_MARKER")
mesh = Mesh(2, 2)
assert mesh.sum("tp", rank) == 2 * (rank // 2 * 2) + 1
assert mesh.sum("dp", rank) == 2 * (rank % 2) + 2
if rank == int(os.environ.get("DM_FAILS", -1)):
    try:
        # The first attempt, whatever the count says: with several agents the counts of two of them differ.
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
        sys.exit(1)
    except FileExistsError:
        pass
mesh.finalize()
say(f"mesh fine: rank {rank} of 4, restart count {attempt}")
