"""How a job of `devicemesh run --hosts` ends: signals, killed starters, nodes and connections that
are lost, and which of several causes is told. A script takes the place of ssh
(tests/support/rsh.py)."""

import os
import re
import select
import signal
import subprocess
import time

import pytest

from support.processes import children, gone, is_stopped, run, state_and_parent, wait_until
from support.rsh import keeper_of, rsh, start
from support.terminals import unread
from support.tool import HERE, PATIENCE, SLEEP, all_gone, ends, is_full, says, without_waits


def test_the_first_failure_is_told_once(start):
    out, err = ends(start("al,be,ga", f'if [ $RANK = 3 ]; then echo "ValueError: nope" >&2; exit 41; fi; {SLEEP}', "-n", "2"), 41)
    assert len(re.findall(rf"rank 3 \(pid \d+\) on {HERE} exited with code 41", err)) == 1, err
    # The starter repeats the reason where other lines followed it.
    reason = f"devicemesh run: rank 3 on {HERE} failed first: exit code 41: ValueError: nope"
    assert err.splitlines().count(reason) in (1, 2) and err.splitlines()[-1] == reason, err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["int", "term"])
def test_signals_reach_all_ranks(start, number):
    process = start("al,be,ga", f"echo $$; {SLEEP}")
    pids = [process.stdout.readline().strip() for _ in range(3)]
    process.send_signal(number)
    _, err = ends(process, 128 + number)
    assert len(re.findall(rf"got signal {int(number)} \(\w+\), passed on to all ranks, which are killed in 1 s; a second signal kills at once\n", err)) == 1, err
    all_gone(pids)


def test_other_signals_are_passed_on(start):
    process = start("al,be", "trap 'echo got it; exit 0' USR1; echo ready; while :; do sleep 0.05; done")
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    process.send_signal(signal.SIGUSR1)
    assert ends(process, 0)[0] == "got it\ngot it\n"


def test_ctrl_z_is_answered_on_a_line_of_its_own_before_the_tool_stops(start):
    """The terminal has echoed ^Z, and the shell's prompt follows."""
    process = start("al,be", f"echo ready; {SLEEP}", "--color", "never", terminal=True)
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    process.send_signal(signal.SIGTSTP)
    wait_until(lambda: is_stopped(process.pid), "the tool is stopped")
    told = re.sub(rb"^devicemesh run: waiting for .*\r\n", b"", unread(process.terminal), flags=re.M)
    assert told == b"\r\ndevicemesh run: stopped the ranks on all hosts; SIGCONT (fg or bg in the shell) continues\r\n"
    process.terminate()
    process.send_signal(signal.SIGCONT)
    assert process.wait(PATIENCE) == 143


def test_no_rank_outlives_a_killed_starter(start):
    process = start("al,be,127.0.0.3", f"echo $$; {SLEEP}")
    pids = [process.stdout.readline().strip() for _ in range(3)]
    process.kill()
    all_gone(pids)


@pytest.mark.parametrize("part", ["front", "keeper"])
def test_no_ssh_outlives_a_killed_starter(start, tmp_path, part):
    """An ssh that waits for a host does not read its input, so it does not notice the end of the
    starter."""
    process = start("al,silent,through", SLEEP)
    keeper = keeper_of(process)
    wait_until(lambda: len(children(keeper)) == 3, "all commands run", PATIENCE)
    commands = children(keeper)
    wait_until(lambda: any(map(children, commands[2:])), "the second command has started another one", PATIENCE)
    commands += children(commands[2])
    os.kill(process.pid if part == "front" else keeper, signal.SIGKILL)
    all_gone(commands)
    _, err = process.communicate(timeout=PATIENCE)
    if part == "keeper":
        assert process.returncode == 137, err
        assert re.search(r"its process dm-ranks \(pid \d+\), which reaches the hosts, was killed by signal 9 \(SIGKILL\)", err), err


# Kills the tool as soon as the command for the silent host runs, and waits until that has ended.
KILLED = """\
"$@" & until grep -qsx sleep /proc/[0-9]*/comm; do :; done
kill -9 $!
while grep -qsx 'sleep\\|rsh' /proc/[0-9]*/comm; do :; done
echo all have ended
"""


def test_the_session_of_the_starter_may_be_outside_its_pid_namespace(start, tmp_path):
    """As in a container that another process has entered. There the number of the session is 0."""
    inside = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if run(*inside, "true", code=None).returncode != 0:
        pytest.skip("no PID namespaces here (unshare)")
    process = start("silent,silent2", inside=[*inside, "sh", "-c", KILLED, "sh"])
    assert ends(process, 0)[0] == "all have ended\n"


