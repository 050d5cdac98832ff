"""`devicemesh run --restart rank` on several hosts (tests/netlab.py): ranks, nodes and hosts are
lost, and the ranks of examples/recover.c go on and come back. test_restarts.py has what the tool
itself does there, with shell scripts as ranks, and test_run_store.py the same for `--store`."""

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from hostranks import SILENCE
from lost_ranks.job import HOST
from netlab import Lab
from sshd import Sshd
from support.paths import LINK, TOOL
from support.pinned import Unavailable
from support.processes import MARK, environment, gone, marked, wait_until
from support.tool import PATIENCE

NODES = ("alpha", "beta", "gamma")
PORT = 29400
# How many bytes of what the tools and the ranks of a node say nobody has read yet.
ROOM = 4096
# A job ends well within this many seconds, also on a busy machine.
END = 150
HEALS = ("--restart", "rank", "--max-restarts", 3)
# How long the ranks wait for a process that takes an empty place, in milliseconds.
REPLACE = 60000


class Nodes(Lab):
    """Hosts, the tools on them, and what all of them say."""

    def __init__(self, program, folder):
        super().__init__((*NODES, "store"), folder)
        self.program, self.said, self.changed, self.tools, self.readers = program, [], threading.Condition(), {}, []
        # Whether nobody reads now what the tools and the ranks say.
        self.is_held = False
        self.variables = {}

    def command(self, options, arguments):
        return [*map(str, (TOOL, "run", "--failure-grace", 5, "--grace-period", 5, *options, "--", self.program, *arguments))]

    def start(self, host, *command, **variables):
        """Starts a tool on a host. Its ranks take the hosts for hosts, although these share a
        kernel."""
        own = environment(without=["DM_"], **{HOST: host, SILENCE: 2000}, **self.variables, **variables)
        self.tools[host] = self.spawn(host, [str(word) for word in command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                      env=own)
        fcntl.fcntl(self.tools[host].stdout, fcntl.F_SETPIPE_SZ, ROOM)
        reader = threading.Thread(target=self.read, args=(host, self.tools[host].stdout), daemon=True)
        self.tools[host].readers = [reader]
        reader.start()
        self.readers.append((self.tools[host], reader))

    def node(self, number, where, *options, spares=0, steps=1500, replace=REPLACE):
        """A node of a job by hand."""
        every = ("--nnodes", len(NODES), "--node-rank", number, "-n", 2, *HEALS, *where, *options)
        self.start(NODES[number], *self.command(every, (steps, spares, replace)))

    def nodes(self, *where, **more):
        for number in range(len(NODES)):
            self.node(number, where, **more)

    def read(self, host, pipe):
        rest = b""
        while part := os.read(pipe.fileno(), 256):
            *lines, rest = (rest + part).split(b"\n")
            with self.changed:
                self.said += [f"{host}: {line.decode(errors='replace')}\n" for line in lines]
                self.changed.notify_all()
                self.changed.wait_for(lambda: not self.is_held)
        self.said += [f"{host}: {rest.decode(errors='replace')}"] if rest else []

    def go_on(self):
        with self.changed:
            self.is_held = False
            self.changed.notify_all()

    def text(self):
        return "".join(self.said)

    def hold_at(self, pattern):
        """Waits until a tool or a rank has said a line with this pattern. Then nobody reads until
        the next call that waits, so the ranks of a node stand still when they have filled its pipe:
        they make about 1000 steps."""
        self.wait_for(pattern, is_held=True)

    def wait_for(self, *patterns, is_held=False):
        """Waits until each of these patterns is in a line that a tool or a rank has said."""
        self.go_on()
        missing, seen = set(patterns), 0

        def are_there():
            # A job may say ten thousands of lines, so each line is looked at once.
            nonlocal seen
            new, seen = "".join(self.said[seen:]), len(self.said)
            missing.difference_update([pattern for pattern in missing if re.search(pattern, new)])
            self.is_held = is_held and not missing
            return not missing

        with self.changed:
            is_there = self.changed.wait_for(are_there, END)
        assert is_there, f"nobody has said {sorted(missing)}:\n{self.text()}"

    def pid(self, rank):
        return int(re.findall(rf"rank {rank} is process (\d+)", self.text())[-1])

    def ends(self, *hosts):
        """The tools of these hosts end well, and nothing is left to read."""
        self.go_on()
        for host in hosts:
            try:
                code = self.tools[host].wait(END)
            except subprocess.TimeoutExpired:
                code = f"none after {END} s"
            assert code == 0, f"exit code {code} on {host}:\n{self.text()}"

    def done(self):
        """Returns the ranks that are done, with the number of replicas. A store that is a process
        of its own does not end, so neither does its output."""
        for tool, reader in self.readers:
            if tool.poll() is not None:
                reader.join(PATIENCE)
        return {int(rank): int(replicas) for rank, replicas in re.findall(r"rank (\d+) is done with (\d+) replicas", self.text())}

    def serve(self, **variables):
        """Starts a store of its own on a host of its own. Gives the options that name it."""
        address = self.hosts["store"].ipv4
        self.start("store", TOOL, "store", "--listen", f"{address}:{PORT}", **variables)
        self.wait_for("store: serving ")
        return "--store", f"{address}:{PORT}"


@pytest.fixture
def lab(programs, tmp_path):
    with Nodes(programs.c("examples/recover.c", name="recover-example", link=LINK), tmp_path / "lab") as lab:
        yield lab
        print(lab.text())


ENDPOINT = ("--rdzv-endpoint", f"alpha:{PORT}")
FULL = {rank: 3 for rank in range(6)}
# Each node has a relay, but for the one that serves the store.
RELAYS = {"DM_STORE_RELAY_FROM": 2}


def connections_to_the_store(pid):
    """How many sockets of a process are connected to the port of the store on some host."""
    own = set()
    for number in os.listdir(f"/proc/{pid}/fd"):
        # The process may have closed it by now.
        with contextlib.suppress(FileNotFoundError):
            own.add(os.readlink(f"/proc/{pid}/fd/{number}"))
    rows = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]]
    return sum(int(row[2].rsplit(":")[-1], 16) == PORT and f"socket:[{row[9]}]" in own for row in rows)


