#!/usr/bin/env python3
"""A rank that stops (SIGSTOP) or fails in the middle of a collective call: the others have an error that names it by their deadline, dm_abort and
dm_world_abort end a making that does not, and no communicator and no memory of one is left. The library is libhostccl behind one that stops a
rank in a given call (tests/c/programs/stall.c), the ranks are those of tests/c/programs/stopped.c."""

import os
import re
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


def main():
    shim, ranks = build()
    wanted = sys.argv[1:]
    failed = []
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