def test_a_reader_that_goes_after_a_signal_does_not_shorten_the_grace_period(start, tmp_path):
    """Ctrl-C ends `tee`, too. The tool notices that at the next output, 0.6 s later, which would
    be late enough for a second signal."""
    # The rank needs 2 s after the signal, for example for a checkpoint.
    script = f"trap : INT TERM; echo started; while [ ! -e {tmp_path}/go ]; do sleep 0.1; done; echo ending; sleep 2; echo > {tmp_path}/saved-$RANK"
    process = start("al,be", script, grace=30)
    assert [process.stdout.readline() for _ in range(2)] == ["started\n"] * 2
    process.send_signal(signal.SIGINT)
    says(process, "passed on to all ranks")
    time.sleep(0.6)
    process.stdout.close()
    (tmp_path / "go").touch()
    wait_until(lambda: all((tmp_path / f"saved-{rank}").exists() for rank in range(2)), "both ranks have saved", PATIENCE)
    assert process.wait(PATIENCE) in (130, 141)


def test_the_master_of_a_connection_stays(start, tmp_path):
    """An ssh with ControlPersist leaves a process in the background, which other commands of the
    user use."""
    ends(start("al,master", "exit 0"), 0)
    file = tmp_path / "master"
    wait_until(lambda: file.exists() and file.read_text().endswith("\n"), "the master has written its number", PATIENCE)
    master = int(file.read_text())
    try:
        assert not gone(master)
    finally:
        os.kill(master, signal.SIGKILL)


STUBBORN = "trap '' INT TERM; echo $$; while :; do sleep 0.1; done"


def test_no_rank_outlives_a_starter_that_is_killed_during_the_end(start):
    process = start("al,be,127.0.0.3", STUBBORN, grace=300)
    pids = [process.stdout.readline().strip() for _ in range(3)]
    process.send_signal(signal.SIGINT)
    says(process, "passed on to all ranks")
    process.kill()
    all_gone(pids)


def interrupt_until(process, condition):
    """Sends SIGINT every 2 s until the condition holds. Nothing tells when the starter has handled
    one, and on a busy machine the next one may become one with it."""
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, "no interrupt has ended the job"
        process.send_signal(signal.SIGINT)
        again = time.monotonic() + 2
        while not condition() and time.monotonic() < again:
            time.sleep(0.01)


def test_no_rank_outlives_three_interrupts(start):
    """The nodes are stopped, so they do not obey. The signals are more than 0.5 s apart, because
    closer ones count as one."""
    process = start("al,be", STUBBORN.replace("$$", "$$ $PPID"), grace=300)
    pids = [int(pid) for _ in range(2) for pid in process.stdout.readline().split()]
    process.send_signal(signal.SIGINT)
    says(process, "passed on to all ranks")
    for keeper in pids[1::2]:
        os.kill(keeper, signal.SIGSTOP)
    time.sleep(0.6)
    interrupt_until(process, lambda: select.select([process.stderr], [], [], 0)[0])
    assert process.stderr.readline() == "devicemesh run: closed the connections to al, be; what still runs there is killed within 5 s, on a host that is out " \
                                        "of reach within 65 s; a devicemesh run that is stopped (kill -STOP) stays with its ranks, so look there\n"
    for keeper in pids[1::2]:
        os.kill(keeper, signal.SIGCONT)
    _, err = ends(process, 130)
    assert err.splitlines()[-1].startswith("devicemesh run: got signal 2 (SIGINT)"), err
    all_gone(pids)


@pytest.mark.lengthy
def test_nodes_that_do_not_obey_are_named_and_given_up(start):
    """The nodes are stopped, so nobody but the starter can say why the job ends. The limit is 20 s
    after the ranks' time: 5.1 s."""
    process = start("al,be", "echo $PPID; exec sleep 1000", "--failure-grace", "0.1")
    keepers = [int(process.stdout.readline()) for _ in range(2)]
    for keeper in keepers:
        os.kill(keeper, signal.SIGSTOP)
    began = time.monotonic()
    process.terminate()
    waiting = r"devicemesh run: waiting for the end of node 1 \(be\), (\d+) s after the signal; in (\d+) s the connection is closed; a second signal kills the ranks at once\n"
    line = says(process, "waiting for the end")
    found = re.fullmatch(waiting, line)
    assert found, line
    # Both numbers are rounded down.
    assert int(found[1]) + int(found[2]) in (24, 25), line
    _, err = ends(process, 143)
    assert time.monotonic() - began >= 25, err
    assert err.splitlines()[-2:] == ["devicemesh run: al, be did not end in time, so the connection is closed; look there for ranks that still run, and for a devicemesh run that is stopped",
                                     "devicemesh run: got signal 15 (SIGTERM)"], err
    for keeper in keepers:
        os.kill(keeper, signal.SIGKILL)
    all_gone(keepers)


