"""Processes that live long. Many calls, meshes and worlds leave nothing behind. A rank can leave a
world and join again at one port. dm_init ends at its own timeout and can be called again. A rank
waits for a port that a connection holds for a moment, but a port at which another process listens
is an error. A very large WORLD_SIZE takes no memory. The file takes about 20 seconds, because
memory that grows shows only after many calls.

DM_LIVES=N makes every count N times as large (`DM_LIVES=10` for a long look)."""

import os
import resource
import socket
import struct
import subprocess
import sys
import time

import pytest

from support.paths import LIBRARY, ROOT

TIMES = int(os.environ.get("DM_LIVES", "1"))
PATIENCE = 150
pytestmark = pytest.mark.timeout(PATIENCE * TIMES + 30)


@pytest.fixture
def start(programs, start_ranks):
    """Starts ranks of tests/c/programs/lives.c, which read what they may do next."""
    program = programs.c("tests/c/programs/lives.c")

    def ranks(size, *arguments, **more):
        return start_ranks([program, *arguments], size, stdin=subprocess.PIPE, stderr=subprocess.PIPE,
                           each=lambda rank: {"LOCAL_RANK": 0}, **more)
    return ranks


def end(ranks):
    """Waits for all of them; no rank may fail."""
    for number, rank in enumerate(ranks):
        out, err = rank.communicate(timeout=PATIENCE * TIMES)
        assert rank.returncode == 0, f"rank {number} ended with {rank.returncode}: {out}{err}"


def go_on(rank):
    rank.stdin.write("\n")
    rank.stdin.flush()


def says(rank, word):
    line = rank.stdout.readline()
    assert line == f"{word}\n", (line, rank.poll())


def number_of_keys(port):
    """Asks the store by its own protocol: VALIDATE, then GETNUMKEYS."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as store:
        store.sendall(b"\0" + struct.pack("<I", 0x3C85F7CE) + b"\7")
        return struct.unpack("<q", store.recv(8, socket.MSG_WAITALL))[0]


def keys_after(start, size, what, count):
    """The keys in the store after so many calls. Each rank finds that its memory has not grown."""
    ranks = start(size, what, count)
    says(ranks[0], "done")
    keys = number_of_keys(ranks.port)
    go_on(ranks[0])
    end(ranks)
    return keys


@pytest.mark.parametrize("what, size, few, many", [("barriers", 3, 20, 1500 * TIMES), ("meshes", 4, 5, 60 * TIMES)])
def test_calls_leave_nothing(start, what, size, few, many):
    small, large = keys_after(start, size, what, few), keys_after(start, size, what, many)
    assert large <= small + 25 * size, f"{few} {what} leave {small} keys, {many} leave {large}"


@pytest.mark.parametrize("size", [2, 3, 8])
def test_rejoining(start, size):
    end(start(size, "rejoin", 25 * TIMES))


REJOINING = """
import os, sys
sys.path.insert(0, sys.argv[1])
import devicemesh
for _ in range(int(sys.argv[3])):
    world = devicemesh.World('cpu', world_size=2, rank=int(os.environ['RANK']), init_method='file://' + sys.argv[2], timeout=120)
    world.barrier()
    world.close()
"""


def test_rejoining_in_a_store_that_stays(start_ranks, tmp_path):
    """A folder may outlive the worlds. Each world in it ends in order, and the last one leaves no
    folder."""
    for count in (3, 12 * TIMES):
        path = tmp_path / f"store{count}"
        start_ranks([sys.executable, "-c", REJOINING, ROOT / "bindings/python", path, count], 2,
                    variables={"DM_LIBRARY": LIBRARY / "libdevicemesh.so"}).outputs(timeout=PATIENCE * TIMES)
        assert not path.with_name(f"{path.name}.devicemesh").exists(), f"a folder is left after {count} worlds"


@pytest.mark.parametrize("how", ["late", "aborted"])
def test_joining_again(start, how):
    ranks = start(2, how)
    for rank in ranks:
        says(rank, "late")
    for rank in ranks:
        go_on(rank)
    end(ranks)


def test_a_port_that_a_connection_holds(start):
    """The ranks need the port's number when the connection has ended, so nobody holds it for them
    then. Another process may get it, although the kernel seldom gives a number again so soon."""
    with socket.socket() as listener, socket.socket() as holder:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        holder.bind(("127.0.0.1", 0))
        holder.connect(listener.getsockname())
        ranks = start(2, "rejoin", 1, port=holder.getsockname()[1], variables={"DM_LOG": "debug"})
        for rank in ranks:
            said = rank.stderr.readline()
            assert "; it joins within " in said, said
        time.sleep(1)
        waiting = [rank.poll() for rank in ranks]
        # The connection ends at once, without a TIME_WAIT that would hold the port for a minute.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end(ranks)
    assert waiting == [None, None], f"they did not wait: {waiting}"


def test_a_port_at_which_somebody_listens(start):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        began = time.monotonic()
        (rank,) = start(1, "rejoin", 1, port=listener.getsockname()[1], variables={"WORLD_SIZE": 2})
        err = rank.communicate(timeout=PATIENCE)[1]
        took = time.monotonic() - began
    assert rank.returncode == 1 and "another process listens there" in err, err
    assert took < 30, f"{took:.1f} s, of a timeout of 120 s"


ENORMOUS = """#include "check.h"
int main(void)
{
  dm_world_options options = DM_WORLD_OPTIONS_INIT;
  dm_world *world = NULL;
  options.timeout_ms = 1000;
  FAILS(DM_STATUS_TIMEOUT, "never called", dm_world_init("cpu", &options, &world));
  return finish();
}
"""


@pytest.mark.parametrize("size", [50_000_000, 2147483647])
def test_a_world_that_is_said_to_be_enormous(programs, start_ranks, tmp_path, size):
    """A rank whose memory is limited to 1 GiB ends at its timeout."""
    source = tmp_path / "enormous.c"
    source.write_text(ENORMOUS)
    limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    start_ranks([programs.c(source)], 1, variables={"WORLD_SIZE": size}, preexec_fn=limit).outputs(timeout=PATIENCE)
