"""Ctrl-C, forks and the interpreter's exit while calls are blocked. One process: the ranks of a
world are threads of it, and rank 0 is the main thread."""

import contextlib
import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import unittest
from unittest import mock

import devicemesh
from devicemesh import (AbortedError, DeviceMesh, Events, InvalidHandleError, InvalidStateError, NotFoundError, World, _exit,
                        _interrupt, _library, deserialize, init_device_mesh, lookup, unregister)
from devicemesh.stores import Callbacks


class MemoryStore:
    """A store for the ranks of one process."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()
        # Called at the next get on the main thread.
        self.at_get = None
        # Set when a get waits.
        self.waits = threading.Event()

    def set(self, key, value):
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def get(self, key, timeout):
        if self.at_get is not None and threading.current_thread() is threading.main_thread():
            at_get, self.at_get = self.at_get, None
            at_get()
        with self.changed:
            if key not in self.values and timeout > 0:
                self.waits.set()
            return self.values[key] if self.changed.wait_for(lambda: key in self.values, timeout) else None

    def add(self, key, amount):
        with self.changed:
            value = int(self.values.get(key, b"0")) + amount
            self.values[key] = str(value).encode()
            self.changed.notify_all()
        return value


def on_ranks(function):
    """The results of function(rank), on two threads, of which the main thread is rank 0."""
    results = [None, None]

    def run(rank):
        results[rank] = function(rank)

    other = threading.Thread(target=run, args=(1,))
    other.start()
    run(0)
    other.join()
    return results


def two_worlds(**options):
    return on_ranks(lambda rank: World("cpu", world_size=2, rank=rank, local_rank=rank, timeout=60, **options))


def two_meshes(worlds):
    return on_ranks(lambda rank: init_device_mesh("cpu", (2,), mesh_dim_names=("dp",), world=worlds[rank]))


def waits_for_join():
    """Whether the main thread waits in _interrupt.apart. The frame is that of a running thread, so
    its callers may return meanwhile."""
    frame = sys._current_frames()[threading.main_thread().ident]
    if frame.f_code is not threading.Condition.wait.__code__:
        return False
    while frame is not None and frame.f_code is not _interrupt.apart.__code__:
        frame = frame.f_back
    return frame is not None


def ends_of_joins():
    """The threads that end joins which were abandoned."""
    return {each for each in threading.enumerate() if each.name == "devicemesh join's end"}


def interrupt_when_it_waits():
    """Sends SIGINT to this process when its main thread waits for a join."""
    until = time.monotonic() + 60
    while not waits_for_join() and time.monotonic() < until:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)


@contextlib.contextmanager
def interrupt_when_blocked():
    """Sends SIGINT to this process when its main thread is blocked in a call."""

    def send():
        while _interrupt.watch is None or _interrupt.watch.blocked is None:
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=send)
    sender.start()
    yield
    sender.join()


class StoresInPython(unittest.TestCase):
    def setUp(self):
        self.store = MemoryStore()
        self.worlds = two_worlds(store=self.store)

    def test_meshes_outlive_the_end_of_their_world_object(self):
        meshes = two_meshes(self.worlds)
        for world in self.worlds:
            world.close()
        del self.worlds
        values = [bytearray([1]), bytearray([2])]
        on_ranks(lambda rank: meshes[rank].get_group().all_reduce(values[rank]))
        self.assertEqual(values, [bytearray([3])] * 2)
        on_ranks(lambda rank: meshes[rank].finalize())

    def test_ctrl_c_in_the_store(self):
        self.store.at_get = lambda: signal.raise_signal(signal.SIGINT)
        with self.assertRaises(KeyboardInterrupt):
            self.worlds[0].barrier()
        self.assertIs(signal.getsignal(signal.SIGINT), signal.default_int_handler)
        with self.assertRaises(AbortedError):
            self.worlds[0].barrier()

    def test_ctrl_c_between_two_calls_of_the_store(self):
        # In this store Python runs the handler of the signal at the beginning of a callback.
        self.store.get = lambda key, timeout: self.store.values.get(key)
        with interrupt_when_blocked(), self.assertRaises(KeyboardInterrupt):
            self.worlds[0].barrier()
        with self.assertRaises(AbortedError):
            self.worlds[0].barrier()

    def test_a_store_that_fails_by_ctrl_c_is_broken(self):
        def odd(key, amount):
            signal.raise_signal(signal.SIGINT)
            return 1

        self.store.add = odd
        with self.assertRaises(KeyboardInterrupt):
            self.worlds[0].barrier()

    def test_ctrl_c_in_the_store_of_a_local_call(self):
        self.store.at_get = lambda: signal.raise_signal(signal.SIGINT)
        with self.assertRaises(KeyboardInterrupt):
            self.worlds[0].waiting
        mesh = two_meshes(self.worlds)[0]
        self.store.at_get = lambda: signal.raise_signal(signal.SIGINT)
        with self.assertRaises(KeyboardInterrupt):
            mesh.lost_ranks()
        self.assertIs(signal.getsignal(signal.SIGINT), signal.default_int_handler)
        self.assertEqual((self.worlds[0].waiting, mesh.lost_ranks()), (0, ()))

    def test_a_closed_mesh_from_lookup_leaves_no_handle_of_its_world(self):
        meshes = two_meshes(self.worlds)
        meshes[0].register("train")
        found = lookup("train")
        unregister("train")
        view, adopted = found.root(), DeviceMesh.from_group(found.get_group(), "cpu")
        for mesh in (found, view, adopted):
            self.assertEqual(mesh.world.rank, 0)
        for each in (adopted, view, found, *meshes, *self.worlds):
            each.close()
        # A thread of the library drops the store.
        until = time.monotonic() + 20
        while any(each.store is self.store for each in Callbacks.alive.values()):
            self.assertLess(time.monotonic(), until, "this process is still in the world")
            time.sleep(0.001)


class Interrupts(unittest.TestCase):
    def test_ctrl_c_in_a_logger(self):
        class Interrupting(logging.Handler):
            def emit(self, record):
                signal.raise_signal(signal.SIGINT)

        logger = logging.getLogger("interrupting")
        logger.propagate, handler = False, Interrupting()
        mesh = init_device_mesh("cpu", (1,))
        devicemesh.use_logging("DEBUG", logger=logger)
        logger.setLevel(logging.DEBUG)
        logger.addHandler(handler)
        try:
            with self.assertRaises(KeyboardInterrupt):
                mesh.get_group().broadcast_bytes(b"", root=7)  # the library refuses the root, and logs that
            with self.assertRaises(KeyboardInterrupt):
                mesh["typo"]
            logger.removeHandler(handler)
            with self.assertRaises(NotFoundError):
                mesh["typo"]
        finally:
            devicemesh.use_logging("OFF")
        self.assertIs(signal.getsignal(signal.SIGINT), signal.default_int_handler)

    def test_ctrl_c_ends_the_world_of_a_mesh_from_lookup_alone(self):
        default = init_device_mesh("cpu", (1,))
        worlds = two_worlds(store=MemoryStore())
        meshes = two_meshes(worlds)
        meshes[0].register("train")
        self.addCleanup(unregister, "train")
        found = lookup("train")
        with interrupt_when_blocked(), self.assertRaises(KeyboardInterrupt):
            found.shrink(timeout=60)
        with self.assertRaises(AbortedError):
            worlds[0].barrier()
        default.get_group().all_reduce(bytearray(4))

    def test_ctrl_c_ends_the_call_of_a_mesh_whose_world_was_closed(self):
        worlds = two_worlds(store=MemoryStore())
        mesh = two_meshes(worlds)[0]
        for world in worlds:
            world.close()
        with interrupt_when_blocked(), self.assertRaises(KeyboardInterrupt):
            mesh.shrink(timeout=60)

    def test_ctrl_c_while_what_ends_the_wait_fails(self):
        ended = threading.Event()

        def work():
            interrupt_when_it_waits()
            ended.wait(60)

        def end():
            ended.set()
            raise ValueError

        with self.assertRaises(KeyboardInterrupt):
            _interrupt.apart(work, end, lambda made: None)

    def test_ctrl_c_before_the_join_has_begun(self):
        """The first attempts to end the join end nothing."""
        # The main thread waits for the end of the join, or another thread goes on.
        for seconds in (_interrupt.ENDING_TIME, 0):
            ends, over = [], threading.Event()

            def work():
                interrupt_when_it_waits()
                until = time.monotonic() + 60
                while len(ends) < 3 and time.monotonic() < until:
                    time.sleep(0.001)
                over.set()

            with mock.patch.object(_interrupt, "ENDING_TIME", seconds), self.assertRaises(KeyboardInterrupt):
                _interrupt.apart(work, lambda: ends.append(None), lambda made: None)
            self.assertTrue(over.wait(60))
            self.assertGreaterEqual(len(ends), 3)

    def test_an_abandoned_join_is_not_ended_when_a_later_one_has_begun(self):
        """The end of default worlds would end the later one, too. That of another world would
        not, so it goes on."""
        for is_default in (True, False):
            go, ends, over, earlier = threading.Event(), [], threading.Event(), ends_of_joins()

            def work():
                interrupt_when_it_waits()
                go.wait(60)
                over.set()

            with mock.patch.object(_interrupt, "ENDING_TIME", 0), self.assertRaises(KeyboardInterrupt):
                _interrupt.apart(work, lambda: ends.append(None), lambda made: None, is_default=is_default)
            (thread,) = ends_of_joins() - earlier
            mesh = init_device_mesh("cpu", (1,))
            before = len(ends)
            if is_default:
                thread.join(20)
                self.assertEqual((thread.is_alive(), len(ends)), (False, before))
            else:
                until = time.monotonic() + 60
                while len(ends) < before + 3 and time.monotonic() < until:
                    time.sleep(0.001)
                self.assertGreaterEqual(len(ends), before + 3)
            go.set()
            self.assertTrue(over.wait(60))
            thread.join(60)
            mesh.get_group().all_reduce(bytearray(4))

    def test_a_world_counts_as_a_later_join(self):
        before = _interrupt.default_joins
        World.default("cpu").close()
        self.assertEqual(_interrupt.default_joins, before + 1)
        two_worlds(store=MemoryStore())
        self.assertEqual(_interrupt.default_joins, before + 1)

    def test_ctrl_c_comes_also_where_no_thread_can_end_the_join(self):
        go, threads, start = threading.Event(), [], threading.Thread.start
        self.addCleanup(go.set)

        def limited(thread):
            threads.append(thread)
            if len(threads) > 1:
                raise RuntimeError("can't start new thread")
            start(thread)

        def work():
            interrupt_when_it_waits()
            go.wait(60)

        with mock.patch.object(_interrupt, "ENDING_TIME", 0), mock.patch.object(threading.Thread, "start", limited):
            with self.assertRaises(KeyboardInterrupt):
                _interrupt.apart(work, lambda: None, lambda made: None)
        self.assertEqual(len(threads), 2)

    def test_what_an_abandoned_join_has_made_cannot_be_undone(self):
        """The thread that ends the join stops also then."""
        go, hook, earlier = threading.Event(), mock.Mock(), ends_of_joins()

        def work():
            interrupt_when_it_waits()
            go.wait(60)

        with mock.patch.object(threading, "excepthook", hook):
            with mock.patch.object(_interrupt, "ENDING_TIME", 0), self.assertRaises(KeyboardInterrupt):
                _interrupt.apart(work, lambda: None, mock.Mock(side_effect=ValueError))
            (thread,) = ends_of_joins() - earlier
            go.set()
            thread.join(20)
        self.assertFalse(thread.is_alive())

    def test_ctrl_c_before_a_call_has_begun_to_join(self):
        ends, sent = [], []

        def call():
            os.kill(os.getpid(), signal.SIGINT)
            until = time.monotonic() + 60
            while len(ends) < 3 and time.monotonic() < until:
                time.sleep(0.001)
            sent.append(len(ends))
            return 0

        with mock.patch.object(_interrupt, "has_callbacks", True), self.assertRaises(KeyboardInterrupt):
            _interrupt.blocked_in(lambda: ends.append(None), call)
        self.assertGreaterEqual(sent[0], 3)

    def test_a_mesh_that_another_thread_closes_during_a_call(self):
        mesh = init_device_mesh("cpu", (1,))

        def call():
            closing = threading.Thread(target=mesh.close)
            closing.start()
            closing.join()
            return _library.library.dm_ndim(mesh._handle)

        self.assertEqual(_interrupt.call(mesh.get_group()._end, call), 1, "Ctrl-C needs the handle")
        self.assertFalse(mesh._free.alive)
        self.assertEqual(repr(mesh), "DeviceMesh(closed)")

    def test_a_world_that_another_thread_closes_during_a_call(self):
        world = World("cpu", world_size=1, rank=0, store=MemoryStore())

        def call():
            closing = threading.Thread(target=world.close)
            closing.start()
            closing.join()
            return _library.library.dm_world_rank(world._handle, ctypes.byref(ctypes.c_int32()))

        self.assertEqual(_interrupt.call(world._end, call), 0, "Ctrl-C needs the handle")
        self.assertFalse(world._free.alive)
        self.assertEqual(repr(world), "World(closed)")

    def test_a_handle_whose_end_takes_long_holds_up_no_call(self):
        began, go = threading.Event(), threading.Event()

        def free():
            began.set()
            go.wait(20)

        thread = threading.Thread(target=_interrupt.after_blocked, args=(lambda: None, free))
        thread.start()
        self.assertTrue(began.wait(60))
        _interrupt.blocked_in(lambda: None, lambda: 0)
        self.assertTrue(thread.is_alive(), "the call waited for the other thread")
        go.set()
        thread.join(60)

    def test_ctrl_c_when_a_call_returns(self):
        """Another thread has the lock then, so the main thread waits for it."""
        lock, ends = mock.MagicMock(), []
        lock.__enter__.side_effect = KeyboardInterrupt
        before = signal.set_wakeup_fd(-1)
        self.assertEqual(before, -1)
        with mock.patch.object(_interrupt, "lock", lock), self.assertRaises(KeyboardInterrupt):
            _interrupt.blocked_in(lambda: ends.append(None), lambda: 0)
        self.assertIsNone(_interrupt.watch.blocked, "the next Ctrl-C would end a mesh that works")
        self.assertEqual(signal.set_wakeup_fd(-1), -1)

    def test_ctrl_c_while_handles_are_freed(self):
        """The next call frees the rest."""
        freed = []

        def end():
            pass

        def free(number):
            freed.append(number)
            if len(freed) == 1:
                raise KeyboardInterrupt

        def call():
            for number in range(3):
                _interrupt.after_blocked(end, lambda number=number: free(number))
            return 0

        with self.assertRaises(KeyboardInterrupt):
            _interrupt.blocked_in(end, call)
        _interrupt.blocked_in(end, lambda: 0)
        self.assertEqual(sorted(set(freed)), [0, 1, 2])

    def test_the_wakeup_descriptor_of_the_program(self):
        """A program may have said that a full buffer is no warning."""
        reader, writer = socket.socketpair()
        self.addCleanup(reader.close)
        self.addCleanup(writer.close)
        writer.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                writer.send(bytes(4096))
        self.addCleanup(signal.set_wakeup_fd, signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False))
        came, warnings = [], []
        self.addCleanup(signal.signal, signal.SIGUSR1, signal.signal(signal.SIGUSR1, lambda *_: came.append(None)))
        _interrupt.blocked_in(lambda: None, lambda: 0)
        with mock.patch.object(sys, "unraisablehook", warnings.append):
            signal.raise_signal(signal.SIGUSR1)
            while not came:
                time.sleep(0.001)
        self.assertEqual(warnings, [])

    def test_a_handler_that_raises_before_a_call_leaves_ctrl_c_alone(self):
        class Alarm(Exception):
            pass

        set_handler = signal.signal

        def interrupted(number, handler):
            before = set_handler(number, handler)
            if handler is _interrupt.note:
                raise Alarm
            return before

        with mock.patch.object(_interrupt, "has_callbacks", True), mock.patch.object(signal, "signal", interrupted):
            with self.assertRaises(Alarm):
                _interrupt.local(lambda: 0)
        self.assertIs(signal.getsignal(signal.SIGINT), signal.default_int_handler)

    def test_a_view_that_ctrl_c_hides_is_freed(self):
        mesh, made = init_device_mesh("cpu", (1,)), []

        def root(out):
            status = _library.library.dm_root(mesh._handle, out)
            made.append(out._obj.value)
            signal.raise_signal(signal.SIGINT)
            return status

        with mock.patch.object(_interrupt, "has_callbacks", True):
            for view in (mesh._local_view, mesh._view):
                with self.assertRaises(KeyboardInterrupt):
                    view(root)
                with self.assertRaises(InvalidHandleError):
                    _library.check(_library.library.dm_is_member(made.pop(), ctypes.byref(ctypes.c_bool())))

    def test_what_a_call_has_made_when_ctrl_c_comes_is_freed(self):
        mesh, made, call = init_device_mesh("cpu", (1,)), [], _interrupt.call

        def interrupted(end, function, *arguments):
            (out,) = [each for each in arguments if isinstance(getattr(each, "_obj", None), ctypes.c_void_p)]
            if function in (_library.library.dm_shrink, _library.library.dm_recover):
                _library.check(_library.library.dm_root(mesh._handle, out))  # here nobody is lost
            else:
                _library.check(call(end, function, *arguments))
            made.append(out._obj.value)
            raise KeyboardInterrupt

        for makes in (lambda: init_device_mesh("cpu", (1,)), lambda: deserialize(mesh.serialize()),
                      lambda: mesh.get_group().all_gather_bytes(b""), mesh.shrink, mesh.recover):
            with mock.patch.object(_interrupt, "call", interrupted), self.assertRaises(KeyboardInterrupt):
                makes()
            (handle,) = made
            made.clear()
            is_member = _library.library.dm_is_member(handle, ctypes.byref(ctypes.c_bool()))
            length = ctypes.c_size_t()
            data = _library.library.dm_buffers_get(handle, 0, ctypes.byref(ctypes.c_void_p()), ctypes.byref(length))
            self.assertEqual((is_member, data), (InvalidHandleError.status, InvalidHandleError.status))

    def test_ctrl_c_just_before_the_main_thread_waits_for_a_join(self):
        # In about one of a hundred joins the signal comes between Python's last look at signals and
        # the wait.
        for _ in range(300):
            store = MemoryStore()

            def send():
                store.waits.wait()
                os.kill(os.getpid(), signal.SIGINT)

            sender = threading.Thread(target=send)
            began = time.monotonic()
            sender.start()
            with self.assertRaises(KeyboardInterrupt):
                World("cpu", world_size=2, rank=0, store=store, timeout=30)
            self.assertLess(time.monotonic() - began, 25, "the wait ended at the timeout of the join")
            sender.join()

    def test_a_join_that_gets_no_thread_ends_nothing(self):
        ended = []
        with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
            with self.assertRaisesRegex(RuntimeError, "can't start"):
                _interrupt.apart(lambda: None, lambda: ended.append("default worlds"), lambda made: None)
        self.assertEqual(ended, [])

    def test_a_long_wait_for_an_event_lets_signals_through(self):
        class Alarm(Exception):
            pass

        def ring(number, frame):
            raise Alarm

        before = signal.signal(signal.SIGALRM, ring)
        self.addCleanup(signal.signal, signal.SIGALRM, before)
        with Events() as events:
            while events.next() is not None:
                pass
            began = time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            with self.assertRaises(Alarm):
                events.next(20)
            self.assertLess(time.monotonic() - began, 10)
            self.assertIsNone(events.next(0.15))

    def test_a_child_that_another_thread_forks_during_a_call(self):
        answers = []

        def fork():
            child = os.fork()
            if child == 0:
                left = signal.set_wakeup_fd(-1)
                os._exit(0 if left == -1 and signal.getsignal(signal.SIGINT) is signal.default_int_handler else 1)
            answers.append(os.waitpid(child, 0)[1])

        def call():
            thread = threading.Thread(target=fork)
            thread.start()
            thread.join()
            return 0

        for has_callbacks in (False, True):
            with mock.patch.object(_interrupt, "has_callbacks", has_callbacks):
                _interrupt.blocked_in(lambda: None, call)
        self.assertEqual(answers, [0, 0])

    def test_a_forked_child_gets_the_descriptor_without_warnings(self):
        watch, set_descriptor = mock.Mock(blocked=(None,), previous=-1), mock.Mock(return_value=-1)
        lock, joins_lock = _interrupt.lock, _interrupt.joins_lock
        with mock.patch.object(_interrupt, "watch", watch), mock.patch.object(signal, "set_wakeup_fd", set_descriptor):
            with mock.patch.object(_interrupt, "lock", lock), mock.patch.object(_interrupt, "joins_lock", joins_lock):
                _interrupt.forget()
        set_descriptor.assert_called_once_with(-1, warn_on_full_buffer=False)

    def test_the_exit_of_an_interpreter_with_calls_that_use_a_store_in_python(self):
        # A thread that writes a traceback while the interpreter ends is a fatal error of Python.
        code = (
            "import threading\n"
            "from devicemesh import DeviceMeshError\n"
            "from test_interrupts import MemoryStore, two_meshes, two_worlds\n"
            "started = []\n"
            "def flatten(mesh):\n"
            "    try:\n"
            "        mesh.flatten('f')\n"
            "    except DeviceMeshError:\n"
            "        pass\n"
            "for closes in (False, True):\n"
            "    store = MemoryStore()\n"
            "    worlds = two_worlds(store=store)\n"
            "    mesh = two_meshes(worlds)[0]\n"
            "    store.waits.clear()\n"
            "    threading.Thread(target=flatten, args=(mesh,), daemon=True).start()\n"
            "    store.waits.wait()\n"
            "    started.append(worlds)\n"
            "[world.close() for world in started[1]]\n"
            "print('over', flush=True)\n")
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
                              cwd=os.path.dirname(os.path.abspath(__file__)))
        self.assertEqual((done.returncode, done.stdout), (0, "over\n"), done.stderr)
        self.assertNotIn("Fatal", done.stderr)

    def test_the_exit_of_an_interpreter_with_a_join_that_uses_a_store_in_python(self):
        # The store waits again and again in short waits, so the thread of the join takes Python's
        # lock all the time.
        code = (
            "import os, signal, sys, threading\n"
            "from devicemesh import DeviceMeshError, World\n"
            "from test_interrupts import MemoryStore\n"
            "way, store = sys.argv[1], MemoryStore()\n"
            "def end(*_):\n"
            "    sys.exit(0)\n"
            "def join():\n"
            "    try:\n"
            "        World('cpu', world_size=2, rank=0, store=store, timeout=60)\n"
            "    except DeviceMeshError:\n"
            "        pass\n"
            "def send():\n"
            "    store.waits.wait()\n"
            "    os.kill(os.getpid(), signal.SIGINT)\n"
            "if way == 'main thread ends':\n"
            "    threading.Thread(target=join, daemon=True).start()\n"
            "    store.waits.wait()\n"
            "else:\n"
            "    if way == 'handler exits':\n"
            "        signal.signal(signal.SIGINT, end)\n"
            "    threading.Thread(target=send).start()\n"
            "    try:\n"
            "        join()\n"
            "    except KeyboardInterrupt:\n"
            "        pass\n")
        for way in ("Ctrl-C", "handler exits", "main thread ends"):
            for _ in range(5):
                done = subprocess.run([sys.executable, "-c", code, way], capture_output=True, text=True, timeout=60,
                                      cwd=os.path.dirname(os.path.abspath(__file__)))
                self.assertEqual((way, done.returncode, done.stderr), (way, 0, ""))

    def test_a_join_does_not_begin_when_the_interpreter_ends(self):
        with mock.patch.object(_exit, "is_ending", True):
            store = MemoryStore()
            with self.assertRaisesRegex(InvalidStateError, "the interpreter ends"):
                World("cpu", world_size=1, rank=0, store=store)
        self.assertFalse(any(each.store is store for each in Callbacks.alive.values()))


if __name__ == "__main__":
    unittest.main()