def test_three_interrupts_do_not_hide_the_rank_that_failed(start, tmp_path):
    go = tmp_path / "go"
    os.mkfifo(go)
    process = start("al,be", f"echo $GROUP_RANK $PPID; if [ $RANK = 0 ]; then read line < {go}; exit 41; fi; {SLEEP}")
    keepers = dict(process.stdout.readline().split() for _ in range(2))
    os.kill(int(keepers["1"]), signal.SIGSTOP)
    go.write_text("go\n")
    assert "exited with code 41" in first_message(process)
    fronts = [state_and_parent(int(keepers[node]))[1] for node in ("0", "1")]
    for _ in range(2):
        time.sleep(0.6)
        process.send_signal(signal.SIGINT)
    # The third signal ends the starter, so the first node must have told its code before.
    wait_until(lambda: gone(fronts[0]), "the first node has ended", PATIENCE)
    time.sleep(0.6)
    # A node that could still tell that its keeper was killed would make this the exit code, so the
    # starter must have closed the connection to the second node.
    interrupt_until(process, lambda: gone(fronts[1]))
    os.kill(int(keepers["1"]), signal.SIGKILL)
    _, err = ends(process, 41)
    assert "exited with code 41" in err.splitlines()[-1], err


def test_the_cause_stands_once_where_only_standard_error_is_a_terminal(start):
    """As with `| tee log`. Then the starter's own lines have colours, and those of the nodes have
    none."""
    process = start("al,be", "test $RANK = 1 && exit 3; sleep 0.2", terminal=True, without=("DM_STORE_SECRET", "DM_RSH", "NCCL_", "NO_COLOR"), TERM="xterm")
    assert process.wait(PATIENCE) == 3
    said = unread(process.terminal)
    assert said.count(b"exited with code 3") == 1, said


def test_a_second_ctrl_c_that_comes_too_early_is_answered_and_the_next_one_kills(start, tmp_path):
    """On a slow machine the second key may come more than half a second after the first one, so
    that it counts. Then another job is tried."""
    for _ in range(10):
        process = start("al,be", STUBBORN, "--color", "never", grace=300, terminal=True)
        pids = [process.stdout.readline().strip() for _ in range(2)]
        said = b""

        def says(*texts):
            nonlocal said
            while not any(text in said for text in texts):
                said += os.read(process.terminal, 4096)

        process.send_signal(signal.SIGINT)
        says(b"passed on to all ranks")
        process.send_signal(signal.SIGINT)
        says(b"does not count", b"was killed by signal 9")
        if b"does not count" not in said:
            process.wait(PATIENCE)
            continue
        time.sleep(0.6)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130
        said += unread(process.terminal)
        break
    assert said.count(b"Ctrl-C again within 0.5 s of the first does not count; press it once more to kill the ranks at once\r\n") == 1, said
    assert said.count(b" was killed by signal 9 (SIGKILL)") == 2 and b"closed the connections" not in said, said
    assert said.splitlines()[-1].startswith(b"devicemesh run: got signal 2 (SIGINT)"), said
    all_gone(pids)


def test_a_first_node_that_cannot_serve_ends_the_job(start):
    """192.0.2.1 is an address of no host (RFC 5737)."""
    began = time.monotonic()
    _, err = ends(start("al,be", endpoint="192.0.2.1:29400"), 1)
    said = f"devicemesh run: node 0 is on {HERE}, and tcp://192.0.2.1:29400 is at another host: --rdzv-endpoint must name the host of node 0\n"
    assert said in err and time.monotonic() - began < 20, err


