"""One rank of a job of tests/test_fork.py: `forked.py HOW`. Rank 0 has children made in that way
while the job runs.

HOW: "workers" (a pool of multiprocessing's, as data loaders have), "calls" (a child that calls what
it must not, and ends like any program), "sleeps" (multiprocessing, os.fork, subprocess and system:
each a child that sleeps on while the test kills the rank).
"""

import array
import gc
import multiprocessing
import os
import subprocess
import sys
import time
import traceback

from devicemesh import DeviceMeshError, init_device_mesh
from devicemesh.errors import UnsupportedError

HOW = sys.argv[1]
RANK = int(os.environ["RANK"])
SIZE = int(os.environ["WORLD_SIZE"])
mesh = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("dp",))


def say(text):
    os.write(1, f"{text}\n".encode())


def reduce():
    data = array.array("f", [1.0] * 1000)
    mesh.get_group("dp").all_reduce(data)
    assert set(data) == {float(SIZE)}, data[:4]


def work(number):
    """The questions of a data loader's worker to a mesh: which part of the data is its."""
    return number, mesh.get_local_rank("dp"), mesh.size("dp"), mesh.get_coordinate()


def is_refused(call):
    try:
        call()
    except UnsupportedError as error:
        assert "was forked from process" in str(error) and "spawn" in str(error), error
    else:
        raise AssertionError(f"{call} was not refused")


def calls():
    global mesh
    assert work(7) == (7, 0, SIZE, (0,)), work(7)
    is_refused(reduce)
    is_refused(lambda: mesh["dp"].flatten("other"))
    is_refused(lambda: init_device_mesh("cpu", (SIZE,)))
    is_refused(mesh.finalize)
    is_refused(mesh.abort)
    del mesh
    gc.collect()


def in_fork(body):
    """A child that leaves as programs do, through the interpreter's end; or, in what body does, by
    os._exit."""
    child = os.fork()
    if child == 0:
        try:
            body()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0


def sleep_on():
    os.close(1)
    os.close(2)
    time.sleep(120)


def sleepers():
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=sleep_on)
    process.start()
    child = os.fork()
    if child == 0:
        sleep_on()
        os._exit(0)
    apart = subprocess.Popen(["sleep", "120"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, close_fds=False)
    say(f"children {process.pid} {child} {apart.pid}")
    os.system("sleep 120 >/dev/null 2>&1 & echo child $!")


reduce()
if HOW == "workers":
    for _ in range(3):
        if RANK == 0:
            with multiprocessing.get_context("fork").Pool(3) as pool:
                answers = pool.map(work, range(20))
            assert answers == [(number, 0, SIZE, (0,)) for number in range(20)], answers
        reduce()
    mesh.finalize()
elif HOW == "calls":
    if RANK == 0:
        in_fork(calls)
        in_fork(lambda: (is_refused(reduce), os._exit(0)))
        in_fork(lambda: None)
        process = multiprocessing.get_context("fork").Process(target=calls)
        process.start()
        process.join()
        assert process.exitcode == 0, process.exitcode
    reduce()
    mesh.finalize()
else:
    if RANK == 0:
        sleepers()
    say(f"ready {os.getpid()}")
    if RANK == 0:
        time.sleep(120)
    try:
        reduce()
    except DeviceMeshError as error:
        say(f"{type(error).__name__} {time.monotonic():.6f} {error}")
say("done")
