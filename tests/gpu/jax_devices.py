"""Which GPU JAX computes on beside the GPU of the mesh, where each process sees several of them:
what is refused, and each way that the refusal names. Under devicemesh run or torchrun with 2 ranks
or more.

The argument is how JAX is told: "config" (jax_default_device), "put" (jax.device_put), "world"
(the mesh takes JAX's device), "distributed" (local_device_ids) or "visible"
(CUDA_VISIBLE_DEVICES). Prints "ok" or "failed" with the reason, and exits with 0 or 1; 77 says
that this machine cannot show it.
"""

import os
import sys

WAY = sys.argv[1] if len(sys.argv) > 1 else "config"
RANK, SIZE, LOCAL = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
if WAY == "visible":
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(LOCAL + 1)))).split(",")[LOCAL]


def done(word, why=""):
    os.write(1, f"{word} {WAY}: rank {RANK}{why and ': '}{why}\n".encode())
    sys.stdout.flush()
    os._exit({"ok": 0, "failed": 1, "skipped": 77}[word])


try:
    import jax
    import jax.numpy as jnp
except ImportError as error:
    done("skipped", str(error))
if WAY == "distributed":
    port = os.environ.get("JAX_COORDINATOR", f"{os.environ['MASTER_ADDR']}:{int(os.environ['MASTER_PORT']) + 1}")
    jax.distributed.initialize(port, SIZE, RANK, local_device_ids=[LOCAL])
if jax.default_backend() != "gpu":
    done("skipped", f"JAX {jax.__version__} sees no GPU")
gpus = jax.local_devices()
if WAY not in ("visible", "distributed") and len(gpus) < 2:
    done("skipped", "one visible GPU: JAX and the library cannot differ")

import devicemesh  # noqa: E402
import devicemesh_jax as dmj  # noqa: E402


def sum_of(mesh, x):
    return jax.jit(lambda x: dmj.all_reduce(x, mesh))(x)


def check(mesh, x):
    total = sum_of(mesh, x)
    wanted = float(sum(range(1, SIZE + 1)))
    if total.tolist() != [wanted] * len(total):
        done("failed", f"the sum is {total}, not {wanted}")
    (device,) = total.devices()
    if device.local_hardware_id != mesh.world.device:
        done("failed", f"the sum lies on {device}, GPU {device.local_hardware_id}, and the mesh is on GPU {mesh.world.device}")


try:
    if WAY == "world":
        # NCCL takes one rank for each GPU of a host, so JAX's device must be this rank's as well.
        jax.config.update("jax_default_device", gpus[LOCAL % len(gpus)])
        ours = devicemesh.World("cuda", device=gpus[LOCAL % len(gpus)].local_hardware_id)
        mesh = devicemesh.init_device_mesh("cuda", (SIZE,), mesh_dim_names=("all",), world=ours)
    else:
        mesh = devicemesh.init_device_mesh("cuda", (SIZE,), mesh_dim_names=("all",))
    own = next((gpu for gpu in gpus if gpu.local_hardware_id == mesh.world.device), None)
    if own is None:
        done("failed", f"the mesh is on GPU {mesh.world.device}, and JAX has {gpus}")
    value = jnp.full(1000, RANK + 1.0)
    if WAY in ("config", "put"):
        # Every rank tries another GPU than its own, so that no rank waits for the others.
        other = next(gpu for gpu in gpus if gpu is not own)
        try:
            sum_of(mesh, jax.device_put(value, other)).block_until_ready()
            done("failed", f"a computation on {other} was not refused, and the mesh is on {own}")
        except ValueError as error:
            if "CUDA_VISIBLE_DEVICES" not in str(error) or "local_device_ids" not in str(error):
                done("failed", f"the refusal does not say what to set: {error}")
        dmj.recover()
    if WAY == "config":
        jax.config.update("jax_default_device", own)
        value = jnp.full(1000, RANK + 1.0)
    elif WAY == "put":
        value = jax.device_put(value, own)
    check(mesh, value)
    mesh.finalize()
except Exception as error:
    done("failed", f"{type(error).__name__}: {error}")
done("ok")
