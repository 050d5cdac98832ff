"""How `devicemesh run` ends on one node: nothing outlives it, signals leave the ranks their time,
and its last line gives the reason."""

import contextlib
import fcntl
import os
import re
import select
import signal
import stat
import subprocess
import sys
import termios
import time

import pytest

from support.paths import TOOL
from support.processes import MARK, children, environment, gone, is_stopped, kill_all, marked, rest_of, run, state_and_parent, wait_until
from support.tool import PATIENCE, ends, is_full

# This many seconds after the tool is killed, no process is left. The machine may be busy.
LEFT = 10
# A wrapper script whose child has daemonised twice, ignores what it can, and has no open pipe.
ORPHANS = """
setsid -f sh -c 'trap "" TERM HUP INT; setsid -f sleep 1000; sleep 1000' >/dev/null 2>&1
sh -c 'sleep 1000 & wait' & echo ready; wait
"""
IGNORES = "trap 'echo got it' INT TERM; echo ready; while :; do sleep 0.05; done"


@pytest.fixture
def start():
    """Starts a job in a process group of its own, whose processes have a mark; the test ends it."""
    started = []

    def begin(ranks, script, *options, **how):
        mark = f"ends-{os.getpid()}-{time.monotonic_ns()}"
        command = [TOOL, "run", "-n", str(ranks), *options, "--", "/bin/sh", "-c", script]
        tool = subprocess.Popen(
            command, env=environment(without=["NO_COLOR"], **{MARK + "_END": mark}), text=True,
            **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "preexec_fn": os.setpgrp, **how})
        tool.mark = mark
        started.append(tool)
        return tool

    yield start_and_wait(begin)
    kill_all(started)
    for tool in started:
        wait_until(lambda: not left(tool), f"{left(tool)} have ended", PATIENCE)


def start_and_wait(begin):
    """Starts a job and waits until each of its ranks has said `ready`."""
    def ready(ranks, script, *options, **how):
        tool = begin(ranks, script, *options, **how)
        if tool.stdout and "ready" in script:
            assert [tool.stdout.readline() for _ in range(ranks)] == ["ready\n"] * ranks
        return tool
    return ready


def left(tool):
    return marked(tool.mark, MARK + "_END")


def keeper(tool):
    """The process that holds the ranks."""
    (pid,) = [pid for pid, name in left(tool).items() if name == "dm-ranks"]
    return pid


def kill_front(tool):
    tool.kill()


def kill_group(tool):
    os.killpg(tool.pid, signal.SIGKILL)


def kill_keeper(tool):
    os.kill(keeper(tool), signal.SIGKILL)


@pytest.mark.parametrize("kill", [kill_front, kill_group, kill_keeper])
def test_nothing_outlives_a_killed_tool(start, kill):
    tool = start(2, ORPHANS)
    wait_until(lambda: list(left(tool).values()).count("sleep") == 6, "all daemons run")
    kill(tool)
    tool.wait(PATIENCE)
    wait_until(lambda: not left(tool), "nothing is left", LEFT)
    if kill is kill_keeper:
        out, err = ends(tool, 137)
        assert "dm-ranks" in err and "was killed by signal 9 (SIGKILL); all ranks are ended" in err, err
    else:
        # A rank that the tool kills at its own end has not failed.
        assert rest_of(tool, PATIENCE) == ("", "")


def test_nothing_outlives_a_killed_tool_that_cannot_write(start):
    tool = start(1, "setsid -f sleep 1000; exec yes", "--prefix")
    wait_until(lambda: is_full(tool), "the pipe is full")
    tool.kill()
    wait_until(lambda: not left(tool), "nothing is left", LEFT)


@pytest.mark.parametrize("options", [(), ("--hosts", "localhost")], ids=["one host", "hosts"])
def test_what_the_shell_has_started_before_lives_on(tmp_path, options):
    """A shell that becomes the tool leaves its children to the tool, for example the tee of
    `exec > >(tee log)`."""
    command = [TOOL, "run", "-n", "1", *options, "--", "/bin/sh", "-c", "true"]
    script = f'(sleep 0.5; echo whole >{tmp_path}/log) & exec "$0" "$@"'
    run("/bin/sh", "-c", script, *command, timeout=PATIENCE)
    wait_until(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text() == "whole\n", "the child has ended by itself")


# A helper has half a second.
@pytest.mark.alone
@pytest.mark.parametrize("code", [0, 3])
def test_a_helper_of_a_rank_writes_its_last_lines(start, code):
    tool = start(1, f"(sleep 0.1; echo last) & exit {code}", "--prefix")
    assert ends(tool, code)[0] == "[rank 0] last\n"


