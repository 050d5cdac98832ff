"""Beside jax.distributed: mesh_to_jax puts JAX's devices where the ranks are, so XLA's own collectives give what ours give."""

import os

import devicemesh
import devicemesh_jax as dmj
import jax
import jax.numpy as jnp
import numpy
from jax.sharding import NamedSharding, PartitionSpec

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(os.environ["JAX_COORDINATOR"], world, rank)
shape = (2, world // 2)
order = [(3 * index) % world for index in range(world)] if world % 3 else None
mesh = devicemesh.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"), ranks=order, timeout=120)
theirs = dmj.mesh_to_jax(mesh)
assert theirs.axis_names == ("dp", "tp") and theirs.devices.shape == shape, theirs
assert [device.process_index for device in theirs.devices.flat] == list(mesh.ranks), theirs.devices
view = dmj.mesh_to_jax(mesh["tp"])
assert [device.process_index for device in view.devices.flat] == list(mesh.group_ranks("tp")), view.devices

mine = jnp.arange(4.0) + 10 * rank
blocks = NamedSharding(theirs, PartitionSpec(("dp", "tp")))
everything = jax.make_array_from_single_device_arrays((4 * world,), blocks, [mine])


def compare(what, ours, by_xla):
    (got,) = [numpy.asarray(shard.data) for shard in by_xla.addressable_shards]
    numpy.testing.assert_array_equal(numpy.asarray(ours), got, err_msg=f"rank {rank}: {what}")


for dim in ("dp", "tp"):
    total = jax.jit(
        jax.shard_map(lambda x: jax.lax.psum(x, dim), mesh=theirs, in_specs=blocks.spec, out_specs=blocks.spec,
                      check_vma=False))
    compare(f"sum along {dim}", dmj.all_reduce(mine, mesh, dim), total(everything))
    rows = jax.jit(
        jax.shard_map(lambda x: jax.lax.all_gather(x, dim, tiled=True), mesh=theirs, in_specs=blocks.spec,
                      out_specs=blocks.spec, check_vma=False))
    compare(f"rows along {dim}", dmj.all_gather(mine, mesh, dim, tiled=True), rows(everything))
    # Ours inside a program over all processes: each of them calls it for its own device.
    inside = jax.jit(
        jax.shard_map(lambda x: dmj.all_reduce(x, mesh, dim), mesh=theirs, in_specs=blocks.spec, out_specs=blocks.spec,
                      check_vma=False))
    compare(f"ours inside shard_map along {dim}", dmj.all_reduce(mine, mesh, dim), inside(everything))
try:
    jax.jit(lambda x: dmj.all_reduce(x, mesh, "dp"))(everything)
    raise SystemExit("XLA cannot divide a collective of ours")
except ValueError as error:
    assert f"XLA divides over {world} devices: put it inside jax.shard_map over mesh_to_jax(mesh)" in str(error), error
print("fine", flush=True)
jax.distributed.shutdown()
