"""A user's program under mypy --strict: what the type hints promise."""

from typing import List, Optional, Tuple

from devicemesh import Communicator, DeviceMesh, DType, NotFoundError, ReduceOp, Shard, Work, World, init_device_mesh, plan_ranks

world: World = World("cpu", world_size=8, rank=6, offline=True)
mesh: DeviceMesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"), world=world)
group: Communicator = mesh.get_group("tp")
groups: List[Communicator] = mesh["dp", "tp"].get_all_groups()
coordinate: Optional[Tuple[int, ...]] = mesh.get_coordinate()
neighbor: Optional[int] = mesh.neighbor("tp", 1)
first: int = int(mesh.mesh[0, 0]) + group.rank + group.size
shape, offset = mesh.local_shard((16, 8), (Shard(0), Shard(1)))
ranks: Tuple[int, ...] = plan_ranks(["a"] * 8, (2, 4)).ranks
names: Optional[Tuple[str, ...]] = mesh._unflatten("tp", (2, 2), ("cp", "tp")).mesh_dim_names
kind: DType = DType.BFLOAT16
op: ReduceOp = ReduceOp.SUM


def checked(buffer: bytearray) -> bool:
    """Is not called: the types alone are looked at."""
    work: Work = group.all_reduce(buffer, op="mean", async_op=True)
    group.all_reduce(buffer, op=op)
    group.all_reduce(buffer, op="medium")  # type: ignore[arg-type]
    init_device_mesh("cpu", (2, 4), ("dp", "tp"))  # type: ignore[arg-type]
    return work.wait(timeout=3.0)


with mesh as current, mesh.group():
    same: DeviceMesh = current
try:
    mesh["pp"]
except NotFoundError as error:
    status: int = error.status
print("typed", mesh, coordinate, neighbor, first, shape, offset, names, len(groups), ranks)
