"""JAX on several ranks, each with its own GPU or all on one: collectives of devicemesh_jax inside
jax.jit, many in a row, with XLA's command buffers off and on (the argument "buffers"), and the
device that XLA takes beside the one that the library takes.

Arguments: nothing, "buffers", or "mismatch". The last needs two visible GPUs: XLA gets another one
than the library takes (local rank modulo count) on every rank, and the package must refuse with
what to set."""

import os
import sys

from nccl_copy import follow_loaded, loaded, seen, skip

MODE = sys.argv[1] if len(sys.argv) > 1 else "plain"
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
CUDA = os.environ.get("DM_DEVICE") == "cuda" and not os.environ.get("DM_GPU_STANDIN")
if MODE == "buffers":
    os.environ["XLA_FLAGS"] = os.environ.get(
        "XLA_FLAGS",
        "") + " --xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"
if not CUDA:
    os.environ["JAX_PLATFORMS"] = "cpu"
try:
    import jax
    import jax.numpy as jnp
    import numpy
except ImportError as error:
    skip(f"no JAX in {sys.executable}: {error}")
RANK, SIZE, LOCAL = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
TYPE = "cuda" if CUDA else "cpu"
if CUDA:
    visible = [device for device in jax.devices() if device.platform in ("gpu", "cuda")]
    if not visible:
        skip(f"JAX {jax.__version__} sees no GPU")
    if MODE == "mismatch" and len(visible) < 2:
        skip("one visible GPU: XLA and the library cannot differ")
    jax.config.update("jax_default_device", visible[(LOCAL + (MODE == "mismatch")) % len(visible)])
elif MODE != "plain":
    skip("a dry run")
seen("copies of NCCL that JAX has loaded", loaded())
follow_loaded()
import devicemesh  # noqa: E402
import devicemesh_jax as dmj  # noqa: E402

shape = (SIZE // 2, 2) if SIZE % 2 == 0 else (SIZE, 1)
mesh = devicemesh.init_device_mesh(TYPE, shape, mesh_dim_names=("dp", "tp"))


@jax.jit
def step(x):
    for _ in range(4):
        x = dmj.all_reduce(jnp.sin(x) * 0.5, mesh, "dp") + dmj.all_reduce(x * 0.25, mesh, "tp")
    return x, dmj.all_gather(x, mesh, "tp", tiled=True), dmj.shift(x, mesh, "dp")


def expected(ranks):
    """The same by numpy for all ranks at once; row r is that of rank r."""
    x = numpy.stack([numpy.linspace(-1, 1, 256, dtype=numpy.float32) + rank for rank in range(ranks)])
    rows = numpy.arange(ranks).reshape(shape)

    def total(values, axis):
        summed = values.reshape(*shape, -1).sum(axis=axis, keepdims=True)
        return numpy.broadcast_to(summed, (*shape, values.shape[-1])).reshape(values.shape)

    for _ in range(4):
        x = total(numpy.sin(x) * 0.5, 0) + total(x * 0.25, 1)
    row, column = numpy.argwhere(rows == RANK)[0]
    return x[RANK], numpy.concatenate([x[rank] for rank in rows[row]]), x[rows[(row - 1) % shape[0], column]]


mine = jnp.linspace(-1, 1, 256, dtype=jnp.float32) + RANK
try:
    for number in range(10):
        for got, wanted in zip(step(mine), expected(SIZE)):
            numpy.testing.assert_allclose(numpy.asarray(got), wanted, rtol=2e-3, atol=2e-3, err_msg=f"rank {RANK}, round {number}")
except AssertionError:
    raise
except Exception as error:  # what XLA raises for a handler's refusal
    if MODE != "mismatch":
        raise
    seen("JAX and the mesh on different devices", f"{type(error).__name__}: {error}")
    sys.stdout.flush()
    os._exit(0)
seen(f"jitted collectives, {MODE}", f"10 rounds are right on {mine.devices()}")
mesh.finalize()
print(f"JAX={jax.__version__}", flush=True)
os._exit(1 if MODE == "mismatch" else 0)
