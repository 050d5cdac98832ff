"""Commands whose outputs are terminals."""

import contextlib
import fcntl
import os
import select
import struct
import subprocess
import termios
import time

from .processes import words


def unread(ours):
    """What a terminal shows and nobody has read yet. One read may give less than is there. Leaves
    the terminal non-blocking."""
    os.set_blocking(ours, False)
    shown = b""
    with contextlib.suppress(OSError):
        while piece := os.read(ours, 65536):
            shown += piece
    return shown


def on_terminals(columns, *command, env):
    """Runs a command whose standard output and standard error are a terminal of that width each.
    Gives what each shows, with the terminal's ends of lines (\\r\\n). The command must succeed."""
    ends = [os.openpty(), os.openpty()]
    for ours, _ in ends:
        fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(words(command), env=env, stdin=subprocess.DEVNULL, stdout=ends[0][1], stderr=ends[1][1])
    for _, theirs in ends:
        os.close(theirs)
    told = {ours: b"" for ours, _ in ends}
    open_ends = set(told)
    until = time.monotonic() + 120
    while open_ends:
        assert time.monotonic() < until, told
        for end in select.select(list(open_ends), [], [], 1)[0]:
            try:
                piece = os.read(end, 65536)
            except OSError:  # The terminal has gone when the command has ended.
                piece = b""
            told[end] += piece
            if not piece:
                open_ends.remove(end)
                os.close(end)
    assert process.wait(timeout=60) == 0, told
    return [text.decode() for text in told.values()]
