"""A rank of a mesh is one process with one device: a computation over several devices of a process,
or on another device than the mesh's, is refused when it is lowered.

XLA would run the handler once for each of several devices, at the same time and on one
communicator, so the first device of one rank could be paired with the second device of another
rank. NCCL would reach the memory of another device than its own, or fault.
"""

from __future__ import annotations

from typing import Any, List, Optional

import devicemesh
import jax
from jax.extend.core import Primitive

try:
    from jax._src import dispatch
except ImportError as error:
    raise ImportError(f"devicemesh_jax does not know this version of JAX ({error}); it is tested with 0.7.2 to 0.10.2") from error

from ._meshes import used


def ask_for_devices(primitive: Primitive) -> None:
    """Lets JAX tell the lowering rule of this primitive on which devices the computation will
    run."""
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def devices_here(context: Any) -> List[Any]:
    """The devices of this process among those of the computation that is being lowered. shard_map
    puts its mesh in place of the list."""
    where = context.module_context.axis_context
    devices = getattr(where, "device_assignment", None)
    if devices is None and isinstance(getattr(where, "mesh", None), jax.sharding.Mesh):
        devices = where.mesh.devices.flat
    return [device for device in devices or () if device.process_index == jax.process_index()]


def check_one(context: Any, name: str) -> None:
    """Raises ValueError where the collective would run on more than one device of this process, or
    where XLA would have to divide it over devices."""
    devices = devices_here(context)
    if len(devices) > 1:
        raise ValueError(
            f"{name} is in a computation over {len(devices)} devices of this process ({', '.join(map(str, devices))}), but a rank of a mesh is one process with one "
            "device: start one process for each device (devicemesh run -n <devices>; with jax.distributed, initialize(local_device_ids=...)), or call it in a "
            "computation on one device, outside pmap, shard_map and arrays that are sharded over this process's devices")
    where = context.module_context.axis_context
    if not hasattr(where, "mesh") and getattr(where, "num_devices", 1) > 1:
        raise ValueError(
            f"{name} is in a computation that XLA divides over {where.num_devices} devices: put it inside jax.shard_map over mesh_to_jax(mesh), where each process calls "
            "it for its own device")


def check_ordinal(context: Any, name: str, mesh: str) -> None:
    """Raises ValueError where the computation is for another GPU than the one on which the mesh has
    its communicators. XLA takes the first visible GPU unless it is told otherwise, and the library
    the one with the process's number on its host."""
    ours = device_of(mesh)
    for device in devices_here(context):
        theirs = getattr(device, "local_hardware_id", None)
        if device.platform in ("gpu", "cuda") and None not in (ours, theirs) and ours != theirs:
            raise ValueError(
                f"{name} is in a computation on JAX's device {device}, which is GPU {theirs} of those that this process sees, but mesh {mesh!r} has its communicators on GPU "
                f"{ours}. Let each process see one GPU (CUDA_VISIBLE_DEVICES={ours} before the first call of JAX), give JAX that GPU "
                f"(jax.distributed.initialize(local_device_ids=[{ours}]), jax.config.update('jax_default_device', ...), jax.device_put), or give the mesh JAX's "
                f"(world=devicemesh.World(..., device={theirs}), dm_world_options.device)")


def device_of(mesh: str) -> Optional[int]:
    """The index of the GPU of a registered mesh. None: its world does not tell (RCCL, communicators
    that the mesh has adopted). The handler asks the communicator then, when it is called."""
    objects = [each() for each in used.get(mesh, ())]
    found = next((each for each in reversed(objects) if each is not None), None) or devicemesh.lookup(mesh)
    if getattr(found, "_adopted_groups", None):
        return None
    try:
        return found.world.device
    except devicemesh.UnsupportedError:
        return None
