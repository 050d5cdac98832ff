"""What a program of PyTorch's DeviceMesh does, with this package: eight processes, no PyTorch, no
numpy.

    devicemesh run -n 8 -- python3 from_pytorch.py
"""

from array import array

from devicemesh import init_device_mesh

mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
rank = mesh.get_rank()

dp_cp = mesh["dp", "cp"]                 # a view
loss_mesh = dp_cp._flatten("dp_cp")      # one dimension, one communicator
tp = mesh.get_group("tp")                # a Communicator here, a ProcessGroup there

gradients = array("f", [rank] * 4)       # or a torch.Tensor, a numpy or jax array: used where it lies
tp.all_reduce(gradients)                 # there: dist.all_reduce(gradients, group=tp)

loss = array("f", [rank])
loss_mesh.get_group().all_reduce(loss, op="avg")

if rank == 0:
    print(repr(mesh))
    print("coordinate", mesh.get_coordinate(), "local rank along cp", mesh.get_local_rank("cp"))
    print("gradients over tp", list(gradients), "mean loss over dp and cp", loss[0])

assert list(gradients) == [2 * (rank // 2 * 2) + 1] * 4
assert loss[0] == 3 + rank % 2
mesh.finalize()                          # there: dist.destroy_process_group()
