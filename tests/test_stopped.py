#!/usr/bin/env python3
"""A rank that stops (SIGSTOP) or fails in the middle of a collective call: the others have an error that names it by their deadline, dm_abort and
dm_world_abort end a making that does not, and no communicator and no memory of one is left. The library is libhostccl behind one that stops a
rank in a given call (tests/c/programs/stall.c), the ranks are those of tests/c/programs/stopped.c.

Arguments: only these kinds. --served: rank 0 serves the store and is the one that stops, so that the store stops with it."""

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(os.environ.get("DM_ROOT", Path(__file__).resolve().parent.parent))
LIBRARY = Path(os.environ.get("DM_LIB_DIR", ROOT / "target/release"))
SCRATCH = Path(os.environ.get("DM_TMP", ROOT / "target/tests"))
KINDS = [("barrier", 1), ("init", 0), ("init-id", 0), ("init-root", 1), ("init-root", 0), ("init-split", 1), ("init-second-split", 3), ("flatten", 2),
         ("unflatten-split", 1), ("finalize", 1), ("finalize-flush", 1), ("finalize-destroy", 2), ("lazy", 1), ("lazy-id", 0), ("lazy-init", 1),
         ("all-reduce", 3), ("abort", 1), ("world-abort", 1), ("leaks", 1), ("unmade", 1)]


def build():
    SCRATCH.mkdir(parents=True, exist_ok=True)
    cc = [os.environ.get("CC", "cc"), "-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-I", ROOT / "include", "-I", ROOT / "tests/c"]
    link = [f"-L{LIBRARY}", f"-Wl,-rpath,{LIBRARY}:{SCRATCH}", "-pthread", "-ldl"]
    # Cargo names the library without its version; the loader looks for its SONAME.
    version = re.search(r'^version = "(\d+\.\d+)', (ROOT / "Cargo.toml").read_text(), re.M).group(1)
    soname = SCRATCH / f"libhostccl.so.{version}"
    soname.unlink(missing_ok=True)
    soname.symlink_to(LIBRARY / "libhostccl.so")
    programs = ROOT / "tests/c/programs"
    shim, ranks = SCRATCH / "libstall.so", SCRATCH / "stopped"
    subprocess.run([*cc, "-shared", "-fPIC", programs / "stall.c", "-Wl,--no-as-needed", *link, "-lhostccl", "-o", shim], check=True)
    subprocess.run([*cc, programs / "stopped.c", *link, "-ldevicemesh", "-o", ranks], check=True)
    return shim, ranks


def served(shim, ranks, kind):
    """Without a launcher, rank 0 serves the store. Gives the exit codes and what the ranks wrote."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "DM_CCL_LIBRARY": str(shim)}
    running = [subprocess.Popen([ranks, kind, "0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(4)]
    try:
        return [(rank.communicate(timeout=60)[0], rank.returncode) for rank in running]
    finally:
        for rank in running:
            rank.kill()


def main():
    shim, ranks = build()
    wanted = [argument for argument in sys.argv[1:] if argument != "--served"]
    failed = []
    if "--served" in sys.argv:
        for kind in wanted or ["barrier", "init", "init-split", "flatten", "finalize-flush"]:
            for rank, (output, code) in enumerate(served(shim, ranks, kind)):
                print(f"{kind}, rank {rank}: {code}\n{output}", flush=True)
                failed += [kind] if code != 0 else []
        print(f"failed: {sorted(set(failed))}" if failed else "all well")
        return 1 if failed else 0
    for kind, victim in KINDS:
        if wanted and kind not in wanted:
            continue
        command = [LIBRARY / "devicemesh", "run", "-n", "4", "--prefix", "--grace-period", "10", "--", ranks, kind, str(victim)]
        began = time.monotonic()
        try:
            done = subprocess.run(command, env={**os.environ, "DM_CCL_LIBRARY": str(shim)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                  text=True, timeout=60)
            code, output = done.returncode, done.stdout
        except subprocess.TimeoutExpired as late:
            code, output = "not done after 60 s", (late.stdout or b"").decode(errors="replace")
        print(f"{kind}, rank {victim}: {time.monotonic() - began:.1f} s, {code}\n{output}", flush=True)
        if code != 0:
            failed.append(kind)
    print(f"failed: {failed}" if failed else "all well")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
