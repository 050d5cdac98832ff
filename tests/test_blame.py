"""Who is to blame for a failure, as data. Ranks are killed by SIGKILL, and the survivors learn from
functions alone which ranks are lost, and go on without them (tests/c/programs/survive.c)."""

import os
import signal

import pytest

from support.processes import rest_of


@pytest.mark.parametrize("victims", [(2,), (5,), (2, 4)], ids=str)
@pytest.mark.parametrize("place", ["collective", "barrier"])
def test_survivors_know_who_is_lost(programs, start_ranks, place, victims):
    ranks = start_ranks([programs.c("tests/c/programs/survive.c"), place, *map(str, victims)], 6)
    for rank in ranks:
        line = rank.stdout.readline()
        assert line == "ready\n", f"instead of ready: {line!r}"
    for victim in victims:
        os.kill(ranks[victim].pid, signal.SIGKILL)
    for number, rank in enumerate(ranks):
        output, _ = rest_of(rank, 120)
        expected = -signal.SIGKILL if number in victims else 0
        assert rank.returncode == expected, f"rank {number} ended with {rank.returncode}: {output}"
