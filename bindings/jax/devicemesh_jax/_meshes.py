"""The names by which compiled programs find meshes, and the jax.sharding.Mesh of a mesh."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any, Dict, List, Optional, Tuple, Union

import jax
import numpy

import devicemesh
from devicemesh import DeviceMesh
from devicemesh import _beside as beside
from devicemesh._library import library

from ._operators import integer

MeshOrName = Union[DeviceMesh, str]
# The meshes that were used under each name that this package chose. The last one is registered
# now, so a call with it need not register it again.
used: Dict[str, List["weakref.ref[DeviceMesh]"]] = {}


def named(mesh: MeshOrName) -> Tuple[DeviceMesh, str]:
    """A mesh and the name under which it is registered.

    A mesh without a name gets a name that is made from its contents. So the name is the same on
    all its ranks, as XLA's caches need it. Equal meshes share the name. It means the mesh that was
    made or traced last and has not ended.
    """
    if isinstance(mesh, str):
        return devicemesh.lookup(mesh), mesh
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh is a {type(mesh).__name__}; a devicemesh.DeviceMesh or the name of a registered one was expected")
    name = own_name(mesh)
    known = used.get(name)
    if not known or known[-1]() is not mesh:
        give_name(name, mesh)
    return mesh, name


def own_name(mesh: DeviceMesh) -> str:
    return f"jax/{hash(mesh) & 0xFFFFFFFFFFFFFFFF:016x}"


def give_name(name: str, mesh: DeviceMesh) -> None:
    mesh.register(name)
    others = [known for known in used.get(name, ()) if known() is not None and known() is not mesh]
    used[name] = [*others, weakref.ref(mesh)]


def pass_names_on(made: Optional[DeviceMesh]) -> None:
    """Passes the name of a mesh to an equal mesh that was just made. When a mesh has ended, its
    name passes to the last equal mesh in use that lives.

    jax.jit cannot tell equal meshes apart, so a function that was traced with the one is called
    with the other. Programs make a mesh anew after a failure, which not every rank has noticed; so
    the new one takes the name whatever has become of the old one. Local; every rank makes and ends
    the same meshes.
    """
    if made is not None:
        name = own_name(made)
        # A copy of a mesh that has ended, or one from lookup(), has ended too.
        if name in used and not is_over(made._handle):
            give_name(name, made)
        return
    for name in list(used):
        living = [mesh for mesh in (known() for known in used[name]) if mesh is not None and not is_over(mesh._handle)]
        if living and has_ended(name):
            give_name(name, living[-1])


def has_ended(name: str) -> bool:
    view = ctypes.c_void_p()
    if library.dm_lookup(name.encode(), ctypes.byref(view)):
        return True
    try:
        return is_over(view)
    finally:
        library.dm_free(view)


def is_over(view: Any) -> bool:
    """Whether the mesh of a view was finalized, aborted or shrunk. Such a view has no root any
    more."""
    root = ctypes.c_void_p()
    if library.dm_root(view, ctypes.byref(root)):
        return True
    library.dm_free(root)
    return False


beside.mesh_changes.append(pass_names_on)


def along(mesh: MeshOrName, dim: Union[None, int, str]) -> Tuple[str, str, int]:
    """The name of the mesh, the name of the dimension, and the number of ranks along it. A call is
    compiled with these."""
    found, name = named(mesh)
    if dim is None:
        found.get_local_rank()  # says what is wrong when there is not one dimension
        dim = 0
    label = dim if isinstance(dim, str) else \
        label_of(found, integer("dim (a name or an index of one dimension; flatten makes one of several)", dim))
    return name, label, found.size(label)


def label_of(mesh: DeviceMesh, index: int) -> str:
    names = dim_names(mesh)
    if not -len(names) <= index < len(names):
        raise IndexError(f"dim is {index}, but there are {len(names)} dimensions: {', '.join(names)}")
    return names[index]


def dim_names(mesh: DeviceMesh) -> Tuple[str, ...]:
    return mesh.mesh_dim_names or tuple(f"dim_{index}" for index in range(mesh.ndim))


def replica_groups(mesh: MeshOrName, dim: Union[None, int, str] = None) -> List[List[int]]:
    """The world ranks of all groups along a dimension, as XLA's replica groups: a list of equally
    long lists."""
    return (devicemesh.lookup(mesh) if isinstance(mesh, str) else mesh).replica_groups(dim)


def mesh_to_jax(mesh: MeshOrName) -> jax.sharding.Mesh:
    """The jax.sharding.Mesh with the same ranks, shape and names: for jax.jit over sharded arrays,
    with XLA's own collectives.

    It needs jax.distributed with one device per process, and process numbers that are the world's
    ranks. A mesh of one rank needs no jax.distributed.
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
