"""Ctrl-C ends a call that is blocked in the library.

Python runs signal handlers on the main thread between bytecodes, so not while that thread is
inside a C function. But Python's own C handler writes the signal's number to the wakeup descriptor
at once. During a call on the main thread that descriptor is this module's. A watching thread reads
it, and ends the blocked call by aborting its mesh or world. The call returns, and Python raises
KeyboardInterrupt as usual. No call moves to another thread. A descriptor that was set before (an
event loop's) gets its bytes and is restored.

A handler of the program's own may not raise: many only note that the job should stop after this
step. With such a handler the first signal leaves the call alone, and a second one during the call
ends it. This holds for SIGINT and for SIGTERM, for which Python has no handler.

The library may call Python on the thread that is blocked: a store, a logger. Python would raise
KeyboardInterrupt in there, and it would be lost, because no exception passes through the library.
So while a call may run Python on this thread, SIGINT is only noted, and KeyboardInterrupt is
raised after the call. This also holds for local calls that make a view or may ask the store
(local). Other local calls are not covered. If such a call fails and the failure is logged, a Ctrl-C
that arrives in the Python logger is lost.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from typing import Any, Callable, Iterator, Optional, Tuple, TypeVar

from ._beside import after_outstanding, after_outstanding_success, before_call

# The signals by which a program is asked to end. Others (SIGCHLD, SIGUSR1 ...) leave a blocked
# call alone.
ENDING = frozenset((int(signal.SIGINT), int(signal.SIGTERM)))
# A call that ends by itself within this time of the signal leaves the mesh alive.
GRACE = 0.1
# How many seconds one wait for a join lasts. Python handles signals between two of them.
SLICE = 0.1
# How many times SIGINT came during calls in which it is only noted. Only the main thread changes
# this number and the next one, because Python calls handlers there.
noted = 0
# The number of the program's functions that run now on the main thread inside the call, and that
# KeyboardInterrupt may end.
breakable_calls = 0
# Whether the library may call functions of Python on the thread that calls it.
has_callbacks = False

Result = TypeVar("Result")
End = Callable[[], Any]


class Watch:
    """The wakeup descriptor and the thread that reads it. The process has one Watch, which the
    first call that may block makes."""

    def __init__(self) -> None:
        self.reader, self.writer = socket.socketpair()
        self.writer.setblocking(False)
        self.descriptor = self.writer.fileno()
        # How to end the call that is blocked now on the main thread. Each call has a new tuple,
        # whose identity tells calls apart.
        self.blocked: Optional[Tuple[End]] = None
        self.previous = -1
        threading.Thread(target=self.read, name="devicemesh Ctrl-C", daemon=True).start()

    def read(self) -> None:
        warned: Optional[Tuple[End]] = None
        while True:
            numbers = self.reader.recv(256)
            if not numbers:
                return
            if self.previous >= 0:
                with contextlib.suppress(OSError):
                    os.write(self.previous, numbers)
            blocked, asked = self.blocked, [number for number in numbers if number in ENDING]
            if blocked is None or not asked:
                continue
            raises = signal.SIGINT in asked and signal.getsignal(signal.SIGINT) in (signal.default_int_handler, note)
            if raises or warned is blocked or len(asked) > 1:
                time.sleep(GRACE)
                if self.blocked is blocked:
                    with contextlib.suppress(Exception):  # the call itself says what went wrong
                        blocked[0]()
            warned = blocked


watch: Optional[Watch] = None
main_thread = threading.main_thread().ident


def expect_callbacks() -> None:
    """Says that the library has functions of Python from now on, which it may call on the thread
    that calls it."""
    global has_callbacks
    has_callbacks = True


class Noted(KeyboardInterrupt):
    """Ctrl-C in a function of the program that runs inside a call. KeyboardInterrupt is raised
    again after the call."""


def note(_: int, __: Any) -> None:
    """The handler of SIGINT during a call that may run functions of Python on this thread."""
    global noted
    noted += 1
    if breakable_calls:
        raise Noted


@contextlib.contextmanager
def breakable() -> Iterator[None]:
    """While a function of the program runs in this, Ctrl-C raises Noted in it. The caller catches
    the exception, because it cannot pass through the library."""
    global breakable_calls
    if threading.get_ident() != main_thread:
        yield
        return
    before = breakable_calls
    try:
        breakable_calls = before + 1
        yield
    finally:
        breakable_calls = before


def forget() -> None:
    """Forgets the watch in a forked child, which has no watching thread, and whose sockets are the
    parent's. If the parent's main thread was in a call, the child also takes back what the call
    has changed: the sockets' numbers will soon be those of other files."""
    global watch, main_thread
    if watch is not None:
        with contextlib.suppress(ValueError):  # a subinterpreter
            if watch.blocked is not None:
                signal.set_wakeup_fd(watch.previous)
            if signal.getsignal(signal.SIGINT) is note:
                signal.signal(signal.SIGINT, signal.default_int_handler)
        watch.reader.close()
        watch.writer.close()
    watch, main_thread = None, threading.main_thread().ident


