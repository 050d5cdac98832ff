"""examples/elastic.cpp: a rank of the training is killed by SIGKILL, and a spare takes its place. The
losses are bit by bit those of a job that nobody has disturbed. `make soak-elastic` has the random
cases."""

import re
import signal

import pytest

from elastic.job import Job
from support.paths import ROOT, TOOL

FLAGS = ("-O2", "-Wall", "-Wextra", "-Wpedantic", "-Werror")
PATIENCE = 60


def losses(events):
    return {event.words.split()[-1] for event in events if event.words.startswith("is done: losses")}


@pytest.fixture
def elastic(programs):
    program = programs.cpp("examples/elastic.cpp", *FLAGS)
    jobs = []

    def start(spares, *arguments, **options):
        jobs.append(Job(TOOL, program, spares, arguments=("--data", ROOT / "examples/data/digits.csv", *arguments), **options))
        return jobs[-1]

    yield start
    for job in jobs:
        job.__exit__()


def test_a_spare_goes_on_with_the_training(elastic):
    """A rank is killed in the middle of the training, and the spare ends with the same losses."""
    undisturbed = elastic(0)
    assert undisturbed.end(PATIENCE), undisturbed.said()
    job = elastic(1, "--check")
    assert job.wait_for(lambda events: any("is at step 49" in event.words for event in events), PATIENCE), job.said()
    assert job.send(5, signal.SIGKILL), job.said()
    assert job.end(PATIENCE), job.said()
    said = job.said()
    assert len(re.findall(r"rank \d is in epoch 1: 1 lost, 1 joined", said)) == 8, said
    done = [event.rank for event in job.events if event.words.startswith("is done")]
    assert sorted(done) == [0, 1, 2, 3, 4, 6, 7, 8], said
    assert re.search(r"^check: the weights and losses are equal bit by bit on all replicas$", said, re.M), said
    assert re.search(r"^check: one process gets the same losses up to", said, re.M) and "wrong" not in said, said
    assert len(losses(job.events)) == 1 and losses(job.events) == losses(undisturbed.events), said
