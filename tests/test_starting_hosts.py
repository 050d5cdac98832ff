"""`devicemesh run --hosts`: how it starts hosts, what it sends to them, what their ranks write,
and what it says of hosts that cannot take part. A script takes the place of ssh and runs the
command here (tests/support/rsh.py). test_ends_on_hosts.py has how such a job ends, and test_ssh.py
the cases with sshd."""

import os
import re
import signal
import socket
import subprocess
import time

import pytest

from netlab import Lab
from support.paths import TOOL
from support.processes import children, environment, is_asleep, run, wait_until
from support.rsh import keeper_of, rsh, start
from support.terminals import on_terminals
from support.tool import HERE, PATIENCE, SLEEP, ends, without_waits


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


def test_what_one_node_cannot_do_names_the_node(start, tmp_path):
    (tmp_path / "file").write_text("")
    _, err = ends(start("al,be", "exit 0", "--log-dir", "file"), 1)
    assert re.fullmatch(r"devicemesh run: cannot make --log-dir file: it is a file, not a folder; node [01] \((al|be)\) says so\n", err), err


def test_two_names_of_one_host_are_told_once(start, rsh):
    """Another program than ssh may reach several containers of one machine, so only ssh is a
    reason to warn."""
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
    script = r'env | grep -E "^(MINE|DM_|NCCL_)" | grep -v -e DM_STARTED_BY_RUN -e DM_MESH_SIZE | sort | tr "\n" " "; echo; ' \
             r'tr "\0" " " < /proc/$(cut -d" " -f4 /proc/$PPID/stat)/cmdline >&2'
    given = {"MINE_A": "a b", "MINE_B": "it's $HOME", "MINE_C": "c", "MINEX": "x", "DM_STORE_SECRET": "hush", "DM_HOSTCCL_HOST": "me",
             "NCCL_DEBUG": "WARN", "DM_RSH_AGENT": "no"}
    out, err = ends(start("al,be", script, "-n", "1", "-x", "MINE_*", "-x", "MINEX=y=z", without=["NCCL_", "DM_"], **given), 0)
    line = "DM_STORE_SECRET=hush MINEX=y=z MINE_A=a b MINE_B=it's $HOME MINE_C=c NCCL_DEBUG=WARN"
    assert [text.strip() for text in out.splitlines()] == [line, line], out
    assert "--agent" in err and "hush" not in err, err
    assert "hush" not in (tmp_path / "started").read_text()


def test_the_ranks_know_the_width_of_the_terminal():
    command, env = [TOOL, "run", "--hosts", "127.0.0.1,127.0.0.2", "--", "sh", "-c", "echo ${COLUMNS-none}"], environment(without=["COLUMNS"])
    assert on_terminals(60, *command, env=env)[0] == "60\r\n60\r\n"
    assert run(*command, env=env, timeout=PATIENCE).stdout == "none\nnone\n"


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


@pytest.mark.parametrize("host", ["chatty", "flooding"])
def test_what_a_login_shell_prints_is_no_output_of_the_job(start, host):
    out, err = ends(start(f"{host},be", "echo rank $RANK", "--color", "never"), 0)
    # On a busy machine the text takes so long that the tool says for whom it waits.
    assert (sorted(out.splitlines()), without_waits(err)) == (["rank 0", "rank 1"], [])


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


@pytest.mark.parametrize("options, left", [("", r"1?\d|20"), (" -o connecttimeout=7", "[0-7]")], ids=["ours", "user's"])
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


def test_a_login_script_that_waits_for_input_is_thought_of(tmp_path):
    """ssh would have given up after its ConnectTimeout if it had not connected."""
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\nread answer\n")
    ssh.chmod(0o755)
    done = run(TOOL, "run", "--rsh-agent", f"{ssh} -o ConnectTimeout=1", "--hosts", "beta", "--rdzv-timeout", "2", "--", "true", code=1, timeout=PATIENCE)
    assert re.search(r"run: beta: no answer within 2 s \(--rdzv-timeout\); ssh has connected, so maybe a login script there waits for input", done.stderr), done.stderr