def test_the_helpers_of_a_rank_end_soon_after_it(start, tmp_path):
    """Also while the job goes on."""
    os.mkfifo(tmp_path / "over")
    tool = start(2, f"test $RANK = 0 && {{ sleep 1000 & echo $!; exit 0; }}; read line < {tmp_path}/over")
    helper = int(tool.stdout.readline())
    wait_until(lambda: gone(helper), "the helper has ended")
    (tmp_path / "over").write_text("over\n")
    ends(tool, 0)


def test_names_that_find_the_tool_do_not_find_its_guard(start):
    tool = start(1, "echo ready; exec sleep 1000")
    with open(f"/proc/{keeper(tool)}/cmdline", "rb") as file:
        name, pid, descriptor, rest = file.read().split(b"\0")
    assert (name, int(pid), descriptor.isdigit(), rest) == (b"dm-ranks", tool.pid, True, b"")


def test_a_signal_leaves_the_ranks_their_time(start):
    tool = start(2, IGNORES, "--grace-period", "3")
    began = time.monotonic()
    tool.terminate()
    out, err = ends(tool, 143)
    assert time.monotonic() - began >= 3
    lines = [line for line in err.splitlines() if line.startswith("devicemesh run: ")]
    assert lines[0] == ("devicemesh run: got signal 15 (SIGTERM), passed on to 2 ranks, which are killed in 3 s; "
                        "a second signal kills at once")
    assert lines[1] == "devicemesh run: killed ranks 0, 1, which had not ended in time"
    assert lines[-1] == "devicemesh run: got signal 15 (SIGTERM)"
    assert out == "got it\n" * 2


def test_a_rank_may_save_its_work(start):
    """timeout(1) signals the tool and the tool's process group. The tool counts one signal. On a
    slow machine the second one may come more than half a second after the first one, so that it
    counts. Then another job is tried."""
    for _ in range(10):
        tool = start(1, "trap 'sleep 1; echo saved; exit 0' TERM; echo ready; while :; do sleep 0.05; done")
        tool.terminate()
        os.killpg(tool.pid, signal.SIGTERM)
        out, err = ends(tool, 143)
        if "before a second signal" not in err:
            break
    assert out == "saved\n" and "1 rank, which is killed in 30 s" in err, (out, err)


def test_a_second_signal_ends_at_once(start):
    tool = start(2, IGNORES)
    tool.send_signal(signal.SIGINT)
    assert "passed on" in tool.stderr.readline()
    # The second signal would kill a rank that has not handled the first one.
    assert [tool.stdout.readline() for _ in range(2)] == ["got it\n"] * 2
    time.sleep(0.6)  # Signals within half a second are the same wish.
    began = time.monotonic()
    tool.send_signal(signal.SIGINT)
    out, err = ends(tool, 130)
    assert time.monotonic() - began < 10 and out == ""
    assert "killed ranks 0, 1, which had not ended before a second signal (SIGINT)\n" in err, err


def test_ctrl_z_stops_the_ranks_and_the_clock(start, tmp_path):
    """On a busy machine --timeout may pass while the job is not stopped. Then another job is
    tried."""
    os.mkfifo(tmp_path / "go")
    go = os.open(tmp_path / "go", os.O_RDWR)
    for _ in range(5):
        began = time.monotonic()
        # The shell itself reads. Dash starts a command in the foreground by vfork, and a shell in
        # vfork whose child is stopped is in state D.
        tool = start(2, f"echo started; read line < {tmp_path}/go; echo done", "--timeout", "4")
        started = [tool.stdout.readline() for _ in range(2)]
        pids = [pid for pid in left(tool) if state_and_parent(pid)[1] == keeper(tool)] if time.monotonic() - began < 3 else []
        tool.send_signal(signal.SIGTSTP)
        said = tool.stderr.readline()
        if time.monotonic() - began >= 3:
            tool.kill()
            continue
        assert started == ["started\n"] * 2 and len(pids) == 2, left(tool)
        assert said == "devicemesh run: stopped 2 ranks; SIGCONT (fg or bg in the shell) continues\n"
        wait_until(lambda: all(map(is_stopped, (tool.pid, *pids))), "the tool and the ranks are stopped")
        ran = time.monotonic() - began
        time.sleep(4.5)  # Longer than --timeout.
        began = time.monotonic()
        tool.send_signal(signal.SIGCONT)
        os.write(go, b"go\n" * 2)
        output = rest_of(tool, PATIENCE)
        if tool.returncode == 0 or ran + time.monotonic() - began < 4:
            break
        while select.select([go], [], [], 0)[0]:
            os.read(go, 100)
    assert (tool.returncode, *output) == (0, "done\n" * 2, "")
    os.close(go)


