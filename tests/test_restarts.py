"""`devicemesh run --restart`: what starts again when a rank fails, what goes on meanwhile, what
the tool says of it, and how such a job ends; on one node and on several."""

import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time

import pytest

from support.paths import TOOL
from support.processes import environment, is_stopped, rest_of, run, wait_until
from support.tool import HERE, PATIENCE, SLEEP, TOOL_OF_RANK, ends, line, says, waiting, without_waits

# How often the rank, or the job, was started again.
COUNT = "$TORCHELASTIC_RESTART_COUNT"
# The numbers of a rank, and how it joins.
NUMBERS = f"$RANK $LOCAL_RANK $GROUP_RANK {COUNT} $DM_JOIN"
QUICK = ("--failure-grace", "0.1")
# Adds 1 to a key of the store that the rank was told, and prints the sum.
ADD = """
import os, socket, struct
store = socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
store.sendall(struct.pack("<BIBI", 0, 0x3C85F7CE, 13, os.getpid()))
store.sendall(struct.pack("<BQ5sq", 4, 5, b"/seen", 1))
answer = store.recv(12, socket.MSG_WAITALL)
print(*(os.environ.get(name, "-") for name in ("RANK", "TORCHELASTIC_RESTART_COUNT", "DM_JOIN")), struct.unpack("<q", answer[4:])[0], flush=True)
"""


@pytest.fixture
def start(spawn):
    """Starts a job; its tool ends with the test."""
    def begin(*options, script=SLEEP, program=(), **variables):
        return spawn(TOOL, "run", *options, "--", *(program or ("/bin/sh", "-c", script)), **variables)

    return begin


@pytest.fixture
def nodes(start, free_port):
    """A function that starts nodes of one job on this host, one for each text of options."""
    endpoint = f"127.0.0.1:{free_port()}"

    def begin(*each, script):
        return [start("--rdzv-endpoint", endpoint, "--nnodes", 2, *QUICK, *options.split(), script=script) for options in each]

    begin.port = int(endpoint.partition(":")[2])
    return begin


def failing_after(file):
    """The script of a rank that fails as soon as there is this file. The other ranks get SIGTERM
    soon after that, so what they do before must be done by then."""
    return f"{{ until test -e {file}; do sleep 0.01; done; exit 3; }}"


def last(err):
    return err.splitlines()[-1]


# All ranks again.


