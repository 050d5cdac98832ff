"""`devicemesh run --store`: nodes that meet in a `devicemesh store`, so that the job needs none of
them. test_lost_nodes.py has real ranks on hosts of their own."""

import os
import re
import signal

import pytest

from support.paths import TOOL
from support.processes import children, environment, is_stopped, run, wait_until
from support.tool import HERE, SLEEP, TOOL_OF_RANK, all_gone, ends, line, says, waiting

QUICK = ("--failure-grace", "0.1", "--grace-period", "1")
# What each rank says of the store and of its job there.
PLACE = "echo $RANK $WORLD_SIZE $MASTER_ADDR:$MASTER_PORT $TORCHELASTIC_USE_AGENT_STORE $DM_STARTED_BY_RUN"


@pytest.fixture
def store(spawn, free_port):
    """A store of its own, at `address`."""
    address = f"127.0.0.1:{free_port()}"

    def serve():
        service = spawn(TOOL, "store", "--listen", address)
        assert service.stdout.readline().startswith(f"serving tcp://{address}"), service.stderr.read()
        service.address, service.again = address, serve
        return service

    return serve()


@pytest.fixture
def nodes(spawn, store):
    """A function that starts nodes of one job, one for each text of options."""
    def begin(*each, script=SLEEP, **variables):
        return [spawn(TOOL, "run", "--store", store.address, "--nnodes", 2, *QUICK, *options.split(), "--", "/bin/sh", "-c", script, **variables) for options in each]

    return begin


def test_one_job_after_the_other(nodes, store):
    """Each has a number, by which the library keeps their keys apart."""
    for number in (1, 2):
        said = sorted(ends(node, 0)[0] for node in nodes("-n 1", "-n 1", script=PLACE))
        assert said == [f"{rank} 2 {store.address} True {store.address}/{number}\n" for rank in (0, 1)]


def test_a_job_after_one_whose_nodes_were_killed(nodes):
    """The keepers end soon after their nodes, and until then the store has the first job."""
    both = nodes("-n 1", "-n 1", script=f"echo $RANK $PPID; {SLEEP}")
    keepers = dict(line(node).split() for node in both)
    assert sorted(keepers) == ["0", "1"]
    for node in both:
        node.kill()
    all_gone(keepers.values())
    for node in nodes("-n 2", "-n 1", script="exit 0"):
        ends(node, 0)


def test_ranks_of_jobs_in_one_store_meet_their_own(nodes, programs):
    hello = programs.c("examples/hello_mesh.c", name="hello-in-store")
    for _ in range(2):
        said = "".join(ends(node, 0)[0] for node in nodes("-n 1", "-n 1", script=f"exec {hello}"))
        assert "rank 1 at " in said, said


def test_the_ranks_of_a_large_job_are_told_of_the_relay_of_their_node(nodes, store):
    for size, is_there in [(None, False), (2, True), (3, False), (0, False)]:
        variables = {} if size is None else {"DM_STORE_RELAY_FROM": size}
        said = [ends(node, 0)[0] for node in nodes("-n 1", "-n 1", script='echo "$DM_STORE_RELAY"', **variables)]
        pattern = rf"tcp://{store.address} 127\.0\.0\.1:\d+ 127\.0\.0\.1\n" if is_there else r"\n"
        assert all(re.fullmatch(pattern, line) for line in said), (size, said)
    (node, ) = nodes("-n 1", DM_STORE_RELAY_FROM="many")
    (other, ) = nodes("-n 1", DM_STORE_RELAY_FROM="many")
    assert "DM_STORE_RELAY_FROM is \"many\", and must be a number of ranks" in ends(node, 2)[1]
    ends(other, 2)


@pytest.mark.parametrize("relay", ["is there", "has gone"])
def test_ranks_meet_with_and_without_their_relay(nodes, programs, relay):
    hello = programs.c("examples/hello_mesh.c", name="hello-in-store")
    gone = 'export DM_STORE_RELAY="tcp://$MASTER_ADDR:$MASTER_PORT 127.0.0.1:1 127.0.0.1"; ' if relay == "has gone" else ""
    said = "".join(ends(node, 0)[0] for node in nodes("-n 2", "-n 2", script=f"{gone}exec {hello}", DM_STORE_RELAY_FROM=2))
    assert all(f"rank {rank} at " in said for rank in range(4)), said


