"""python lost.py died|aborted: a rank that does not come because its process ended, or that aborts the mesh. The others are inside a jitted program."""

import os
import sys
import threading
import time

import devicemesh
import devicemesh_jax as dmj
import jax
import jax.numpy as jnp

how, rank, world = sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
mesh = devicemesh.init_device_mesh("cpu", (world,), mesh_dim_names=("dp",), timeout=120)
try:
    dmj.mesh_to_jax(mesh)
    sys.exit("a mesh of JAX over several processes needs jax.distributed")
except ValueError as error:
    assert "call jax.distributed.initialize" in str(error), error
program = jax.jit(lambda x: [dmj.all_reduce(x * index, mesh, "dp") for index in range(8)])
x = jnp.ones(100_000)
jax.block_until_ready(program(x))
if rank == 1:
    # Long enough for the others to be inside; were they not, they would get the same error when they come.
    time.sleep(1)
    if how == "died":
        os._exit(0)
    mesh.abort()
elif how == "aborted" and rank == 0:
    # By this rank's own thread, while its main thread is blocked in XLA.
    threading.Timer(0.5, mesh.abort).start()
began = time.monotonic()
for attempt in range(3):
    # Several in flight, so that later ones wait for a token that never comes.
    try:
        jax.block_until_ready([program(x), program(x)])
        sys.exit("the collective succeeded")
    except jax.errors.JaxRuntimeError as error:
        message = str(error).splitlines()[0]
        expected = "PEER_LOST" if how == "died" and attempt == 0 else "DM_STATUS_"
        assert expected in message, message
        print(f"rank {rank} after {time.monotonic() - began:.2f} s: {message}", flush=True)
# Work without collectives goes on, collectives on a mesh that works too, and the process ends by itself.
assert float(jax.jit(jnp.sum)(x)) == 100_000
assert dmj.recover() is not None and dmj.recover() is None
if how == "aborted":
    # What one rank has aborted has ended for the others too, and they say so.
    mesh.abort()
    again = devicemesh.init_device_mesh("cpu", (world,), mesh_dim_names=("dp",), timeout=120)
    assert jax.jit(lambda x: dmj.all_reduce(x, again))(x)[-1] == world
print(f"rank {rank} goes on", flush=True)
