#!/usr/bin/env python3
"""Data-parallel training in JAX: one process per device, the gradients averaged inside jax.jit.

    devicemesh run -n 4 -- python3 examples/jax_dp.py --check

Each rank trains on its share of every batch. --check also trains in one process, on the whole
batches, and compares the losses.
"""

import argparse
import csv
from pathlib import Path

import devicemesh
import devicemesh_jax as dmj
import jax
import jax.numpy as jnp
import numpy

DATA = Path(__file__).parent / "data/digits.csv"
BATCH, RATE, HIDDEN = 120, 0.3, 64


def digits():
    """Images of 8 x 8 pixels from 0 to 16, and the digit each one shows."""
    with open(DATA) as file:
        rows = numpy.array([[int(value) for value in row] for row in csv.reader(file) if row and row[0].isdigit()])
    return rows[:, :64].astype("float32") / 16, rows[:, 64]


def fresh(key):
    first, second = jax.random.split(key)
    return {"w1": jax.random.normal(first, (64, HIDDEN)) / 8, "b1": jnp.zeros(HIDDEN),
            "w2": jax.random.normal(second, (HIDDEN, 10)) / 8, "b2": jnp.zeros(10)}


def logits(parameters, images):
    hidden = jax.nn.relu(images @ parameters["w1"] + parameters["b1"])
    return hidden @ parameters["w2"] + parameters["b2"]


def loss_of(parameters, images, labels):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits(parameters, images)), labels[:, None], axis=1))


def updated(parameters, gradients):
    return jax.tree.map(lambda value, gradient: value - RATE * gradient, parameters, gradients)


@jax.jit
def step_alone(parameters, images, labels):
    loss, gradients = jax.value_and_grad(loss_of)(parameters, images, labels)
    return updated(parameters, gradients), loss


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--epochs", type=int, default=10)
    arguments.add_argument("--check", action="store_true", help="compare with one process")
    options = arguments.parse_args()

    world = devicemesh.World("cpu")
    mesh = devicemesh.init_device_mesh("cpu", (world.size,), mesh_dim_names=("dp",), world=world)
    rank, size = mesh.get_local_rank("dp"), mesh.size("dp")
    if BATCH % size:
        raise SystemExit(f"{BATCH} images a batch cannot be shared by {size} ranks")

    @jax.jit
    def step(parameters, images, labels):
        local = jax.value_and_grad(loss_of)(parameters, images, labels)
        # Shares are equally large, so the mean of their losses and gradients is that of the whole
        # batch.
        loss, gradients = dmj.all_reduce(local, mesh, "dp", op="avg")
        return updated(parameters, gradients), loss

    images, labels = digits()
    train, share = len(images) // BATCH * BATCH - BATCH, BATCH // size
    parameters = alone = fresh(jax.random.key(0))
    worst = 0.0
    for epoch in range(options.epochs):
        order = numpy.random.default_rng(epoch).permutation(train).reshape(-1, BATCH)
        losses = []
        for batch in order:
            mine = batch[rank * share : (rank + 1) * share]
            parameters, loss = step(parameters, images[mine], labels[mine])
            losses.append(loss)
            if options.check:
                alone, loss_alone = step_alone(alone, images[batch], labels[batch])
                worst = max(worst, abs(float(loss) - float(loss_alone)) / float(loss_alone))
        if rank == 0:
            print(f"epoch {epoch + 1}  loss {sum(map(float, losses)) / len(losses):.4f}", flush=True)
    if rank == 0:
        right = jnp.argmax(logits(parameters, images[train:]), axis=1) == labels[train:]
        print(f"test accuracy {100 * float(jnp.mean(right)):.2f} %", flush=True)
    if options.check:
        worst = float(dmj.all_reduce(jnp.float32(worst), mesh, "dp", op="max"))
        if worst > 1e-3:
            raise SystemExit(f"rank {rank}: a loss is {worst:.1e} off that of one process")
        if rank == 0:
            print(f"check: one process gets the same losses up to {worst:.1e} relative", flush=True)
    # Without this, a rank that ends first would be lost to the others.
    world.finalize()


if __name__ == "__main__":
    main()
