"""Trains a linear model on a mesh (replicate=2, shard=4). Each rank keeps a part of the weights and
has samples of its own."""

import numpy
from devicemesh import init_device_mesh

WEIGHTS, SAMPLES, STEPS, RATE = 64, 8, 200, 0.2


def inputs(sample):
    """The inputs of a sample. Replace this by your data."""
    numbers = (sample * WEIGHTS + numpy.arange(WEIGHTS)) * (sample + 7919) % 1009
    return (numbers / 504 - 1).astype("float32")


# This gives a communicator for each dimension. Along the last dimension, ranks are neighbours.
mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
replicate, shard = mesh.get_all_groups()
data = mesh.flatten("data").get_group()

samples = numpy.stack([inputs(data.rank * SAMPLES + s) for s in range(SAMPLES)])
mine = numpy.zeros(WEIGHTS // shard.size, "float32")
weights, my_gradient = numpy.zeros(WEIGHTS, "float32"), numpy.zeros_like(mine)
for step in range(1, STEPS + 1):
    shard.all_gather(mine, weights)
    errors = samples @ (weights - 1)  # The model should find that all weights are 1.
    loss = numpy.array([numpy.mean(errors**2)], "float32")
    # The gradient is averaged over all ranks: first over the shards, each of which keeps its
    # part, and then over the replicas.
    shard.reduce_scatter((errors @ samples / SAMPLES).astype("float32"), my_gradient, op="avg")
    replicate.all_reduce(my_gradient, op="avg")
    mine -= RATE * my_gradient
    data.all_reduce(loss, op="avg")
    if mesh.get_rank() == 0 and (step == 1 or step % 50 == 0):
        print(f"step {step:3}: loss {loss[0]:.4f}", flush=True)
mesh.finalize()
