#!/usr/bin/env python3
"""Ranks with the variables that MPICH sets and no others, started by this process: they find the same port through their ancestors, also under
a shell. A second job of the same launcher has the same port: its rank 0 says how to choose one, and the first job is not disturbed."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(os.environ.get("DM_ROOT", Path(__file__).resolve().parent.parent))
LIBRARY = Path(os.environ.get("DM_LIB_DIR", ROOT / "target/release")) / "libdevicemesh.so"
RANK = """
from ours import Mesh
import sys
mesh = Mesh(1, 2)
print("sum", mesh.sum("tp", 20), flush=True)
sys.stdin.readline()
print("sum", mesh.sum("tp", 1), flush=True)
mesh.finalize()
"""
LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "OMPI_", "PMI", "PALS_", "SLURM_", "JOB_COMPLETION_INDEX")


def start(rank, wrapper=()):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    environment.update(PMI_RANK=str(rank), PMI_SIZE="2", MPI_LOCALRANKID=str(rank), MPI_LOCALNRANKS="2", PMI_FD="9",
                       DM_LIBRARY=str(LIBRARY), PYTHONPATH=str(ROOT / "tests/interop"))
    return subprocess.Popen([*wrapper, sys.executable, "-c", RANK], env=environment, text=True,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def main():
    ranks = [start(0), start(1, ("sh", "-c", '"$@"; exit $?', "sh"))]
    late = []
    try:
        for rank in ranks:
            line = rank.stdout.readline()
            assert line == "sum 40.0\n", line + rank.stderr.read()
        # Its rank 1 reaches the first job's store.
        late = [start(1), start(0)]
        error = late[1].communicate(timeout=60)[1]
        assert late[1].returncode != 0 and "the port was made from the job's id (PMI)" in error and "-genv MASTER_PORT" in error, error
        for rank in ranks:
            rank.stdin.write("go on\n")
            rank.stdin.flush()
        for rank in ranks:
            rest, error = rank.communicate(timeout=60)
            assert rank.returncode == 0 and rest == "sum 2.0\n", rest + error
    finally:
        for process in ranks + late:
            if process.poll() is None:
                process.kill()
            process.wait()
    print("2 ranks as MPICH starts them")
    return 0


if __name__ == "__main__":
    sys.exit(main())
