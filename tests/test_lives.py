#!/usr/bin/env python3
"""Long lives: what many calls, meshes and worlds leave behind is nothing; a world is left and joined again at one port; dm_init ends at its own timeout and
can be called again; a port that a connection holds for a moment is waited for, one at which somebody listens is an error; a world that is said to be
enormous takes no memory. Takes about 20 seconds, because memory that grows shows only after many calls.

DM_LIVES=N makes every count N times as large (`DM_LIVES=10` for a long look)."""

import os
import resource
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(os.environ.get("DM_ROOT", Path(__file__).resolve().parent.parent))
LIBRARY = Path(os.environ.get("DM_LIB_DIR", ROOT / "target/release"))
SCRATCH = Path(os.environ.get("DM_TMP", ROOT / "target/tests"))
PROGRAM = SCRATCH / "lives"
TIMES = int(os.environ.get("DM_LIVES", "1"))
PATIENCE = 150


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(rank, size, port, *arguments, **more):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "TORCHELASTIC"))}
    environment = {**inherited, "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return subprocess.Popen([PROGRAM, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, **more)


def end(ranks):
    """Waits for all of them; no rank may fail."""
    try:
        for number, rank in enumerate(ranks):
            out, err = rank.communicate(timeout=PATIENCE)
            assert rank.returncode == 0, f"rank {number} ended with {rank.returncode}: {out.decode()}{err.decode()}"
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def all_at(size, *arguments, port=None):
    port = port or free_port()
    return port, [start(rank, size, port, *arguments) for rank in range(size)]


def number_of_keys(port):
    """By the store's own protocol: VALIDATE, then GETNUMKEYS."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as store:
        store.sendall(b"\0" + struct.pack("<I", 0x3C85F7CE) + b"\7")
        return struct.unpack("<q", store.recv(8, socket.MSG_WAITALL))[0]


def keys_after(size, what, count):
    """The keys in the store after so many calls, and each rank finds that its memory has not grown."""
    port, ranks = all_at(size, what, count)
    try:
        line = ranks[0].stdout.readline()
        assert line == b"done\n", (line, ranks[0].stderr.read().decode())
        keys = number_of_keys(port)
        ranks[0].stdin.write(b"\n")
        ranks[0].stdin.flush()
    finally:
        if sys.exc_info()[0]:
            [rank.kill() for rank in ranks]
    end(ranks)
    return keys


def calls_leave_nothing():
    for what, size, few, many in (("barriers", 3, 20, 1500 * TIMES), ("meshes", 4, 5, 60 * TIMES)):
        small, large = keys_after(size, what, few), keys_after(size, what, many)
        print(f"{small} keys after {few} {what}, {large} after {many}, {size} ranks")
        assert large <= small + 25 * size, f"{few} {what} leave {small} keys, {many} leave {large}"


def rejoining():
    for size in (2, 3, 8):
        _, ranks = all_at(size, "rejoin", 25 * TIMES)
        end(ranks)
    print(f"{25 * TIMES} times joined and freed at one port by 2, 3 and 8 ranks")


def rejoining_in_a_store_that_stays():
    """A folder stands for every store that outlives the worlds: what a world left there is removed by the next one."""
    sizes = []
    with tempfile.TemporaryDirectory() as folder:
        for count in (3, 12 * TIMES):
            path = Path(folder) / f"store{count}"
            code = ("import sys; sys.path.insert(0, sys.argv[1]); import devicemesh\n"
                    "for _ in range(int(sys.argv[3])):\n"
                    "    world = devicemesh.World('cpu', world_size=2, rank=int(sys.argv[4]), init_method='file://' + sys.argv[2], timeout=120)\n"
                    "    world.barrier(); world.close()\n")
            ranks = [subprocess.Popen([sys.executable, "-c", code, ROOT / "bindings/python", path, str(count), str(rank)],
                                      env={**os.environ, "DM_LIBRARY": str(LIBRARY / "libdevicemesh.so")},
                                      stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for rank in range(2)]
            end(ranks)
            sizes.append(len(list(Path(f"{path}.devicemesh").iterdir())))
    print(f"{sizes[0]} files after 3 worlds in a folder, {sizes[1]} after {12 * TIMES}")
    assert sizes[1] <= sizes[0] + 2, sizes


def joining_again(how):
    _, ranks = all_at(2, how)
    for rank in ranks:
        line = rank.stdout.readline()
        assert line == b"late\n", (line, rank.stderr.read().decode())
    for rank in ranks:
        rank.stdin.write(b"\n")
        rank.stdin.flush()
    end(ranks)


def a_port_that_a_connection_holds():
    with socket.socket() as listener, socket.socket() as holder:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        holder.connect(listener.getsockname())
        ranks = [start(rank, 2, port, "rejoin", 1) for rank in range(2)]
        time.sleep(1.5)
        waiting = [rank.poll() for rank in ranks]
        # Gone at once, without a TIME_WAIT that would hold the port for a minute.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end(ranks)
    assert waiting == [None, None], f"they did not wait: {waiting}"


def a_port_at_which_somebody_listens():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        began = time.monotonic()
        rank = start(0, 2, listener.getsockname()[1], "rejoin", 1)
        err = rank.communicate(timeout=PATIENCE)[1].decode()
        took = time.monotonic() - began
    assert rank.returncode == 1 and "another process listens there" in err, err
    assert took < 30, f"{took:.1f} s, of a timeout of 120 s"


def a_world_that_is_said_to_be_enormous():
    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))

    code = PROGRAM.with_name("enormous.c")
    code.write_text('#include "check.h"\n'
                    "int main(void)\n{\n  dm_world_options options = DM_WORLD_OPTIONS_INIT;\n  dm_world *world = NULL;\n  options.timeout_ms = 1000;\n"
                    '  FAILS(DM_STATUS_TIMEOUT, "never called", dm_world_init("cpu", &options, &world));\n  return finish();\n}\n')
    build(code, PROGRAM.with_name("enormous"))
    for size in (50_000_000, 2147483647):
        rank = subprocess.Popen([PROGRAM.with_name("enormous")], stderr=subprocess.PIPE, preexec_fn=limit, env={
            **os.environ, "RANK": "0", "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())})
        err = rank.communicate(timeout=PATIENCE)[1].decode()
        assert rank.returncode == 0, f"WORLD_SIZE={size}: {rank.returncode} {err}"


def build(source, program):
    SCRATCH.mkdir(parents=True, exist_ok=True)
    subprocess.run([os.environ.get("CC", "cc"), "-std=c11", "-D_GNU_SOURCE", "-O1", "-I", ROOT / "include", "-I", ROOT / "hostccl/include", "-I", ROOT / "tests/c",
                    source, f"-L{LIBRARY}", "-ldevicemesh", f"-Wl,-rpath,{LIBRARY}", "-pthread", "-o", program], check=True)


def main():
    build(ROOT / "tests/c/programs/lives.c", PROGRAM)
    for case in (calls_leave_nothing, rejoining, rejoining_in_a_store_that_stays, lambda: joining_again("late"), lambda: joining_again("aborted"),
                 a_port_that_a_connection_holds, a_port_at_which_somebody_listens, a_world_that_is_said_to_be_enormous):
        began = time.monotonic()
        case()
        print(f"{getattr(case, '__name__', 'case')}: {time.monotonic() - began:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
