"""Jobs on four hosts (tests/netlab.py) that make every kind of call, while a rank is lost, a host
falls silent, the network is parted or is bad (tests/lost_ranks/hosts.py). `make soak
ARGS=--hosts` runs many that chance chooses.

A fault that only silence tells takes some seconds."""

import json
import os

import pytest

from lost_ranks.hosts import LAYOUTS, Fault, planned, suffer

CLEAR = (0.0, 0.0)
FIXED = [
    Fault(tuple(LAYOUTS[0].split()), "kill", 3, "all_reduce", 1, 0.001, CLEAR),
    Fault(tuple(LAYOUTS[4].split()), "kill", 5, "init", 1, 0.002, CLEAR),
    Fault(tuple(LAYOUTS[4].split()), "cut", 2, "all_gather", 1, 0.0, CLEAR),
    Fault(tuple(LAYOUTS[2].split()), "stop", 1, "reduce_scatter", 1, 0.0, CLEAR),
    Fault(tuple(LAYOUTS[0].split()), "part", 0, "exchange", 1, 0.0, CLEAR),
    Fault(tuple(LAYOUTS[1].split()), "exit", 4, "flatten", 1, 0.0005, CLEAR),
]


def check(fault, programs, tmp_path, seed, again):
    outcome = suffer(programs.c("tests/c/programs/phases.c"), fault, tmp_path, seed, again)
    return outcome, f"{fault}; in {outcome.phase}\n" + "\n".join(outcome.complaints)


@pytest.mark.parametrize("fault", FIXED, ids=lambda fault: f"{fault.how}-in-{fault.phase}")
def test_fault(programs, tmp_path, fault):
    outcome, told = check(fault, programs, tmp_path, 0, fault.how == "kill")
    assert not outcome.complaints, told


def pytest_generate_tests(metafunc):
    if "random_fault" in metafunc.fixturenames:
        metafunc.parametrize("random_fault", range(metafunc.config.option.random_deaths))


@pytest.mark.long
@pytest.mark.timeout(400)
def test_random_fault(programs, tmp_path, record_property, random_fault):
    fault = planned(int(os.environ["DM_SEED"]), random_fault)
    outcome, told = check(fault, programs, tmp_path, random_fault, random_fault % 4 == 0)
    record_property(
        "death",
        json.dumps({
            "number": random_fault, "how": fault.how, "phase": outcome.phase or fault.phase, "notice": outcome.notice,
            "again": outcome.again, "survivors": outcome.survivors, "failed": bool(outcome.complaints)
        }))
    assert not outcome.complaints, told
