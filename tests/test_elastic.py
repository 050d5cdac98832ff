"""examples/elastic.cpp: a rank of the training is killed by SIGKILL, and a spare or a new process
takes its place. `make soak-elastic` has the random cases."""

import re
import signal
import sys

import pytest

from elastic.job import Job
from elastic.plan import planned
from support.paths import ROOT, TOOL
from support.processes import run

FLAGS = ("-O2", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f'-DDM_EXAMPLE_DATA="{ROOT}/examples/data/digits.csv"')
PATIENCE = 50


def losses(events):
    return {event.words.split()[-1] for event in events if event.words.startswith("is done: losses")}


@pytest.fixture
def elastic(programs):
    program = programs.cpp("examples/elastic.cpp", *FLAGS)
    jobs = []

    def start(spares, *arguments, **options):
        jobs.append(Job(TOOL, program, spares, arguments=arguments, **options))
        return jobs[-1]

    yield start
    for job in jobs:
        job.__exit__()


@pytest.mark.parametrize("spares, restarts, newcomer", [(1, 0, 8), (0, 3, 5)], ids=["spare", "restart"])
def test_the_training_goes_on(elastic, spares, restarts, newcomer):
    """A rank is killed in the middle of the training. A spare or a new process takes its place, so
    the mesh is whole in every step, and the losses are those of an undisturbed job."""
    undisturbed = elastic(0)
    assert undisturbed.end(PATIENCE), undisturbed.said()
    # The pause after each step makes the training last for over 2 s after the kill.
    job = elastic(spares, "--check", "--pause", 5, "--replace", 30000, restarts=restarts)
    assert job.wait_for(lambda events: any("is at step 49" in event.words for event in events), PATIENCE), job.said()
    assert job.send(5, signal.SIGKILL), job.said()
    assert job.end(PATIENCE), job.said()
    said = job.said()
    done = [event.rank for event in job.events if event.words.startswith("is done")]
    assert sorted(done) == sorted([0, 1, 2, 3, 4, 6, 7, newcomer]), said
    assert re.search(r"^check: the weights and losses are equal bit by bit on all replicas$", said, re.M), said
    assert re.search(r"^check: one process gets the same losses up to", said, re.M) and "wrong" not in said, said
    assert len(losses(job.events)) == 1 and losses(job.events) == losses(undisturbed.events), said


@pytest.mark.long
def test_demo(elastic, programs):
    """The demo prints a line for each death."""
    program = programs.cpp("examples/elastic.cpp", *FLAGS)
    said = run(sys.executable, ROOT / "examples/demo_elastic.py", "--tool", TOOL, "--program", program, "--kills", 2, "--seed", 1).stdout
    assert len(re.findall(r"^rank +\d+ was killed; the others knew after +\d+ ms, and step +\d+ was done after +\d+ ms, loss", said, re.M)) == 2, said
    assert re.search(r"^test accuracy 9\d\.\d+ %$", said, re.M), said


def test_plans_repeat():
    """A seed and a number give one plan, and other numbers give others."""
    plans = [str(planned(7, number)) for number in range(50)]
    assert plans == [str(planned(7, number)) for number in range(50)] and len(set(plans)) == 50
