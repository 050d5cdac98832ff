"""`devicemesh run --hosts` over ssh, with sshd (tests/sshd.py) on hosts of tests/netlab.py."""

import os
import re
import signal
import subprocess

import pytest

from netlab import Lab
from sshd import Sshd
from support.paths import TOOL
from support.processes import children, environment, state_and_parent
from support.tool import SLEEP, all_gone, ends

NAMES = ["alpha", "beta", "gamma", "delta"]


@pytest.fixture
def ssh(tmp_path):
    """Four hosts with sshd, and a function that starts a job from one of them."""
    with Lab(NAMES, tmp_path / "lab") as lab:
        agent = Sshd(lab, NAMES, tmp_path).agent

        def start(host, *arguments):
            return lab.spawn(host, [str(TOOL), "run", "--rsh-agent", agent, "--grace-period", "1", *arguments],
                             env=environment(without=["DM_STORE", "DM_RSH"], DM_STORE_SECRET="hush"), stdin=subprocess.DEVNULL,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        yield lab, start


def test_ssh_starts_a_mesh_on_four_hosts(ssh, programs):
    lab, start = ssh
    program = programs.c("examples/hello_mesh.c", name="hello-on-ssh")
    out, _ = ends(start("beta", "--hosts", "alpha:1,beta:2,gamma:1,delta:2", "--", "sh", "-c", f"DM_HOSTCCL_HOST=$(hostname) exec {program}"), 0)
    assert "rank 5 at (dp=2, tp=1): sum over tp 9, over dp 9" in out, out


def test_ssh_that_is_refused_is_named(ssh):
    lab, start = ssh
    _, err = ends(start("alpha", "--hosts", "alpha,beta,nowhere", "--", "sleep", "1000"), 1)
    assert re.search(r"devicemesh run: nowhere: ssh ended with code 255: ssh: Could not resolve hostname nowhere: ", err), err


def test_ssh_passes_failures_and_signals(ssh):
    lab, start = ssh
    _, err = ends(start("alpha", "--hosts", ",".join(NAMES), "--", "sh", "-c", f'[ $RANK = 2 ] && echo lost >&2 && exit 7; {SLEEP}'), 7)
    assert re.search(r"rank 2 on gamma failed first: exit code 7; its last line: lost\n", err), err
    process = start("alpha", "--hosts", ",".join(NAMES), "--", "sh", "-c", f"echo $$; {SLEEP}")
    pids = [process.stdout.readline().strip() for _ in NAMES]
    process.send_signal(signal.SIGINT)
    assert "got signal 2 (SIGINT), passed on to all ranks" in ends(process, 130)[1]
    all_gone(pids)


def test_ssh_leaves_no_rank_behind_a_killed_starter(ssh):
    lab, start = ssh
    process = start("delta", "--hosts", ",".join(NAMES), "--", "sh", "-c", f"echo $$; {SLEEP}")
    pids = [process.stdout.readline().strip() for _ in NAMES]
    # The ssh and the agent on delta, which end while the hosts are still there.
    pids += children(process.pid)
    process.kill()
    all_gone(pids)


def test_ssh_tells_of_a_node_that_was_killed(ssh):
    """ssh ends with code 255 here, and also where the connection fails, so the node itself says
    that it was killed."""
    lab, start = ssh
    process = start("alpha", "--hosts", "alpha,beta", "--failure-grace", "0.2", "--", "sh", "-c", f"echo $RANK $PPID; {SLEEP}")
    keepers = dict(process.stdout.readline().split() for _ in range(2))
    os.kill(state_and_parent(int(keepers["1"]))[1], signal.SIGKILL)
    _, err = ends(process, 1)
    said = [line for line in err.splitlines() if "afterwards" not in line and "waiting for" not in line]
    assert set(said) == {"devicemesh run: node 1 (beta) has gone: its devicemesh run was killed"}, err


@pytest.mark.lengthy
def test_a_host_that_falls_silent_is_told_once(ssh):
    """The other nodes and ssh notice the silence after half a minute, at different times."""
    lab, start = ssh
    process = start("alpha", "--hosts", ",".join(NAMES), "--", "sh", "-c", f"echo $$; {SLEEP}")
    pids = [process.stdout.readline().strip() for _ in NAMES]
    lab.cut("gamma")
    _, err = ends(process, 1)
    assert "devicemesh run: the connection to gamma has failed: ranks there may run up to 1 min " in err, err
    said = [line for line in err.splitlines() if not re.search(r"waiting for|afterwards rank \d|connection to gamma", line)]
    # ssh does not know whether the host is down. The other nodes do.
    gone = r"devicemesh run: node 2 \(gamma\) has gone: its (devicemesh run was killed, or its host is down or out of reach|host or the network is down)"
    assert said and all(re.match(gone, line) for line in said) and len(said) <= 2, err
    all_gone(pids)
