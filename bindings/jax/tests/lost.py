"""Ranks that are lost while the others are inside a jitted program. First rank 0 and rank 1 abort
the mesh; then the process of rank 1 ends.

Each of the others prints what it was told, and "goes on" when collectives on a mesh that works succeed again."""

import os
import sys
import threading
import time

import devicemesh
import devicemesh_jax as dmj
import jax
import jax.numpy as jnp

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ONES = jnp.ones(100_000)


def new_mesh():
    return devicemesh.init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",), timeout=120)


def lose(how):
    mesh = new_mesh()
    program = jax.jit(lambda x: [dmj.all_reduce(x * index, mesh, "dp") for index in range(8)])
    jax.block_until_ready(program(ONES))
    if RANK == 1:
        # The others are inside by then. Were they not, they would get the same error when they
        # arrive.
        time.sleep(1)
        if how == "died":
            os._exit(0)
        mesh.abort()
    elif how == "aborted" and RANK == 0:
        # A thread of this rank aborts the mesh, while the main thread is blocked in XLA.
        threading.Timer(0.5, mesh.abort).start()
    began = time.monotonic()
    for attempt in range(3):
        # Several are in flight, so that later ones wait for a token that never arrives.
        try:
            jax.block_until_ready([program(ONES), program(ONES)])
            sys.exit("the collective succeeded")
        except jax.errors.JaxRuntimeError as error:
            message = str(error).splitlines()[0]
            expected = "PEER_LOST" if how == "died" and attempt == 0 else "DM_STATUS_"
            assert expected in message, message
            print(f"rank {RANK} after {time.monotonic() - began:.2f} s: {message}", flush=True)
    # Work without collectives goes on.
    assert float(jax.jit(jnp.sum)(ONES)) == 100_000
    assert dmj.recover() is not None and dmj.recover() is None
    if how == "aborted":
        # The mesh that one rank has aborted has ended for the others too, and abort says so.
        mesh.abort()
        again = new_mesh()
        assert jax.jit(lambda x: dmj.all_reduce(x, again))(ONES)[-1] == WORLD
    print(f"rank {RANK} goes on after {how}", flush=True)


try:
    dmj.mesh_to_jax(new_mesh())
    sys.exit("a mesh of JAX over several processes needs jax.distributed")
except ValueError as error:
    assert "call jax.distributed.initialize" in str(error), error
lose("aborted")
lose("died")
