"""examples/recover.c heals: ranks are killed by SIGKILL at chosen and at random moments, with and
without spares. The ranks that are left end with the weights of an undisturbed run, which the
program checks itself, or all of them end with an error. tests/c/recover.c, recover_silent.c and
spares.c have the cases that need no killing."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from support.healing import check_comes_back, jobs
from support.paths import LIBRARY, LINK, ROOT, TOOL
from support.processes import environment, rest_of, words


@pytest.fixture
def heal(programs):
    yield from jobs(programs)


@pytest.mark.parametrize(
    "size, spares, victims, replicas",
    [(8, 0, [5], 3), (8, 0, [0], 3), (8, 0, [2, 7], 2), (6, 0, [4, 5], 2), (4, 0, [1], 1), (2, 0, [], 1), (7, 1, [3], 3), (8, 2, [0, 1], 3),
     (8, 2, [1, 2], 3), (7, 1, [1, 3], 2), (7, 1, [6], 3)], ids=str)
def test_ranks_are_killed_together(heal, size, spares, victims, replicas):
    """Spares take the places of the lost ranks, as far as they make replicas whole."""
    job = heal(size, spares)
    job.wait_for("is at step 20")
    for rank in victims:
        job.kill(rank)
    last, said = job.end(victims)
    done = [rank for rank, words in last.items() if words == f"is done with {replicas} replicas"]
    assert len(done) == 2 * replicas, said
    assert all(words == "waited until the job had ended" for rank, words in last.items() if rank not in done), said


def test_a_spare_replaces_a_spare(heal):
    """The ranks of the mesh do not notice the loss of a spare. The other spare takes the place of
    the next rank that is lost, and is lost itself then."""
    job = heal(8, 2)
    job.wait_for("is at step 20")
    job.kill(6)
    job.wait_for("is at step 60")
    job.kill(0)
    job.wait_for("rank 7 goes on in epoch 1 with 2 lost and 1 joined")
    job.kill(7)
    last, said = job.end([0, 6, 7])
    assert sorted(last.values()) == ["is done with 2 replicas"] * 4 + ["waited until the job had ended"], said


@pytest.mark.parametrize("number", range(6))
def test_ranks_are_killed_at_random(heal, chance, number):
    """Ranks are killed one after the other, also while the others recover from the loss before. The
    job goes on meanwhile, and a rank may be done before its turn."""
    spares = number % 3
    job = heal(8 + spares, spares, room=None)
    job.wait_for("is at step 20")
    victims = []
    for rank in chance.sample(range(8 + spares), chance.randint(2, 4)):
        time.sleep(chance.choice([0, 0.005, 0.05, 0.2, 0.5]) * chance.random())
        victims += [rank] if job.kill(rank) else []
    last, said = job.end(victims)
    ends = [words for words in last.values() if words != "waited until the job had ended"]
    found = re.fullmatch(r"is done with (\d) replicas", ends[0]) if ends else None
    if found:
        assert set(ends) == {ends[0]} and len(ends) == 2 * int(found.group(1)), f"{victims}\n{said}"
    else:
        # Where every replica has lost a rank and no spare is left, all give up.
        gives_up = ("replicas along dimension", "start the job from a checkpoint")
        assert all(any(words in end for words in gives_up) for end in last.values()), f"{victims}\n{said}"


def test_rank_0_is_killed_that_serves_the_store(programs, start_ranks):
    """Nothing can be decided without the store. Each survivor gives up with an error that says
    so."""
    ranks = start_ranks([programs.c("examples/recover.c", name="recover-example", link=LINK), 100000], 4)
    for rank in range(4):
        line = ""
        while " is at step 10\n" not in line:
            line = ranks[rank].stdout.readline()
            assert line, f"rank {rank} ended"
    os.kill(ranks[0].pid, signal.SIGKILL)
    for rank in (1, 2, 3):
        output, _ = rest_of(ranks[rank], 120)
        assert ranks[rank].returncode == 1, f"rank {rank}: {output}"
        assert re.match(rf"rank {rank}: dm_recover: .*rank 0", output.splitlines()[-1]), output


@pytest.mark.alone
@pytest.mark.parametrize("spares, deaths, joined", [(0, 2, 0), (1, 1, 1)], ids=["smaller", "with a spare"])
def test_time_to_the_next_step(programs, tmp_path, spares, deaths, joined):
    """From SIGKILL to the first all-reduce of the next mesh, 8 ranks. docs/reliability.md has what
    was measured; here the bound is a loose one, for busy machines."""
    program = programs.c("tests/c/programs/recover_time.c")
    command = words([TOOL, "run", "-n", 8 + spares, "--failure-grace", "60", "--", program, spares, deaths])
    ended = subprocess.run(command, env=environment(DM_TMP=str(tmp_path)), text=True, capture_output=True, timeout=120)
    times = re.findall(r"^([\d.]+) ms after death \d: 1 lost, (\d) joined$", ended.stdout, re.M)
    assert len(times) == deaths and all(int(count) == joined for _, count in times), ended.stdout + ended.stderr
    assert all(float(time) < 3000 for time, _ in times), times


def test_the_example_in_python():
    check_comes_back([sys.executable, ROOT / "examples/recover.py"], PYTHONPATH=ROOT / "bindings/python", DM_LIBRARY=LIBRARY / "libdevicemesh.so")


def test_the_page_shows_the_program():
    page = (ROOT / "docs/reliability.md").read_text()
    shown = re.search(r"```c\n(static dm_status share_state.*?)```", page, re.S).group(1)
    assert shown in (ROOT / "examples/recover.c").read_text()
