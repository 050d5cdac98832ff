"""What the tests on several ranks share: one mesh over all of them, and jax.lax over all ranks' data on each one as the judge.

jax.lax's collectives under jax.vmap with an axis name compute in one process what ours compute in
many, with the same derivatives. So one rank makes everybody's operands (they depend on the rank
alone) and computes everybody's results. Each rank compares its own result with its row of these.
"""

import fcntl
import os
import re
import warnings

# A name that JAX deprecates is an error where our packages import it.
warnings.filterwarnings("error", category=DeprecationWarning, module="devicemesh")

import devicemesh
import jax
import jax.numpy as jnp
import numpy
from jax._src import compiler

jax.config.update("jax_enable_x64", True)
# Computations run on the first one; the second one is for what must be refused.
jax.config.update("jax_num_cpu_devices", 2)
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
# The group of a rank along "inner" is neighbours, along "outer" it is strided.
SHAPE = (1, 1) if WORLD == 1 else (2, WORLD // 2)
MESH = devicemesh.init_device_mesh("cpu", SHAPE, mesh_dim_names=("outer", "inner"), timeout=120)
FLAT = MESH.flatten("all")


compile_or_get_cached = compiler.compile_or_get_cached


def compile_in_turn(backend, computation, *arguments, **options):
    """Compiles a program in JAX's place, or finds it in JAX's cache on disk. One rank at a time
    does so for programs of one name, so the first rank compiles, and the others find the program.
    Without turns all ranks would compile it at the same moment, which takes most of their time."""
    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if folder is None:
        return compile_or_get_cached(backend, computation, *arguments, **options)
    name = re.sub(r"\W", "_", str(computation.operation.attributes["sym_name"]))
    with open(f"{folder}/{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return compile_or_get_cached(backend, computation, *arguments, **options)


compiler.compile_or_get_cached = compile_in_turn


def own_mesh(dim="dp"):
    """A mesh over all ranks with a communicator of its own, which a test may break."""
    return devicemesh.init_device_mesh("cpu", (WORLD,), mesh_dim_names=(dim,), dim_options={dim: devicemesh.DimOptions(own_comm=True)})


def operand(rank, shape, salt=0, dtype="float64"):
    """A rank's array of small numbers with a sign, the same on every rank that asks."""
    values = numpy.random.default_rng([rank, salt, *shape]).uniform(-2, 2, shape)
    return jnp.asarray(values, dtype)


def group(dim):
    return MESH.group_ranks(dim) if dim != "all" else tuple(range(WORLD))


def stacked(dim, shape, salt=0):
    """The operands of all ranks of this rank's group, and this rank's place among them."""
    ranks = group(dim)
    return jnp.stack([operand(rank, shape, salt) for rank in ranks]), ranks.index(RANK)


def close(case, ours, theirs, what):
    numpy.testing.assert_allclose(numpy.asarray(ours), numpy.asarray(theirs), rtol=1e-9, atol=1e-9, err_msg=f"rank {RANK}: {what}")
    case.assertEqual(ours.shape, theirs.shape, what)