os.register_at_fork(after_in_child=forget)


def call(end: End, function: Callable[..., int], *arguments: Any) -> int:
    """Calls function(*arguments), a function of the library that may block. Ctrl-C ends it through
    end(). The call starts when the outstanding work of other packages is over."""
    return blocked_in(end, after_outstanding, function, *arguments) if before_call else blocked_in(end, function, *arguments)


def issue(end: End, function: Callable[..., int], *arguments: Any) -> int:
    """Does what call does, for a function that puts data on a communicator. If the outstanding
    work has failed, its error is raised and the function is not called."""
    return blocked_in(end, after_outstanding_success, function, *arguments) if before_call else blocked_in(end, function, *arguments)


def blocked_in(end: End, function: Callable[..., int], *arguments: Any) -> int:
    """Calls function(*arguments). While it is blocked on the main thread, Ctrl-C calls end()."""
    global watch
    if threading.get_ident() != main_thread:
        return function(*arguments)
    if watch is None:
        watch = Watch()
    here = watch
    try:
        previous = signal.set_wakeup_fd(here.descriptor, warn_on_full_buffer=False)
    except ValueError:  # a subinterpreter, where Python's signals do not come
        return function(*arguments)
    # If the descriptor is this module's already, Ctrl-C came between the two lines here, and the
    # earlier descriptor must still be restored.
    if previous != here.descriptor:
        here.previous = previous
    here.blocked = (end,)
    try:
        return local(function, *arguments)
    finally:
        here.blocked = None
        signal.set_wakeup_fd(here.previous)


def local(function: Callable[..., int], *arguments: Any) -> int:
    """Calls function(*arguments), a function of the library that waits for no other rank. Ctrl-C
    does not end the call. When the call runs a function of Python on the main thread and Ctrl-C
    comes meanwhile, KeyboardInterrupt is raised after the call."""
    if has_callbacks and threading.get_ident() == main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        return noting(function, *arguments)
    return function(*arguments)


def noting(function: Callable[..., int], *arguments: Any) -> int:
    """Calls function(*arguments). When SIGINT has come meanwhile, raises KeyboardInterrupt after
    the call."""
    global breakable_calls
    before = noted
    try:
        # The handler of another signal may raise as soon as `note` is set, so this line is inside.
        with contextlib.suppress(ValueError):  # a subinterpreter, to which no signals come
            signal.signal(signal.SIGINT, note)
        return function(*arguments)
    finally:
        # Python runs the handler of a signal that has come before it changes the handler.
        breakable_calls = 0
        if signal.getsignal(signal.SIGINT) is note:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if noted != before:
            raise KeyboardInterrupt


def apart(work: Callable[[], Result], end: End, undo: Callable[[Result], Any]) -> Result:
    """Runs work() on a thread of its own. The main thread waits for it, and Ctrl-C or any handler
    that raises ends the wait at once.

    When the wait is ended, end() tells work() to end, and undo() undoes what work() still makes.
    If work() has not begun by then, it never begins, and end() is not called.
    """
    if threading.get_ident() != main_thread:
        return work()
    lock, done = threading.Lock(), threading.Event()
    made: list[Result] = []
    failed: list[BaseException] = []
    begun = abandoned = False

    def run() -> None:
        nonlocal begun
        with lock:
            if abandoned:
                return
            begun = True
        try:
            result = work()
        except BaseException as error:
            failed.append(error)
        else:
            with lock:
                if abandoned:
                    undo(result)
                made.append(result)
        done.set()

    try:
        threading.Thread(target=run, name="devicemesh join", daemon=True).start()
        # A signal that comes just before the lock of the wait blocks does not wake this thread.
        while not done.wait(SLICE):
            pass
    except BaseException:
        with lock:
            abandoned, has_begun = True, begun
            if made:
                undo(made[0])
        if has_begun:
            with contextlib.suppress(Exception):  # the program must get the exception that ended the wait
                end()
        raise
    if failed:
        raise failed[0]
    return made[0]
