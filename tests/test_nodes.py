"""`devicemesh run` on several nodes: how they meet, who is which, and how a job ends on all of
them for one cause. Most cases are several tools on this host; those of `hosts` are on hosts of
tests/netlab.py, and are skipped where this machine cannot make any."""

import os
import re
import signal
import socket
import socketserver
import subprocess
import threading
import time

import pytest

from netlab import Lab
from support.paths import TOOL
from support.processes import environment, kill_all, run
from support.tool import HERE, PATIENCE, SLEEP, all_gone, ends, says, without_waits


class Node:
    """A running tool."""

    def __init__(self, endpoint, options, script, spawn=subprocess.Popen, **variables):
        command = [str(TOOL), "run", "--rdzv-endpoint", endpoint, "--failure-grace", "1", *options.split(), "--", "/bin/sh", "-c", script]
        self.process = spawn(command, env=environment(without=["NO_COLOR", "DM_STORE_SECRET"], **variables),
                             stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def ends(self, code, *said):
        """Waits for the end. It must have this exit code and have written all of `said`; gives both
        outputs."""
        out, self.err = ends(self.process, code)
        self.has_said(*said)
        return out, self.err

    def has_said(self, *said):
        for text in said:
            assert re.search(text, self.err), f"{text!r} is not in:\n{self.err}"

    def line(self):
        return self.process.stdout.readline().strip()

    def signal(self, number):
        self.process.send_signal(number)


@pytest.fixture
def node():
    """Starts a node; it ends with the test."""
    started = []

    def start(*arguments, **how):
        started.append(Node(*arguments, **how))
        return started[-1]

    yield start
    kill_all([one.process for one in started])


@pytest.fixture
def endpoint(free_port):
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def together(node, free_port):
    """Starts nodes with these options on this host."""
    def start(options, script=SLEEP, endpoint=None, **variables):
        endpoint = endpoint or f"127.0.0.1:{free_port()}"
        return [node(endpoint, each, script, **variables) for each in options]
    return start


class Talker(socketserver.BaseRequestHandler):
    """Answers as a mail server does."""

    def handle(self):
        self.request.sendall(b"220 mail.example ESMTP\r\n")
        self.request.recv(1000)


def numbered(nodes, ranks, more=""):
    """The options of that many nodes with so many ranks each."""
    return [f"--nnodes {nodes} --node-rank {node} -n {ranks} {more}" for node in range(nodes)]


def causes(outputs):
    """The lines that name the cause, without what differs from node to node."""
    first = [without_waits(err)[0] for _, err in outputs]
    return {re.sub(r"(; .* (SIGTERM|still)|, passed on).*", "", line) for line in first}


ENVIRONMENT = "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK $GROUP_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT $TORCHELASTIC_RUN_ID"


def test_nodes_of_different_sizes(together, endpoint):
    nodes = together([f"--nnodes 3 --node-rank {node} -n {node + 1} --rdzv-id job" for node in (2, 0, 1)], ENVIRONMENT, endpoint)
    lines = sorted(line for node in nodes for line in node.ends(0)[0].splitlines())
    places = [(0, 0, 1, 0), (1, 0, 2, 1), (2, 1, 2, 1), (3, 0, 3, 2), (4, 1, 3, 2), (5, 2, 3, 2)]
    assert lines == [f"{rank} 6 {local} {size} {node} 3 {endpoint} job" for rank, local, size, node in places]


def test_numbered_by_arrival_where_nothing_is_said(together):
    nodes = together(["--nnodes 4 -n 1", "--nnodes 4 -n 1 --node-rank 1", "--nnodes 4 -n 1", "--nnodes 4 -n 1"],
                     "echo $RANK $GROUP_RANK $TORCHELASTIC_RUN_ID")
    lines = [node.ends(0)[0].split() for node in nodes]
    assert sorted(line[:2] for line in lines) == [[str(rank)] * 2 for rank in range(4)], lines
    assert lines[1][0] == "1" and len({line[2] for line in lines}) == 1, lines


def test_one_job_after_the_other_at_one_endpoint(together, endpoint):
    codes = (0, 3, 0, 4)
    jobs = []
    for code in codes:
        for node in jobs[-1] if jobs else ():
            node.process.wait(PATIENCE)
        jobs.append(together(["--nnodes 2 -n 1"] * 2, f"exit {code}", endpoint))
    for code, job in zip(codes, jobs):
        for node in job:
            node.ends(code)


def test_the_first_failure_is_the_same_on_all_nodes(together):
    script = f'if [ $RANK = 3 ]; then echo noise; echo "ValueError: nope" >&2; exit 41; fi; {SLEEP}'
    outputs = [
        node.ends(41, rf"rank 3 on {HERE} failed first: exit code 41: ValueError: nope\n$")
        for node in together(numbered(3, 2), script)
    ]
    named = {re.search(r"devicemesh run: (rank 3 \(pid \d+\) on \S+ exited with code 41)", err).group(1) for _, err in outputs}
    assert len(named) == 1, named


def test_a_signal_is_named_and_gives_the_code(together):
    for node in together(numbered(2, 2), f"if [ $RANK = 2 ]; then kill -SEGV $$; fi; {SLEEP}"):
        node.ends(139, rf"rank 2 \(pid \d+\) on {HERE} was killed by signal 11 \(SIGSEGV\)")


@pytest.mark.parametrize("number", [0, 1])
def test_ctrl_c_on_any_node_ends_all(together, number):
    nodes = together(numbered(2, 2), f"echo $$; {SLEEP}")
    pids = [node.line() for node in nodes for _ in range(2)]
    nodes[number].signal(signal.SIGINT)
    for node in nodes:
        node.ends(130, rf"node {number} \({HERE}\): got signal 2 \(SIGINT\), passed on to 2 ranks here")
    all_gone(pids)


@pytest.mark.parametrize("number, said", [(0, rf"node 0 \({HERE}\) has gone, and with it the store at tcp://127.0.0.1:\d+: its devicemesh run was killed; 1 rank here"),
                                          (1, rf"node 1 \({HERE}\) has gone: its devicemesh run was killed; 1 rank here still runs")],
                         ids=["node0", "node1"])
def test_a_killed_tool_ends_all(together, number, said):
    nodes = together(numbered(3, 1), f"echo $$; {SLEEP}")
    pids = [node.line() for node in nodes]
    nodes[number].signal(signal.SIGKILL)
    for index, node in enumerate(nodes):
        node.ends(*((-signal.SIGKILL,) if index == number else (1, said)))
    all_gone(pids)


def test_a_second_signal_ends_all_at_once(together):
    """The first signal leaves the ranks a minute on both nodes, because they ignore it."""
    nodes = together(numbered(2, 1, "--grace-period 60"), "trap '' INT; echo $$; while :; do sleep 0.1; done")
    pids = [node.line() for node in nodes]
    nodes[1].signal(signal.SIGINT)
    says(nodes[0].process, f"node 1 ({HERE}): got signal 2 (SIGINT), passed on to 1 rank here, which is killed in 60 s")
    time.sleep(0.6)  # Signals within half a second are the same wish.
    nodes[1].signal(signal.SIGINT)
    nodes[1].ends(130, r"killed rank 1, which had not ended before a second signal \(SIGINT\)")
    nodes[0].ends(130, "killed rank 0, which had not ended before a second signal at another node")
    all_gone(pids)


def test_a_node_that_is_done_waits_for_the_others(together):
    for node in together(numbered(2, 1), "if [ $RANK = 0 ]; then exit 0; fi; sleep 1; exit 5"):
        node.ends(5, "rank 1 .*exited with code 5")


def test_the_whole_job_has_the_limit_of_any_node(together):
    for node in together(["--nnodes 2 --node-rank 0 -n 1", "--nnodes 2 --node-rank 1 -n 1 --timeout 3s"]):
        node.ends(124, rf"node 1 \({HERE}\): not done after 3 s \(--timeout\)|{HERE}: not done after 3 s")


ONLY_HERE = r"; only this host reaches 127\.0\.0\.1, so nodes on several hosts need another --rdzv-endpoint"


def played_in_time(scene):
    """Plays a scene, which starts nodes of which one must come while another one waits. Gives the
    nodes. Where one has come too late, a node says that nobody serves the store. The machine was
    slow then, and the scene is played again."""
    for _ in range(5):
        nodes = scene()
        for node in nodes:
            node.ends(1)
        if not any("nobody serves tcp://" in node.err for node in nodes):
            break
    return nodes


def test_nodes_that_do_not_come_are_named(together):
    options = [f"--nnodes 4 --node-rank {node} -n 1 --rdzv-timeout 2" for node in (0, 2)]
    for node in played_in_time(lambda: together(options)):
        node.has_said(rf"nodes 1, 3 of 4 did not come to tcp://127.0.0.1:\d+ within 2 s \(--rdzv-timeout\); there are node [02] on \S+ \(pid \d+\), node [02] on .*{ONLY_HERE}\n$")


@pytest.mark.parametrize(
    "options, said",
    [("--nnodes 3 -n 1", r"2 of 3 nodes did not come .* there is one on "),
     ("--nnodes 2 --node-rank 1 -n 1",
      r"nobody serves tcp://127.0.0.1:\d+ after 1 s; node 0 must run on the host that --rdzv-endpoint names"), ],
    ids=["first", "second"])
def test_a_node_that_is_alone_says_who_is_missing(together, options, said):
    (lonely,) = together([f"{options} --rdzv-timeout 1s"])
    lonely.ends(1, said)


PID = rf"{HERE} \(pid \d+\)"


@pytest.mark.parametrize(
    "options, said",
    [(["--nnodes 2 -n 1", "--nnodes 3 -n 1"], rf"{PID} has --nnodes [23], {PID} has --nnodes [23]: say the same"),
     (["--nnodes 3 --node-rank 0 -n 1", "--nnodes 3 --node-rank 1 -n 1", "--nnodes 3 --node-rank 1 -n 1"
       ], rf"{PID} and {PID} both have --node-rank 1"),
     (["--nnodes 3 --node-rank 0 -n 1", "--nnodes 3 --node-rank 0 -n 1"], rf"{PID} and {PID} both have --node-rank 0"), ],
    ids=["nnodes", "node-rank 1", "node-rank 0"])
def test_nodes_that_do_not_fit_are_named(together, options, said):
    outputs = [node.ends(1, said) for node in together(options)]
    assert len(causes(outputs)) == 1, outputs


def job(script, nodes):
    return rf"the job `/bin/sh -c '{script}'` of user \S+ \({nodes}\)"


@pytest.mark.parametrize("options, script, said", [
    ("--nnodes 2 -n 1", "exit 7", "their arguments differ.*give both the same --rdzv-id"),
    ("--nnodes 2 -n 1 --rdzv-id two", "exit 0", 'their --rdzv-id are none and "two"'),
    ("-n 4", "exit 7", "their arguments differ")], ids=["arguments", "rdzv-id", "one node"])
def test_a_stranger_is_refused_and_the_job_goes_on(node, endpoint, options, script, said):
    first = node(endpoint, "--nnodes 2 -n 1", "exit 0")
    says(first.process, "waiting for 1 of 2 nodes; there is one on")
    shape = "1 node" if options == "-n 4" else "2 nodes"
    both = rf"tcp://{endpoint} serves {job('exit 0', '2 nodes')}, started \d+ s ago on {PID}, while this is {job(script, shape)} on {PID}: "
    node(endpoint, options, script).ends(1, both + said)
    node(endpoint, "--nnodes 2 -n 1", "exit 0").ends(0)
    first.ends(0, "refused a node of another job: " + both)


def test_a_job_that_waits_in_vain_repeats_whom_it_refused(node, endpoint):
    """On a busy machine the stranger may come when the job has ended. It waits for a second node
    itself then, and another job is tried."""
    for _ in range(5):
        first = node(endpoint, "--nnodes 2 -n 1 --rdzv-timeout 3", "exit 0")
        says(first.process, "waiting for 1 of 2 nodes")
        stranger = node(endpoint, "--nnodes 2 -n 1 --rdzv-timeout 3", "exit 7")
        stranger.ends(1)
        if "1 of 2 nodes did not come" not in stranger.err:
            break
        first.ends(1)
    stranger.has_said("their arguments differ")
    first.ends(1, r"1 of 2 nodes did not come to .* within 3 s .*; refused a node of another job: .*their arguments differ.*\n$")


def test_one_id_joins_different_arguments(node, endpoint):
    nodes = [node(endpoint, "--nnodes 2 -n 1 --rdzv-id job", script) for script in ("echo one $WORLD_SIZE", "echo two $WORLD_SIZE")]
    assert [one.ends(0)[0] for one in nodes] == ["one 2\n", "two 2\n"]


def test_a_job_of_one_node_refuses_others_at_its_endpoint(node, endpoint):
    first = node(endpoint, "-n 1", f"echo $MASTER_PORT; {SLEEP}")
    assert first.line() == endpoint.split(":")[1]
    serves = rf"tcp://{endpoint} serves the job `.*` of user \S+ \(1 node\), started \d+ s ago on {PID}"
    node(endpoint, "-n 4", "exit 0").ends(1, serves + ", while this is the job")
    node(endpoint, "-n 1", f"echo $MASTER_PORT; {SLEEP}").ends(1, serves + ", which has its node already")
    first.signal(signal.SIGTERM)
    out, err = first.ends(143, r"devicemesh run: got signal 15 \(SIGTERM\), passed on to 1 rank, which is killed in 30 s; a second signal kills at once\n")


@pytest.mark.parametrize("options", ["-n 1", "-n 1 --nnodes 2 --node-rank 0", "-n 1 --nnodes 2"])
def test_a_port_that_another_program_has_is_told_at_once(together, options):
    """The program gives no answer. A node that waits for one would wait for 10 minutes."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        (alone,) = together([options], "exit 0", f"127.0.0.1:{port}")
        alone.ends(1, rf"^devicemesh run: port {port} of {HERE} is in use by `.*` \(pid {os.getpid()}\), so the job's store cannot be served at "
                      rf"tcp://127.0.0.1:{port} \(that is no devicemesh run\): choose another port with --rdzv-endpoint\n")


def test_a_server_of_another_kind_is_named(together):
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Talker) as other:
        port = other.server_address[1]
        endpoint = f"127.0.0.1:{port}"
        threading.Thread(target=other.serve_forever, args=(0.05,), daemon=True).start()
        try:
            first, second = together(numbered(2, 1), "exit 0", endpoint)
            first.ends(1, rf"port {port} of {HERE} is in use by `.*` \(pid {os.getpid()}\), .* \(that is no devicemesh run\)")
            second.ends(1, rf"what listens at tcp://{endpoint} is no store: choose another port")
        finally:
            other.shutdown()


def test_a_name_without_an_address_is_an_error(together):
    (lost,) = together(["--nnodes 2 -n 1 --rdzv-timeout 3"], "exit 0", "no-host.invalid:29400")
    lost.ends(1, r"waiting for the name no-host.invalid to get an address \(.*\); \d s left",
              rf"the name no-host.invalid has no address on {HERE} \(.*; \d tries in \d s\): check --rdzv-endpoint")


def test_the_last_try_of_a_name_does_not_hide_the_answer(node):
    """The end of the wait cuts off the second try."""
    node("no-such-host.invalid:29400", "--nnodes 2 -n 1 --rdzv-timeout 1.01s", "exit 0").ends(1, r"has no address on \S+ \(failed to lookup address")


def test_a_node_that_waits_says_for_whom(together):
    # A node says it after half a second. On a busy machine the other one may come later than that.
    both = r"node 1 of 3; there are node [02] on \S+ \(pid \d+\), node [02] on \S+ \(pid \d+\)"
    alone = (r"nodes 1, 2 of 3; there is node 0 on \S+ \(pid \d+\)", r"node 0 to serve \S+ \(.*\)")
    options = [f"--nnodes 3 --node-rank {node} -n 1 --rdzv-timeout 3" for node in (0, 2)]
    for node, other in zip(played_in_time(lambda: together(options)), alone):
        node.has_said(rf"waiting for ({both}|{other}); [012] s left", "node 1 of 3 did not come")


def test_a_node_that_cannot_connect_says_so(together):
    (second,) = together(["--nnodes 2 --node-rank 1 -n 1 --rdzv-timeout 3"])
    second.ends(1, rf"waiting for node 0 to serve tcp://127\.0\.0\.1:\d+ \(Connection refused.*\); [012] s left \(--rdzv-timeout\){ONLY_HERE}\n",
                rf"nobody serves tcp://127\.0\.0\.1:\d+ after 3 s; node 0 must run on the host that --rdzv-endpoint names, .*{ONLY_HERE}\n$")


def test_one_too_many_leaves_the_job_alone(together, endpoint):
    nodes = together(["--nnodes 2 -n 1"] * 2, f"echo $$; {SLEEP}", endpoint)
    for node in nodes:
        node.line()
    (late,) = together(["--nnodes 2 -n 1"], f"echo $$; {SLEEP}", endpoint)
    late.ends(1, r"has its 2 nodes already \(one on .* choose another port")
    assert all(node.process.poll() is None for node in nodes)
    nodes[1].signal(signal.SIGTERM)
    for node in nodes:
        node.ends(143)


def test_a_program_that_one_node_lacks_ends_all(node, endpoint):
    first = node(endpoint, "--nnodes 2 --node-rank 0 -n 1 --rdzv-id job", SLEEP)
    run(TOOL, "run", "--rdzv-endpoint", endpoint, "--rdzv-id", "job", "--nnodes", 2, "-n", 1, "--", "/nonexistent/program", code=127, timeout=PATIENCE)
    first.ends(127, rf"node 1 \({HERE}\): cannot start /nonexistent/program as rank 1: ")


def test_who_has_the_secret_joins(together):
    for node in together(numbered(2, 1), "exit 0", DM_STORE_SECRET="hush"):
        node.ends(0)


def test_who_lacks_the_secret_does_not_join(node, endpoint):
    options = [f"--nnodes 2 --node-rank {number} -n 1 --rdzv-timeout 5s" for number in (0, 1)]
    right, wrong = played_in_time(lambda: [node(endpoint, options[0], "exit 0", DM_STORE_SECRET="hush"), node(endpoint, options[1], "exit 0")])
    wrong.has_said("DM_STORE_SECRET")
    right.has_said("node 1 of 2 did not come")


@pytest.mark.parametrize("first, second, why", [
    ({"DM_STORE_SECRET": "hush"}, {}, "it has no DM_STORE_SECRET and the store has one"),
    ({}, {"DM_STORE_SECRET": "hush"}, "it has a DM_STORE_SECRET and the store has none"),
    ({"DM_STORE_SECRET": "hush"}, {"DM_STORE_SECRET": "lush"}, "its DM_STORE_SECRET is another one than the store's")], ids=["none", "one", "another"])
def test_a_node_that_waits_says_who_was_refused_for_a_secret(node, endpoint, first, second, why):
    """It says so at once, and again at the end, with all that were refused since then. On a busy
    machine one may come when the node does not wait any more. Then another job is tried."""
    refused = rf"the store refused {{}}, the last one from 127.0.0.1, because {why}: give all nodes the same DM_STORE_SECRET, or none\n"

    def scene():
        waiting = node(endpoint, "--nnodes 2 --node-rank 0 -n 1 --rdzv-timeout 6s", "exit 0", **first)
        says(waiting.process, "waiting for node 1 of 2")
        strangers = []
        for attempt in range(2):
            strangers.append(node(endpoint, "--nnodes 2 --node-rank 1 -n 1 --rdzv-timeout 3s", "exit 0", **second))
            _, err = strangers[-1].ends(1)
            if attempt == 0 and "nobody serves tcp://" not in err:
                line = says(waiting.process, "the store refused")
                assert re.fullmatch("devicemesh run: " + refused.format("1 connection"), line), line
        return waiting, strangers

    for _ in range(5):
        waiting, strangers = scene()
        if not any("nobody serves tcp://" in stranger.err for stranger in strangers):
            break
        waiting.ends(1)
    for stranger in strangers:
        stranger.has_said("DM_STORE_SECRET")
    waiting.ends(1, r"^devicemesh run: node 1 of 2 did not come to .*; " + refused.format("2 connections"))


@pytest.mark.parametrize("options, said", [
    ("--nnodes 2 -n 1", "needs --rdzv-endpoint HOST:PORT"), ("--nnodes 2 --node-rank 2 -n 1 --rdzv-endpoint a:1", "the nodes are 0 to 1"),
    ("-n 1 --rdzv-endpoint tcp://a:1", "without tcp://"), ("-n many", "cpu, gpu or auto")])
def test_wrong_command_lines_say_what_to_do(options, said):
    assert said in run(TOOL, "run", *options.split(), "--", "true", code=2, timeout=PATIENCE).stderr


FAILING = ["-n", "1", "--", "/bin/sh", "-c", "exit 3"]


@pytest.mark.parametrize("variables, when, colourful", [
    ({}, "auto", True), ({"NO_COLOR": "1"}, "auto", False), ({"TERM": "dumb"}, "auto", False), ({"NO_COLOR": "1"}, "always", True)])
def test_colours_on_a_terminal(variables, when, colourful):
    ours, theirs = os.openpty()
    done = subprocess.run([TOOL, "run", "--color", when, *FAILING], stderr=theirs,
                          env=environment(without=["NO_COLOR"], **{"TERM": "xterm", **variables}), timeout=PATIENCE)
    os.close(theirs)
    said = os.read(ours, 4096)
    os.close(ours)
    assert done.returncode == 3 and b"exited with code 3" in said and (b"\x1b[" in said) == colourful, said


def test_no_colours_in_a_pipe():
    assert "\x1b[" not in run(TOOL, "run", *FAILING, code=3, timeout=PATIENCE).stderr


@pytest.fixture
def lab(tmp_path, node):
    """Starts a node for each of the options on a host of its own. Gives the hosts and the nodes."""
    labs = []

    def start(script, options):
        labs.append(Lab(["alpha", "beta", "gamma"][:len(options)], tmp_path).__enter__())
        hosts = labs[0]
        return hosts, [node("alpha:29400", each, script, spawn=lambda command, name=name, **more: hosts.spawn(name, command, **more))
                       for name, each in zip(hosts.hosts, options)]

    yield start
    for hosts in labs:
        hosts.__exit__()


def test_hosts_meet_by_name(lab):
    _, nodes = lab("echo $RANK $WORLD_SIZE $MASTER_ADDR", numbered(3, 2))
    lines = [line for node in nodes for line in node.ends(0)[0].splitlines()]
    assert sorted(lines) == [f"{rank} 6 alpha" for rank in range(6)], lines


def test_hosts_compute_together(lab, programs):
    """A mesh of device type cpu over three hosts that have only the network in common."""
    _, nodes = lab(f"DM_HOSTCCL_HOST=$(hostname) exec {programs.c('examples/hello_mesh.c', name='hello-on-hosts')}", numbered(3, 2))
    lines = [line for node in nodes for line in node.ends(0)[0].splitlines()]
    assert "rank 5 at (dp=2, tp=1): sum over tp 9, over dp 9" in lines, lines


def test_hosts_name_the_host_that_failed(lab):
    _, nodes = lab(f'if [ $RANK = 2 ]; then echo "out of memory" >&2; exit 6; fi; {SLEEP}',
                   ["--nnodes 3 -n 2 --node-rank 0", "--nnodes 3 -n 1 --node-rank 1", "--nnodes 3 -n 1 --node-rank 2"])
    for node in nodes:
        node.ends(6, r"rank 2 on beta failed first: exit code 6: out of memory\n$")


def test_hosts_with_one_number_name_each_other(tmp_path, node):
    """The second host cannot serve the store of the endpoint, so it tells the first one in that
    store."""
    with Lab(["alpha", "beta"], tmp_path) as hosts:
        nodes = []
        for name in hosts.hosts:
            nodes.append(node("alpha:29400", "--nnodes 2 -n 1 --node-rank 0", "exit 0",
                              spawn=lambda command, name=name, **more: hosts.spawn(name, command, **more)))
            if name == "alpha":
                says(nodes[0].process, "waiting for node 1 of 2; there is node 0 on alpha")
        outputs = [node.ends(1) for node in nodes]
    pids = r"(alpha \(pid \d+\) and beta|beta \(pid \d+\) and alpha) \(pid \d+\)"
    said = rf"devicemesh run: {pids} both have --node-rank 0: number the nodes 0 to 1, or leave --node-rank out"
    first, second = (without_waits(err) for _, err in outputs)
    assert len(first) == 1 and re.fullmatch(said, first[0]) and first == second, outputs


def test_a_killed_tool_of_another_host_is_told_from_a_lost_host(lab):
    hosts, nodes = lab(f"echo $$ $PPID; {SLEEP}", numbered(2, 1))
    pids = [pid for node in nodes for pid in node.line().split()]
    os.kill(int(pids[3]), signal.SIGKILL)
    nodes[0].ends(1, r"node 1 \(beta\) has gone: its devicemesh run was killed; ")
    nodes[1].ends(137)
    all_gone(pids)


@pytest.mark.lengthy
def test_hosts_that_fall_silent_are_missed(lab):
    hosts, nodes = lab(f"echo $$; {SLEEP}", numbered(2, 1))
    pids = [node.line() for node in nodes]
    hosts.cut("beta")
    nodes[0].ends(1, r"node 1 \(beta\) has gone: its host or the network is down; ")
    nodes[1].ends(1, r"node 0 \(alpha\) (is out of reach|has gone), and with it the store at tcp://alpha:29400")
    all_gone(pids)


def test_a_name_that_only_its_own_host_reaches_is_told_at_once(tmp_path, node):
    """The default /etc/hosts of Debian gives the name of the host the address 127.0.1.1."""
    with Lab(["alpha", "beta"], tmp_path) as hosts:
        alpha = hosts.hosts["alpha"]
        alpha.names_are("127.0.1.1 alpha")
        alone = node("alpha:29400", "--nnodes 2 --node-rank 0 -n 1 --rdzv-timeout 2", "exit 0",
                     spawn=lambda command, **more: hosts.spawn("alpha", command, **more))
        alone.ends(1, r"^devicemesh run: the name alpha is 127\.0\.1\.1 on alpha \(see /etc/hosts\), which no other host can reach: "
                      r"name an address of this host by --rdzv-endpoint, as 10\.0\.0\.5:29400\n",
                   r"node 1 of 2 did not come to tcp://alpha:29400 \(127\.0\.1\.1\) within 2 s \(--rdzv-timeout\); .*"
                   r"; only this host reaches alpha \(127\.0\.1\.1\), so nodes on several hosts need another --rdzv-endpoint\n$")


def test_hosts_that_cannot_reach_the_name_of_the_first_end_at_once(tmp_path, node):
    """Slurm names both hosts, so the tool knows that not all nodes are on this one."""
    step = {"SLURM_JOB_ID": 7, "SLURM_JOB_NUM_NODES": 2, "SLURM_STEP_ID": 0, "SLURM_STEP_NUM_NODES": 2, "SLURM_STEP_NUM_TASKS": 2, "SLURM_LOCALID": 0,
            "SLURM_STEP_NODELIST": "alpha,beta", "SLURM_JOB_NODELIST": "alpha,beta", "SLURM_NODEID": 0, "SLURM_PROCID": 0}
    with Lab(["alpha", "beta"], tmp_path) as hosts:
        alpha = hosts.hosts["alpha"]
        alpha.names_are("127.0.1.1 alpha", f"{hosts.hosts['beta'].ipv4} beta")
        first = hosts.spawn("alpha", [str(TOOL), "run", "-n1", "--", "true"], env=environment(without=["DM_STORE"], **step),
                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        _, err = ends(first, 1)
    assert len(err.splitlines()) == 1, err
    assert re.match(r"devicemesh run: the name alpha is 127\.0\.1\.1 on alpha \(see /etc/hosts\), which no other host can reach: name an address", err), err