@pytest.mark.parametrize("relays", [False, True], ids=["direct", "relays"])
def test_a_rank_comes_back_on_a_node_without_the_store(lab, relays):
    lab.variables = RELAYS if relays else {}
    lab.nodes(*ENDPOINT)
    lab.hold_at("rank 4 is at step 20")
    assert connections_to_the_store(lab.pid(0)) > 0
    assert (connections_to_the_store(lab.pid(4)) == 0) == relays
    os.kill(lab.pid(4), signal.SIGKILL)
    lab.wait_for("rank 4 came back in epoch 1")
    lab.ends(*NODES)
    assert lab.done() == FULL, lab.text()
    assert re.search(r"gamma: .*rank 4 .* on gamma was killed by signal 9 \(SIGKILL\); it starts again \(restart 1 of 3\)", lab.text())


def test_the_ranks_of_a_lost_node_come_back_when_a_node_joins(lab):
    lab.nodes(*ENDPOINT)
    lab.hold_at("rank 5 is at step 20")
    lab.tools["gamma"].kill()
    lab.wait_for(r"node 2 \(gamma\) has gone: its devicemesh run was killed; the job goes on")
    lab.node(2, ENDPOINT)
    lab.wait_for("rank 4 came back", "rank 5 came back")
    lab.ends(*NODES)
    assert lab.done() == FULL, lab.text()


def test_spares_of_the_other_nodes_take_the_places_of_a_lost_node(lab):
    """Each node has a spare, of which the lost node takes one with it. The ranks of beta are 2, 3
    and the spare 7."""
    lab.nodes(*ENDPOINT, *("--spares", 1), spares=3, replace=0)
    lab.hold_at("rank 3 is at step 20")
    lab.tools["beta"].kill()
    lab.wait_for("rank 6 goes on in epoch", "rank 8 goes on in epoch")
    lab.ends("alpha", "gamma")
    assert lab.done() == {rank: 3 for rank in (0, 1, 4, 5, 6, 8)}, lab.text()


@pytest.mark.lengthy
def test_a_silent_host_is_missed_and_the_others_go_on(lab):
    """The store misses the host after half a minute; the ranks miss it in their collectives, after
    two seconds. Most of the time they then wait for a process in its place, because ranks that
    make steps take the processors from other tests."""
    lab.nodes(*ENDPOINT, steps=200000, replace=20000)
    lab.wait_for("rank 2 is at step 20")
    lab.cut("beta")
    lab.wait_for(r"node 1 \(beta\) has gone: its host or the network is down; the job goes on", "rank 0 goes on in epoch", "rank 4 goes on in epoch")
    lab.tools["alpha"].terminate()
    assert lab.tools["gamma"].wait(END) == 143, lab.text()


@pytest.mark.parametrize("lost, relays", [(0, False), (0, True), (2, False)])
def test_with_a_store_of_its_own_no_node_is_needed(lab, lost, relays):
    lab.variables = RELAYS if relays else {}
    where = lab.serve()
    lab.nodes(*where)
    lab.hold_at(f"rank {2 * lost} is at step 20")
    lab.tools[NODES[lost]].kill()
    lab.wait_for(rf"node {lost} \({NODES[lost]}\) has gone: its devicemesh run was killed; the job goes on")
    lab.node(lost, where)
    lab.wait_for(f"rank {2 * lost} came back", f"rank {2 * lost + 1} came back")
    lab.ends(*NODES)
    assert lab.done() == FULL, lab.text()


