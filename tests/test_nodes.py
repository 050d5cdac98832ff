#!/usr/bin/env python3
"""`devicemesh run` on several nodes: how they meet, who is which, and how a job ends on all of them for one cause. Most cases are several tools on this host;
those of `hosts` are on hosts of tests/netlab.py, and are left out, visibly, where this machine cannot make any.

`test_nodes.py NAME` runs one case.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from netlab import Lab, Unavailable

ROOT = Path(os.environ.get("DM_ROOT", Path(__file__).resolve().parent.parent))
TOOL = Path(os.environ.get("DM_LIB_DIR", ROOT / "target/release")) / "devicemesh"
PATIENCE = 60
SLEEP = "exec sleep 1000"
HERE = socket.gethostname()
CASES = []


def case(body):
    CASES.append(body)
    return body


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Node:
    """A running tool."""

    all = []

    def __init__(self, endpoint, options, script, spawn=subprocess.Popen, **variables):
        command = [str(TOOL), "run", "--rdzv-endpoint", endpoint, "--grace-period", "1", *options.split(), "--", "/bin/sh", "-c", script]
        clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "NO_COLOR", "DM_STORE_SECRET")}
        self.process = spawn(command, env={**clean, **variables}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        Node.all.append(self)

    def ends(self, code, *said):
        """What it wrote, once it has ended so, and said all of this."""
        out, err = self.process.communicate(timeout=PATIENCE)
        assert self.process.returncode == code, f"exit code {self.process.returncode}, not {code}:\n{out}{err}"
        for text in said:
            assert re.search(text, err), f"{text!r} is not in:\n{err}"
        return out, err

    def line(self):
        return self.process.stdout.readline().strip()

    def signal(self, number):
        self.process.send_signal(number)


def together(options, script=SLEEP, endpoint=None, **variables):
    """Nodes with these options on this host."""
    endpoint = endpoint or f"127.0.0.1:{free_port()}"
    return [Node(endpoint, each, script, **variables) for each in options]


def causes(outputs):
    """The lines that name the cause, without what differs from node to node."""
    return {re.sub(r"(; (ending|its last)|, passed on).*", "", err.splitlines()[0]) for _, err in outputs}


def gone(pid):
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


ENVIRONMENT = "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK $GROUP_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT $TORCHELASTIC_RUN_ID"


@case
def nodes_of_different_sizes():
    endpoint = f"127.0.0.1:{free_port()}"
    nodes = together([f"--nnodes 3 --node-rank {node} -n {node + 1} --rdzv-id job" for node in (2, 0, 1)], ENVIRONMENT, endpoint)
    lines = sorted(line for node in nodes for line in node.ends(0)[0].splitlines())
    places = [(0, 0, 1, 0), (1, 0, 2, 1), (2, 1, 2, 1), (3, 0, 3, 2), (4, 1, 3, 2), (5, 2, 3, 2)]
    expected = [f"{rank} 6 {local} {size} {node} 3 {endpoint} job" for rank, local, size, node in places]
    assert lines == expected, lines


@case
def numbered_by_arrival_where_nothing_is_said():
    nodes = together(["--nnodes 4 -n 1", "--nnodes 4 -n 1 --node-rank 1", "--nnodes 4 -n 1", "--nnodes 4 -n 1"], "echo $RANK $GROUP_RANK $TORCHELASTIC_RUN_ID")
    lines = [node.ends(0)[0].split() for node in nodes]
    assert sorted(line[:2] for line in lines) == [[str(rank)] * 2 for rank in range(4)], lines
    assert lines[1][0] == "1" and len({line[2] for line in lines}) == 1, lines


@case
def one_job_after_the_other_at_one_endpoint():
    endpoint = f"127.0.0.1:{free_port()}"
    jobs = [together(["--nnodes 2 -n 1"] * 2, f"exit {code}", endpoint) for code in (0,)]
    for code in (3, 0, 4):
        for node in jobs[-1]:
            node.process.wait(PATIENCE)
        jobs.append(together(["--nnodes 2 -n 1"] * 2, f"exit {code}", endpoint))
    for code, job in zip((0, 3, 0, 4), jobs):
        for node in job:
            node.ends(code)


@case
def the_first_failure_is_the_same_on_all_nodes():
    script = f'if [ $RANK = 3 ]; then echo noise; echo "ValueError: nope" >&2; exit 41; fi; {SLEEP}'
    nodes = together([f"--nnodes 3 --node-rank {node} -n 2" for node in range(3)], script)
    outputs = [node.ends(41, rf"rank 3 on {HERE} failed first: exit code 41; its last output:\n  \| ValueError: nope\n") for node in nodes]
    named = {re.search(r"devicemesh run: (rank 3 \(pid \d+\) on \S+ exited with code 41)", err).group(1) for _, err in outputs}
    assert len(named) == 1, named


@case
def a_signal_is_named_and_gives_the_code():
    nodes = together([f"--nnodes 2 --node-rank {node} -n 2" for node in range(2)], f"if [ $RANK = 2 ]; then kill -SEGV $$; fi; {SLEEP}")
    for node in nodes:
        node.ends(139, rf"rank 2 \(pid \d+\) on {HERE} was killed by signal 11 \(SIGSEGV\)")


@case
def ctrl_c_on_any_node_ends_all():
    for number in (0, 1):
        nodes = together([f"--nnodes 2 --node-rank {node} -n 2" for node in range(2)], f"echo $$; {SLEEP}")
        pids = [node.line() for node in nodes for _ in range(2)]
        nodes[number].signal(signal.SIGINT)
        for node in nodes:
            node.ends(130, rf"node {number} \({HERE}\): got signal 2 \(SIGINT\), passed on to 2 ranks here")
        assert all(map(gone, pids)), pids


@case
def a_killed_tool_ends_all():
    for number, said in ((0, rf"node 0 \({HERE}\) has gone, and with it the store at tcp://127.0.0.1"), (1, rf"node 1 \({HERE}\) has gone: its devicemesh run was killed")):
        nodes = together([f"--nnodes 3 --node-rank {node} -n 1" for node in range(3)], f"echo $$; {SLEEP}")
        pids = [node.line() for node in nodes]
        nodes[number].signal(signal.SIGKILL)
        for index, node in enumerate(nodes):
            node.ends(*((-signal.SIGKILL,) if index == number else (1, said)))
        assert all(map(gone, pids)), pids


@case
def a_node_that_is_done_waits_for_the_others():
    nodes = together([f"--nnodes 2 --node-rank {node} -n 1" for node in range(2)], "if [ $RANK = 0 ]; then exit 0; fi; sleep 1; exit 5")
    for node in nodes:
        node.ends(5, "rank 1 .*exited with code 5")


@case
def the_whole_job_has_the_limit_of_any_node():
    nodes = together(["--nnodes 2 --node-rank 0 -n 1", "--nnodes 2 --node-rank 1 -n 1 --timeout 3s"])
    for node in nodes:
        node.ends(124, rf"node 1 \({HERE}\): not done after 3 s \(--timeout\)|{HERE}: not done after 3 s")


@case
def who_does_not_come_is_named():
    nodes = together([f"--nnodes 4 --node-rank {node} -n 1 --rdzv-timeout 2" for node in (0, 2)])
    for node in nodes:
        node.ends(1, rf"nodes 1, 3 of 4 did not come to tcp://127.0.0.1:\d+ within 2 s \(--rdzv-timeout\); there are node [02] on {HERE} \(pid \d+\), node [02] on ")
    (lonely,) = together(["--nnodes 3 -n 1 --rdzv-timeout 1s"])
    lonely.ends(1, r"2 of 3 nodes did not come .* there is one on ")
    (lonely,) = together(["--nnodes 2 --node-rank 1 -n 1 --rdzv-timeout 1s"])
    lonely.ends(1, r"nobody serves tcp://127.0.0.1:\d+ after 1 s; node 0 must run on the host that --rdzv-endpoint names")


@case
def nodes_that_do_not_fit_are_named():
    pid = rf"{HERE} \(pid \d+\)"
    for options, said in (
        (["--nnodes 2 -n 1", "--nnodes 3 -n 1"], rf"{pid} has --nnodes [23], {pid} has --nnodes [23]: say the same"),
        (["--nnodes 3 --node-rank 0 -n 1", "--nnodes 3 --node-rank 1 -n 1", "--nnodes 3 --node-rank 1 -n 1"], rf"{pid} and {pid} both have --node-rank 1"),
        (["--nnodes 3 --node-rank 0 -n 1", "--nnodes 3 --node-rank 0 -n 1"], rf"{pid} and {pid} both have --node-rank 0"),
        (["--nnodes 2 -n 1 --rdzv-id one", "--nnodes 2 -n 1 --rdzv-id two"], rf'{pid} has --rdzv-id "(one|two)", {pid} has "(one|two)"'),
    ):
        outputs = [node.ends(1, said) for node in together(options)]
        assert len(causes(outputs)) == 1, outputs


@case
def one_too_many_leaves_the_job_alone():
    endpoint = f"127.0.0.1:{free_port()}"
    nodes = together(["--nnodes 2 -n 1"] * 2, f"echo $$; {SLEEP}", endpoint)
    for node in nodes:
        node.line()
    (late,) = together(["--nnodes 2 -n 1"], SLEEP, endpoint)
    late.ends(1, r"has its 2 nodes already \(one on .* choose another port")
    assert all(node.process.poll() is None for node in nodes)
    nodes[1].signal(signal.SIGTERM)
    for node in nodes:
        node.ends(143)


@case
def a_program_that_one_node_lacks_ends_all():
    endpoint = f"127.0.0.1:{free_port()}"
    first = Node(endpoint, "--nnodes 2 --node-rank 0 -n 1", SLEEP)
    command = [TOOL, "run", "--rdzv-endpoint", endpoint, "--nnodes", "2", "-n", "1", "--", "/nonexistent/program"]
    second = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert second.returncode == 127, second
    first.ends(127, rf"node 1 \({HERE}\): cannot start /nonexistent/program as rank 1: ")


@case
def only_who_has_the_secret_joins():
    endpoint = f"127.0.0.1:{free_port()}"
    nodes = [Node(endpoint, f"--nnodes 2 --node-rank {node} -n 1", "exit 0", DM_STORE_SECRET="hush") for node in range(2)]
    for node in nodes:
        node.ends(0)
    right = Node(endpoint, "--nnodes 2 --node-rank 0 -n 1 --rdzv-timeout 5s", "exit 0", DM_STORE_SECRET="hush")
    Node(endpoint, "--nnodes 2 --node-rank 1 -n 1 --rdzv-timeout 5s", "exit 0").ends(1, "DM_STORE_SECRET")
    right.ends(1, "node 1 of 2 did not come")


@case
def wrong_command_lines_say_what_to_do():
    for options, said in (("--nnodes 2 -n 1", "needs --rdzv-endpoint HOST:PORT"), ("--nnodes 2 --node-rank 2 -n 1 --rdzv-endpoint a:1", "the nodes are 0 to 1"),
                          ("-n 1 --rdzv-endpoint tcp://a:1", "without tcp://"), ("-n 1 --log-dir x --prefix", "add --tee"), ("-n many", "cpu, gpu or auto")):
        done = subprocess.run([TOOL, "run", *options.split(), "--", "true"], capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 2 and said in done.stderr, done


@case
def each_rank_has_a_log():
    script = 'echo out $RANK; echo err $RANK >&2; if [ $RANK = 1 ]; then exit 9; fi; sleep 0.2'
    for tee in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder) / "logs/deep"
            command = [TOOL, "run", "-n", "2", "--log-dir", folder, *(("--tee", "--prefix") if tee else ()), "--", "/bin/sh", "-c", script]
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
            assert done.returncode == 9, done
            for rank in range(2):
                assert sorted((folder / f"rank-{rank}.log").read_text().split("\n")) == ["", f"err {rank}", f"out {rank}"]
            assert f"failed first: exit code 9, log in {folder}/rank-1.log; its last output:" in done.stderr and "| err 1" in done.stderr, done.stderr
            assert (done.stdout.count("[rank"), done.stderr.count("[rank")) == ((2, 2) if tee else (0, 0)), done


@case
def colours_are_for_terminals():
    failing = [TOOL, "run", "-n", "1", "--", "/bin/sh", "-c", "exit 3"]
    for variables, when, colourful in (({}, "auto", True), ({"NO_COLOR": "1"}, "auto", False), ({"TERM": "dumb"}, "auto", False), ({"NO_COLOR": "1"}, "always", True)):
        ours, theirs = os.openpty()
        clean = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        done = subprocess.run([*failing[:2], "--color", when, *failing[2:]], stderr=theirs, env={**clean, "TERM": "xterm", **variables}, timeout=PATIENCE)
        os.close(theirs)
        said = os.read(ours, 4096)
        os.close(ours)
        assert done.returncode == 3 and b"exited with code 3" in said and (b"\x1b[" in said) == colourful, (variables, when, said)
    piped = subprocess.run(failing, capture_output=True, timeout=PATIENCE)
    assert b"\x1b[" not in piped.stderr, piped


def lab(script, options, number_of_hosts, during):
    """Nodes on hosts of their own."""
    with tempfile.TemporaryDirectory() as folder, Lab(["alpha", "beta", "gamma"][:number_of_hosts], folder) as hosts:
        nodes = [Node("alpha:29400", each, script, spawn=lambda command, name=name, **more: hosts.spawn(name, command, **more))
                 for name, each in zip(hosts.hosts, options)]
        during(hosts, nodes)


@case
def hosts_meet_by_name():
    def during(_, nodes):
        lines = [line for node in nodes for line in node.ends(0)[0].splitlines()]
        assert sorted(lines) == [f"{rank} 6 alpha" for rank in range(6)], lines
    lab("echo $RANK $WORLD_SIZE $MASTER_ADDR", [f"--nnodes 3 --node-rank {node} -n 2" for node in range(3)], 3, during)


@case
def hosts_name_the_host_that_failed():
    def during(_, nodes):
        for node in nodes:
            node.ends(6, r"rank 2 on beta failed first: exit code 6; its last output:\n  \| out of memory\n")
    lab(f'if [ $RANK = 2 ]; then echo "out of memory" >&2; exit 6; fi; {SLEEP}', ["--nnodes 3 -n 2 --node-rank 0", "--nnodes 3 -n 1 --node-rank 1", "--nnodes 3 -n 1 --node-rank 2"], 3, during)


@case
def hosts_that_fall_silent_are_missed():
    def during(hosts, nodes):
        pids = [node.line() for node in nodes]
        hosts.cut("beta")
        nodes[0].ends(1, r"node 1 \(beta\) has gone: ")
        nodes[1].ends(1, r"node 0 \(alpha\) (is out of reach|has gone), and with it the store at tcp://alpha:29400")
        assert all(map(gone, pids)), pids
    lab(f"echo $$; {SLEEP}", [f"--nnodes 2 --node-rank {node} -n 1" for node in range(2)], 2, during)


def main():
    wanted = sys.argv[1:]
    passed = left_out = 0
    for body in CASES:
        if wanted and body.__name__ not in wanted:
            continue
        began = time.monotonic()
        try:
            body()
            passed += 1
        except Unavailable as why:
            left_out += 1
            print(f"{body.__name__} left out: {why}")
            continue
        finally:
            for node in Node.all:
                if node.process.poll() is None:
                    node.process.kill()
                    node.process.wait()
            Node.all.clear()
        print(f"{body.__name__}: {time.monotonic() - began:.1f} s", flush=True)
    print(f"{passed} passed, {left_out} left out")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
