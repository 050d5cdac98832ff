"""A rank is lost: by SIGKILL, exit, SIGSTOP or abort, before and in each phase of a job, by itself
and from outside, in jobs of 2 to 8 ranks. Every survivor must get an error in time that names the
lost rank. Nothing may be left, and a new job gets the port.

The jobs of `death` cases are lost_ranks/; tests/soak.py runs cases that chance chooses. They
take over a minute together, because a stopped rank is missed only at the deadline."""

import json
import os
import re
import signal
import time

import pytest

from lost_ranks.death import Death, suffer
from lost_ranks.job import MARK, Rank
from lost_ranks.random_cases import planned
from lost_ranks.verdict import COLLECTIVES, MAKING, NOTICE, named
from support.paths import LIBRARY, ROOT
from support.processes import environment, launch, marked, rest_of, starvation, waits

# A stopped rank is missed at the deadline, so it is short here. All calls before that must end
# before their deadlines, on a busy machine, too.
SHORT_MS = 2000
PHASES = ("join", *MAKING, *COLLECTIVES, "barrier", "finalize", "free")


@pytest.fixture
def phases(programs):
    return programs.c("tests/c/programs/phases.c")


def fixed_deaths():
    """Each phase with each way to be lost: pairs of a death and whether a new job follows on the
    same port."""
    number = 0
    for phase in PHASES:
        for how in ("kill", "exit", "stop"):
            for delay in (-1.0,) if phase == "free" else (-1.0, (0.0002, 0.001)[number // 2 % 2]):
                size = 3 + number % 2
                victim = (number * 5 // 2) % size
                outside = how != "exit" and delay >= 0
                yield Death(size, victim, how, phase, delay, outside, file=number % 5 == 4, short_ms=SHORT_MS), number % 4 == 0
                number += 1
    # Ranks that wait in the store for one that has not come.
    for victim in (1, 3):
        yield Death(4, victim, "kill", "join", outside=True, absent=2), True


def name_of(death):
    when = "before" if death.delay < 0 else "in"
    return f"{death.how}-{when}-{death.phase}-rank{death.victim}of{death.size}" + (f"-without-rank{death.absent}"
                                                                                   if death.absent >= 0 else "")


@pytest.mark.parametrize("death, again", [pytest.param(*case, id=name_of(case[0])) for case in fixed_deaths()])
def test_death(phases, free_port, tmp_path, death, again):
    outcome = suffer(phases, death, free_port(), tmp_path, again)
    assert not outcome.complaints, f"{death}; lost in {outcome.phase}\n" + "\n".join(outcome.complaints)


def pytest_generate_tests(metafunc):
    if "random_death" in metafunc.fixturenames:
        metafunc.parametrize("random_death", range(metafunc.config.option.random_deaths))
    if "random_shrink" in metafunc.fixturenames:
        metafunc.parametrize("random_shrink", range(1, 1 + (metafunc.config.option.random_deaths)))


def test_random_death(phases, free_port, tmp_path, record_property, random_death):
    death = planned(int(os.environ["DM_SEED"]), random_death)
    outcome = suffer(phases, death, free_port(), tmp_path)
    told = {
        "number": random_death, "how": death.how, "phase": outcome.phase or death.phase, "notice": outcome.notice,
        "again": outcome.again, "survivors": outcome.survivors, "failed": bool(outcome.complaints)
    }
    record_property("death", json.dumps(told))
    assert not outcome.complaints, f"{death}; lost in {outcome.phase}\n" + "\n".join(outcome.complaints)


@pytest.mark.parametrize("size, victim", [(2, 1), (4, 0), (4, 2), (8, 5), (8, 0)])
def test_killed_in_a_large_all_reduce(programs, start_ranks, chance, size, victim):
    """Every survivor has an error that names the rank itself within 2 seconds."""
    ranks = start_ranks([programs.c("tests/c/programs/reduce_forever.c")], size)
    for rank in ranks:
        line = rank.stdout.readline()
        assert line == "running\n", f"instead of running: {line!r}"
    time.sleep(chance.uniform(0.0, 0.3))
    pids = [os.getpid(), *(rank.pid for rank in ranks)]
    before, killed = waits(pids), time.monotonic()
    os.kill(ranks[victim].pid, signal.SIGKILL)
    told = {number: rank.stdout.readline() for number, rank in enumerate(ranks) if number != victim}
    starved = starvation(before, pids)
    for number, line in told.items():
        assert line, f"rank {number} ended with {ranks[number].wait(60)}"
        status, moment, message = line.split(" ", 2)
        assert status == "DM_STATUS_PEER_LOST" and f"rank {victim} was lost" in message, (status, message)
        late = float(moment) - killed
        assert late < NOTICE + starved, f"rank {number} knew after {late:.3f} s, of which {starved:.3f} s may be waiting for processors"
        assert rest_of(ranks[number], 60)[0] == "" and ranks[number].returncode == 0, ranks[number].returncode


# A stopped rank does not react to SIGTERM. So the first rank that fails is one whose deadline has
# passed, and the tool kills the stopped rank five seconds later. The tool serves the store, so the
# death of rank 0 is no special case.
UNDER_THE_TOOL = [
    (2, "all_reduce", "kill", 137, r"rank 2 \(pid \d+\) was killed by signal 9 \(SIGKILL\)", 30_000, NOTICE + 2),
    (0, "init", "exit", 7, r"rank 0 \(pid \d+\) exited with code 7", 30_000, NOTICE + 2),
    (1, "barrier", "stop", 3, r"rank [023] \(pid \d+\) exited with code 3", SHORT_MS, SHORT_MS / 1000 + 1 + 5 + NOTICE),
]


@pytest.mark.parametrize("victim, phase, how, code, said, timeout_ms, most", UNDER_THE_TOOL,
                         ids=[f"{how}-in-{phase}" for _, phase, how, *_ in UNDER_THE_TOOL])
def test_under_the_tool(phases, victim, phase, how, code, said, timeout_ms, most):
    """The tool says who failed first. It ends the job when the others have had their error,
    which names the lost rank; nobody outlives the tool."""
    mark = f"tool-{os.getpid()}-{time.monotonic_ns()}"
    variables = environment(**{MARK: mark, "DM_TIMEOUT_MS": timeout_ms, "DM_DIE": f"{victim}:{phase}:{how}:300", "DM_STAY_MS": 300})
    # The others have had their errors before they get SIGTERM.
    grace = "1" if how == "stop" else "10"
    ended = launch(4, phases, options=("--prefix", "--failure-grace", grace), env=variables, code=code, timeout=60)
    ended_at = time.monotonic()
    # The clock is CLOCK_MONOTONIC on both sides.
    dying = re.search(rf"^\[rank {victim}\] dying \S+ ([\d.]+)$", ended.stdout, re.M)
    assert dying, ended.stdout
    took = ended_at - float(dying[1])
    first = ended.stderr.splitlines()[0]
    assert re.search(f"^devicemesh run: {said}", first), ended.stderr
    errors = [line for line in ended.stdout.splitlines() if "] error " in line]
    assert len(errors) == 3 and any(f"rank {victim} " in line for line in errors), errors
    if how != "stop":
        assert all(" error DM_STATUS_PEER_LOST " in line for line in errors), errors
    assert took < most, f"the job ended {took:.2f} s after the death"
    assert not marked(mark, MARK), marked(mark, MARK)


# The phases in which all ranks of the job make a call together. All of them get one verdict.
TOGETHER = ("init", "flatten", "unflatten")


@pytest.mark.parametrize("victim, phase, how", [(0, "init", "exit"), (0, "flatten", "kill"), (1, "init", "kill"), (3, "unflatten", "exit")])
def test_lost_while_communicators_are_made(phases, chance, victim, phase, how):
    """A rank is lost within the first 1.5 ms of a call that makes communicators. A survivor may
    find memory of the lost rank gone before the store knows of the loss: the tool serves the store.
    The error of every survivor says who was lost, and not what followed from the loss. On a busy
    machine the tool may learn of the victim and the survivors at once. It says so, and one of them
    gives the exit code."""
    delay = chance.randrange(1500)
    variables = environment(DM_TIMEOUT_MS=30_000, DM_DIE=f"{victim}:{phase}:{how}:{delay}", DM_STAY_MS=300)
    ended = launch(4, phases, options=("--prefix", "--failure-grace", "10"), env=variables, code=None, timeout=60)
    is_one_of_several = ended.returncode == 3 and f"at the same time rank {victim} (pid " in ended.stderr
    assert ended.returncode == (137 if how == "kill" else 7) or is_one_of_several, ended.stderr
    ranks = {number: Rank(number, None) for number in range(4)}
    for line in ended.stdout.splitlines():
        number, said = re.fullmatch(r"\[rank (\d)\] (.*)", line).groups()
        ranks[int(number)].read(said)
    for rank in ranks.values():
        if rank.number == victim:
            continue
        assert rank.error, f"rank {rank.number} has no error after {delay} us\n{ended.stdout}"
        status, at, message = rank.error
        # On a busy machine the rank may be lost later than planned.
        if rank.phase(at)[0] in TOGETHER:
            assert status == "DM_STATUS_PEER_LOST" and victim in named(message), f"rank {rank.number} after {delay} us: {status} {message}"


@pytest.fixture
def stalling(programs):
    """The program of a job in which one rank stops or fails inside the communicator library, and
    the library that lets it (tests/c/programs/stall.c)."""
    strict = ["-Wall", "-Wextra"]
    # Cargo names the library without its version; the loader looks for its SONAME.
    version = re.search(r'^version = "(\d+\.\d+)', (ROOT / "Cargo.toml").read_text(), re.M).group(1)
    engine = programs.once(f"libhostccl.so.{version}", lambda path: os.symlink(LIBRARY / "libhostccl.so", path))
    link = [f"-L{LIBRARY}", f"-Wl,-rpath,{LIBRARY}:{engine.parent}", "-pthread", "-ldl"]
    library = programs.c("tests/c/programs/stall.c", *strict, "-shared", "-fPIC", name="libstall.so",
                         link=["-Wl,--no-as-needed", *link, "-lhostccl"])
    return programs.c("tests/c/programs/stopped.c", *strict, link=[*link, "-ldevicemesh"]), {"DM_CCL_LIBRARY": str(library)}


# (what happens, which rank stops): tests/c/programs/stopped.c explains them.
STALLS = [("barrier", 1), ("init", 0), ("init-id", 0), ("init-root", 1), ("init-root", 0), ("init-split", 1),
          ("init-second-split", 3), ("flatten", 2), ("unflatten-split", 1), ("finalize", 1), ("finalize-flush", 1),
          ("finalize-destroy", 2), ("lazy", 1), ("lazy-id", 0), ("lazy-init", 1), ("all-reduce", 3), ("abort", 1),
          ("world-abort", 1), ("leaks", 1), ("unmade", 1), ("gone", 0), ("gone-failing", 0)]


@pytest.mark.parametrize("what, victim", STALLS)
def test_stopped_in_a_collective(stalling, what, victim):
    """By their deadline the survivors get an error that names the stopped rank. dm_abort and
    dm_world_abort end a blocked making of communicators. No communicator and none of its memory is
    left. The ranks check this themselves."""
    program, variables = stalling
    launch(4, program, what, victim, options=("--prefix", "--failure-grace", "10"), env=environment(**variables), timeout=60, merged=True)


def test_survivors_shrink(programs, tmp_path, random_shrink):
    """2 to 6 ranks, of which some end at random moments while the others shrink, slice ranges
    and compute (tests/c/programs/shrink.c). Each rank must end, be left out, or come to a mesh
    that joins the ranks it says. A seed repeats the plan, not the moments."""
    size, lost = 2 + random_shrink % 5, tmp_path / "lost"
    lost.touch()
    ended = launch(size, programs.c("tests/c/programs/shrink.c"), options=("--failure-grace", 120, "--timeout", 120),
                   env=environment(DM_SEED=random_shrink, DM_LOST=lost), code=None, timeout=150)
    dead = {int(line) for line in lost.read_text().split()}
    words = [line.split() for line in ended.stdout.splitlines()]
    odd = [" ".join(line) for line in words if not line or line[0] not in ("done", "out")]
    assert not odd, "\n".join([*odd, ended.stderr])
    assert dead, "nobody died"
    went_on = [int(line[1]) for line in words]
    assert sorted([*dead, *went_on]) == list(range(size)), (
        f"of {size} ranks {sorted(dead)} died and {sorted(went_on)} went on or out\n{ended.stderr}"
    )
