"""What run K of a seed does to its job."""

import random
from dataclasses import dataclass

from .job import MESH


@dataclass
class Strike:
    # The event from which `delay` counts: the start of the job, the first rank at `step`, or the
    # strike before this one.
    after: str
    step: int
    delay: float
    # The ranks that are hit. A rank that does not run then is left out.
    victims: tuple
    # kill; stop: SIGSTOP, and SIGCONT after `pause` seconds; cut: the hosts with the numbers
    # `victims` fall silent.
    how: str
    pause: float = 0.0

    def __str__(self):
        when = f"step {self.step}" if self.after == "step" else f"the {self.after}"
        what = f"stop for {self.pause:.1f} s" if self.how == "stop" else self.how
        return f"{what} {' '.join(map(str, self.victims))} {1000 * self.delay:.1f} ms after {when}"


@dataclass
class Plan:
    spares: int
    restarts: int  # of each rank; 0: lost ranks stay away
    strikes: list
    on_hosts: bool = False

    def __str__(self):
        return ("4 hosts, " if self.on_hosts else "") + f"{self.spares} spares, {self.restarts} restarts: " + "; ".join(map(str, self.strikes))


# Steps of the training, and the milliseconds after each step.
EPOCHS, PAUSE_MS = 6, 5
STEPS = 24 * EPOCHS


def planned(seed, number, restarts="both", on_hosts=False):
    """The plan of run `number` of a seed. It depends on these alone."""
    chance = random.Random(f"elastic/{seed}/{number}")
    again = chance.random() < 0.5
    again = again if restarts == "both" else restarts == "yes"
    again = again and not on_hosts
    spares = chance.choice((0, 1)) if again else chance.choice((0, 1, 1, 2, 3))
    size = MESH + spares
    strikes = []
    for at in range(chance.choice((1, 1, 2, 2, 3))):
        count = chance.choices((1, 2, 3), (6, 3, 1))[0]
        victims = tuple(chance.sample(range(size), count))
        how = "stop" if chance.random() < 0.15 else "kill"
        pause = chance.choice((0.1, 1.0, 6.0)) if how == "stop" else 0.0
        if on_hosts and how == "kill" and chance.random() < 0.4:
            how, victims = "cut", (chance.randrange(4),)
        step, delay = 1 + 24 * chance.randrange(EPOCHS), chance.uniform(0.0, 0.3)
        if at == 0 and not again and chance.random() < 0.1:
            after = "start"
        elif at > 0 and chance.random() < 0.7:
            # While the others recover from the strike before.
            after, delay = "strike", chance.uniform(0.0, chance.choice((0.01, 0.1, 0.4)))
        else:
            after = "step"
        strikes.append(Strike(after, step, delay, victims, how, pause))
    return Plan(spares, 5 if again else 0, strikes, on_hosts)
