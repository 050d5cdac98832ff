#!/usr/bin/env python3
"""Trains examples/elastic.cpp, kills ranks at random while it runs, and prints a line for each:
`make demo-elastic`.

The times are those of the slowest rank: until it knew that a rank was lost, and until the end of its
first step on the next mesh."""

import argparse
import random
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from elastic.job import MESH, Job  # noqa: E402

# How long the job may take to come back after a death, and to come to its end, in seconds.
PATIENCE = 120


def recovered(events, moment):
    """The first step of each rank of the mesh that was made after a moment, or nothing while not all
    of them have made it."""
    later = [event for event in events if event.moment >= moment]
    epochs = [int(event.words.split()[3].rstrip(":")) for event in later if event.words.startswith("is in epoch ")]
    if not epochs:
        return None
    inside = {event.rank for event in later if event.words.startswith(f"is in epoch {max(epochs)}:")}
    steps = {event.rank: event for event in later if event.words.startswith("goes on:")}
    return [steps[rank] for rank in sorted(inside)] if inside <= set(steps) and len(inside) in (MESH, MESH // 2) else None


def story(job, victim, moment, first):
    """The line for one death."""
    knew = [event.moment for event in job.events if event.moment >= moment and event.words.startswith("notices:")]
    # A process that has just joined does not know who was lost before.
    went_on = max(event.words.split(": ")[1] for event in job.events if event.moment >= moment and event.words.startswith("is in epoch"))
    step, loss = first[0].words.split()[3], first[0].words.split()[-1]
    knowing = f"{1000 * (max(knew) - moment):4.0f} ms" if knew else "   -   "
    return (f"rank {victim:2d} was killed; the others knew after {knowing}, and step {step:>3} was done after "
            f"{1000 * (max(event.moment for event in first) - moment):5.0f} ms, loss {loss}; {len(first)} ranks ({went_on})")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", required=True)
    parser.add_argument("--program", required=True)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--spares", type=int, default=0, help="spares take the places of lost ranks, which do not start again then")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31))
    options = parser.parse_args()
    restarts = 0 if options.spares else options.kills
    chance = random.Random(options.seed)
    print(f"seed {options.seed}; {MESH} ranks as (replicate=2, shard=2, tp=2)" +
          (f" and {options.spares} spares" if options.spares else "; a lost rank starts again"), flush=True)
    arguments = ["--check", "--pause", "20"] + (["--replace", "30000"] if restarts else [])
    with Job(options.tool, options.program, options.spares, restarts, arguments) as job:
        if not job.wait_for(lambda events: any("is at step" in event.words for event in events), PATIENCE):
            print(job.said())
            return 1
        seen = 0
        for _ in range(options.kills):
            time.sleep(chance.uniform(0.3, 1.5))
            with job.changed:
                # The ranks that the newest mesh has; before the first recovery the ranks 0 to 7.
                epochs = [event.words.split()[3] for event in job.events if event.words.startswith("is in epoch ")]
                there = {event.rank for event in job.events if epochs and event.words.startswith(f"is in epoch {epochs[-1]}")} or set(range(MESH))
            victim = chance.choice(sorted(there))
            killed = job.send(victim, signal.SIGKILL)
            if killed is None:
                break  # the training is over
            first = job.wait_for(lambda events: recovered(events, killed[1]), PATIENCE)
            if not first:
                break
            seen += 1
            print(story(job, victim, killed[1], first), flush=True)
        ended = job.end(PATIENCE)
        shown = [line for line in job.lines if line.startswith(("epoch 20", "test accuracy", "check:", "the result"))]
        print("".join(shown), end="")
        good = ended and seen == options.kills and any("equal bit by bit" in line for line in shown) and "wrong" not in job.said()
        if not good:
            print(job.said())
        return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