def test_a_name_of_the_first_host_that_another_host_lacks(tmp_path, rsh):
    """The user gave no --rdzv-endpoint, so the message does not ask to check it."""
    with Lab(["alpha"], tmp_path / "lab") as lab:
        process = lab.spawn("alpha", [str(TOOL), "run", "--rsh-agent", str(rsh), "--hosts", "al,be", "--", "true"], env=environment(without=["DM_"]),
                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        _, err = ends(process, 1)
    assert re.search(r"devicemesh run: the name al has no address on alpha \(.*; \d tries in \d s\): by this name the nodes meet on the first host of "
                     r"--hosts; write a name that all hosts know, or give an address of that host with --rdzv-endpoint\n", err), err


@pytest.mark.parametrize("hosts, options, said", [
    ("al,nologin", (), r"devicemesh run: nologin: \S+/rsh ended with code 1: This account is currently not available\.\n"),
    ("al,denied", (), r"devicemesh run: denied: \S+/rsh ended with code 255: Warning: noise; denied: Permission denied \(publickey\)\.\n"),
    ("al,anna@denied", (), r"devicemesh run: anna@denied: \S+/rsh ended with code 255: .*; anna@denied: Permission denied \(publickey\)\.\n"),
    ("al,ancient", (), r"devicemesh run: ancient: \S+/rsh ended with code 2: error: unrecognized subcommand 'agent'; "
                       r"what ran there is no devicemesh \d\S+: --remote-tool names its path\n"),
    ("al,old", (), r"devicemesh run: old: it has devicemesh 0\.0\.1, and this is \d\S+: install the same on all hosts\n"),
    # On a busy machine al may not have answered yet when the tool says for whom it waits.
    ("al,silent", ("--rdzv-timeout", "4"), r"waiting for (1 of 2 hosts to answer: |2 of 2 hosts to answer: al, )silent; \d s left \(--rdzv-timeout\)(; .*)?\n"
                                                r".*: silent: no answer within 4 s \(--rdzv-timeout\); maybe \S+/rsh, or a login script there, waits for input or for a key: let a login script .*\n"),
    ("al,asking", ("--rdzv-timeout", "4"), r"asking; \d s left \(--rdzv-timeout\); \S+/rsh to asking has printed: Welcome to asking!; Press a key:(; .*)?\n"
                                                r".*run: asking: no answer within 4 s \(--rdzv-timeout\); \S+/rsh has printed: Welcome to asking!; Press a key:; maybe \S+/rsh, or .*\n"),
    ("al,be", ("--remote-tool", "/nonexistent/tool"),
     r"devicemesh run: al, be: \S+/rsh ended with code 127: .*/nonexistent/tool: not found; devicemesh must be there")])
def test_a_host_that_cannot_take_part_is_named(start, hosts, options, said):
    out, err = ends(start(hosts, SLEEP, *options), 1)
    assert re.search(said, err), err
    assert len(err.splitlines()) <= 2, err


def test_all_hosts_that_cannot_take_part_are_named_in_one_message(start):
    _, err = ends(start("al,denied,lost,old,silent", SLEEP, "--rdzv-timeout", "4"), 1)
    assert re.fullmatch(
        r"devicemesh run: 4 of 5 hosts cannot take part:\n"
        r"(  denied: \S+/rsh ended with code 255: .*denied: Permission denied \(publickey\)\.\n"
        r"|  lost: \S+/rsh ended with code 255: ssh: connect to host lost port 22: No route to host\n"
        r"|  old: it has devicemesh 0\.0\.1, and this is \S+: install the same on all hosts\n){3}"
        r"  silent: no answer within [34] s(; maybe .*)?\n", err), err


def test_a_host_with_another_secret_is_named(start):
    _, err = ends(start("al,secretive", SLEEP), 1)
    refused = r"devicemesh run: the store at \S+ is served without a secret, but DM_STORE_SECRET is set here: set it there too; node 1 \(secretive\) was refused\n"
    assert re.search(refused, err), err


def test_an_interrupt_tells_of_the_hosts_that_cannot_take_part(start, tmp_path):
    process = start("al,denied,silent", SLEEP)
    keeper, started = keeper_of(process), tmp_path / "started"
    wait_until(lambda: started.exists() and len(started.read_text().splitlines()) == 3, "all commands run", PATIENCE)
    wait_until(lambda: len(children(keeper)) == 2, "denied has been refused", PATIENCE)
    # The keeper tells the starter of it. Both have done their part when they sleep again.
    for pid in (keeper, process.pid):
        wait_until(lambda: all(is_asleep(pid) and not time.sleep(0.01) for _ in range(5)), "the tool sleeps", PATIENCE)
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
    started = lambda: len((tmp_path / "started").read_text().splitlines())
    wait_until(lambda: started() >= 32, "32 commands run", PATIENCE)
    assert started() == 32
    process.send_signal(signal.SIGINT)
    assert "before all hosts had started" in ends(process, 130)[1]


@pytest.mark.parametrize("options, said", [
    (["--hosts", "u@a,a"], "u@a and a are one host, which gets one node: write one of the two\n"), (["--hostfile", "/dev/null"], "--hostfile /dev/null: it names no host\n"), (["--hosts", "a:0"], "no number of ranks"),
    (["--hosts", "a,b:2:3"], '"b:2:3" has two colons: write b:2'), (["--hosts", "a,,b"], 'host 2 of "a,,b" has no name'),
    (["--hosts", "a", "--nnodes", "2"], "run: --nnodes does not go with --hosts and --hostfile: the list of hosts says how many nodes there are, so leave --nnodes out\n"),
    (["--hostfile", "a", "--node-rank", "0"], "run: --node-rank does not go with --hosts"), (["--hosts", "a", "--hostfile", "b"], "cannot be used with"),
    (["--hosts", "a", "-x", "NOT_SET_HERE"], "-x NOT_SET_HERE=VALUE sets it"),
    (["--hostfile", "/nonexistent"], "--hostfile /nonexistent: No such file"), (["-x", "A=b"], "is for --hosts or --hostfile"),
    (["--hosts", "a", "--rsh-agent", " "], "--rsh-agent is empty")])
def test_wrong_command_lines(options, said):
    assert said in run(TOOL, "run", *options, "--", "true", code=2, timeout=PATIENCE).stderr


def test_a_job_at_the_port_of_another_one_says_why_and_leaves_it_alone(start, free_port):
    """Chance decides which refused node learns of it first, so the test starts four jobs. Each of
    the two nodes of a job may say it."""
    endpoint = f"127.0.0.1:{free_port()}"
    first = start("al,be", f"echo ready; {SLEEP}", endpoint=endpoint)
    assert [first.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    others = [start("al,ga", "true", endpoint=endpoint) for _ in range(4)]
    for other in others:
        _, err = ends(other, 1)
        assert 1 <= err.count("devicemesh run: ") == err.count(" need two ports in --rdzv-endpoint") <= 2, err
    first.terminate()
    _, err = ends(first, 143)
    assert "got signal" in err and ": got signal" not in err.replace("devicemesh run: got", ""), err
