"""Meshes as compiled programs know them, by name; and as JAX's own sharding knows them."""

from __future__ import annotations

import weakref
from typing import Any, Dict, List, Tuple, Union

import jax
import numpy

import devicemesh
from devicemesh import DeviceMesh

MeshOrName = Union[DeviceMesh, str]
# The mesh that was registered last under a name of ours, so that a mesh in use is not registered again at each call.
latest: Dict[str, "weakref.ref[DeviceMesh]"] = {}


def named(mesh: MeshOrName) -> Tuple[DeviceMesh, str]:
    """A mesh and the name it is registered under.

    A mesh that comes without a name gets one of its contents, which is the same on all its ranks, as XLA's caches need it. Equal meshes share it: the one
    that was used last is what the name means.
    """
    if isinstance(mesh, str):
        return devicemesh.lookup(mesh), mesh
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh is a {type(mesh).__name__}; a devicemesh.DeviceMesh or the name of a registered one was expected")
    name = f"jax/{hash(mesh) & 0xFFFFFFFFFFFFFFFF:016x}"
    known = latest.get(name)
    if known is None or known() is not mesh:
        mesh.register(name)
        latest[name] = weakref.ref(mesh)
    return mesh, name


def along(mesh: MeshOrName, dim: Union[None, int, str]) -> Tuple[str, str, int]:
    """Name of the mesh, name of the dimension, number of ranks along it: what a call is compiled with."""
    found, name = named(mesh)
    if dim is None:
        found.get_local_rank()  # says what is wrong when there is not one dimension
        dim = 0
    label = dim if isinstance(dim, str) else dim_names(found)[dim]
    return name, label, found.size(label)


def dim_names(mesh: DeviceMesh) -> Tuple[str, ...]:
    return mesh.mesh_dim_names or tuple(f"dim_{index}" for index in range(mesh.ndim))


def replica_groups(mesh: MeshOrName, dim: Union[None, int, str] = None) -> List[List[int]]:
    """The world ranks of all groups along a dimension, as XLA takes replica groups: a list of equally long lists."""
    return (devicemesh.lookup(mesh) if isinstance(mesh, str) else mesh).replica_groups(dim)


def mesh_to_jax(mesh: MeshOrName) -> jax.sharding.Mesh:
    """The jax.sharding.Mesh with the same ranks, shape and names: for jax.jit over sharded arrays, with XLA's own collectives.

    It takes jax.distributed with one device per process, whose process numbers are the world's ranks; a mesh of one rank needs no jax.distributed.
    """
    found = devicemesh.lookup(mesh) if isinstance(mesh, str) else mesh
    ranks, names = found.ranks, dim_names(found)
    devices: Dict[int, Any] = {}
    for device in jax.devices():
        if device.process_index in devices:
            raise ValueError(
                f"process {device.process_index} of jax.distributed has more than one device, and a rank of {found!r} has one; "
                "start one process per device (jax.distributed.initialize(local_device_ids=...))")
        devices[device.process_index] = device
    missing = [rank for rank in ranks if rank not in devices]
    if missing or (len(ranks) > 1 and jax.process_index() != found.get_rank()):
        raise ValueError(
            f"{found!r} has ranks up to {max(ranks)} and this is rank {found.get_rank()}; jax.distributed has {jax.process_count()} processes and "
            f"this is its process {jax.process_index()}: call jax.distributed.initialize(address, num_processes=world size, process_id=rank) first")
    grid = numpy.empty(len(ranks), dtype=object)
    grid[:] = [devices[rank] for rank in ranks]
    return jax.sharding.Mesh(grid.reshape(found.shape), names)