def test_ranks_that_are_stopped_can_be_ended(start):
    tool = start(1, "trap 'echo got it; exit 0' TERM; echo ready; while :; do sleep 0.05; done")
    tool.send_signal(signal.SIGTSTP)
    wait_until(lambda: is_stopped(tool.pid), "the tool is stopped")
    # A shell does the same for `kill %1` where the job is stopped.
    tool.terminate()
    tool.send_signal(signal.SIGCONT)
    assert ends(tool, 143)[0] == "got it\n"


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGKILL, 137)], ids=["the tool ends", "a rank fails"])
def test_a_rank_that_somebody_has_stopped_can_end_itself(start, number, code):
    tool = start(2, "trap 'echo got it; exit 0' TERM; echo ready; while :; do sleep 0.05; done", "--failure-grace", "0.1")
    first, second = children(keeper(tool))
    os.kill(first, signal.SIGSTOP)
    wait_until(lambda: is_stopped(first), "the rank is stopped")
    os.kill(tool.pid if code == 143 else second, number)
    assert ends(tool, code)[0] == "got it\n" * (2 if code == 143 else 1)


def on_terminal(start, ranks, script, *options, tostop=False):
    """Starts a job in a session of its own, which a terminal controls. Gives the job, and the end
    of the terminal where the keys are. With `tostop` the terminal stops who writes in the
    background."""
    def log_in():
        # Under nohup the tests ignore this signal, and the tool would, too.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    ours, theirs = os.openpty()
    if tostop:
        settings = termios.tcgetattr(theirs)
        settings[3] |= termios.TOSTOP
        termios.tcsetattr(theirs, termios.TCSANOW, settings)
    tool = start(ranks, script, *options, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, preexec_fn=log_in)
    os.close(theirs)
    return tool, ours


def test_keys_of_a_terminal(start):
    """Ctrl-Z and Ctrl-C, as the terminal sends them."""
    tool, ours = on_terminal(start, 1, "trap 'echo got it; exit 0' INT; echo ready; while :; do sleep 0.05; done")
    said = b""

    def says(text):
        nonlocal said
        while text not in said:
            said += os.read(ours, 4096)

    says(b"ready")
    os.write(ours, b"\x1a")
    says(b"stopped 1 rank")
    wait_until(lambda: is_stopped(tool.pid), "the tool is stopped")
    tool.send_signal(signal.SIGCONT)
    os.write(ours, b"\x03")
    says(b"got it")
    assert tool.wait(PATIENCE) == 130
    os.close(ours)
    assert said.count(b"got it") == 1, said


@pytest.mark.parametrize("options", [("--color", "never"), ("--prefix", ), ("--hosts", "127.0.0.1,127.0.0.2")], ids=["direct", "prefix", "hosts"])
def test_a_terminal_that_stops_who_writes_in_the_background(start, options):
    """`stty tostop`. The ranks and their parent are in the background."""
    tool, ours = on_terminal(start, 2, "sleep 0; echo out $RANK; echo err >&2; echo tty > /dev/tty; exec sleep 1000", *options, tostop=True)
    said, ranks = b"", 4 if "--hosts" in options else 2
    for awaited, key in ((lambda: all(said.count(text) == ranks for text in (b"out", b"err", b"tty")), b"\x03"), (lambda: b"got signal 2" in said, b"")):
        while not awaited():
            assert select.select([ours], [], [], PATIENCE)[0], said
            said += os.read(ours, 4096)
        os.write(ours, key)
    assert tool.wait(PATIENCE) == 130
    os.close(ours)


@pytest.mark.parametrize("script, name", [("read line < /dev/tty", "SIGTTIN"), ("stty -echo < /dev/tty", "SIGTTOU")])
def test_a_rank_that_uses_the_terminal_is_told(start, script, name):
    tool, ours = on_terminal(start, 2, f"echo at work; test $RANK = 0 || {script}; sleep 1000")
    said = b""
    for awaited, key in ((f"rank 1 is stopped by {name}, because", b"\x03"), ("got signal 2", b"")):
        while awaited.encode() not in said:
            assert select.select([ours], [], [], PATIENCE)[0], f"{awaited!r} is not in {said}"
            said += os.read(ours, 4096)
        os.write(ours, key)
    assert tool.wait(PATIENCE) == 130
    os.close(ours)
    assert said.count(b"is stopped by") == 1, said


