"""Running commands to their end, and finding the processes that a test has left."""

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

from .paths import ROOT, TOOL

# The variable whose value tells which test started a process. All its descendants inherit it.
MARK = "LIBDEVICEMESH_TESTED_BY"
# A variable of all processes of a gate. A gate may run beside the tests (.ci/run).
GATE = "LIBDEVICEMESH_GATE"
# The threads that read the outputs of processes end within this many seconds after the processes.
READERS_END = 5.0


class Failed(AssertionError):
    """A command failed, or what it wrote is not what was expected."""


class Late(Failed):
    """A command was not done in time."""


def words(command):
    return [str(part) for part in command]


def environment(without=(), **variables):
    """This process's variables but for those that begin with a prefix in `without`; then
    `variables`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(tuple(without))}
    return {**kept, **{name: str(value) for name, value in variables.items()}}


def run(*command, code=0, timeout=120, cwd=ROOT, env=None, input=None, merged=False):
    """Runs a command to its end and gives what it wrote (stdout, stderr, returncode).

    Raises Failed with everything that the command wrote when the exit code is not `code` (None:
    any will do), or when the command is not done after `timeout` seconds. It and its children are
    ended then. `env` replaces the variables; `merged` puts stderr into stdout."""
    command = words(command)
    # A library of the interpreter may have set variables behind Python's back, as readline sets
    # COLUMNS. The command gets the variables that Python knows.
    env = os.environ if env is None else env
    process = subprocess.Popen(
        command, cwd=cwd, env=env, text=True, errors="replace", start_new_session=True,
        stdin=subprocess.DEVNULL if input is None else subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if merged else subprocess.PIPE)
    shown = f"$ {' '.join(command)}"
    try:
        out, err = process.communicate(input, timeout=timeout)
    except subprocess.TimeoutExpired:
        out, err = end_group(process)
        raise Late(f"{shown}\n{out}{err or ''}\nnot done after {timeout} s") from None
    except BaseException:
        end_group(process)
        raise
    if code is not None and process.returncode != code:
        raise Failed(f"{shown}\n{out}{err or ''}\nexit code {process.returncode}, expected {code}")
    return subprocess.CompletedProcess(command, process.returncode, out, err or "")


def rest_of(process, timeout):
    """Waits for the end of a process, and gives the rest of its outputs. An output that is no pipe
    or is closed gives None. Raises subprocess.TimeoutExpired, with what was read, where the
    process does not end in time.

    Threads read, because Popen.communicate() with a timeout loses the text that the test's last
    readline() has read ahead."""
    pipes, rest = (process.stdout, process.stderr), [None, None]

    def read(at):
        with pipes[at] as pipe:
            rest[at] = pipe.read(0)
            for line in pipe:
                rest[at] += line

    readers = [threading.Thread(target=read, args=(at,), daemon=True) for at in (0, 1) if pipes[at] and not pipes[at].closed]
    process.readers = readers
    for reader in readers:
        reader.start()
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired as late:
        late.output, late.stderr = rest
        raise
    for reader in readers:
        reader.join(timeout)
        assert not reader.is_alive(), f"the process has ended, and an output is still open: {process.args}"
    return tuple(rest)


def end_group(process):
    """Ends the process group of a command and gives what it wrote. SIGTERM comes first, because
    the tool ends its ranks then."""
    out = err = ""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            out, err = process.communicate(timeout=10)
            break
        except (subprocess.TimeoutExpired, ProcessLookupError):
            continue
    return out, err


def kill_all(processes):
    """Kills the processes that still run, waits for all of them, and closes their pipes.

    An output stays open while a thread of `process.readers` reads it, because another process may
    hold its other end, and to close the output would wait for the end of that process."""
    for process in processes:
        process.kill()
    until = time.monotonic() + READERS_END
    for process in processes:
        process.wait()
        readers = getattr(process, "readers", [])
        for reader in readers:
            reader.join(max(0.0, until - time.monotonic()))
        outputs = () if any(reader.is_alive() for reader in readers) else (process.stdout, process.stderr)
        for pipe in filter(None, (process.stdin, *outputs)):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def launch(ranks, *command, options=(), **how):
    """`run` of a command on that many ranks under `devicemesh run`."""
    return run(TOOL, "run", "-n", ranks, *options, "--", *command, **how)


def all_pids():
    """The processes of this machine, except this process."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def marked(mark, variable=MARK):
    """The processes whose environment has this value of the variable, by pid."""
    found = {}
    wanted = f"{variable}={mark}".encode()
    for pid in all_pids():
        # The tests call this often, and Path would double the time.
        try:
            with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:
                if wanted not in file.readall().split(b"\0"):
                    continue
            found[pid] = Path(f"/proc/{pid}/comm").read_text().strip()
        except OSError:
            continue
    return found


def state_and_parent(pid):
    """The letter of a process's state (proc_pid_stat(5)) and the process that is its parent."""
    # The name before these fields stands in parentheses, and may hold some itself.
    state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    return state, int(parent)


def is_asleep(pid):
    """Whether all threads of a process sleep."""
    return all(file.read_text().rpartition(")")[2].split()[0] == "S" for file in Path(f"/proc/{pid}/task").glob("*/stat"))


def is_stopped(pid):
    return state_and_parent(pid)[0] == "T"


def children(pid):
    """The processes whose parent is the first thread of this process, the oldest first."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def gone(pid):
    """Whether a process has ended, also when nobody has waited for it yet."""
    try:
        return state_and_parent(pid)[0] == "Z"
    except OSError:
        return True


def is_pending(pid, number):
    """Whether a signal to this process has not arrived yet. A second one would change nothing."""
    pending = re.search(r"^ShdPnd:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.M)[1]
    return bool(int(pending, 16) >> number - 1 & 1)


def waits(pids):
    """For each thread of these processes the seconds for which it was ready to run and waited for
    a processor, by the path of its file in /proc."""
    found = {}
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):
                found[task] = int(task.read_text().split()[1]) / 1e9
    return found


def starvation(before, pids):
    """The longest time, in seconds, for which the threads of one of these processes have waited for
    a processor since waits(pids) was `before`. A thread that has ended counts as 0."""
    waited = {}
    for task, seconds in waits(pids).items():
        process = task.parts[2]
        waited[process] = waited.get(process, 0.0) + max(0.0, seconds - before.get(task, 0.0))
    return max(waited.values(), default=0.0)


def disk_waits():
    """For how many seconds since the machine started some process has waited for a disk. A program
    whose pages the machine has dropped waits until they are read again. It is 0 where the kernel
    does not count this (pressure stall information)."""
    with contextlib.suppress(OSError):
        return int(re.search(r"^some .* total=(\d+)", Path("/proc/pressure/io").read_text(), re.M)[1]) / 1e6
    return 0.0


def wait_until(condition, what, patience=60):
    """Waits for a condition; `what` says in the failure's message what should have happened."""
    until = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < until, f"not within {patience} s: {what}"
        time.sleep(0.01)
