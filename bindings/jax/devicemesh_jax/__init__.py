"""Collectives of libdevicemesh inside jax.jit: a communicator per mesh dimension, one process per
device.

    import devicemesh, devicemesh_jax as dmj

    mesh = devicemesh.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))

    @jax.jit
    def step(parameters, batch):
        loss, gradients = jax.value_and_grad(loss_of)(parameters, batch)
        return dmj.all_reduce((loss, gradients), mesh, "dp", op="avg")

README.md beside this package says what is ordered, what a derivative means and what an error looks
like.
"""

from ._meshes import mesh_to_jax, replica_groups
from ._order import recover
from .collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    recv,
    reduce,
    reduce_scatter,
    scan,
    scatter,
    send,
    sendrecv,
    shift,
)
from .ragged import all_gatherv, all_to_allv, ragged_all_to_all, reduce_scatterv

__all__ = [
    "all_gather",
    "all_gatherv",
    "all_reduce",
    "all_to_all",
    "all_to_allv",
    "barrier",
    "broadcast",
    "gather",
    "mesh_to_jax",
    "ragged_all_to_all",
    "recover",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatterv",
    "replica_groups",
    "scan",
    "scatter",
    "send",
    "sendrecv",
    "shift",
]