PASSWORD = """
import getpass
try:
    getpass.getpass()
finally:
    getpass.getpass()
"""


def test_a_rank_that_the_terminal_stops_at_the_end_is_killed(start, tmp_path):
    """A rank asks for a password, also when it gets Ctrl-C. The terminal stops it each time."""
    (tmp_path / "ask.py").write_text(PASSWORD)
    script = f"test $RANK = 1 && exec sleep 1000; exec python3 {tmp_path}/ask.py"
    tool, ours = on_terminal(start, 2, script, "--stdin", "0", "--grace-period", "300")
    said = b""
    again = "rank 0 has used the terminal again and is stopped by SIGTTOU"
    for awaited, key in (("rank 0 is stopped by SIGTTOU, because", b"\x03"), (again, b"")):
        while awaited.encode() not in said:
            assert select.select([ours], [], [], PATIENCE)[0], f"{awaited!r} is not in {said}"
            said += os.read(ours, 4096)
        os.write(ours, key)
    assert tool.wait(PATIENCE) == 130
    os.close(ours)


def test_a_second_ctrl_c_that_comes_too_early_is_answered(start):
    """On a slow machine the second key may come more than half a second after the first one, so
    that it counts. Then another job is tried."""
    said = b""
    for _ in range(10):
        tool, ours = on_terminal(start, 1, IGNORES)
        said, keys = b"", [b"ready", b"passed on", b"does not count"]
        while keys:
            try:
                said += os.read(ours, 4096)
            except OSError:
                break
            if keys[0] in said:
                keys.pop(0)
                os.write(ours, b"\x03" if keys else b"")
        tool.kill()
        os.close(ours)
        if not keys:
            break
        assert b"before a second signal" in said, said
    assert b"Ctrl-C again within 0.5 s of the first does not count; press it once more to kill the ranks at once" in said, said


def test_a_closed_terminal_ends_the_job(start):
    tool, ours = on_terminal(start, 1, ORPHANS)
    while b"ready" not in os.read(ours, 4096):
        pass
    os.close(ours)
    assert tool.wait(PATIENCE) == 128 + signal.SIGHUP
    assert not left(tool)


PYTHON = """
import os, sys, time
if os.environ["RANK"] == "1":
    print(" 10%|#", end="", file=sys.stderr)
    try:
        raise ValueError("loss is nan")
    finally:
        print(" 45%|####      | 9/20 [00:01<00:01, 8.5it/s]", file=sys.stderr)
time.sleep(100)
"""


def test_the_last_line_says_why():
    done = run(TOOL, "run", "-n", 2, "--failure-grace", 0.1, "--", sys.executable, "-c", PYTHON, code=1, timeout=PATIENCE)
    lines = done.stderr.splitlines()
    assert lines[-1] == "devicemesh run: rank 1 failed first: exit code 1: ValueError: loss is nan", done.stderr
    assert "devicemesh run: the last output of rank 1:" in lines and "  | ValueError: loss is nan" in lines, done.stderr


def test_the_last_line_quotes_a_rank_that_said_why(tmp_path):
    """Rank 0 fails when the tool has noticed the end of rank 1, because the process is there until
    then."""
    pid = tmp_path / "pid"
    script = f"if [ $RANK = 1 ]; then echo $$ > {pid}; exit 2; fi; until test -s {pid}; do sleep 0.01; done; " \
             f"while kill -0 $(cat {pid}) 2>/dev/null; do sleep 0.01; done; echo 'error: no file' >&2; exit 3"
    done = run(TOOL, "run", "-n", 2, "--failure-grace", 60, "--", "/bin/sh", "-c", script, code=2, timeout=PATIENCE)
    assert done.stderr.splitlines()[-1] == "devicemesh run: rank 1 failed first: exit code 2; rank 0 said: error: no file", done.stderr


@pytest.mark.parametrize("script, options, code", [("", (), 143), ("", ("--timeout", "4"), 124), ("exit 3", ("--timeout", "4"), 3)],
                         ids=["signal", "timeout", "timeout of a job that has failed"])
