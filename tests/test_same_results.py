#!/usr/bin/env python3
"""The same C program gives the same results under the tool, under plain environment variables, and as threads of one process."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(os.environ.get("DM_ROOT", Path(__file__).resolve().parent.parent))
LIBRARY = Path(os.environ.get("DM_LIB_DIR", ROOT / "target/release"))
SCRATCH = Path(os.environ.get("DM_TMP", ROOT / "target/tests"))


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def main():
    program = SCRATCH / "results"
    SCRATCH.mkdir(parents=True, exist_ok=True)
    subprocess.run([os.environ.get("CC", "cc"), "-std=c11", "-D_GNU_SOURCE", "-O1", "-I", ROOT / "include", ROOT / "tests/c/programs/results.c",
                    f"-L{LIBRARY}", "-ldevicemesh", f"-Wl,-rpath,{LIBRARY}", "-pthread", "-o", program], check=True)

    def sorted_lines(text):
        return sorted(text.splitlines())

    tool = subprocess.run([LIBRARY / "devicemesh", "run", "-n", "8", "--", program], capture_output=True, text=True, timeout=120, check=True)
    threads = subprocess.run([program, "--threads", free_port()], capture_output=True, text=True, timeout=120, check=True)
    port = free_port()
    ranks = [
        subprocess.Popen([program], stdout=subprocess.PIPE, text=True,
                         env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "8", "LOCAL_RANK": str(rank),
                              "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
        for rank in range(8)
    ]
    outputs = []
    try:
        for rank in ranks:
            outputs.append(rank.communicate(timeout=120)[0])
            assert rank.returncode == 0, f"exit code {rank.returncode}"
    finally:
        for rank in ranks:
            rank.kill()

    by_tool, by_threads, by_environment = sorted_lines(tool.stdout), sorted_lines(threads.stdout), sorted_lines("".join(outputs))
    assert len(by_tool) == 8, by_tool
    for name, lines in (("threads", by_threads), ("environment variables", by_environment)):
        assert lines == by_tool, f"{name}:\n" + "\n".join(lines) + "\nthe tool:\n" + "\n".join(by_tool)
    print("8 ranks, 3 ways, the same results")
    return 0


if __name__ == "__main__":
    sys.exit(main())
