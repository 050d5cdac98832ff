#!/usr/bin/env python3
"""The training of jax_dp.py as a job that heals: any rank may be killed at any time.

    devicemesh run -n 3 --restart rank --max-restarts 5 -- python3 examples/jax_elastic.py

A rank that is killed is started again, and gets the parameters from another rank. The ranks wait for it
(--replace), or go on without it, and then let it in at the end of an epoch. The ranks that are left share
every batch, so the losses are those of a job that nobody disturbs.
"""

import argparse
import os
import sys

import devicemesh
import devicemesh_jax as dmj
import jax
import jax.numpy as jnp
import numpy

from jax_dp import BATCH, digits, fresh, logits, loss_of, updated

# A collective fails inside a jitted program (JaxRuntimeError), or a call of the mesh does.
LOST = (jax.errors.JaxRuntimeError, devicemesh.DeviceMeshError)


def say(words):
    print(f"rank {os.environ['RANK']} {words}", flush=True)


def stepper(mesh):
    """One step on this mesh: shares may differ in size, so each counts by its size."""
    @jax.jit
    def step(parameters, images, labels):
        weighted = lambda *given: loss_of(*given) * (len(labels) / BATCH)  # noqa: E731
        loss, gradients = dmj.all_reduce(jax.value_and_grad(weighted)(parameters, images, labels), mesh, "dp")
        return updated(parameters, gradients), loss

    return step


def agree(mesh, value, op):
    return int(dmj.all_reduce(jnp.int32(value), mesh, "dp", op=op))


class Training:
    """The state after the last step, and the one before it: when a rank is lost, the others may be one
    step apart."""

    def __init__(self):
        self.step, self.parameters = 0, fresh(jax.random.key(0))
        self.before = (0, self.parameters)

    def advance(self, parameters):
        self.before = (self.step, self.parameters)
        self.step, self.parameters = self.step + 1, parameters

    def share(self, mesh, has_state):
        """After a recovery the ranks go back to the last step that all have done, and those that have
        joined get the parameters."""
        first = agree(mesh, self.step if has_state else 2**31 - 1, "min")
        if has_state and self.step > first:
            self.step, self.parameters = self.before
        root = mesh.recovery.state_root
        if mesh.recovery.joined_ranks:
            parameters = dmj.broadcast(self.parameters, mesh, "dp", root=root)
            self.parameters = jax.block_until_ready(parameters)
        self.step = first


def train(mesh, world, state, epochs, images, labels):
    """Trains until the end, or until somebody waits to join. Returns whether the training is done."""
    step, rank, size = stepper(mesh), mesh.get_local_rank("dp"), mesh.size("dp")
    train_set = len(images) // BATCH * BATCH - BATCH
    batches = train_set // BATCH
    while state.step < epochs * batches:
        epoch, batch = divmod(state.step, batches)
        order = numpy.random.default_rng(epoch).permutation(train_set).reshape(-1, BATCH)
        mine = numpy.array_split(order[batch], size)[rank]
        # A step counts when its result is there. Until then the state of the step before is kept.
        parameters, loss = jax.block_until_ready(step(state.parameters, images[mine], labels[mine]))
        state.advance(parameters)
        if state.step % batches == 0:
            if rank == 0:
                print(f"epoch {epoch + 1}  loss of the last batch {float(loss):.4f}  {size} ranks", flush=True)
            if state.step < epochs * batches and agree(mesh, world.waiting, "max") > 0:
                return False
    return True


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--epochs", type=int, default=10)
    arguments.add_argument("--replace", type=float, default=60, metavar="SECONDS", help="how long to wait for a process in the place of a lost rank")
    options = arguments.parse_args()
    images, labels = digits()
    say(f"is process {os.getpid()}")
    world = None
    try:
        world = devicemesh.World("cpu")
        mesh = devicemesh.init_device_mesh("cpu", (int(os.environ["DM_MESH_SIZE"]),), mesh_dim_names=("dp",), world=world)
    except devicemesh.InvalidStateError as error:
        if os.environ.get("DM_JOIN") != "running" and (world is None or world.ticket == 0):
            raise  # This process does not come back to a running job.
        # The exit code is 0, because the launcher would take any other code for a failed rank.
        sys.exit(say(f"comes too late: {error}"))
    state, has_state, must_share = Training(), not mesh.recovery.has_joined, mesh.recovery.has_joined
    while True:
        is_in, lets_in = mesh.recovery.new_coordinate is not None, False
        try:
            if is_in:
                if must_share:
                    state.share(mesh, has_state)
                    has_state, must_share = True, False
                if train(mesh, world, state, options.epochs, images, labels):
                    world.finalize()
                    break
                lets_in = True
        except LOST as error:
            say(f"notices: {str(error).splitlines()[0][:150]}")
        # The jitted collectives fail until JAX's error is taken.
        dmj.recover()
        try:
            mesh = mesh.recover(replace=options.replace, has_state=has_state)
        except devicemesh.AbortedError:
            sys.exit(say("has waited until the job had ended"))
        except devicemesh.InvalidStateError:
            if not lets_in:
                raise
            continue  # The process that waited to join is lost by now.
        must_share, is_in = True, mesh.recovery.new_coordinate is not None
        has_state = has_state and is_in and not mesh.recovery.has_joined
        say(f"is in epoch {mesh.recovery.epoch} with {mesh.size('dp')} ranks")
    test = slice(len(images) // BATCH * BATCH - BATCH, None)
    right = jnp.argmax(logits(state.parameters, images[test]), axis=1) == labels[test]
    say(f"is done: test accuracy {100 * float(jnp.mean(right)):.2f} %")


if __name__ == "__main__":
    main()
