"""`devicemesh run` where a launcher says which nodes there are: the variables of a Slurm step, the
pods of a Kubernetes indexed job, and the systemd service among the examples.
tests/interop/test_slurm.py uses a real Slurm."""

import os
import re
import shutil
import subprocess

import pytest

from netlab import Lab
from support.paths import ROOT, TOOL
from support.processes import environment, kill_all, run
from support.tool import PATIENCE

STEP = {"SLURM_JOB_NODELIST": "127.0.0.[1-2]", "SLURM_STEP_NODELIST": "127.0.0.[1-2]", "SLURM_JOB_NUM_NODES": 2, "SLURM_STEP_ID": 0,
        "SLURM_STEP_NUM_NODES": 2, "SLURM_STEP_NUM_TASKS": 2, "SLURM_LOCALID": 0, "SLURM_PROCID": 0}


@pytest.fixture
def plain():
    """Starts several tools without options on this host, each with its variables."""
    started = []

    def start(script, variables, *options):
        nodes = [subprocess.Popen([TOOL, "run", *options, "--", "/bin/sh", "-c", script], stdin=subprocess.DEVNULL, text=True,
                                        env=environment(without=["DM_STORE"], **each), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
                 for each in variables]
        started.extend(nodes)
        return [(node.communicate(timeout=PATIENCE), node.returncode) for node in nodes]

    yield start
    kill_all(started)


def test_a_slurm_step_needs_no_options(plain):
    job = os.getpid()
    done = plain("echo $RANK $WORLD_SIZE $GROUP_RANK $MASTER_ADDR $TORCHELASTIC_RUN_ID",
                 [{**STEP, "SLURM_JOB_ID": job, "SLURM_NODEID": node, "SLURM_PROCID": node} for node in (1, 0)], "-n", "2")
    lines = sorted(line for (out, _), _ in done for line in out.splitlines())
    assert lines == [f"{rank} 4 {rank // 2} 127.0.0.1 slurm-{job}.0" for rank in range(4)], done


@pytest.mark.parametrize("change, said", [
    ({"SLURM_STEP_NUM_TASKS": 4}, "this Slurm step has 4 tasks on 2 nodes.*srun --ntasks-per-node 1 devicemesh run"),
    ({"SLURM_STEP_ID": ""}, r"this Slurm allocation has 2 nodes \(127.0.0.\[1-2\]\).*srun --ntasks-per-node 1 devicemesh run")])
def test_slurm_without_a_tool_on_each_node_says_what_to_do(plain, change, said):
    variables = [{**STEP, "SLURM_JOB_ID": 7, "SLURM_NODEID": 0, **change}]
    (((_, err), code), ) = plain("exit 0", variables)
    assert code == 2 and re.search(said, err), err
    (((out, _), code), ) = plain("echo $WORLD_SIZE", variables, "--nnodes", "1", "-n", "1")
    assert (out, code) == ("1\n", 0)


def test_the_unit_of_systemd_starts_both_nodes(free_port, tmp_path):
    """The command of examples/launch/train.service, on two nodes."""
    unit = (ROOT / "examples/launch/train.service").read_text()
    command = re.search(r"^ExecStart=((?:.*\\\n)*.*)", unit, re.M).group(1).replace("\\\n", " ").split()
    changes = {"/usr/local/bin/devicemesh": str(TOOL), "head:29400": f"127.0.0.1:{free_port()}", "./train": "/bin/true"}
    words = [changes.get(word, word) for word in command]
    assert set(changes) <= set(command), command
    nodes = [subprocess.Popen(words, stdin=subprocess.DEVNULL, env=environment(without=["DM_STORE"])) for _ in range(2)]
    assert [node.wait(PATIENCE) for node in nodes] == [0, 0]
    if shutil.which("systemd-analyze"):
        installed = tmp_path / "train.service"
        installed.write_text(unit.replace("/usr/local/bin/devicemesh", str(TOOL)).replace("User=train", "User=root"))
        done = run("systemd-analyze", "verify", installed, merged=True, code=None)
        assert "train.service" not in done.stdout, done.stdout


def test_pods_of_an_indexed_job_meet_in_pod_0(tmp_path):
    """The hosts have the names, the /etc/hosts and the variables of pods. Pod 0 gets its address
    in the name server after the others have asked for it."""
    pods, domain = [f"train-{index}" for index in range(3)], "train.ns.svc.cluster.local"
    with Lab(pods, tmp_path) as hosts:
        for name, host in hosts.hosts.items():
            host.names_are(f"{host.ipv4} {name}.{domain} {name}")
        started = {}
        for index in (2, 1, 0):
            started[index] = hosts.spawn(
                pods[index], [str(TOOL), "run", "--nnodes=3", "-n2", "--", "/bin/sh", "-c", "echo $RANK $WORLD_SIZE $GROUP_RANK $MASTER_ADDR"],
                env=environment(without=["DM_STORE"], JOB_COMPLETION_INDEX=index, KUBERNETES_SERVICE_HOST="10.96.0.1"),
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            if index == 1:
                line = started[2].stderr.readline()
                assert f"waiting for the name train-0.{domain} to get an address" in line, line
                for name, host in list(hosts.hosts.items())[1:]:
                    host.names_are(f"{host.ipv4} {name}.{domain} {name}", f"{hosts.hosts['train-0'].ipv4} train-0.{domain}")
        lines = sorted(line for pod in started.values() for line in pod.communicate(timeout=PATIENCE)[0].splitlines())
    assert lines == [f"{rank} 6 {rank // 2} train-0.{domain}" for rank in range(6)], lines
