"""PyTorch's DeviceMesh without PyTorch: a communicator for every dimension of a mesh of ranks.

    from devicemesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    mesh.get_group("tp").all_reduce(gradients)

The C library underneath, libdevicemesh, is documented in include/devicemesh.h of its repository;
this package reaches every function of it.

Threads: everything may be called from several threads, but never let two of them call along one
dimension without an order of their own. Calls that overlap get a MismatchError, and results before
that may be mixed. The end: only finalize and abort end a communicator, and closing or dropping a
mesh does not. Forks: a forked child must not use a mesh or world of its parent, so use
multiprocessing's "spawn". The child may ask a mesh where it is. It may make a mesh of its own if
the parent had none when it forked.
"""

from . import errors
from ._library import last_error, status_name
from ._library import version as _version
from .constants import DType, ReduceOp
from .current import get_current_mesh
from .errors import *  # noqa: F403
from .events import Event, EventKind, Events, metrics, set_event_handler
from .group import Group
from .libraries import get_device_proc, set_ccl_resolver
from .logs import use_logging
from .mesh import Communicator, DeviceMesh, deserialize, init_device_mesh, lookup, unregister
from .options import DimOptions
from .planning import RankPlan, plan_ranks
from .recovery import Recovery
from .sharding import Partial, Placement, Replicate, Shard, local_shard
from .stores import Store, TorchStore
from .work import Work
from .world import World, abort_default_worlds, finalize_default_worlds

__version__ = _version()
__all__ = [
    "Communicator", "DType", "DeviceMesh", "DimOptions", "Event", "EventKind", "Events", "Group", "Partial", "Placement", "RankPlan", "Recovery",
    "ReduceOp", "Replicate", "Shard", "Store", "TorchStore", "Work", "World",
    "abort_default_worlds", "deserialize", "finalize_default_worlds", "get_current_mesh", "get_device_proc",
    "init_device_mesh", "last_error", "local_shard", "lookup", "metrics", "plan_ranks", "set_ccl_resolver", "set_event_handler", "status_name",
    "unregister", "use_logging",
]
__all__ += errors.__all__