def test_another_job_at_the_same_time_is_refused(nodes, spawn, store, tmp_path):
    script, go = waiting(tmp_path, "$RANK $DM_JOIN")
    both = nodes("-n 1", "-n 1", script=script)
    assert sorted(line(node) for node in both) == ["0", "1"]
    other = spawn(TOOL, "run", "--store", store.address, "-n", 1, "--", "true")
    assert re.search(rf"tcp://{store.address} serves the job .* Two jobs need two `devicemesh store`s at one time", ends(other, 1)[1])
    (more, ) = nodes("-n 1", script=script)
    assert "for another job at the same time start another `devicemesh store`" in ends(more, 1)[1]
    go.touch()
    for node in both:
        ends(node, 0)


def test_a_refused_node_is_told_although_the_last_node_comes_at_the_same_moment(nodes, spawn, store):
    """All come while the node that waits is stopped, so it finds a refused node and the last node
    at once."""
    (first, ) = nodes("--node-rank 0 -n 1", script="echo ready")
    says(first, "waiting for node 1 of 2; there is node 0 on ")
    (keeper, ) = children(first.pid)
    os.kill(keeper, signal.SIGSTOP)
    wait_until(lambda: is_stopped(keeper), "node 0 is stopped")
    for _ in range(2):
        ends(spawn(TOOL, "run", "--store", store.address, "-n", 1, "--", "true"), 1)
    (second, ) = nodes("--node-rank 1 -n 1", script="echo ready")
    assert line(second) == "ready"
    os.kill(keeper, signal.SIGCONT)
    _, err = ends(first, 0)
    assert err.count("devicemesh run: refused a node of another job: ") == 2, err
    ends(second, 0)


@pytest.mark.parametrize("lost", [0, 1])
def test_any_node_may_be_lost_and_replaced(nodes, tmp_path, lost):
    """Twice, and the nodes were started in the order of their numbers, so node 0 has begun the
    job."""
    script, go = waiting(tmp_path, "$RANK $DM_JOIN")
    options = [f"--node-rank {number} -n 1 --restart rank --max-restarts 1" for number in (0, 1)]
    (first, ) = nodes(options[0], script=script)
    says(first, "waiting for ")
    both = [first, *nodes(options[1], script=script)]
    assert [line(node) for node in both] == ["0", "1"]
    for _ in range(2):
        both[lost].kill()
        said = says(both[1 - lost], f"node {lost} ({HERE}) has gone")
        assert said.endswith("its devicemesh run was killed; the job goes on, and a node that joins takes its place: start the same devicemesh run again\n"), said
        (both[lost], ) = nodes(options[lost], script=script)
        assert line(both[lost]) == f"{lost} running"
    go.touch()
    for node in both:
        ends(node, 0)


def test_the_job_starts_again_as_another_job_in_the_store(nodes, tmp_path):
    """Rank 1 fails when rank 0 has printed its line."""
    script = f"{PLACE} $TORCHELASTIC_RESTART_COUNT; test $TORCHELASTIC_RESTART_COUNT = 1 && exit 0; : > {tmp_path}/$RANK; " \
             f"test $RANK = 1 && {{ until test -e {tmp_path}/0; do sleep 0.01; done; exit 3; }}; {SLEEP}"
    ended = [ends(node, 0) for node in nodes("-n 1 --max-restarts 1", "-n 1 --max-restarts 1", script=script)]
    jobs = sorted(said.split("/")[1] for out, _ in ended for said in out.splitlines())
    assert jobs == ["1 0", "1 0", "2 1", "2 1"], ended
    assert all(f"the job had 1 restart, because rank 1 on {HERE} exited with code 3\n" in err for _, err in ended), ended


def test_the_job_ends_with_the_store(nodes, store):
    both = nodes("-n 1", "-n 1", script=f"echo $RANK; {SLEEP}")
    assert sorted(line(node) for node in both) == ["0", "1"]
    store.kill()
    for node in both:
        _, err = ends(node, 1)
        assert f"the store at tcp://{store.address} has gone: its devicemesh store has ended; 1 rank here still runs" in err, err


def test_a_job_starts_again_when_the_store_is_back(nodes, store):
    both = nodes("-n 1 --max-restarts 1", "-n 1 --max-restarts 1", script=f"echo $RANK; test $TORCHELASTIC_RESTART_COUNT = 1 || {SLEEP}")
    assert sorted(line(node) for node in both) == ["0", "1"]
    store.kill()
    for node in both:
        assert "then all ranks start again (restart 1 of 1)" in says(node, "has gone: its devicemesh store has ended")
    says(both[0], f"waiting for a `devicemesh store` to serve tcp://{store.address} (Connection refused")
    store.again()
    for node in both:
        ends(node, 0)


