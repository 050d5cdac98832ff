"""A plugin of pytest: the ranks meet before test_barrier, in which rank 0 empties a file that the
others must not have written to. It has no barrier before that, and relies on the ranks being in
step."""

import numpy
from mpi4py import MPI


def pytest_runtest_logstart(nodeid):
    if "::test_barrier" in nodeid:
        MPI.COMM_WORLD.mesh.get_group().all_reduce(numpy.zeros(1))
