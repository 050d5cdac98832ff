"""`devicemesh run --hosts`: how it starts hosts, what it sends to them, and how all of it ends. In
most cases a script takes the place of ssh and runs the command here. The cases with the fixture
`ssh` use sshd on the hosts of tests/netlab.py."""

import os
import re
import signal
import socket
import subprocess
import time

import pytest

from netlab import Lab
from sshd import Sshd
from support.paths import TOOL
from support.pinned import Unavailable
from support.processes import children, environment, gone, kill_all, run, state_and_parent, wait_until
from test_nodes import HERE, PATIENCE, SLEEP, all_gone

# The script in the place of ssh. It notes its arguments. The hosts have none of the variables whose
# names begin with MINE, DM_ or NCCL_.
RSH = """\
#!/bin/sh
echo "$@" >> {folder}/started
host=$1; shift
case $host in
  denied) echo "Warning: Permanently added '$host' (ED25519) to the list of known hosts." >&2; echo "Warning: noise" >&2; echo "$host: Permission denied (publickey)." >&2; exit 255;;
  lost) echo "ssh: connect to host $host port 22: No route to host" >&2; exit 255;;
  nologin) echo "This account is currently not available."; exit 1;;
  silent*) exec sleep 1000;;
  asking) echo "Welcome to $host!"; printf 'Press a key: '; exec sleep 1000;;
  through*) sleep 1000; exit 1;;
  chatty) echo "Welcome to $host!"; echo "2 updates" >&2; printf 'Have fun: ';;
  master) setsid -f sh -c 'echo $$ > {folder}/master; exec sleep 1000' > /dev/null 2>&1 < /dev/null;;
  old) printf '\\037devicemesh-agent {{"hello":{{"version":"0.0.1","port":1}}}}\\n' >&2; exec sleep 1000;;
esac
unset $(env | sed -n 's/^\\(\\(MINE\\|DM_\\|NCCL_\\)[A-Z_]*\\)=.*/\\1/p')
case $host in
  relay) echo $$ > {folder}/relay; sh -c "$*"; exit $?;;
  deaf) sh -c "$*"; read line < {folder}/heard; exit 1;;
  apart) exec unshare --user --map-root-user --net sh -c "$*";;
esac
exec sh -c "$*"
"""


@pytest.fixture
def rsh(tmp_path):
    path = tmp_path / "rsh"
    path.write_text(RSH.format(folder=tmp_path))
    path.chmod(0o755)
    return path


@pytest.fixture
def start(rsh, free_port, tmp_path):
    """Starts a job on several hosts, each of which is this machine."""
    started, terminals = [], []

    def one(hosts, script=SLEEP, *options, without=("DM_STORE_SECRET", "DM_RSH", "NCCL_"), grace=1, endpoint=None, inside=(), terminal=False, rsh=rsh, **variables):
        command = [*inside, TOOL, "run", "--rsh-agent", rsh, "--hosts", hosts, "--rdzv-endpoint", endpoint or f"127.0.0.1:{free_port()}",
                   "--grace-period", grace, *options, "--", "/bin/sh", "-c", script]
        ours, theirs = os.openpty() if terminal else (None, subprocess.PIPE)
        started.append(subprocess.Popen(list(map(str, command)), env=environment(without=without, **variables), cwd=tmp_path, text=True,
                                        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=theirs))
        if terminal:
            os.close(theirs)
            terminals.append(ours)
            started[-1].terminal = ours
        return started[-1]

    yield one
    kill_all(started)
    for terminal in terminals:
        os.close(terminal)


def ends(process, code):
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, f"exit code {process.returncode}, not {code}:\n{out}{err}"
    return out, err


