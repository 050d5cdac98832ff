"""One of the programs that tests/test_python.py runs on two ranks: `joins.py MODE FILE`. Joins of
the default world that their timeout ends, or Ctrl-C, and that are begun anew.

FILE is where a rank says that the other one may go on.
"""

import datetime
import os
import signal
import sys
import threading
import time

import devicemesh
from devicemesh import World, init_device_mesh

MODE, FILE = sys.argv[1:]
RANK = int(os.environ["RANK"])


def wait_for_file():
    while not os.path.exists(FILE):
        time.sleep(0.02)


def touch_file():
    open(FILE, "w").close()


def joined(**options):
    mesh = init_device_mesh("cpu", (2,), timeout=60, **options)
    value = bytearray([RANK + 1])
    mesh.get_group().all_reduce(value)
    assert value[0] == 3, value
    mesh.finalize()


def times_out(timeout):
    began = time.monotonic()
    try:
        init_device_mesh("cpu", (2,), timeout=timeout)
    except (devicemesh.MeshTimeoutError, devicemesh.PeerLostError, devicemesh.StoreError) as error:
        return f"{type(error).__name__} after {time.monotonic() - began:.1f} s: {error}"
    raise AssertionError("joined without the other rank")


def interrupted(call):
    """Ctrl-C in call(), which is blocked by then on a machine that is not too busy; it may also
    come earlier."""
    began = time.monotonic()
    try:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        call()
    except KeyboardInterrupt:
        return f"KeyboardInterrupt after {time.monotonic() - began:.1f} s"
    raise AssertionError("joined without the other rank")


if MODE == "late":
    # Two joins of rank 0 are in vain; then both ranks come.
    if RANK == 0:
        print(times_out(1), flush=True)
        print(times_out(datetime.timedelta(seconds=0.5)), flush=True)
        touch_file()
    wait_for_file()
    joined()
elif MODE == "gone":
    if RANK == 1:
        print(times_out(1), flush=True)
elif MODE == "interrupted":
    if RANK == 0:
        print(interrupted(lambda: init_device_mesh("cpu", (2,))), flush=True)
        touch_file()
    wait_for_file()
    joined()
elif MODE == "own world":
    def world():
        return World("cpu", world_size=2, rank=RANK, init_method=f"file://{FILE}.store", timeout=60)

    if RANK == 0:
        print(interrupted(world), flush=True)
        deadline = time.monotonic() + 30
        while any(thread.name == "devicemesh join" for thread in threading.enumerate()):
            assert time.monotonic() < deadline, "the abandoned join goes on"
            time.sleep(0.02)
        touch_file()
    wait_for_file()
    joined(world=world())
print("done", flush=True)
