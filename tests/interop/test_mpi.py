"""The library under Open MPI and MPICH.

The first line of each test's documentation is its row in docs/interop.md (table.py)."""

import socket
import tempfile
from concurrent.futures import ThreadPoolExecutor

import pytest

from hanging import Hanging, right, right_in_json
from launchers import MPICH, OPEN_MPI, ROOT_MAY, fine, needs
from support.paths import TOOL
from support.processes import environment, run

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


@pytest.fixture(params=[OPEN_MPI, MPICH], ids=str)
def launcher(request):
    needs(request.param.command[0])
    return request.param


@pytest.fixture
def mpi(tmp_path):
    """Runs a launcher to its end and gives what it and its ranks wrote."""
    def to_its_end(launcher, *arguments, code=0, merged=True):
        # Open MPI leaves its folder in TMPDIR. Jobs that begin at the same time and make one folder
        # there fail now and then, so each job has a TMPDIR of its own.
        variables = environment(**ROOT_MAY, TMPDIR=tempfile.mkdtemp(dir=tmp_path))
        return run(*launcher.command, *arguments, env=variables, timeout=150, code=code, merged=merged).stdout
    return to_its_end


@pytest.fixture
def mesh(programs):
    return programs.c("tests/interop/mesh.c", name="interop-mesh")


@pytest.fixture
def ssh(tmp_path):
    """A program that takes the arguments of ssh and runs the command on this machine."""
    path = tmp_path / "not_ssh"
    path.write_text('#!/bin/sh\nwhile case "$1" in -*) ;; *) false ;; esac; do shift; done\nshift\nexec sh -c "$*"\n')
    path.chmod(0o755)
    return path


def test_mpi_with_nothing_set(launcher, mpi, mesh):
    """{launcher}, 4 ranks, nothing set"""
    fine(mpi(launcher, "-n", 4, mesh, 2, 2), 4)


def test_mpi_under_a_shell(launcher, mpi, mesh):
    """{launcher}, 4 ranks, each under a shell"""
    fine(mpi(launcher, "-n", 4, "sh", "-c", f"{mesh} 2 2; exit $?"), 4)


def test_mpi_collectives(launcher, mpi, programs):
    """{launcher}, tests/c/collectives.c on 4 ranks"""
    mpi(launcher, "-n", 4, programs.c("tests/c/collectives.c"))


def test_mpi_on_two_hosts(launcher, mpi, mesh, ssh, record_property):
    """{launcher}, two hosts, nothing set"""
    output = mpi(launcher, *launcher.two_hosts(ssh), mesh, 1, 2, code=None)
    assert "no address to meet at" in output and "MASTER_ADDR" in output and "mesh fine" not in output, output
    record_property("note", "refused at once, says what to set")


def test_mpi_on_two_hosts_with_an_address(launcher, mpi, mesh, ssh, free_port):
    """{launcher}, two hosts, MASTER_ADDR and MASTER_PORT exported by it"""
    address = launcher.exported(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    fine(mpi(launcher, *address, *launcher.two_hosts(ssh), mesh, 1, 2), 2)


@pytest.mark.lengthy
def test_mpi_why(launcher, mpi, programs, ssh, free_port, tmp_path):
    """{launcher}, a job on two hosts that hangs: devicemesh why on both hosts, twice on one, and once on one"""
    def meeting():
        return launcher.exported(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))

    program = programs.c("tests/c/programs/hang.c", "-Wall", "-Wextra")
    variables = environment(**ROOT_MAY, TMPDIR=tempfile.mkdtemp(dir=tmp_path))
    job = [*launcher.command, *meeting(), *launcher.two_hosts(ssh, 4), program, "sleep"]
    with Hanging(*job, env=variables, output=tmp_path / "job.out") as job:
        job.wait()
        # Open MPI gives its ranks a terminal.
        why = [TOOL, "why", "--color", "never", job.name]
        right(mpi(launcher, *meeting(), *launcher.two_hosts(ssh), *why, code=1))
        right_in_json(mpi(launcher, "-n", 2, *why, "--json", code=1, merged=False), 2)
        right(mpi(launcher, "-n", 1, *why, code=1))


def test_mpi_why_at_a_port_that_is_taken(launcher, mpi, ssh, record_property):
    """{launcher}, devicemesh why on two hosts, MASTER_PORT taken"""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = launcher.exported(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(taken.getsockname()[1]))
        # The second process meets nobody there, and waits for the whole --timeout.
        output = mpi(launcher, *address, *launcher.two_hosts(ssh), TOOL, "why", "--timeout", "1s", code=3)
    assert "the processes need a MASTER_PORT that is free and not the job's" in output, output
    record_property("note", "refused, says what to set")


def test_mpi_why_on_two_hosts_without_an_address(launcher, mpi, ssh, record_property):
    """{launcher}, devicemesh why on two hosts, nothing set"""
    output = mpi(launcher, *launcher.two_hosts(ssh), TOOL, "why", code=3)
    advice = {OPEN_MPI: "start it as mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=PORT",
              MPICH: "start it as mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT PORT"}[launcher]
    assert f"has started 2 of these, and nothing says where they meet: {advice} (rank 0's host, a free port there)\n" in output, output
    record_property("note", "refused at once, says what to set")


def test_mpi_jobs_at_once(mpi, mesh):
    """three Open MPI and three MPICH jobs of 2 ranks at once"""
    needs(OPEN_MPI.command[0], MPICH.command[0])
    with ThreadPoolExecutor(6) as pool:
        for output in pool.map(lambda launcher: mpi(launcher, "-n", 2, mesh, 1, 2), 3 * [OPEN_MPI, MPICH]):
            fine(output, 2)