def test_ranks_by_host(start, tmp_path):
    script = "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK; pwd >&2"
    out, err = ends(start("al,be:3,ga:1", script, "-n", "2"), 0)
    places = [(0, 0, 2, 0), (1, 1, 2, 0), (2, 0, 3, 1), (3, 1, 3, 1), (4, 2, 3, 1), (5, 0, 1, 2)]
    assert sorted(out.splitlines()) == [f"{rank} 6 {local} {size} {node}" for rank, local, size, node in places]
    assert set(err.splitlines()) == {os.path.realpath(tmp_path)}, err


def test_this_host_needs_no_ssh(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# this machine twice\n127.0.0.1 slots=2\n127.0.0.2:1\n")
    done = run(TOOL, "run", "--rsh-agent", "/nonexistent/ssh", "--hostfile", file, "--", "/bin/sh", "-c", "echo $RANK $MASTER_ADDR",
               timeout=PATIENCE)
    assert sorted(done.stdout.splitlines()) == ["0 127.0.0.1", "1 127.0.0.1", "2 127.0.0.1"] and not done.stderr, done


def test_two_names_of_one_host_are_told_once(start, rsh):
    """Another program than ssh may reach several containers of one machine, so only ssh is a reason to warn."""
    ssh = rsh.parent / "ssh"
    ssh.write_text(f'#!/bin/sh\nwhile [ "$1" = -o ]; do shift 2; done\nexec {rsh} "$@"\n')
    ssh.chmod(0o755)
    line = "devicemesh run: (al|be|ga) and (al|be|ga) are one host, and LOCAL_RANK starts at 0 for each of the two, so their ranks share devices; " \
           "write (al|be|ga):3 in place of both\n"
    _, err = ends(start("al:1,be:2,ga:1", "exit 0", rsh=ssh), 0)
    assert len(re.findall("are one host", err)) == 1 and re.fullmatch(line.replace(":3", ":[23]"), err), err
    assert ends(start("127.0.0.2:1,127.0.0.3:2", "exit 0", rsh=ssh), 0)[1] == ""
    assert ends(start("al:1,be:2", "exit 0"), 0)[1] == ""


def test_a_hostfile_may_be_a_pipe():
    words = ["--rsh-agent", "/nonexistent/ssh", "--hostfile", "/dev/stdin", "--", "/bin/sh", "-c", "echo $RANK"]
    done = run(TOOL, "run", *words, input="127.0.0.1:2\n", timeout=PATIENCE)
    assert sorted(done.stdout.splitlines()) == ["0", "1"] and not done.stderr, done


def test_variables_go_with_the_job_and_no_secret_is_on_a_command_line(start, tmp_path):
    script = r'env | grep -E "^(MINE|DM_|NCCL_)" | grep -v DM_STARTED_BY_RUN | sort | tr "\n" " "; echo; ' \
             r'tr "\0" " " < /proc/$(cut -d" " -f4 /proc/$PPID/stat)/cmdline >&2'
    given = {"MINE_A": "a b", "MINE_B": "it's $HOME", "MINE_C": "c", "MINEX": "x", "DM_STORE_SECRET": "hush", "DM_HOSTCCL_HOST": "me",
             "NCCL_DEBUG": "WARN", "DM_RSH_AGENT": "no"}
    out, err = ends(start("al,be", script, "-n", "1", "-x", "MINE_*", "-x", "MINEX=y=z", without=["NCCL_", "DM_"], **given), 0)
    line = "DM_STORE_SECRET=hush MINEX=y=z MINE_A=a b MINE_B=it's $HOME MINE_C=c NCCL_DEBUG=WARN"
    assert [text.strip() for text in out.splitlines()] == [line, line], out
    assert "--agent" in err and "hush" not in err, err
    assert "hush" not in (tmp_path / "started").read_text()


def test_the_first_failure_is_told_once(start):
    out, err = ends(start("al,be,ga", f'if [ $RANK = 3 ]; then echo "ValueError: nope" >&2; exit 41; fi; {SLEEP}', "-n", "2"), 41)
    assert len(re.findall(rf"rank 3 \(pid \d+\) on {HERE} exited with code 41", err)) == 1, err
    assert len(re.findall(r"failed first: exit code 41: ValueError: nope\n", err)) == 1, err


def test_many_lines_arrive_whole(start):
    script = "i=0; while [ $i -lt 2000 ]; do echo line $i of rank $RANK; i=$((i+1)); done; printf 'no end'"
    out, _ = ends(start("al,be,ga", script), 0)
    lines = out.replace("no end", "").splitlines()
    assert sorted(lines) == sorted(f"line {i} of rank {rank}" for i in range(2000) for rank in range(3)) and out.count("no end") == 3


def test_half_a_line_is_shown(start):
    process = start("al,be", f"if [ $RANK = 0 ]; then printf 'step 1... '; fi; {SLEEP}")
    assert os.read(process.stdout.fileno(), 100) == b"step 1... "
    process.terminate()
    ends(process, 143)


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


def test_no_rank_outlives_a_killed_starter(start):
    process = start("al,be,127.0.0.3", f"echo $$; {SLEEP}")
    pids = [process.stdout.readline().strip() for _ in range(3)]
    process.kill()
    all_gone(pids)


def keeper_of(process):
    wait_until(lambda: children(process.pid), "dm-ranks runs", PATIENCE)
    return children(process.pid)[0]


@pytest.mark.parametrize("part", ["front", "keeper"])
def test_no_ssh_outlives_a_killed_starter(start, tmp_path, part):
    """An ssh that waits for a host does not read its input, so it does not notice the end of the starter."""
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
    """Ctrl-C ends `tee`, too. The tool notices that at the next output, 0.6 s later, which would be late enough for a second signal."""
    # The rank needs 2 s after the signal, for example for a checkpoint.
    script = f"trap : INT TERM; echo started; while [ ! -e {tmp_path}/go ]; do sleep 0.1; done; echo ending; sleep 2; echo > {tmp_path}/saved-$RANK"
    process = start("al,be", script, grace=30)
    assert [process.stdout.readline() for _ in range(2)] == ["started\n"] * 2
    process.send_signal(signal.SIGINT)
    assert "passed on to all ranks" in process.stderr.readline()
    time.sleep(0.6)
    process.stdout.close()
    (tmp_path / "go").touch()
    wait_until(lambda: all((tmp_path / f"saved-{rank}").exists() for rank in range(2)), "both ranks have saved", PATIENCE)
    assert process.wait(PATIENCE) in (130, 141)


def test_the_master_of_a_connection_stays(start, tmp_path):
    """An ssh with ControlPersist leaves a process in the background, which other commands of the user use."""
    ends(start("al,master", "exit 0"), 0)
    master = int((tmp_path / "master").read_text())
    try:
        assert not gone(master)
    finally:
        os.kill(master, signal.SIGKILL)


def test_what_a_login_shell_prints_is_no_output_of_the_job(start):
    assert ends(start("chatty,be", "echo rank $RANK", "--color", "never"), 0) in [("rank 0\nrank 1\n", ""), ("rank 1\nrank 0\n", "")]


STUBBORN = "trap '' INT TERM; echo $$; while :; do sleep 0.1; done"


def test_no_rank_outlives_a_starter_that_is_killed_during_the_end(start):
    process = start("al,be,127.0.0.3", STUBBORN, grace=300)
    pids = [process.stdout.readline().strip() for _ in range(3)]
    process.send_signal(signal.SIGINT)
    assert "passed on to all ranks" in process.stderr.readline()
    process.kill()
    all_gone(pids)


def test_no_rank_outlives_three_interrupts(start):
    """The nodes are stopped, so they do not obey. Each signal comes later than those that are one wish with the last (0.5 s)."""
    process = start("al,be", STUBBORN.replace("$$", "$$ $PPID"), grace=300)
    pids = [int(pid) for _ in range(2) for pid in process.stdout.readline().split()]
    process.send_signal(signal.SIGINT)
    assert "passed on to all ranks" in process.stderr.readline()
    for keeper in pids[1::2]:
        os.kill(keeper, signal.SIGSTOP)
    for _ in range(2):
        time.sleep(0.6)
        process.send_signal(signal.SIGINT)
    assert "closed the connections to the hosts" in process.stderr.readline()
    for keeper in pids[1::2]:
        os.kill(keeper, signal.SIGCONT)
    _, err = ends(process, 130)
    assert err.splitlines()[-1].startswith("devicemesh run: got signal 2 (SIGINT)"), err
    all_gone(pids)


def test_a_second_ctrl_c_that_comes_too_early_is_answered_and_the_next_one_kills(start, tmp_path):
    """On a slow machine the second key may come more than half a second after the first one, so that
    it counts. Then another job is tried."""
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
        os.set_blocking(process.terminal, False)
        said += os.read(process.terminal, 1 << 16)
        break
    assert said.count(b"Ctrl-C again within 0.5 s of the first does not count; press it once more to kill the ranks at once\r\n") == 1, said
    assert said.count(b" was killed by signal 9 (SIGKILL)") == 2 and b"closed the connections" not in said, said
    assert said.splitlines()[-1].startswith(b"devicemesh run: got signal 2 (SIGINT)"), said
    all_gone(pids)


def test_a_first_node_that_cannot_serve_ends_the_job(start):
    """192.0.2.1 is an address of no host (RFC 5737)."""
    began = time.monotonic()
    _, err = ends(start("al,be", endpoint="192.0.2.1:29400"), 1)
    assert f"devicemesh run: node 0 on {HERE}: cannot listen on" in err and time.monotonic() - began < 20, err


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("part", ["front", "keeper"])
def test_a_node_that_is_killed_is_told_once(start, number, part):
    """The other node, the connection and the killed node itself notice it. The command in the place of ssh
    becomes the front of its node."""
    process = start("al,be", f"echo $GROUP_RANK $$ $PPID; {SLEEP}")
    lines = dict((int(line.split()[0]), line.split()[1:]) for line in (process.stdout.readline() for _ in range(2)))
    keeper = int(lines[number][1])
    os.kill(state_and_parent(keeper)[1] if part == "front" else keeper, signal.SIGKILL)
    _, err = ends(process, 1 if part == "front" else 137)
    why = {"front": r"has gone: (\S+/rsh, the connection to it, was killed by signal 9 \(SIGKILL\)|its devicemesh run was killed)",
           "keeper": r": its process dm-ranks \(pid \d+\), the parent of the ranks, was killed by signal 9 \(SIGKILL\); all ranks there are ended"}[part]
    said = [line for line in err.splitlines() if "afterwards rank" not in line]
    line = rf"devicemesh run: node {number} \({['al', 'be'][number]}\) ?{why}"
    assert re.fullmatch(line, said[0]) and all(said[0].startswith(again) for again in said[1:]) and len(said) <= 2, err
    all_gone([pids[0] for pids in lines.values()])


def test_a_lost_connection_ends_the_other_hosts_as_a_failure_does(start, tmp_path):
    """The ranks ignore SIGTERM, so SIGKILL ends them, 5 s after SIGTERM. The starter is the first that
    knows of the loss: the host learns of it when the starter closes the connection."""
    process = start("al,relay", "trap '' TERM; echo $RANK $$; exec sleep 1000", "--failure-grace", "0.2", grace=100)
    pids = [int(line.split()[1]) for line in sorted(process.stdout.readline() for _ in range(2))]
    os.kill(int((tmp_path / "relay").read_text()), signal.SIGKILL)
    began = time.monotonic()
    _, err = ends(process, 1)
    assert 5.2 <= time.monotonic() - began < 30, err
    assert err.startswith("devicemesh run: node 1 (relay) has gone: "), err
    assert "output are not written" not in err, err
    assert re.search(rf"^devicemesh run: killed what has not ended in time: rank 0 on {HERE}$", err, re.M), err
    assert re.search(rf"^devicemesh run: afterwards rank 0 \(pid {pids[0]}\) on {HERE} was killed by signal 9 ", err, re.M), err
    all_gone(pids)


def first_message(process):
    """The first line of the tool on standard error, where the ranks and the shell in the place of ssh write, too."""
    return next(line for line in process.stderr if line.startswith("devicemesh run: "))


@pytest.mark.parametrize("host, why", [
    ("127.0.0.3", r"( by signal 9 \(SIGKILL\))?"), ("relay", r"( \(\S+/rsh ended with code 137\))?")], ids=["here", "there"])
def test_a_node_that_was_killed_for_certain_is_not_said_to_be_out_of_reach(start, host, why):
    process = start(f"al,{host}", f"echo $GROUP_RANK $PPID; {SLEEP}")
    keepers = dict(process.stdout.readline().split() for _ in range(2))
    os.kill(state_and_parent(int(keepers["1"]))[1], signal.SIGKILL)
    _, err = ends(process, 1)
    said = [line for line in err.splitlines() if line.startswith("devicemesh run: ")]
    first, last = said[0], said[-1]
    assert re.fullmatch(rf"devicemesh run: node 1 \({host}\) has gone: its devicemesh run was killed{why}", first) and first == last, err


def test_the_first_lost_host_is_the_cause(start, tmp_path):
    """When a network fails, several hosts are lost. Here the connection to the first lost host ends later than its node."""
    os.mkfifo(tmp_path / "heard")
    process = start("al,deaf,be", f"echo $GROUP_RANK $PPID; {SLEEP}", "--failure-grace", 0.5)
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
    process = start("al,be,ga", f'echo $GROUP_RANK $PPID; if [ $RANK = 0 ]; then read line < {go}; echo "ValueError: nope" >&2; exit 5; fi; {SLEEP}')
    keepers = dict(process.stdout.readline().split() for _ in range(3))
    go.write_text("go\n")
    first = first_message(process)
    assert re.match(rf"devicemesh run: rank 0 \(pid \d+\) on {HERE} exited with code 5\n", first), first
    os.kill(state_and_parent(int(keepers["1"]))[1], signal.SIGKILL)
    assert first_message(process).startswith("devicemesh run: afterwards node 1 (be) has gone: ")
    process.send_signal(signal.SIGINT)  # The rank of the third host ends at once.
    _, err = ends(process, 5)
    assert err.splitlines()[-1] == f"devicemesh run: rank 0 on {HERE} failed first: exit code 5: ValueError: nope", err


def test_a_loopback_endpoint_of_several_hosts_is_refused_at_once(start):
    """The third host has a network of its own."""
    if run("unshare", "--user", "--map-root-user", "--net", "true", code=None).returncode != 0:
        pytest.skip("no network namespaces here (unshare)")
    _, err = ends(start("al,be,apart"), 1)
    assert err.splitlines()[0] == "devicemesh run: --rdzv-endpoint 127.0.0.1 is a loopback address, so apart cannot reach al there: " \
                                  "leave --rdzv-endpoint out, or give another address of al", err


def test_a_port_that_another_program_has_is_told_once(start):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        _, err = ends(start("al,be", endpoint=f"127.0.0.1:{port}"), 1)
    assert re.fullmatch(rf"devicemesh run: port {port} of {HERE} is in use by `.*` \(pid {os.getpid()}\), .* choose another port .*\n", err), err


@pytest.mark.parametrize("options, left", [("", "1[789]|20"), (" -o connecttimeout=7", "[567]")], ids=["ours", "user's"])
def test_ssh_has_less_time_to_connect_than_a_host_to_answer(tmp_path, options, left):
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\nexec sleep 1000\n")
    ssh.chmod(0o755)
    process = subprocess.Popen([TOOL, "run", "--rsh-agent", f"{ssh}{options}", "--hosts", "beta", "--", "true"], stdin=subprocess.DEVNULL,
                               stderr=subprocess.PIPE, text=True)
    line = process.stderr.readline()
    process.terminate()
    process.communicate(timeout=PATIENCE)
    assert re.search(rf"waiting for 1 of 1 host to answer: beta; ({left}) s left to connect \(ssh's ConnectTimeout\), "
                     r"9 min \d+ s left to answer \(--rdzv-timeout\)", line), line


def test_a_name_of_the_first_host_that_another_host_lacks(tmp_path, rsh):
    """The user gave no --rdzv-endpoint, so the message does not ask to check it."""
    with Lab(["alpha"], tmp_path / "lab") as lab:
        process = lab.spawn("alpha", [str(TOOL), "run", "--rsh-agent", str(rsh), "--hosts", "al,be", "--", "true"], env=environment(without=["DM_"]),
                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        _, err = ends(process, 1)
    assert re.search(r"devicemesh run: the name al has no address on alpha \(.*; \d tries in [12] s\): by this name the nodes meet on the first host of "
                     r"--hosts; write a name that all hosts know, or give an address of that host with --rdzv-endpoint\n", err), err


def test_a_reader_that_has_gone_ends_the_job(start):
    process = start("al,be", "while :; do echo y; done")
    process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(PATIENCE) == 141, err
    assert err.count("devicemesh run: the reader of the output has ended, so the job ends; all ranks get SIGTERM now, and SIGKILL in 1 s\n") == 1, err


@pytest.mark.parametrize("hosts, options, said", [
    ("al,nologin", (), r"devicemesh run: nologin: \S+/rsh ended with code 1: This account is currently not available\.\n"),
    ("al,denied", (), r"devicemesh run: denied: \S+/rsh ended with code 255: Warning: noise; denied: Permission denied \(publickey\)\.\n"),
    ("al,old", (), r"devicemesh run: old: it has devicemesh 0\.0\.1, and this is \d\S+: install the same on all hosts\n"),
    ("al,silent", ("--rdzv-timeout", "2"), r"waiting for 1 of 2 hosts to answer: silent; \d s left \(--rdzv-timeout\)\n.*: silent: no answer within 2 s \(--rdzv-timeout\)\n"),
    ("al,asking", ("--rdzv-timeout", "2"), r"asking; \d s left \(--rdzv-timeout\); asking has printed: Welcome to asking!; Press a key:\n.*run: asking: no answer within 2 s \(--rdzv-timeout\); it has printed: Welcome to asking!; Press a key:\n"),
    ("al,be", ("--remote-tool", "/nonexistent/tool"),
     r"devicemesh run: al, be: \S+/rsh ended with code 127: .*/nonexistent/tool: not found; devicemesh must be there")])
def test_a_host_that_cannot_take_part_is_named(start, hosts, options, said):
    out, err = ends(start(hosts, SLEEP, *options), 1)
    assert re.search(said, err), err
    assert len(err.splitlines()) <= 2, err


def test_all_hosts_that_cannot_take_part_are_named_in_one_message(start):
    _, err = ends(start("al,denied,lost,old,silent", SLEEP, "--rdzv-timeout", "2"), 1)
    assert re.fullmatch(
        r"devicemesh run: 4 of 5 hosts cannot take part:\n"
        r"(  denied: \S+/rsh ended with code 255: .*denied: Permission denied \(publickey\)\.\n"
        r"|  lost: \S+/rsh ended with code 255: ssh: connect to host lost port 22: No route to host\n"
        r"|  old: it has devicemesh 0\.0\.1, and this is \S+: install the same on all hosts\n){3}"
        r"  silent: no answer within [12] s\n", err), err


def test_an_interrupt_tells_of_the_hosts_that_cannot_take_part(start, tmp_path):
    process = start("al,denied,silent", SLEEP)
    keeper, started = keeper_of(process), tmp_path / "started"
    wait_until(lambda: started.exists() and len(started.read_text().splitlines()) == 3, "all commands run", PATIENCE)
    wait_until(lambda: len(children(keeper)) == 2, "denied has been refused", PATIENCE)
    process.send_signal(signal.SIGINT)
    _, err = ends(process, 130)
    assert "devicemesh run: denied: " in err and "silent" not in err, err


def test_a_folder_that_a_host_lacks_is_named(start, rsh):
    rsh.write_text(rsh.read_text().replace('exec sh -c "$*"', 'folder=$PWD; cd /; rmdir "$folder"; exec sh -c "$*"'))
    folder = rsh.parent / "gone"
    folder.mkdir()
    done = run(TOOL, "run", "--rsh-agent", rsh, "--hosts", "al", "--", "true", cwd=folder, code=1, timeout=PATIENCE)
    assert re.search(rf"devicemesh run: al: cannot enter {folder}, where the job was started: No such file", done.stderr), done.stderr


def test_hundreds_of_hosts_do_not_start_at_once(start, tmp_path):
    process = start("silent[01-100]", "exit 0")
    assert "waiting for 100 of 100 hosts to answer: silent01, " in process.stderr.readline()
    assert len((tmp_path / "started").read_text().splitlines()) == 32
    process.send_signal(signal.SIGINT)
    assert "before all hosts had started" in ends(process, 130)[1]


@pytest.mark.parametrize("options, said", [
    (["--hosts", "u@a,a"], "u@a and a are one host"), (["--hosts", "a:0"], "no number of ranks"),
    (["--hosts", "a,b:2:3"], '"b:2:3" has two colons: write b:2'), (["--hosts", "a,,b"], 'host 2 of "a,,b" has no name'),
    (["--hosts", "a", "--nnodes", "2"], "cannot be used with"), (["--hosts", "a", "-x", "NOT_SET_HERE"], "-x NOT_SET_HERE=VALUE sets it"),
    (["--hostfile", "/nonexistent"], "--hostfile /nonexistent: No such file"), (["-x", "A=b"], "is for --hosts or --hostfile"),
    (["--hosts", "a", "--rsh-agent", " "], "--rsh-agent is empty")])
def test_wrong_command_lines(options, said):
    assert said in run(TOOL, "run", *options, "--", "true", code=2, timeout=PATIENCE).stderr


NAMES = ["alpha", "beta", "gamma", "delta"]


@pytest.fixture
def ssh(tmp_path):
    """Four hosts with sshd, and a function that starts a job from one of them."""
    with Lab(NAMES, tmp_path / "lab") as lab:
        try:
            agent = Sshd(lab, NAMES, tmp_path).agent
        except Unavailable as why:
            pytest.skip(str(why))

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
    """ssh ends with code 255 here, and also where the connection fails, so the node itself says that it was killed."""
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
    assert "devicemesh run: alpha cannot reach gamma: ranks there may run up to 1 min " in err, err
    said = [line for line in err.splitlines() if not re.search(r"waiting for|afterwards rank \d|cannot reach gamma", line)]
    gone = "devicemesh run: node 2 (gamma) has gone: its devicemesh run was killed, or its host is down or out of reach"
    assert said and all(line.startswith(gone) for line in said) and len(said) <= 2, err
    all_gone(pids)


def test_a_node_that_fails_before_all_have_met_ends_the_job(start, rsh):
    """An empty secret ends node 1 before it comes to the store, so node 0 cannot learn of it there."""
    rsh.write_text(rsh.read_text().replace('exec sh -c "$*"', '[ "$host" = be ] && export DM_STORE_SECRET=; exec sh -c "$*"'))
    began = time.monotonic()
    _, err = ends(start("al,be", SLEEP), 1)
    assert "DM_STORE_SECRET is set but empty" in err and "did not end in time" not in err, err
    assert time.monotonic() - began < 15, err