def test_only_ranks_of_the_first_node_fail_at_the_same_time(start, tmp_path):
    """The nodes do not know the order in which ranks on several hosts failed."""
    for name in ("one", "two", "three"):
        process = start("al:3,be:3", f"echo; while ! test -e {tmp_path}/{name}; do sleep 0.01; done; exit 1")
        assert [process.stdout.readline() for _ in range(6)] == ["\n"] * 6
        (tmp_path / name).write_text("")
        _, err = ends(process, 1)
        failed = re.findall(r"^devicemesh run: (at the same time |afterwards |)rank (\d) \(pid", err, re.M)
        # The lines of two nodes come in any order.
        nodes = {int(rank) // 3 for how, rank in failed if how != "afterwards "}
        assert len(nodes) == 1 and sum(how == "" for how, _ in failed) == 1, err


@pytest.mark.parametrize("script, code", [("echo lost >&2", 1), (f"test $RANK = 0 && exit 5; {SLEEP}", 5)], ids=["well", "failed"])
def test_standard_error_that_cannot_be_written_is_a_failure(start, script, code):
    """A job that fails itself has its own code."""
    with open("/dev/full", "w") as full:
        ends(start("al,be", script, "--failure-grace", "0.1", errors=full), code)


def test_the_reason_stands_last_although_the_words_of_a_rank_come_late(start, tmp_path):
    """Rank 0 fails when rank 1 has set its trap."""
    wait = f"until test -e {tmp_path}/trapped; do sleep 0.01; done"
    script = f"trap 'printf bye; exit 0' TERM; if test $RANK = 0; then {wait}; exit 3; fi; touch {tmp_path}/trapped; sleep 1000 & wait"
    process = start("al,late", script, "--failure-grace", "0.1", grace=30, errors=subprocess.STDOUT)
    out, _ = ends(process, 3)
    assert re.search(rf"\nbye\ndevicemesh run: rank 0 \(pid \d+\) on {HERE} exited with code 3\n$", out), out


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("part", ["front", "keeper"])
def test_a_node_that_is_killed_is_told_once(start, number, part):
    """The other node, the connection and the killed node itself notice it. The command in the
    place of ssh becomes the front of its node."""
    process = start("al,be", f"echo $GROUP_RANK $$ $PPID; {SLEEP}")
    lines = dict((int(line.split()[0]), line.split()[1:]) for line in (process.stdout.readline() for _ in range(2)))
    keeper = int(lines[number][1])
    os.kill(state_and_parent(keeper)[1] if part == "front" else keeper, signal.SIGKILL)
    _, err = ends(process, 1 if part == "front" else 137)
    why = {"front": r"has gone: (\S+/rsh, the connection to it, was killed by signal 9 \(SIGKILL\)|its devicemesh run was killed)",
           "keeper": r": its process dm-ranks \(pid \d+\), the parent of the ranks, was killed by signal 9 \(SIGKILL\); all ranks there are ended"}[part]
    said = [line for line in without_waits(err) if "afterwards rank" not in line]
    line = rf"devicemesh run: node {number} \({['al', 'be'][number]}\) ?{why}"
    assert re.fullmatch(line, said[0]) and all(said[0].startswith(again) for again in said[1:]) and len(said) <= 2, err
    all_gone([pids[0] for pids in lines.values()])


def test_a_lost_connection_ends_the_other_hosts_as_a_failure_does(start, tmp_path):
    """The ranks ignore SIGTERM, so SIGKILL ends them, 5 s after SIGTERM. The starter is the first
    that knows of the loss: the host learns of it when the starter closes the connection."""
    process = start("al,relay", "trap '' TERM; echo $RANK $$; exec sleep 1000", "--failure-grace", "0.2", grace=100)
    pids = [int(line.split()[1]) for line in sorted(process.stdout.readline() for _ in range(2))]
    began = time.monotonic()
    os.kill(int((tmp_path / "relay").read_text()), signal.SIGKILL)
    _, err = ends(process, 1)
    assert 5.2 <= time.monotonic() - began < 30, err
    assert without_waits(err)[0].startswith("devicemesh run: node 1 (relay) has gone: "), err
    assert "output are not written" not in err, err
    assert re.search(rf"^devicemesh run: killed rank 0 on {HERE}, which had not ended in time$", err, re.M), err
    assert re.search(rf"^devicemesh run: afterwards rank 0 \(pid {pids[0]}\) on {HERE} was killed by signal 9 ", err, re.M), err
    all_gone(pids)


def first_message(process):
    """The next line of the tool on standard error that is not about whom the tool waits for. The
    ranks and the shell in the place of ssh write there, too."""
    return next(line for line in process.stderr if line.startswith("devicemesh run: ") and without_waits(line))


@pytest.mark.parametrize("host, why", [
    ("127.0.0.3", r"( by signal 9 \(SIGKILL\))?"), ("relay", r"( \(\S+/rsh ended with code 137\))?")], ids=["here", "there"])
def test_a_node_that_was_killed_for_certain_is_not_said_to_be_out_of_reach(start, host, why):
    process = start(f"al,{host}", f"echo $GROUP_RANK $PPID; {SLEEP}")
    keepers = dict(process.stdout.readline().split() for _ in range(2))
    os.kill(state_and_parent(int(keepers["1"]))[1], signal.SIGKILL)
    _, err = ends(process, 1)
    said = [line for line in without_waits(err) if line.startswith("devicemesh run: ")]
    first, last = said[0], said[-1]
    assert re.fullmatch(rf"devicemesh run: node 1 \({host}\) has gone: its devicemesh run was killed{why}", first) and first == last, err


def test_the_first_lost_host_is_the_cause(start, tmp_path):
    """When a network fails, several hosts are lost. Here the connection to the first lost host
    ends later than its node."""
    os.mkfifo(tmp_path / "heard")
    # The second host must be lost before its ranks get SIGTERM.
    process = start("al,deaf,be", f"echo $GROUP_RANK $PPID; {SLEEP}", "--failure-grace", 8)
    keepers = dict(process.stdout.readline().split() for _ in range(3))
    os.kill(state_and_parent(int(keepers["1"]))[1], signal.SIGKILL)
    first = first_message(process)
    assert re.match(r"devicemesh run: node 1 \(deaf\) has gone: its devicemesh run was killed", first), first
    os.kill(state_and_parent(int(keepers["2"]))[1], signal.SIGKILL)
    assert first_message(process).startswith("devicemesh run: afterwards node 2 (be) has gone: ")
    (tmp_path / "heard").write_text("yes\n")
    _, err = ends(process, 1)
    assert "(deaf)" in err.splitlines()[-1] and first.startswith(err.splitlines()[-1]), first + err


def test_a_rank_that_failed_first_is_the_cause_also_when_a_host_is_lost(start, tmp_path):
    go = tmp_path / "go"
    os.mkfifo(go)
    fails = f'if [ $RANK = 0 ]; then read line < {go}; echo "ValueError: nope" >&2; exit 5; fi'
    process = start("al,be,ga", f"echo $GROUP_RANK $PPID; {fails}; {SLEEP}", "--failure-grace", 60)
    keepers = dict(process.stdout.readline().split() for _ in range(3))
    go.write_text("go\n")
    first = first_message(process)
    assert re.match(rf"devicemesh run: rank 0 \(pid \d+\) on {HERE} exited with code 5\n", first), first
    os.kill(state_and_parent(int(keepers["1"]))[1], signal.SIGKILL)
    assert first_message(process).startswith("devicemesh run: afterwards node 1 (be) has gone: ")
    process.send_signal(signal.SIGINT)  # The rank of the third host ends at once.
    _, err = ends(process, 5)
    assert err.splitlines()[-1] == f"devicemesh run: rank 0 on {HERE} failed first: exit code 5: ValueError: nope", err


def test_a_reader_that_has_gone_ends_the_job(start):
    process = start("al,be", "while :; do echo y; done")
    process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(PATIENCE) == 141, err
    assert err.count("devicemesh run: the reader of the output has ended, so the job ends; all ranks get SIGTERM now, and SIGKILL in 1 s\n") == 1, err


@pytest.mark.parametrize("options, code", [((), 143), (("--timeout", "4"), 124)], ids=["signal", "timeout"])
def test_a_reader_that_has_stopped_does_not_stop_the_starter(start, options, code):
    """As `less` does. The starter still passes signals on. It also goes on with its signs of life,
    without which the nodes would end their ranks after a minute. On a busy machine --timeout may
    pass before the ranks have filled the pipe. Then another job is tried."""
    for _ in range(5):
        process = start("al,be", "while :; do seq 10000; done", *options)
        wait_until(lambda: process.poll() is not None or is_full(process), "the pipe is full")
        if is_full(process):
            break
        assert options, process.stderr.read()
    else:
        raise AssertionError("each time the starter has ended before the pipe was full")
    if not options:
        process.terminate()
    assert process.wait(PATIENCE) == code
    assert re.search(r"^devicemesh run: \d+ bytes of the ranks' output are not written$", process.stderr.read(), re.M)


def test_a_node_that_fails_before_all_have_met_ends_the_job(start, rsh):
    """An empty secret ends node 1 before it comes to the store, so node 0 cannot learn of it
    there."""
    rsh.write_text(rsh.read_text().replace('exec sh -c "$*"', '[ "$host" = be ] && export DM_STORE_SECRET=; exec sh -c "$*"'))
    began = time.monotonic()
    _, err = ends(start("al,be", SLEEP), 1)
    assert "DM_STORE_SECRET is set but empty" in err and "did not end in time" not in err, err
    assert time.monotonic() - began < 15, err
