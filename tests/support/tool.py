"""What the tests of `devicemesh run` share: how long they wait, and how they see its end."""

import socket

from .processes import gone, wait_until

# A job, and each step of it, is done within this many seconds. The machine may be busy.
PATIENCE = 60
# What a rank does that goes on until somebody ends it.
SLEEP = "exec sleep 1000"
# The name that the tool gives this host.
HERE = socket.gethostname()


def ends(process, code):
    """Waits for the end of a process, which must have this exit code. Gives its outputs."""
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, f"exit code {process.returncode}, not {code}:\n{out}{err}"
    return out, err


def all_gone(pids):
    wait_until(lambda: all(map(gone, pids)), f"the processes {pids} have ended", PATIENCE)
