"""mpi4py.MPI as far as the tests of mpi4jax use it: the communicator over all ranks, operators and
the status of a message."""

import atexit
import os

import devicemesh

SUM, PROD, MAX, MIN = (devicemesh.ReduceOp[name] for name in ("SUM", "PROD", "MAX", "MIN"))
ANY_TAG = -1


class Comm:
    """One communicator over all ranks: dimension `ranks` of a mesh. A process that no launcher
    started is a world of one."""

    def __init__(self):
        size = int(os.environ.get("WORLD_SIZE", 1))
        self.mesh = devicemesh.init_device_mesh("cpu", (size,), mesh_dim_names=("ranks",), timeout=600)
        # This does what MPI_Finalize does: no rank leaves while others still call collectives.
        atexit.register(self.mesh.finalize)

    def Get_rank(self):
        return self.mesh.get_rank()

    def Get_size(self):
        return self.mesh.size()

    def Clone(self):
        return self


class Status:
    """The rank that a message came from."""

    def __init__(self):
        self.source = None

    def Get_source(self):
        return self.source


COMM_WORLD = Comm()


def get_vendor():
    return "libdevicemesh", tuple(int(part) for part in devicemesh.__version__.split("."))
