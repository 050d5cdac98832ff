"""The library under Slurm, on two nodes that are both this machine (slurm.py).

The first line of each test's documentation is its row in docs/interop.md (table.py)."""

import os
import re

import pytest

from hanging import Hanging, right, right_in_json
from launchers import OPEN_MPI, ROOT_MAY, fine, needs
from slurm import PROGRAMS, Slurm
from torch_ranks import HERE, SIDE, found_torch
from support.paths import LIBRARY, ROOT, TOOL
from support.processes import environment, run, wait_until

# One worker of pytest-xdist runs all these tests, because they share one Slurm cluster. They mostly
# wait.
pytestmark = [pytest.mark.long, pytest.mark.lengthy, pytest.mark.xdist_group("slurm"), pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A Slurm whose two nodes are idle."""
    needs(*PROGRAMS)
    if os.geteuid() != 0:
        pytest.skip("Slurm's daemons want root")
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def slurm(cluster, tmp_path):
    """Runs a command of Slurm's to its end and gives what it wrote."""
    def to_its_end(*command, code=0, merged=True):
        variables = environment(**cluster.environment, **ROOT_MAY, TMPDIR=tmp_path)
        return run(*command, env=variables, timeout=150, code=code, merged=merged).stdout
    return to_its_end


@pytest.fixture
def batch(slurm, tmp_path):
    """Runs a shell script by sbatch and gives what it wrote."""
    def to_its_end(script, *options):
        path, output = tmp_path / "batch.sh", tmp_path / "batch.out"
        path.write_text(f"#!/bin/sh\n{script}\n")
        slurm("sbatch", "--wait", "-o", output, *options, path)
        return output.read_text()
    return to_its_end


@pytest.fixture
def mesh(programs):
    return programs.c("tests/interop/mesh.c", name="interop-mesh")


@pytest.fixture
def resolving(cluster):
    """The words before a program that must find the names of the nodes."""
    needs("libnss_wrapper.so")
    return cluster.resolving


def test_srun(slurm, mesh):
    """srun, 4 tasks on one node"""
    fine(slurm("srun", "-N", 1, "-n", 4, mesh, 2, 2), 4)


def test_srun_on_two_nodes(slurm, mesh, resolving):
    """srun, 4 tasks on two nodes (3 and 1)"""
    fine(slurm("srun", "-N", 2, "-n", 4, *resolving, mesh, 2, 2), 4)


@pytest.mark.parametrize("plugin", ["pmi2", "pmix"])
def test_srun_with_a_plugin(slurm, mesh, resolving, plugin):
    """srun --mpi={plugin}, 4 tasks on two nodes (3 and 1)"""
    if plugin not in slurm("srun", "--mpi=list"):
        pytest.skip("this Slurm is built without it")
    if plugin == "pmix":
        needs("libpmix.so")  # the plugin loads it by this name
    fine(slurm("srun", f"--mpi={plugin}", "-N", 2, "-n", 4, *resolving, mesh, 2, 2), 4)


def test_sbatch_of_steps(batch, mesh, record_property):
    """sbatch of 4 tasks: two steps of 2 at once, then the script itself"""
    steps = [f"srun --exact -N 1 -n 2 {mesh} {shape} &" for shape in ("1 2", "2 1")]
    output = batch("\n".join([*steps, "wait", f"{mesh} 1 1"]), "-N", 1, "-n", 4)
    assert sorted(re.findall(r"rank (\d of \d)", output)) == ["0 of 1", "0 of 2", "0 of 2", "1 of 2", "1 of 2"], output
    record_property("note", "the script is a world of one")


def test_sbatch_with_mpirun(batch, mesh):
    """sbatch on two nodes: mpirun of Open MPI, 2 ranks on one of them"""
    needs(OPEN_MPI.command[0])
    fine(batch(f"{' '.join(OPEN_MPI.command)} -n 2 {mesh} 1 2", "-N", 2, "-n", 4), 2)


def test_srun_of_torchrun(slurm, tmp_path, free_port):
    """torchrun under srun and its own variables first: 2 nodes of 2 ranks"""
    torch = found_torch()
    wrapper = tmp_path / "torchrun.sh"
    meeting = f"--node-rank $SLURM_NODEID --master-addr 127.0.0.1 --master-port {free_port()}"
    wrapper.write_text(f"#!/bin/sh\nexec {torch.python} -m torch.distributed.run --nnodes 2 --nproc-per-node 2 {meeting} "
                       f"{HERE}/side_by_side.py\n")
    wrapper.chmod(0o755)
    exported = ",".join(["ALL", *(f"{name}={value}" for name, value in torch.variables.items())])
    fine(slurm("srun", "-N", 2, "-n", 2, "--export", exported, wrapper), 4, SIDE)


def test_srun_of_devicemesh_run(slurm, mesh, resolving):
    """srun of devicemesh run without options for the meeting: 2 nodes of 2 ranks"""
    fine(slurm("srun", "-N", 2, "--ntasks-per-node", 1, *resolving, TOOL, "run", "-n", 2, "--", mesh, 2, 2), 4)


def test_srun_of_devicemesh_why(cluster, slurm, programs, resolving, tmp_path):
    """srun of devicemesh why on both nodes of a job of 8 ranks that hangs"""
    program = programs.c("tests/c/programs/hang.c", "-Wall", "-Wextra")
    command = ["srun", "-J", "hangs", "-N", 2, "-n", 8, *resolving, program, "sleep"]
    with Hanging(*command, env=environment(**cluster.environment, TMPDIR=tmp_path), output=tmp_path / "job.out") as job:
        wait_until(lambda: slurm("squeue", "-h", "-n", "hangs", "-t", "running"), "the job runs")
        number = slurm("squeue", "-h", "-n", "hangs", "-o", "%i").strip()
        job.name = f"slurm-{number}"
        job.wait()
        why = ["srun", f"--jobid={number}", "--overlap", "-N", 2, "--ntasks-per-node=1", *resolving, TOOL, "why"]
        right(slurm(*why, job.name, code=1))
        right_in_json(slurm(*why, "--json", job.name, code=1, merged=False), 2)
        slurm("scancel", number)


def test_the_batch_script_of_the_examples(slurm, mesh, resolving, tmp_path, record_property):
    """sbatch of examples/launch/train.sbatch: devicemesh run on 2 nodes"""
    output = tmp_path / "train.log"
    slurm(*resolving, f"PATH={LIBRARY}:{os.environ['PATH']}", "sbatch", "--wait", "-o", output, ROOT / "examples/launch/train.sbatch",
          mesh, 1, 2)
    fine(output.read_text(), 2)
    record_property("note", "with a secret")


def test_devicemesh_run_in_a_script_without_srun(batch):
    """sbatch on two nodes: devicemesh run without srun"""
    assert "srun --ntasks-per-node 1 devicemesh run" in batch(f"{TOOL} run -- true; test $? = 2", "-N", 2)