def test_a_reader_that_has_stopped_ends_nothing_silently(start, script, options, code):
    """The ranks have written all and ended, and nobody reads. On a busy machine --timeout may pass
    before the test has seen that. Then another job is tried."""
    for _ in range(5):
        tool = start(2, f"seq 40000; {script}", "--prefix", *options)
        have_ended = lambda: set(left(tool).values()) == {"devicemesh", "dm-ranks"} and is_full(tool)
        wait_until(lambda: tool.poll() is not None or have_ended(), "the ranks have ended")
        if tool.poll() is None:
            break
        assert options, tool.stderr.read()
    else:
        raise AssertionError("each time the tool has ended before the test saw the end of the ranks")
    if not options:
        tool.terminate()
    assert tool.wait(PATIENCE) == code
    assert re.search(r"^devicemesh run: \d+ bytes of the ranks' output are not written$", tool.stderr.read(), re.M)


def test_ranks_that_fail_together_are_counted(start, tmp_path):
    """While the parent of the ranks is stopped, three ranks fail, so the tool learns of all of
    them at once."""
    os.mkfifo(tmp_path / "go")
    tool = start(5, f"echo $$; if [ $RANK -lt 3 ]; then read line < {tmp_path}/go; exit 3; fi; exec sleep 100", "--failure-grace", "0.1")
    pids = [int(tool.stdout.readline()) for _ in range(5)]
    parent = keeper(tool)
    os.kill(parent, signal.SIGSTOP)
    wait_until(lambda: is_stopped(parent), "the parent of the ranks is stopped")
    with open(tmp_path / "go", "w") as file:
        file.write("go\n" * 3)
        file.flush()
        wait_until(lambda: sum(map(gone, pids)) == 3, "three ranks have ended", 10)
    os.kill(parent, signal.SIGCONT)
    _, done = ends(tool, 3)
    # Where the stop lasted for some time, the tool's first line says so.
    assert re.search(r"^devicemesh run: rank \d \(pid \d+\) exited with code 3, and 2 ranks failed at the same time; "
                     r"2 ranks still run and get SIGTERM in 0.1 s unless they end before$", done, re.M), done
    assert (done.count("at the same time rank"), done.count("afterwards rank")) == (2, 2), done


def test_a_keeper_that_somebody_has_stopped_is_told(start, tmp_path):
    """The time goes on meanwhile: a job that was not seen to end before --timeout has not ended in
    time. On a busy machine --timeout may pass before the keeper is stopped. Then another job is
    tried."""
    os.mkfifo(tmp_path / "go")
    for _ in range(5):
        began = time.monotonic()
        tool = start(1, f"echo started; read line < {tmp_path}/go", "--timeout", "3")
        said = tool.stdout.readline()
        late, parent = time.monotonic() + 3, None
        with contextlib.suppress(ValueError, OSError):
            parent = keeper(tool)
            (rank,) = children(parent)
            os.kill(parent, signal.SIGSTOP)
        if time.monotonic() - began < 1.5:
            break
        tool.kill()
        with contextlib.suppress(TypeError, OSError):
            os.kill(parent, signal.SIGCONT)
    assert said == "started\n", tool.stderr.read()
    said = tool.stderr.readline()
    assert f"its process dm-ranks (pid {parent}) is stopped" in said and f"kill -CONT {parent}\n" in said, said
    (tmp_path / "go").write_text("go\n")
    wait_until(lambda: gone(rank) and time.monotonic() > late, "the rank has ended, and --timeout has passed", 10)
    os.kill(parent, signal.SIGCONT)
    ends(tool, 124)


@pytest.mark.parametrize("first, said", [
    ("#!/nonexistent/python3 -u", "the interpreter that its first line (#!) names is missing: /nonexistent/python3"),
    ("#!/bin/sh\r", "the line ends with a carriage return, as on Windows"), ])
def test_a_missing_interpreter_is_named(tmp_path, first, said):
    script = tmp_path / "train.sh"
    script.write_bytes(first.encode() + b"\necho here\n")
    script.chmod(stat.S_IRWXU)
    done = run(TOOL, "run", "-n", 1, "--", script, code=127, timeout=PATIENCE)
    assert f"cannot start {script} as rank 0: " in done.stderr and said in done.stderr, done.stderr


def test_a_missing_loader_is_named(tmp_path):
    program = tmp_path / "train"
    with open("/bin/sh", "rb") as file:
        program.write_bytes(file.read().replace(b"/ld-linux", b"/ld-nolib"))
    program.chmod(stat.S_IRWXU)
    if b"/ld-nolib" not in program.read_bytes():
        pytest.skip("/bin/sh has no loader of this name")
    done = run(TOOL, "run", "-n", 1, "--", program, code=127, timeout=PATIENCE)
    assert "its ELF loader is missing: /lib" in done.stderr and "another C library" in done.stderr, done.stderr


