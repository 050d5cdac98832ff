"""mpi4jax's own tests of its collectives, unmodified, on 4 ranks over devicemesh_jax.

mpi4jax_adapter has modules with mpi4jax's and mpi4py's names over our packages. DM_MPI4JAX names a
checkout of mpi4jax; docs/interop.md says which version passed. The test takes minutes, most of them
in XLA, which compiles some hundred programs on each rank."""

import os
import re
import shutil
from pathlib import Path

import pytest

from support.jax import BYTECODE, prepared
from support.paths import ROOT
from support.pinned import Unavailable
from support.processes import environment, launch

ADAPTER = ROOT / "tests/interop/mpi4jax_adapter"
# They ask how the MPI library that mpi4jax was built with lays out its handles. There is none.
OF_REAL_MPI = ["test_mpi_abi_info", "test_mpi_abi_compatibility_check"]
LIMIT = 1800


def checkout():
    """A checkout of mpi4jax."""
    if "DM_MPI4JAX" not in os.environ:
        raise Unavailable("DM_MPI4JAX names no checkout of https://github.com/mpi4jax/mpi4jax")
    return Path(os.environ["DM_MPI4JAX"])


@pytest.mark.long
@pytest.mark.timeout(LIMIT)
def test_the_tests_of_mpi4jax(tmp_path):
    # The tests alone: beside them lies a package mpi4jax, which is not the adapter.
    tests = tmp_path / "collective_ops"
    shutil.copytree(checkout() / "tests/collective_ops", tests)
    temporary = tmp_path / "tmp"  # a test leaves a file there
    temporary.mkdir()
    python = prepared()
    path = [ADAPTER, ROOT / "bindings/python", ROOT / "bindings/jax", Path(pytest.__file__).parents[1]]
    output = launch(4, python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "meet_first",
                    *(f"--deselect=collective_ops/test_common.py::{name}" for name in OF_REAL_MPI), tests,
                    options=["--prefix"], cwd=tmp_path, env=environment(TMPDIR=temporary, PYTHONPATH=":".join(
                        map(str, path)), **BYTECODE), timeout=LIMIT - 60, merged=True).stdout
    # Tests between two ranks are skipped by the others.
    results = re.findall(r"^\[rank (\d)\] (\d+) passed(?:, (\d+) skipped)?, 2 deselected", output, re.M)
    assert len(results) == 4, output
    assert {int(passed) + int(skipped or 0) for _, passed, skipped in results} == {92}, output
    assert max(int(passed) for _, passed, _ in results) == 92, output