def test_the_variable_names_the_store(spawn, store):
    tool = spawn(TOOL, "run", "-n", 1, "--", "/bin/sh", "-c", PLACE, DM_STORE=f"tcp://{store.address}")
    assert ends(tool, 0)[0] == f"0 1 {store.address} True {store.address}/1\n"
    # A tool that a rank starts has a job of its own.
    nested = f"exec {TOOL} run -n 1 -- sh -c 'echo $MASTER_PORT'"
    tool = spawn(TOOL, "run", "-n", 1, "--", "/bin/sh", "-c", nested, DM_STORE=store.address)
    assert ends(tool, 0)[0] != store.address.split(":")[1] + "\n"
    assert re.search(r"environment variable DM_STORE is \"h:x\": \"x\" is no port", ends(spawn(TOOL, "run", "-n", 1, "--", "true", DM_STORE="h:x"), 2)[1])


def test_what_is_no_store_is_refused(spawn, store, free_port, tmp_path):
    assert "cannot be used with" in ends(spawn(TOOL, "run", "--store", "a", "--rdzv-endpoint", "b", "--", "true"), 2)[1]
    # The store of another `devicemesh run`, which ends with that run.
    script, go = waiting(tmp_path, "$RANK $DM_JOIN")
    port = free_port()
    other = spawn(TOOL, "run", "--rdzv-endpoint", f"127.0.0.1:{port}", "-n", 1, "--", "/bin/sh", "-c", script)
    line(other)
    _, err = ends(spawn(TOOL, "run", "--store", f"127.0.0.1:{port}", "-n", 1, "--", "true"), 1)
    assert f"tcp://127.0.0.1:{port} is the store of a devicemesh run, which ends with it: --store must name a `devicemesh store`" in err, err
    go.touch()
    ends(other, 0)
    _, err = ends(spawn(TOOL, "run", "--store", f"127.0.0.1:{port}", "--rdzv-timeout", "1s", "-n", 1, "--", "true"), 1)
    assert f"nobody serves tcp://127.0.0.1:{port} after 1 s: start `devicemesh store --listen` there" in err, err


def test_the_dry_run_names_the_store(store):
    shown = run(TOOL, "run", "--dry-run", "--store", store.address, "--nnodes", 2, "-n", 1, "--", "true", env=environment(without=["DM_"])).stdout
    assert f"at tcp://{store.address}, which a devicemesh store serves" in " ".join(shown.split()), shown


@pytest.mark.parametrize("lost", [0, 1])
def test_any_host_of_a_list_may_be_lost(spawn, store, tmp_path, lost):
    script, go = waiting(tmp_path, f"$RANK {TOOL_OF_RANK} $DM_JOIN")
    tool = spawn(TOOL, "run", "--hosts", "127.0.0.1,127.0.0.2,127.0.0.3", "--store", store.address, "-n", 1, *QUICK, "--restart", "rank", "--max-restarts", 1, "--",
                 "/bin/sh", "-c", script)
    pids = {}
    while len(pids) < 3:
        text = line(tool)
        assert text, f"the job ended: {pids}"
        rank, pid = text.split()
        pids[int(rank)] = int(pid)
    gone = f"devicemesh run: node {lost} (127.0.0.{lost + 1}) has gone: its devicemesh run was killed by signal 9 (SIGKILL); the job goes on without its ranks"
    os.kill(pids[lost], signal.SIGKILL)
    assert says(tool, "has gone") == f"{gone} until they start again there (restart 1 of 1)\n"
    assert says(tool, "takes the place") == f"devicemesh run: takes the place of node {lost} ({HERE}): its ranks join the running job\n"
    rank, pid, joins = line(tool).split()
    assert (rank, joins) == (str(lost), "running")
    os.kill(int(pid), signal.SIGKILL)
    assert says(tool, "has gone") == f"{gone}; the host has had 1 restart\n"
    go.touch()
    assert ends(tool, 0)[1] == ""


def test_a_list_of_hosts_ends_with_the_store(spawn, store):
    tool = spawn(TOOL, "run", "--hosts", "127.0.0.1,127.0.0.2", "--store", store.address, "-n", 1, *QUICK, "--restart", "rank", "--max-restarts", 1, "--", "/bin/sh", "-c",
                 f"echo $RANK; {SLEEP}")
    assert sorted(line(tool) for _ in range(2)) == ["0", "1"]
    store.kill()
    assert "has gone: its devicemesh store has ended" in ends(tool, 1)[1]