@pytest.fixture
def ssh(lab, tmp_path):
    """A function that starts a job on all hosts from the host of the store."""
    try:
        agent = Sshd(lab, NODES, tmp_path).agent
    except Unavailable as why:
        pytest.skip(str(why))

    def start(*options, steps=1500, replace=0):
        # The program's ranks must know the hosts apart, and a host has no variable of its own.
        wrapper = tmp_path / "rank"
        wrapper.write_text(f'#!/bin/sh\nexport {HOST}=$(hostname)\nexec "$@"\n')
        wrapper.chmod(0o755)
        command = (TOOL, "run", "--rsh-agent", agent, "--hosts", ",".join(NODES), "-n", 2, "--failure-grace", 5, "--grace-period", 5, *HEALS, *options)
        lab.start("store", *command, "--", wrapper, lab.program, steps, 0, replace)

    return start


def tools_of_hosts(lab, rank):
    """The process of the `devicemesh run` that has started a rank."""
    keeper = int(open(f"/proc/{lab.pid(rank)}/stat").read().split()[3])
    return int(open(f"/proc/{keeper}/stat").read().split()[3])


def test_a_rank_comes_back_on_a_host(lab, ssh):
    ssh(replace=REPLACE)
    lab.wait_for("rank 4 is at step 20")
    os.kill(lab.pid(4), signal.SIGKILL)
    lab.wait_for("rank 4 came back in epoch 1")
    lab.ends("store")
    assert lab.done() == FULL, lab.text()


@pytest.mark.parametrize("lost, has_service", [(1, False), (0, True)], ids=["a host", "the first host, with a store of its own"])
def test_the_ranks_of_a_lost_host_start_again(lab, ssh, lost, has_service, tmp_path):
    options = lab.serve() if has_service else ()
    ssh(*options, replace=REPLACE)
    lab.wait_for(f"rank {2 * lost} is at step 20")
    os.kill(tools_of_hosts(lab, 2 * lost), signal.SIGKILL)
    gone = rf"node {lost} \({NODES[lost]}\) has gone: its devicemesh run was killed; the job goes on without its ranks"
    lab.wait_for(rf"{gone} until they start again there \(restart 1 of 3\)\n")
    lab.wait_for(f"rank {2 * lost} came back in epoch 1", f"rank {2 * lost + 1} came back in epoch 1")
    lab.ends("store")
    assert lab.done() == FULL, lab.text()
    assert len(re.findall("has gone", lab.text())) == 1, lab.text()


@pytest.mark.long
@pytest.mark.lengthy
def test_a_host_that_is_out_of_reach_comes_back(lab, ssh):
    """The network to gamma is cut, which the store notices after half a minute. The tries to reach
    the host fail until the network is there again. The other ranks do not wait for a replacement,
    so the first of the two that come back may wait in the world for the second one."""
    ssh(steps=200000)
    lab.wait_for("rank 4 is at step 20")
    lab.cut("gamma")
    lab.wait_for(r"node 2 \(gamma\) has gone: .*; the job goes on without its ranks until they start again there \(restart 1 of 3\)\n")
    lab.wait_for(r"node 2 \(gamma\): ssh ended with code 255: .*; the next try follows after 1 s\n")
    lab.heal("gamma")
    again = r"(came back in epoch|goes on in epoch \d+ with 0 lost and 2 joined)"
    lab.wait_for(f"rank 4 {again}", f"rank 5 {again}")
    lab.tools["store"].terminate()
    assert lab.tools["store"].wait(END) == 143, lab.text()


def test_the_job_ends_with_the_host_of_the_store(lab, ssh):
    ssh()
    lab.wait_for("rank 0 is at step 20")
    os.kill(tools_of_hosts(lab, 0), signal.SIGKILL)
    assert lab.tools["store"].wait(END) == 1, lab.text()
    lab.done()
    assert "goes on without" not in lab.text() and re.search(r"node 0 \(alpha\) has gone", lab.text()), lab.text()


def test_a_host_whose_connection_ends_does_not_end_the_others(lab, ssh):
    """The node there loses its starter, so it ends its ranks, and says nothing to the others.
    Another one takes its place."""
    ssh(replace=REPLACE)
    lab.wait_for("rank 4 is at step 20")
    pid = tools_of_hosts(lab, 4)
    # The ssh to gamma is a process of the host of the store.
    # Other tests may have a host of that name at the same time.
    found = [one for one in marked(os.environ[MARK]) if is_ssh_to("gamma", one)]
    assert len(found) == 1, found
    os.kill(found[0], signal.SIGKILL)
    lab.wait_for(r"node 2 \(gamma\) has gone: .*; the job goes on without its ranks until they start again there \(restart 1 of 3\)\n")
    lab.wait_for("rank 4 came back", "rank 5 came back")
    lab.ends("store")
    assert lab.done() == FULL, lab.text()
    wait_until(lambda: gone(pid), "the node on gamma has ended", PATIENCE)


def is_ssh_to(host, pid):
    try:
        words = open(f"/proc/{pid}/cmdline").read().split("\0")
    except OSError:
        return False
    return words[0] == "ssh" and host in words
