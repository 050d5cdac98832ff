"""`devicemesh why` under Open MPI and MPICH on four hosts of tests/netlab.py, which the launchers
reach by ssh (tests/sshd.py). The commands are those of docs/launchers.md.

The first line of each test's documentation is its row in docs/interop.md (table.py)."""

import json
import os
import shutil
import subprocess
import tempfile

import pytest

from hanging import right
from hangs import HOSTS, check
from launchers import MPICH, OPEN_MPI, ROOT_MAY, needs
from netlab import Lab
from sshd import Sshd
from support.paths import TOOL
from support.processes import environment, wait_until, words

pytestmark = [pytest.mark.long, pytest.mark.lengthy]


@pytest.fixture
def lab(tmp_path):
    """The four hosts, and one from which a user asks."""
    with Lab([*HOSTS, "login"], tmp_path / "lab", own_pids=True) as lab:
        yield lab


@pytest.fixture
def variables(lab, tmp_path):
    """The variables with which launchers find an ssh that reaches the hosts."""
    agent = Sshd(lab, HOSTS, tmp_path).agent
    ssh = tmp_path / "bin/ssh"
    ssh.parent.mkdir()
    # This ssh says on each host that it has noted a new key.
    ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} {agent.removeprefix("ssh ")} -o LogLevel=ERROR "$@"\n')
    ssh.chmod(0o755)
    own = {"PATH": f"{ssh.parent}:{os.environ['PATH']}", "TMPDIR": tempfile.mkdtemp(dir=tmp_path)}
    # The daemons of Open MPI on the other hosts do not get TMPDIR.
    return environment(**ROOT_MAY, **own, OMPI_MCA_orte_tmpdir_base=tempfile.mkdtemp(dir=tmp_path))


@pytest.mark.parametrize("launcher, job, asked", [
    (OPEN_MPI, "mpirun.openmpi -n 8 --host alpha:2,beta:2,gamma:2,delta:2 -x MASTER_ADDR=alpha -x MASTER_PORT=29500",
     "mpirun.openmpi -n 4 --host alpha,beta,gamma,delta -x MASTER_ADDR=alpha -x MASTER_PORT=29555"),
    (MPICH, "mpiexec.mpich -n 8 -ppn 2 -hosts alpha,beta,gamma,delta -genv MASTER_ADDR alpha -genv MASTER_PORT 29500",
     "mpiexec.mpich -n 4 -ppn 1 -hosts alpha,beta,gamma,delta -genv MASTER_ADDR alpha -genv MASTER_PORT 29555")], ids=["Open MPI", "MPICH"])
def test_mpi_why_on_four_hosts(lab, variables, programs, tmp_path, launcher, job, asked):
    """{launcher} over ssh, a job on four hosts that hangs: devicemesh why on all of them"""
    needs(launcher.command[0])
    program, log = programs.c("tests/c/programs/hang.c", "-Wall", "-Wextra"), tmp_path / "job.out"

    def said(host, *command, code=(1,)):
        how = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = lab.spawn(host, words(command), env=variables, **how)
        out, err = process.communicate(timeout=60)
        lab.processes.remove(process)
        assert process.returncode in code, (process.returncode, out, err)
        return out

    with open(log, "wb") as file:
        command = words([*job.split(), program, "sleep"])
        started = lab.spawn("alpha", command, env=variables, stdin=subprocess.DEVNULL, stdout=file, stderr=file)

    def hangs():
        assert started.poll() is None, log.read_text()
        # Ranks 2 and 3 are on beta.
        on_beta = said("beta", TOOL, "why", "--no-stacks", "--timeout", 0, code=(0, 1))
        return "rank 3 has not called all-reduce 6 of mesh/tp" in on_beta

    wait_until(hangs, "the job hangs")
    right(said("login", *asked.split(), TOOL, "why", "--color", "never"), "beta")
    (found,) = json.loads(said("alpha", *asked.split(), TOOL, "why", "--json"))["jobs"]
    check({**found, "name": "hang"}, "sleep")
    assert [rank["host"] for rank in found["ranks"]] == [host for host in HOSTS for _ in range(2)], found
    assert [node["name"] for node in found["nodes"]] == HOSTS and found["name"], found
