#!/usr/bin/env python3
"""A job that heals, in Python: any rank may be killed at any time, and comes back as a new process.

    devicemesh run -n 3 --restart rank --max-restarts 5 -- python3 examples/recover.py

The ranks fit a line to data, and each takes its share of every batch. A rank that is killed is started
again, and gets the weights from another rank. The others wait for it, so the result is that of a job that
nobody disturbs. examples/recover.c does the same in C, with replicas of two ranks and spares.
"""

import os
import sys
import time
from array import array

import devicemesh

SAMPLES = [(2 * i / 63 - 1, 3 * (2 * i / 63 - 1) - 1) for i in range(64)]  # y = 3 x - 1
REPLACE = 60.0  # How long the ranks wait for a process in the place of a lost one, in seconds.


def say(words):
    print(f"rank {os.environ['RANK']} {words}", flush=True)


class Training:
    """The weights after the last step, and those before it, because the other ranks may be one
    step apart when a rank is lost."""

    def __init__(self):
        self.step, self.weights, self.before = 0, array("d", [0, 0]), array("d", [0, 0])

    def advance(self, dp):
        sums = array("d", [0, 0])
        for x, y in SAMPLES[dp.rank::len(dp.ranks)]:
            off = self.weights[0] * x + self.weights[1] - y
            sums[0] += off * x / len(SAMPLES)
            sums[1] += off / len(SAMPLES)
        dp.all_reduce(sums)
        self.before = self.weights
        self.weights = array("d", [weight - 0.5 * gradient for weight, gradient in zip(self.weights, sums)])
        self.step += 1

    def share(self, mesh, has_state):
        """Brings the ranks to one state after a recovery. They go back to the last step that all
        have done, and the ranks that have joined get the weights."""
        dp, first = mesh.get_group("dp"), array("q", [self.step if has_state else 2**62])
        dp.all_reduce(first, op=devicemesh.ReduceOp.MIN)
        if has_state and self.step > first[0]:
            self.weights = self.before
        self.step = first[0]
        if mesh.recovery.joined_ranks:
            dp.broadcast(self.weights, root=mesh.recovery.state_root)


def train(mesh, world, state, steps):
    """Trains until the end, or until a process waits to join. Returns whether the training is done."""
    dp = mesh.get_group("dp")
    while state.step < steps:
        state.advance(dp)
        if state.step % 50 == 0:
            say(f"is at step {state.step}")
            waiting = array("i", [world.waiting])
            dp.all_reduce(waiting)
            if waiting[0] > 0 and state.step < steps:
                return False
        time.sleep(0.001)
    return True


def main():
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 400
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
    state, has_state = Training(), not mesh.recovery.has_joined
    while True:
        lets_in = False
        try:
            if mesh.recovery.epoch > 0:
                state.share(mesh, has_state)
                has_state = True
            if train(mesh, world, state, steps):
                world.finalize()
                break
            lets_in = True
        except devicemesh.DeviceMeshError as error:
            say(f"notices: {error}")
        try:
            mesh = mesh.recover(replace=REPLACE, has_state=has_state)
        except devicemesh.AbortedError:
            # The others had agreed on the end of the job before a rank was lost.
            break
        except devicemesh.InvalidStateError:
            if not lets_in:
                raise
            continue  # The process that waited to join is lost by now.
        has_state = has_state and not mesh.recovery.has_joined
        say(f"is in epoch {mesh.recovery.epoch} with {mesh.size('dp')} ranks")
    say(f"is done: y = {state.weights[0]:.3f} x {state.weights[1]:+.3f} after step {state.step}")


if __name__ == "__main__":
    main()