def test_a_limit_on_the_size_of_files_is_as_a_full_disk(tmp_path):
    """The kernel sends the tool SIGXFSZ for such a write. The ranks have the signal's default
    action: the tool has caught the signal, and has not ignored it."""
    ranks = "grep SigIgn /proc/self/status; seq 10000; exec sleep 1000"
    limited = f"ulimit -f 4; exec {TOOL} run -n 1 --tee --log-dir {tmp_path} -- sh -c '{ranks}'"
    done = run("/bin/sh", "-c", limited, code=1, timeout=PATIENCE)
    assert re.search(r"cannot write \S+/rank-0\.out: File too large", done.stderr), done.stderr
    ignored = int(re.search(r"SigIgn:\s*(\w+)", done.stdout)[1], 16)
    assert not ignored & 1 << (signal.SIGXFSZ - 1), done.stdout


@pytest.mark.parametrize("words, code", [("show 2,4", 1), ("check --json --quiet", 3), ("run --help", 1)])
def test_a_report_that_is_beyond_the_limit_on_the_size_of_files_is_an_error(tmp_path, words, code):
    done = run("/bin/sh", "-c", f"ulimit -f 0; exec {TOOL} {words} > {tmp_path}/report", code=code, timeout=PATIENCE)
    assert re.search("^devicemesh.*(cannot write to standard output: File too large|beyond the limit on file sizes)", done.stderr), done.stderr


@pytest.mark.parametrize("words, code", [("ps --json", 1), ("show 2,4", 1), ("check --json --quiet", 3), ("run --help", 1), ("--version", 1)])
def test_a_closed_standard_output_is_an_error(words, code):
    done = run("/bin/sh", "-c", f"exec {TOOL} {words} >&-", code=code, timeout=PATIENCE)
    assert "cannot write to standard output: Bad file descriptor" in done.stderr, done.stderr


def test_a_limit_on_open_files_that_stops_the_start_is_named():
    done = run("/bin/sh", "-c", f"ulimit -n 4; exec {TOOL} run -n 1 -- true", code=1, timeout=PATIENCE)
    assert "cannot catch signals" in done.stderr and "(raise `ulimit -n`, now 4)" in done.stderr, done.stderr


@pytest.mark.parametrize("limit", [2, 4])
def test_a_limit_on_processes_that_stops_the_start_is_named(limit):
    """The guard's thread needs a third process of the user, and the output's threads need a fifth
    one."""
    # Another case may run at the same time, so each one has a user of its own.
    user = 54320 + limit
    other = f"setpriv --reuid {user} --regid {user} --clear-groups"
    if run("/bin/sh", "-c", f"{other} test -x {TOOL}", code=None).returncode:
        pytest.skip("the limit binds only other users than root, and none can be one here and reach the tool")
    start = f"ulimit -u {limit}; cd /; exec {TOOL} run -n 1 --prefix -- true"
    done = run(*other.split(), "bash", "-c", start, code=1, timeout=PATIENCE)
    assert f"(raise `ulimit -u`, now {limit}, or the container's pids.max)" in done.stderr, done.stderr


def test_a_core_dump_is_told(tmp_path):
    dump = f"cd {tmp_path}; ulimit -c unlimited; exec"
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", f"{dump} sh -c 'kill -ABRT $$'"], os.environ)
    if not os.WCOREDUMP(os.waitpid(pid, 0)[1]):
        pytest.skip("this system writes no core dumps")
    ranks = "test $RANK = 0 && exec sleep 1000; kill -ABRT $$"
    job = f"{dump} {TOOL} run -n 2 --failure-grace 0.1 -- sh -c '{ranks}'"
    done = run("/bin/sh", "-c", job, code=134, timeout=PATIENCE)
    assert "was killed by signal 6 (SIGABRT) (core dumped)" in done.stderr, done.stderr
    assert done.stderr.endswith("rank 1 failed first: signal 6 (SIGABRT) (core dumped)\n"), done.stderr


def test_a_negative_number_of_ranks_is_refused_as_a_number():
    said = run(TOOL, "run", "-n", "-1", "--", "true", code=2, timeout=PATIENCE).stderr
    assert "invalid value '-1' for '--nproc-per-node <N>': 1 to 65536, cpu, gpu or auto" in said, said