def test_the_job_starts_again_in_a_new_store(tmp_path):
    """Rank 1 fails when rank 0 has printed its line."""
    program = f"""{ADD}
import sys, time
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "0":
        open("{tmp_path}/printed", "w").close()
        time.sleep(1000)
    while not os.path.exists("{tmp_path}/printed"):
        time.sleep(0.01)
    sys.exit(3)
"""
    done = run(TOOL, "run", "-n", 2, "--restart", "job", "--max-restarts", 2, *QUICK, "--", sys.executable, "-c", program,
               env=environment(without=["DM_"]), timeout=PATIENCE)
    lines = sorted(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    assert [who for who, _ in lines] == ["0 0 -", "0 1 -", "1 0 -", "1 1 -"], done.stdout
    assert sorted(int(seen) for _, seen in lines) == [1, 1, 2, 2], f"each attempt has an empty store: {done.stdout}"
    assert re.fullmatch(r"devicemesh run: rank 1 \(pid \d+\) exited with code 3; 1 rank still runs and gets SIGTERM in 0.1 s unless it ends before; "
                        r"then all ranks start again \(restart 1 of 2\)", done.stderr.splitlines()[0]), done.stderr
    assert last(done.stderr) == "devicemesh run: all ranks ended well, and the job had 1 restart, because rank 1 exited with code 3"


def test_ranks_meet_again_after_one_was_killed(programs):
    """In the first attempt rank 0 waits for the other in dm_init."""
    hello = programs.c("examples/hello_mesh.c", name="hello-again")
    done = run(TOOL, "run", "-n", 2, "--max-restarts", 1, *QUICK, "--", "/bin/sh", "-c", f"test $RANK{COUNT} = 10 && kill -KILL $$; exec {hello}",
               timeout=PATIENCE)
    assert sorted(done.stdout.splitlines())[0].startswith("rank 0 at "), done.stdout
    assert last(done.stderr).endswith("the job had 1 restart, because rank 1 was killed by signal 9 (SIGKILL)"), done.stderr


def test_a_job_that_fails_again_and_again_ends():
    done = run(TOOL, "run", "-n", 2, "--max-restarts", 2, *QUICK, "--", "/bin/sh", "-c",
               f'test $RANK = 1 || {SLEEP}; echo "error: bad {COUNT}" >&2; exit $((3 + {COUNT}))', code=5, timeout=PATIENCE)
    assert "exited with code 4: error: bad 1; 1 rank still runs and gets SIGTERM in 0.1 s unless it ends before; then all ranks start again after 1 s (restart 2 of 2)\n" in done.stderr, done.stderr
    assert last(done.stderr) == "devicemesh run: rank 1 failed first: exit code 5: error: bad 2; the job had 2 restarts, the first because rank 1 exited with code 3"


def test_nothing_of_an_attempt_outlives_it():
    script = f'test {COUNT} = 0 || {{ kill -0 $(cat left) 2>/dev/null && echo alive; exit 0; }}; setsid -f sh -c "echo \\$\\$ > left; {SLEEP}"; ' \
             'while ! test -s left; do sleep 0.01; done; exit 1'
    folder = os.environ["TMPDIR"]
    done = run(TOOL, "run", "-n", 1, "--max-restarts", 1, "--", "/bin/sh", "-c", f"cd {folder}; {script}", timeout=PATIENCE)
    os.unlink(f"{folder}/left")
    assert done.stdout == "", "the process that the first attempt has left behind has ended"


@pytest.mark.parametrize("unit", ["job", "rank"])
def test_ctrl_c_in_the_pause_ends_the_job(start, unit):
    """On a busy machine the third restart may have begun before the signal. Then another job is
    tried."""
    for _ in range(5):
        tool = start("-n", 1, "--restart", unit, "--max-restarts", 3, script=f"echo {COUNT}; test {COUNT} = 3 && {SLEEP}; exit 3")
        says(tool, "again after 2 s (restart 3 of 3)")
        tool.send_signal(signal.SIGINT)
        out, err = ends(tool, 130)
        if "3\n" not in out:
            break
    whose = "ranks had 2 restarts" if unit == "rank" else "the job had 2 restarts"
    assert last(err) == f"devicemesh run: got signal 2 (SIGINT); {whose}, the first because rank 0 exited with code 3", err


def test_ctrl_c_while_the_ranks_end_for_a_restart_ends_the_job(start, tmp_path):
    tool = start("-n", 2, "--max-restarts", 3, "--failure-grace", "0", script=f"test $RANK = 1 && {failing_after(tmp_path / 'ready')}; trap 'echo asked' TERM; "
                 f"trap 'echo got it; exit 0' INT; echo ready; : > {tmp_path}/ready; while :; do sleep 0.05; done")
    assert line(tool) == "ready"
    assert line(tool) == "asked"
    tool.send_signal(signal.SIGINT)
    out, err = ends(tool, 130)
    assert out == "got it\n" and "got signal 2 (SIGINT), passed on to 1 rank" in err, (out, err)


def test_the_timeout_is_for_all_attempts_together():
    # The second restart follows after 1 s, on a busy machine maybe too late. The third one would
    # follow 2 s after that.
    done = run(TOOL, "run", "-n", 1, "--max-restarts", 100, "--timeout", "2.5s", "--", "/bin/sh", "-c", "exit 3", code=124, timeout=PATIENCE)
    assert re.fullmatch(r"devicemesh run: not done after 2\.5 s \(--timeout\); the job had (1 restart,|2 restarts, the first) because rank 0 exited with code 3",
                        last(done.stderr)), done.stderr


def test_no_restart_without_the_option():
    done = run(TOOL, "run", "-n", 1, "--max-restarts", 0, "--", "/bin/sh", "-c", "exit 3", code=3, timeout=PATIENCE)
    assert re.fullmatch(r"devicemesh run: rank 0 \(pid \d+\) exited with code 3\n", done.stderr), done.stderr


@pytest.mark.parametrize("unit", ["job", "rank"])
def test_no_restart_when_the_reader_has_gone(start, unit):
    tool = start("-n", 1, "--restart", unit, "--max-restarts", 3, script="exec yes")
    assert line(tool) == "y"
    tool.stdout.close()
    _, err = ends(tool, 141)
    assert "start again" not in err and "starts again" not in err, err


@pytest.mark.parametrize("options, said", [
    (("--restart", "rank"), "--max-restarts <N>"),
    (("--restart", "all", "--max-restarts", "1"), "possible values: rank, job"),
    (("--spares", "1", "-n", "2"), "--restart <WHAT>"),
    (("--restart", "job", "--max-restarts", "1", "--spares", "1", "-n", "2"), "--spares does not go with --restart job"),
    (("--restart", "rank", "--max-restarts", "1", "--spares", "1", "-n", "cpu"), "--spares 1 needs the number of the other ranks: -n N"), ])
def test_options_that_do_not_fit_are_refused(options, said):
    assert said in run(TOOL, "run", *options, "--", "true", code=2).stderr


# One rank again.


def test_a_rank_starts_again_alone_and_is_told_to_join(start, tmp_path):
    """Rank 0 runs on, beyond --failure-grace: it waits until rank 1 runs for the second time. Both
    processes of rank 1 are sent to one store."""
    os.mkfifo(tmp_path / "again")
    program = f"""{ADD}
import sys
if os.environ["RANK"] == "0":
    open("{tmp_path}/again").read()
elif os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), 9)
else:
    open("{tmp_path}/again", "w").close()
"""
    tool = start("-n", 2, "--restart", "rank", "--max-restarts", 1, "--failure-grace", 0, program=(sys.executable, "-c", program))
    out, err = ends(tool, 0)
    lines = [line.rsplit(" ", 1) for line in out.splitlines()]
    assert sorted(who for who, _ in lines) == ["0 0 -", "1 0 -", "1 1 running"], out
    assert sorted(int(seen) for _, seen in lines) == [1, 2, 3], f"one store for all: {out}"
    assert re.fullmatch(r"devicemesh run: rank 1 \(pid \d+\) was killed by signal 9 \(SIGKILL\); it starts again \(restart 1 of 1\)\n"
                        r"devicemesh run: all ranks ended well, and ranks had 1 restart, because rank 1 was killed by signal 9 \(SIGKILL\)\n", err), err


def test_a_rank_that_fails_again_and_again_ends_the_job():
    done = run(TOOL, "run", "-n", 2, "--restart", "rank", "--max-restarts", 2, *QUICK, "--", "/bin/sh", "-c",
               f'test $RANK = 1 || {SLEEP}; echo "error: bad {COUNT}" >&2; exit $((3 + {COUNT}))', code=5, timeout=PATIENCE)
    assert "exited with code 3: error: bad 0; it starts again (restart 1 of 2)\n" in done.stderr, done.stderr
    assert "exited with code 4: error: bad 1; it starts again after 1 s (restart 2 of 2)\n" in done.stderr, done.stderr
    assert "exited with code 5; it has had 2 restarts; 1 rank still runs and gets SIGTERM in 0.1 s unless it ends before\n" in done.stderr, done.stderr
    assert last(done.stderr) == "devicemesh run: rank 1 failed first: exit code 5: error: bad 2; ranks had 2 restarts, the first because rank 1 exited with code 3"


def test_each_rank_has_its_own_restarts(tmp_path):
    """No rank ends well before all of them have been started again."""
    again = " && ".join(f"test -e {tmp_path}/{rank}" for rank in range(3))
    done = run(TOOL, "run", "-n", 3, "--restart", "rank", "--max-restarts", 1, "--", "/bin/sh", "-c",
               f'echo $RANK {COUNT}; test {COUNT} = 0 && exit 3; : > {tmp_path}/$RANK; until {again}; do sleep 0.01; done', timeout=PATIENCE)
    assert sorted(done.stdout.splitlines()) == [f"{rank} {count}" for rank in range(3) for count in range(2)], done.stdout
    assert ", and ranks had 3 restarts, the first because rank " in last(done.stderr), done.stderr


def test_a_rank_that_fails_when_another_has_ended_well_ends_the_job(tmp_path):
    pid = tmp_path / "pid"
    script = f"if [ $RANK = 1 ]; then echo $$ > {pid}; exit 0; fi; until test -s {pid}; do sleep 0.01; done; " \
             f"while kill -0 $(cat {pid}) 2>/dev/null; do sleep 0.01; done; exit 4"
    done = run(TOOL, "run", "-n", 2, "--restart", "rank", "--max-restarts", 5, "--", "/bin/sh", "-c", script, code=4, timeout=PATIENCE)
    assert re.fullmatch(r"devicemesh run: rank 0 \(pid \d+\) exited with code 4; it does not start again, because another rank has ended with exit code 0\n",
                        done.stderr), done.stderr


def test_ctrl_z_also_stops_a_restart(start):
    """On a busy machine the third restart may have begun before the signal. Then another job is
    tried."""
    for _ in range(5):
        tool = start("-n", 1, "--restart", "rank", "--max-restarts", 3, script=f"echo {COUNT}; test {COUNT} = 3 || exit 3")
        says(tool, "starts again after 2 s")
        tool.send_signal(signal.SIGTSTP)
        said = next((text for text in tool.stderr if "stopped " in text), "nothing")
        if "stopped 0 ranks" in said:
            break
        wait_until(lambda: tool.poll() is not None or is_stopped(tool.pid), "the tool is stopped or has ended", PATIENCE)
        tool.send_signal(signal.SIGCONT)
        assert ends(tool, 0)[0].endswith("3\n"), said
    # The tool stops after its message, and a SIGCONT before that would be lost.
    wait_until(lambda: is_stopped(tool.pid), "the tool is stopped", PATIENCE)
    time.sleep(2.2)  # Longer than the pause.
    assert os.read(tool.stdout.fileno(), 100).decode() == "0\n1\n2\n"
    tool.send_signal(signal.SIGCONT)
    assert ends(tool, 0)[0] == "3\n"


def test_processes_of_earlier_starts_have_logs_of_their_own(tmp_path):
    """Rank 1 fails when rank 0 has written. The first process of rank 0 waits for the second one of
    rank 1, or for SIGTERM."""
    for unit in ("job", "rank"):
        wrote = f"{tmp_path}/{unit}-wrote-"
        run(TOOL, "run", "-n", 2, "--restart", unit, "--max-restarts", 1, *QUICK, "--log-dir", tmp_path / unit, "--", "/bin/sh", "-c",
            f'echo out {COUNT}; echo err {COUNT} >&2; : > {wrote}$RANK-{COUNT}; test {COUNT} = 1 && exit 0; '
            f'test $RANK = 1 && {failing_after(wrote + "0-0")}; until test -e {wrote}1-1; do sleep 0.01; done', timeout=PATIENCE)
        again = [0, 1] if unit == "job" else [1]
        wanted = {f"rank-{rank}.{kind}": f"{kind} 0\n" for rank in (0, 1) for kind in ("out", "err")}
        wanted |= {f"rank-{rank}.restart-1.{kind}": f"{kind} 1\n" for rank in again for kind in ("out", "err")}
        logs = {path.name: path.read_text() for path in (tmp_path / unit / "latest").iterdir()}
        assert logs == wanted, unit


def test_the_last_line_names_the_log_of_the_last_process(tmp_path):
    done = run(TOOL, "run", "-n", 1, "--restart", "rank", "--max-restarts", 1, "--log-dir", tmp_path, "--timestamps", "--", "/bin/sh", "-c",
               f'echo "error: bad {COUNT}" >&2; exit 3', code=3, timeout=PATIENCE)
    assert re.search(r"failed first: exit code 3: error: bad 1 \(log in \S+/rank-0.restart-1.err\); ranks had 1 restart, because rank 0 exited with code 3\n$", done.stderr), done.stderr


PLACE = "$RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $DM_MESH_SIZE"


def test_spares_have_the_last_ranks():
    done = run(TOOL, "run", "-n", 2, "--restart", "rank", "--max-restarts", 1, "--spares", 1, "--", "/bin/sh", "-c", f"echo {PLACE}", timeout=PATIENCE)
    assert sorted(done.stdout.splitlines()) == ["0 3 0 3 2", "1 3 1 3 2", "2 3 2 3 2"], done.stdout


def test_the_dry_run_shows_restarts_and_spares():
    shown = run(TOOL, "run", "--dry-run", "-n", 2, "--restart", "rank", "--max-restarts", 3, "--spares", 1, "--", "true").stdout
    assert "would start 3 ranks (1 spare) on " in shown and "DM_MESH_SIZE=2" in shown and "TORCHELASTIC_MAX_RESTARTS=3" in shown, shown
    assert "a rank that fails, alone and with DM_JOIN=running; each rank up to 3 times" in " ".join(shown.split()), shown
    shown = run(TOOL, "run", "--dry-run", "-n", 2, "--max-restarts", 1, "--", "true").stdout
    assert "all ranks, up to 1 time, when a rank has failed and all others have ended" in " ".join(shown.split()), shown


def test_ps_shows_restarts_and_spares(start):
    name = f"heals-{os.getpid()}"
    tool = start("-n", 1, "--spares", 1, "--restart", "rank", "--max-restarts", 1, "--rdzv-id", name, script=f"test $RANK{COUNT} = 00 && exit 3; {SLEEP}")
    shown = {}

    def is_shown():
        jobs = json.loads(run(TOOL, "ps", "--json").stdout)["jobs"]
        shown.update(next((job for job in jobs if job["name"] == name), {}))
        return shown.get("restarts") == 1

    wait_until(is_shown, "ps shows the restart", PATIENCE)
    assert (shown["world_size"], shown["spares"], [rank["restarts"] for rank in shown["ranks"]]) == (2, 1, [1, 0]), shown
    row = next(row for row in run(TOOL, "ps").stdout.splitlines() if row.startswith(name))
    assert "  0-1 of 2 (1 spare)  " in row and "  running, 1 restart  " in row, row
    tool.terminate()
    ends(tool, 143)


# Several nodes.


def test_all_nodes_start_again_under_their_numbers(nodes, tmp_path):
    options = f"-n 1 --max-restarts 1 --log-dir {tmp_path}/logs --tee"
    both = nodes(options, options, script=f"echo $RANK $GROUP_RANK {COUNT}; test {COUNT} = 1 && exit 0; "
                 f"test $RANK = 1 && {failing_after(tmp_path / 'printed')}; : > {tmp_path}/printed; {SLEEP}")
    ended = [ends(node, 0) for node in both]
    assert sorted(sorted(out.splitlines()) for out, _ in ended) == [[f"{rank} {rank} 0", f"{rank} {rank} 1"] for rank in (0, 1)], ended
    for _, err in ended:
        assert last(err) == f"devicemesh run: all ranks ended well, and the job had 1 restart, because rank 1 on {HERE} exited with code 3", err
    assert len([path for path in (tmp_path / "logs").iterdir() if not path.is_symlink()]) == 1, "one folder for all nodes and attempts"


def test_the_nodes_end_for_one_cause_when_the_restarts_are_used_up(nodes):
    for node in nodes("-n 1 --max-restarts 1", "-n 1 --max-restarts 1", script=f"test $RANK = 1 || {SLEEP}; echo error: bad >&2; exit 3"):
        _, err = ends(node, 3)
        assert last(err) == (f"devicemesh run: rank 1 on {HERE} failed first: exit code 3: error: bad; "
                             f"the job had 1 restart, because rank 1 on {HERE} exited with code 3"), err


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_node_may_come_back(nodes, lost):
    options = [f"--node-rank {node} -n 1 --max-restarts 1" for node in (0, 1)]
    script = f"echo $RANK {COUNT}; test {COUNT} = 1 && exit 0; {SLEEP}"
    both = nodes(*options, script=script)
    assert [line(node) for node in both] == ["0 0", "1 0"]
    both[lost].kill()
    said = says(both[1 - lost], f"node {lost} ({HERE}) has gone")
    assert "then all ranks start again (restart 1 of 1)" in said, said
    (again, ) = nodes(options[lost], script=script)
    assert ends(again, 0)[0] == f"{lost} 1\n", "it learns from the other node how often the job has started again"
    assert ends(both[1 - lost], 0)[0] == f"{1 - lost} 1\n"


@pytest.mark.parametrize("number, options, sent, said, code",
                         [(0, "", signal.SIGINT, "got signal 2 (SIGINT)", 130), (1, "", signal.SIGINT, "got signal 2 (SIGINT)", 130),
                          (1, "--timeout 2", None, "not done after 2 s (--timeout)", 124)],
                         ids=["ctrl-c at the node of the store", "ctrl-c", "timeout"])
def test_an_end_at_one_node_between_two_attempts_ends_all(nodes, tmp_path, number, options, sent, said, code):
    """The rank of a node fails. The other node's rank takes its time. Meanwhile the first node
    waits for the other one, and gets the signal, or its --timeout passes. Node 0 has the store. On
    a busy machine --timeout may pass before all that. Then another job is tried."""
    for attempt in range(5):
        go, trapped = tmp_path / f"go-{attempt}", tmp_path / f"trapped-{attempt}"
        script = f"test $RANK = {number} && {failing_after(trapped)}; " \
                 f"trap 'echo asked; until test -e {go}; do sleep 0.01; done; exit 0' TERM; : > {trapped}; while :; do sleep 0.05; done"
        began = time.monotonic()
        both = nodes(*(f"--node-rank {node} -n 1 --max-restarts 3 {options if node == number else ''}" for node in (0, 1)), script=script)
        asked = line(both[1 - number])
        if sent is not None or time.monotonic() - began < 2:
            break
        go.touch()
        for node in both:
            rest_of(node, PATIENCE)
    assert asked == "asked"
    if sent is not None:
        both[number].send_signal(sent)
    announced = says(both[number], said)
    go.touch()
    for node in both:
        _, err = ends(node, code)
        assert announced not in err if node is both[number] else f"node {number} ({HERE}): {said}" in err, err
        assert "restart 2" not in err, err


def test_output_that_a_node_loses_between_two_attempts_ends_all(nodes, spawn, tmp_path):
    """Rank 0 fails. Rank 1 writes its last line to a full device, and node 1 must not leave node 0
    alone in the next meeting."""
    script = f"test {COUNT} = 1 && {SLEEP}; test $RANK = 0 && {failing_after(tmp_path / 'trapped')}; " \
             f"trap 'echo bye; exit 0' TERM; : > {tmp_path}/trapped; while :; do sleep 0.05; done"
    options = ["--nnodes", 2, *QUICK, "--rdzv-endpoint", f"127.0.0.1:{nodes.port}", "-n", 1, "--max-restarts", 3]
    second = spawn("/bin/sh", "-c", 'exec "$0" "$@" >/dev/full', TOOL, "run", "--node-rank", 1, "--prefix", *options, "--", "/bin/sh", "-c", script)
    (first, ) = nodes("--node-rank 0 -n 1 --max-restarts 3", script=script)
    for node in (first, second):
        _, err = ends(node, 1)
        assert "cannot write to standard output: No space left on device" in err and "restart 2" not in err, err


def test_ctrl_c_at_one_node_just_after_a_failure_at_another_ends_all(nodes, tmp_path):
    """Rank 0 fails while node 1's tool is stopped, and the job is to start again. Node 1 learns of
    the failure and gets the signal at the same moment, in any order."""
    os.mkfifo(tmp_path / "fail")
    script = f"test {COUNT} = 1 && {SLEEP}; echo $PPID; test $RANK = 0 || {SLEEP}; read line < {tmp_path}/fail; exit 3"
    first, second = nodes(*(f"--node-rank {node} -n 1 --max-restarts 3" for node in (0, 1)), script=script)
    keeper = int(line(second))
    os.kill(keeper, signal.SIGSTOP)
    wait_until(lambda: is_stopped(keeper), "node 1 is stopped")
    (tmp_path / "fail").write_text("go\n")
    says(first, "rank 0 ")
    second.send_signal(signal.SIGINT)
    os.kill(keeper, signal.SIGCONT)
    for node in (first, second):
        _, err = ends(node, 130)
        assert f"node 1 ({HERE}): got signal 2 (SIGINT)" in err or node is second and "got signal 2 (SIGINT)" in err, err
        assert "restart 2" not in err, err


def test_nodes_with_other_options_are_refused(nodes):
    for node in nodes("-n 1 --max-restarts 1", "-n 1", script="exit 0"):
        _, err = ends(node, 1)
        assert re.search(r"has (--restart job --max-restarts 1, .* has no --restart|no --restart, .* has --restart job --max-restarts 1): say the same on all nodes", err), err


def test_a_rank_starts_again_on_its_own_node(nodes, tmp_path):
    """No rank ends well before rank 1 runs again."""
    os.mkfifo(tmp_path / "again")
    options = "-n 1 --restart rank --max-restarts 1 --spares 1"
    script = f'echo {PLACE} {COUNT} $DM_JOIN; test $RANK = 0 && exec cat {tmp_path}/again; ' \
             f'test $RANK -gt 1 && {{ until test -e {tmp_path}/done; do sleep 0.01; done; exit 0; }}; ' \
             f'test {COUNT} = 0 && exit 3; : > {tmp_path}/done; : > {tmp_path}/again'
    first, second = nodes(f"--node-rank 0 {options}", f"--node-rank 1 {options}", script=script)
    (out, err), (other, said) = ends(first, 0), ends(second, 0)
    assert sorted(out.splitlines()) == ["0 4 0 2 2 0", "2 4 1 2 2 0"] and without_waits(err) == [], (out, err)
    assert sorted(other.splitlines()) == ["1 4 0 2 2 0", "1 4 0 2 2 1 running", "3 4 1 2 2 0"], other
    assert "rank 1 (pid " in said and f") on {HERE} exited with code 3; it starts again (restart 1 of 1)\n" in said, said


def test_a_rank_that_fails_when_one_of_another_node_has_ended_well_ends_the_job(nodes, tmp_path):
    os.mkfifo(tmp_path / "over")
    options = "--restart rank --max-restarts 5"
    script = f"test $RANK = 0 && exit 0; test $RANK = 1 && {SLEEP}; echo ready; cat {tmp_path}/over; exit 4"
    first, second = nodes(f"--node-rank 0 -n 2 {options}", f"--node-rank 1 -n 1 {options}", script=script)
    assert line(second) == "ready"
    with socket.create_connection(("127.0.0.1", nodes.port)) as store:
        # VALIDATE, PING, and WAIT for the key by which the tool of rank 0 tells its end.
        key = b"/devicemesh/run/success"
        store.sendall(struct.pack("<BIBI", 0, 0x3C85F7CE, 13, 1) + struct.pack(f"<BQQ{len(key)}s", 6, 1, len(key), key))
        assert store.recv(5, socket.MSG_WAITALL)[4] == 0
    (tmp_path / "over").write_text("")
    for node in (first, second):
        _, err = ends(node, 4)
        assert "starts again" not in err, err


@pytest.mark.parametrize("numbers", [("", ""), ("--node-rank 0 ", "--node-rank 1 ")], ids=["by arrival", "numbered"])
def test_a_node_that_joins_takes_the_place_of_a_lost_one(nodes, tmp_path, numbers):
    """Twice: the node that has joined is lost, too."""
    script, go = waiting(tmp_path, NUMBERS)
    options = [f"{number}-n 1 --spares 1 --restart rank --max-restarts 1 --log-dir {tmp_path}/logs --tee" for number in numbers]
    (first, ) = nodes(options[0], script=script)
    says(first, "waiting for ")
    (second, ) = nodes(options[1], script=script)
    assert sorted(line(first) for _ in range(2)) == ["0 0 0 0", "2 1 0 0"]
    assert sorted(line(second) for _ in range(2)) == ["1 0 1 0", "3 1 1 0"]
    for count in (1, 2):
        second.kill()
        said = says(first, f"node 1 ({HERE}) has gone")
        assert said.endswith("its devicemesh run was killed; the job goes on, and a node that joins takes its place: start the same devicemesh run again\n"), said
        (second, ) = nodes(options[1], script=script)
        assert sorted(line(second) for _ in range(2)) == [f"1 0 1 {count} running", f"3 1 1 {count} running"]
        says(second, f"takes the place of node 1 ({HERE}): its ranks join the running job")
    go.touch()
    for node in (first, second):
        ends(node, 0)


def test_a_lost_node_that_does_not_come_back_does_not_keep_the_others(nodes, tmp_path):
    script, go = waiting(tmp_path, NUMBERS)
    options = "-n 1 --restart rank --max-restarts 1"
    first, second = nodes(f"--node-rank 0 {options}", f"--node-rank 1 {options}", script=script)
    line(second)
    second.kill()
    says(first, f"node 1 ({HERE}) has gone")
    go.touch()
    ends(first, 0)


def test_a_node_that_cannot_take_the_place_is_refused(nodes, tmp_path):
    script, _ = waiting(tmp_path, NUMBERS)
    options = "--restart rank --max-restarts 1"
    both = {line(node)[0]: node for node in nodes(f"-n 1 {options}", f"-n 1 {options}", script=script)}
    # The node with the first rank serves the store.
    server, other = both["0"], both["1"]
    (more, ) = nodes(f"-n 1 {options}", script=script)
    assert "has its 2 nodes already" in ends(more, 1)[1], "no place is free"
    other.kill()
    says(server, "has gone")
    (more, ) = nodes(f"-n 2 {options}", script=script)
    assert re.search(r"has -n 2 and --spares 0, and node 1 of the job, whose place it is to take, had -n 1 and --spares 0: say the same\n$", ends(more, 1)[1])
    server.terminate()
    ends(server, 143)


def test_a_host_that_is_out_of_reach_is_tried_again(start, tmp_path, free_port):
    """A script takes the place of ssh, and cannot reach be while there is a file.
    test_run_store.py and test_lost_nodes.py have hosts that come back at once."""
    rsh, down = tmp_path / "rsh", tmp_path / "down"
    rsh.write_text(f'#!/bin/sh\nhost=$1; shift\ntest $host = be && test -e {down} && echo "no route to $host" >&2 && exit 255\nexec sh -c "$*"\n')
    rsh.chmod(0o755)
    script, go = waiting(tmp_path, f"$RANK {TOOL_OF_RANK} $DM_JOIN")
    tool = start("--rsh-agent", rsh, "--hosts", "al,be", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "-n", 1, "--restart", "rank", "--max-restarts", 2,
                 script=script)
    pid = dict(line(tool).split() for _ in range(2))["1"]
    down.touch()
    os.kill(int(pid), signal.SIGKILL)
    said = says(tool, "node 1 (be) has gone")
    assert said.endswith("; the job goes on without its ranks until they start again there (restart 1 of 2)\n"), said
    assert says(tool, "no route") == f"devicemesh run: node 1 (be): {rsh} ended with code 255: no route to be; the next try follows after 1 s\n"
    down.unlink()
    rank, pid, how = line(tool).split()
    assert (rank, how) == ("1", "running")
    # The job does not wait for a host that does not come back.
    down.touch()
    os.kill(int(pid), signal.SIGKILL)
    said = says(tool, "node 1 (be) has gone")
    assert said.endswith("until they start again there after 1 s (restart 2 of 2)\n"), said
    go.touch()
    ends(tool, 0)


def test_a_host_that_was_back_has_no_more_than_its_restarts(start, tmp_path, free_port):
    """A script takes the place of ssh. It stays when the node there is killed, so that the starter
    kills it."""
    rsh, started = tmp_path / "rsh", tmp_path / "started"
    rsh.write_text(f'#!/bin/sh\nhost=$1; shift\ntest $host = be || exec sh -c "$*"\necho >> {started}\nsh -c "$*"\nexec sleep 1000\n')
    rsh.chmod(0o755)
    script, go = waiting(tmp_path, f"$RANK {TOOL_OF_RANK} $DM_JOIN")
    tool = start("--rsh-agent", rsh, "--hosts", "al,be", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "-n", 1, "--restart", "rank", "--max-restarts", 1,
                 script=script)
    pid = dict(line(tool).split() for _ in range(2))["1"]
    os.kill(int(pid), signal.SIGKILL)
    assert says(tool, "node 1 (be) has gone").endswith(" (restart 1 of 1)\n")
    rank, pid, how = line(tool).split()
    assert (rank, how) == ("1", "running")
    os.kill(int(pid), signal.SIGKILL)
    assert says(tool, "node 1 (be) has gone").endswith("; the host has had 1 restart\n")
    # One more try would begin after 1 s.
    with pytest.raises(subprocess.TimeoutExpired):
        tool.wait(2)
    assert started.read_text() == "\n\n"
    go.touch()
    ends(tool, 0)


def test_a_try_that_hangs_is_followed_by_the_next(start, tmp_path, free_port):
    """A script takes the place of ssh. Its second connection says nothing. The tool looks at such a
    try every 5 s at least, so this test takes about 7 s."""
    rsh, started = tmp_path / "rsh", tmp_path / "started"
    rsh.write_text(f'#!/bin/sh\nhost=$1; shift\ntest $host = be || exec sh -c "$*"\necho >> {started}\n'
                   f'test $(wc -l < {started}) = 2 && exec sleep 1000\nexec sh -c "$*"\n')
    rsh.chmod(0o755)
    script, go = waiting(tmp_path, f"$RANK {TOOL_OF_RANK} $DM_JOIN")
    tool = start("--rsh-agent", rsh, "--hosts", "al,be", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "-n", 1, "--restart", "rank", "--max-restarts", 1,
                 "--rdzv-timeout", 4, script=script)
    pid = dict(line(tool).split() for _ in range(2))["1"]
    os.kill(int(pid), signal.SIGKILL)
    assert says(tool, "has not met") == "devicemesh run: node 1 (be): has not met the others within 4 s (--rdzv-timeout); the next try follows after 1 s\n"
    rank, _, how = line(tool).split()
    assert (rank, how) == ("1", "running")
    go.touch()
    ends(tool, 0)


@pytest.mark.parametrize("unit", ["job", "rank"])
def test_ranks_on_hosts_start_again(unit, tmp_path):
    """Rank 1 fails when rank 0 has printed. Where rank 1 starts again alone, rank 0 ends later."""
    again = tmp_path / "again"
    script = f"echo $RANK {COUNT} $DM_JOIN; test {COUNT} = 1 && {{ : > {again}; exit 0; }}; " \
             f"test $RANK = 1 && {{ until test -e {tmp_path}/printed; do sleep 0.01; done; echo error: bad >&2; exit 3; }}; " \
             f": > {tmp_path}/printed; until test -e {again}; do sleep 0.01; done"
    done = run(TOOL, "run", "--hosts", "127.0.0.1,127.0.0.2", "-n", 1, "--restart", unit, "--max-restarts", 1, *QUICK, "--", "/bin/sh", "-c", script,
               env=environment(without=["DM_", "NO_COLOR"]), timeout=PATIENCE)
    joins = "1 1 running" if unit == "rank" else "1 1"
    wanted = ["0 0", "1 0", joins] + (["0 1"] if unit == "job" else [])
    assert sorted(done.stdout.splitlines()) == sorted(wanted), done.stdout
    assert "exited with code 3: error: bad; " in done.stderr and "(restart 1 of 1)" in done.stderr, done.stderr
    whose = "the job" if unit == "job" else f"ranks on {HERE}"
    assert last(done.stderr) == f"devicemesh run: all ranks ended well, and {whose} had 1 restart, because rank 1 on {HERE} exited with code 3", done.stderr
