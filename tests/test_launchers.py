"""This process starts ranks with only the variables of MPICH. They derive one port from a common
ancestor process, also when a shell is between."""

import subprocess
import sys

import pytest

from support.paths import LIBRARY, ROOT
from support.processes import environment, kill_all

RANK = """
from ours import Mesh
import sys
mesh = Mesh(1, 2)
print("sum", mesh.sum("tp", 20), flush=True)
sys.stdin.readline()
print("sum", mesh.sum("tp", 1), flush=True)
mesh.finalize()
"""


@pytest.fixture
def start():
    """Starts a rank of two, behind the command `wrapper`."""
    started = []

    def one(rank, wrapper=()):
        variables = environment(PMI_RANK=rank, PMI_SIZE=2, MPI_LOCALRANKID=rank, MPI_LOCALNRANKS=2, PMI_FD=9,
                                DM_LIBRARY=LIBRARY / "libdevicemesh.so", PYTHONPATH=ROOT / "tests/interop")
        started.append(subprocess.Popen([*wrapper, sys.executable, "-c", RANK], env=variables, text=True, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        return started[-1]

    yield one
    kill_all(started)


def test_a_second_job_of_the_same_launcher(start):
    """Both jobs have the same port. The second job's rank 0 says how to choose one, and the
    first job is not disturbed."""
    ranks = [start(0), start(1, ("sh", "-c", '"$@"; exit $?', "sh"))]
    for rank in ranks:
        line = rank.stdout.readline()
        assert line == "sum 40.0\n", line + rank.stderr.read()
    start(1)  # reaches the first job's store
    late = start(0)
    error = late.communicate(timeout=60)[1]
    assert late.returncode != 0 and "the port was made from the job's id (PMI)" in error and "-genv MASTER_PORT" in error, error
    for rank in ranks:
        rank.stdin.write("go on\n")
        rank.stdin.flush()
    for rank in ranks:
        rest, error = rank.communicate(timeout=60)
        assert rank.returncode == 0 and rest == "sum 2.0\n", rest + error
