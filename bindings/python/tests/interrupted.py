"""One of the programs that tests/test_python.py interrupts: `interrupted.py MODE FILE`, on two
ranks.

Rank 0 blocks in a call that rank 1 does not make, says so with its pid, and says what became of it.
FILE appears when rank 1 may go on.
"""

import os
import signal
import sys
import threading
import time

import devicemesh
from devicemesh import World, _interrupt, init_device_mesh

MODE, FILE = sys.argv[1:]
RANK = int(os.environ["RANK"])


def say(text):
    os.write(1, f"{text}\n".encode())


def watch():
    """Says when the main thread has been blocked in one call for a while."""
    while True:
        blocked = _interrupt.watch and _interrupt.watch.blocked
        joining = any(thread.name == "devicemesh join" for thread in threading.enumerate())
        # Event.wait of a Work is Python's own code.
        waits = MODE == "work" and sys._current_frames()[threading.main_thread().ident].f_code.co_filename == threading.__file__
        if waits:
            say(f"blocked {os.getpid()}")
            return
        if (blocked or joining) and threading.main_thread().is_alive():
            time.sleep(0.3)
            if joining or _interrupt.watch.blocked is blocked:
                say(f"blocked {os.getpid()}")
                return
        time.sleep(0.01)


def wait_for_file():
    while not os.path.exists(FILE):
        time.sleep(0.02)


def blocked_call():
    """The call that blocks, ready to be made."""
    if MODE == "world":
        return lambda: World("cpu", world_size=2, rank=0, init_method=f"file://{FILE}.world", timeout=60)
    if MODE == "default world":
        return lambda: init_device_mesh("cpu", (2,))
    if MODE == "init":
        world = World("cpu", timeout=60)
        return lambda: init_device_mesh("cpu", (2,), world=world)
    if MODE == "barrier":
        return World("cpu", timeout=60).barrier
    mesh = init_device_mesh("cpu", (2,))
    if MODE == "flatten":
        return lambda: mesh.flatten("f")
    if MODE == "group":
        def receive():
            with mesh.group():
                mesh.get_group().recv(bytearray(4), 1)
        return receive
    if MODE == "work" and RANK == 0:
        works.append(mesh.get_group().all_reduce(bytearray(4), async_op=True))
        return works[0].wait
    return lambda: mesh.get_group().all_reduce(bytearray(4))


signals, works = [], []
if MODE in ("own handler", "terminated"):
    signal.signal(signal.SIGTERM if MODE == "terminated" else signal.SIGINT, lambda number, frame: signals.append(number))
if RANK == 0:
    call = blocked_call()
    threading.Thread(target=watch, daemon=True).start()
    try:
        call()
        say("returned")
    except KeyboardInterrupt:
        say("KeyboardInterrupt")
    except devicemesh.AbortedError as error:
        say(f"AbortedError after {len(signals)} signals: {error}")
    wakeup = signal.set_wakeup_fd(-1)
    say(f"descriptor {wakeup}")
    wait_for_file()
    for work in works:
        work.wait()  # the operation went on
elif MODE in ("world", "default world"):
    wait_for_file()
else:
    call = blocked_call()
    wait_for_file()
    try:
        call()
        say("peer returned")
    except (devicemesh.PeerLostError, devicemesh.MismatchError, devicemesh.AbortedError) as error:
        say(f"peer {type(error).__name__}: {error}")
