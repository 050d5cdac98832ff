"""What the tests of `devicemesh run` share: how long they wait, and how they see its end."""

import os
import select
import socket

from .processes import gone, rest_of, wait_until

# A job, and each step of it, is done within this many seconds. The machine may be busy.
PATIENCE = 60
# A rank with this script goes on until somebody ends it.
SLEEP = "exec sleep 1000"
# In the script of a rank, the shell replaces these words by the number of the process of its node's
# `devicemesh run`. Between the two is the keeper (dm-ranks), the parent of all ranks of the node.
TOOL_OF_RANK = "$(cut -d' ' -f4 /proc/$PPID/stat)"
# The name that the tool gives this host.
HERE = socket.gethostname()


def ends(process, code):
    """Waits for the end of a process, which must have this exit code. Gives the rest of its
    outputs."""
    out, err = rest_of(process, PATIENCE)
    assert process.returncode == code, f"exit code {process.returncode}, not {code}:\n{out}{err}"
    return out, err


def line(tool):
    """The next line that the tool's ranks print."""
    return tool.stdout.readline().strip()


def says(tool, text):
    """Reads the tool's messages up to the one with that text, and gives it."""
    for said in tool.stderr:
        if text in said:
            return said
    raise AssertionError(f"the tool has not said {text!r}")


def without_waits(err):
    """The lines of the tool's messages, without those that say for whom the tool waits. A busy
    machine is so slow that the tool says this."""
    return [said for said in err.splitlines() if not said.startswith("devicemesh run: waiting for ")]


def waiting(tmp_path, words):
    """A script whose rank prints these words, and ends well when there is a file. Gives the script
    and the file."""
    go = tmp_path / "go"
    return f"echo {words}; until test -e {go}; do sleep 0.02; done", go


def all_gone(pids):
    wait_until(lambda: all(map(gone, pids)), f"the processes {pids} have ended", PATIENCE)


def is_full(tool):
    """Whether nothing more fits into the pipe of the tool's output. The kernel tells this to
    writers only, so this opens the other end of the pipe for a moment."""
    end = os.open(f"/proc/self/fd/{tool.stdout.fileno()}", os.O_WRONLY | os.O_NONBLOCK)
    try:
        return not select.select([], [end], [], 0)[1]
    finally:
        os.close(end)
