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
from typing import Any, Callable, Iterator, List, Optional, Tuple, TypeVar

from ._beside import after_outstanding, after_outstanding_success, before_call

# The signals by which a program is asked to end. Others (SIGCHLD, SIGUSR1 ...) leave a blocked
# call alone.
ENDING = frozenset((int(signal.SIGINT), int(signal.SIGTERM)))
# A call that ends by itself within this time of the signal leaves the mesh alive.
GRACE = 0.1
# The seconds between two attempts to end a call. An abort that comes before a join has begun ends
# nothing, so the abort is repeated until the call has returned.
AGAIN = 0.005
# How many seconds the main thread waits for the end of a join that Ctrl-C has ended.
ENDING_TIME = 0.5
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
# How many times this process has begun a call that may join a default world. `joins_lock` guards
# the number. A handler of a signal may make such a call, so the lock is reentrant.
default_joins = 0
joins_lock = threading.RLock()

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
        # The work to do when that call has returned (after_blocked).
        self.left: List[Callable[[], Any]] = []
        self.previous = -1
        threading.Thread(target=self.read, name="devicemesh Ctrl-C", daemon=True).start()

    def read(self) -> None:
        warned: Optional[Tuple[End]] = None
        # The call that ends, until it has returned.
        ends: Optional[Tuple[End]] = None
        while True:
            if ends is not None and self.blocked is not ends:
                ends = None
            self.reader.settimeout(None if ends is None else AGAIN)
            try:
                numbers = self.reader.recv(256)
            except socket.timeout:
                self.end(ends)
                continue
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
                self.end(blocked)
                ends = blocked
            warned = blocked

    def end(self, blocked: Optional[Tuple[End]]) -> None:
        """Ends that call, if it is still blocked."""
        if blocked is not None and self.blocked is blocked:
            with contextlib.suppress(Exception):  # the call itself says what went wrong
                blocked[0]()


watch: Optional[Watch] = None
# Guards `left` of the watch. A handler of a signal may run on a thread that has it, so it is
# reentrant.
lock = threading.RLock()
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
    global watch, main_thread, lock, joins_lock
    lock, joins_lock = threading.RLock(), threading.RLock()
    if watch is not None:
        with contextlib.suppress(ValueError):  # a subinterpreter
            if watch.blocked is not None:
                signal.set_wakeup_fd(watch.previous, warn_on_full_buffer=False)
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
    try:
        here.blocked = (end,)
        return local(function, *arguments)
    finally:
        # Ctrl-C can be raised in any call here, so this line comes first and takes no lock.
        here.blocked = None
        # Python does not tell whether the owner of the earlier descriptor wants to be warned of a
        # full buffer. Such a warning is text on stderr, and no signal is lost without it.
        signal.set_wakeup_fd(here.previous, warn_on_full_buffer=False)
        # A thread that has the lock may still see the call as blocked, and add its work.
        with lock:
            has_left = bool(here.left)
        if has_left:
            do_left(here)


def do_left(here: Watch) -> None:
    """Does what was left until the call has returned. Ctrl-C in one work leaves the rest to the
    next call's end, so no work is taken from the list before it is done."""
    while here.left:
        work = here.left[0]
        work()
        with contextlib.suppress(ValueError):  # a handler of a signal has made a call, too
            here.left.remove(work)


def after_blocked(end: End, work: Callable[[], Any]) -> None:
    """Calls work(), which frees the handle that end() ends. If the main thread is blocked in a call
    of that handle, work() is called when the call has returned, because Ctrl-C could not end the
    call without the handle. work() may be called twice."""
    with lock:
        here = watch
        blocked = None if here is None else here.blocked
        if here is not None and blocked is not None and blocked[0] is end:
            here.left.append(work)
            return
    # The lock is not held here, because work() may take long, and may run code of the program.
    work()


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


def begin_default_join() -> None:
    """Says that a call begins that may join a default world. An earlier join that was abandoned is
    not ended any more from then on, because its end would end this join, too."""
    global default_joins
    with joins_lock:
        default_joins += 1


class JoinedAnew(Exception):
    """A later join of a default world has begun."""


def unless_joined_anew(end: End) -> End:
    """An end() of default worlds that raises JoinedAnew when a later join of them has begun."""
    before = default_joins

    def end_earlier() -> None:
        with joins_lock:
            if default_joins != before:
                raise JoinedAnew
            end()

    return end_earlier


def apart(work: Callable[[], Result], end: End, undo: Callable[[Result], Any], *, is_default: bool = False) -> Result:
    """Runs work() on a thread of its own. The main thread waits for it, and Ctrl-C or any handler
    that raises ends the wait. The exception comes when work() has returned, or ENDING_TIME later.

    When the wait is ended, end() tells work() to end, and undo() undoes what work() still makes.
    If work() has not begun by then, it never begins, and end() is not called. Else end() is called
    until work() has returned, because it ends nothing before the library has begun the join. Where
    is_default says that end() ends all default worlds, it is not called any more when a later join
    of them has begun.
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
            with lock:
                if abandoned:
                    undo(result)
                made.append(result)
        except BaseException as error:
            failed.append(error)
        finally:
            done.set()

    try:
        threading.Thread(target=run, name="devicemesh join", daemon=True).start()
        # A signal that comes just before the lock of the wait blocks does not wake this thread.
        while not done.wait(SLICE):
            pass
    except BaseException:
        if is_default:
            end = unless_joined_anew(end)
        with lock:
            abandoned, has_begun = True, begun
            if made:
                undo(made[0])
        if has_begun:
            try:
                end_until(done, end, ENDING_TIME)
            finally:
                if not done.is_set():
                    # Without a thread the join goes on until its timeout. The program must get the
                    # exception that ended the wait.
                    with contextlib.suppress(RuntimeError):
                        threading.Thread(target=end_until, args=(done, end), name="devicemesh join's end", daemon=True).start()
        raise
    if failed:
        raise failed[0]
    return made[0]


def end_until(done: threading.Event, end: End, seconds: float = threading.TIMEOUT_MAX) -> None:
    """Calls end() again and again, until `done` is set, the time is over, or end() raises
    JoinedAnew."""
    until = time.monotonic() + seconds
    while True:
        try:
            end()
        except JoinedAnew:
            return
        except Exception:  # the program must get the exception that ended the wait
            pass
        if done.wait(AGAIN) or time.monotonic() >= until:
            return
