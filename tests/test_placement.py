"""Where ranks are placed, and where they are found again: GPUs in `devicemesh run --bind`, the
ranks of other launchers in `devicemesh ps`, and the tables of both on terminals."""

import json
import os
import subprocess
import sys

import pytest

from support.nccl import library
from support.paths import LIBRARY, TOOL
from support.processes import environment, run
from support.terminals import on_terminals


def on_terminal(columns, *command):
    """The output of a command on a terminal of that width."""
    return on_terminals(columns, *command, env=environment(without=["CUDA_"]))[0]


@pytest.mark.parametrize("columns", [60, 200])
def test_a_dry_run_fits_the_terminal(columns):
    shown = on_terminal(columns, TOOL, "run", "--dry-run", "--color", "never", "-n", 1, "--bind", "core", "--", "./train",
                        *["--option=value"] * 20)
    lines = shown.splitlines()
    assert max(map(len, lines)) <= columns, shown
    # No word is broken, and nothing is left out.
    words = shown.split()
    assert words.count("--option=value") == 20 and "TORCHELASTIC_USE_AGENT_STORE=True" in words and "CPUs" in words, shown


def test_a_dry_run_names_the_gpu_next_to_which_a_rank_goes(programs):
    driver = library(programs, "libcuda.so.1", ["cuda.c"]).parent
    env = environment(without=["CUDA_"], LD_LIBRARY_PATH=driver, CUDA_COUNT="1")
    shown = run(TOOL, "run", "--dry-run", "-n", 2, "--bind", "numa", "--", "true", env=env).stdout
    rows = [line.split() for line in shown.splitlines() if line.endswith("0 at 0000:a0:00.0")]
    assert [row[0] for row in rows] == ["0", "1"], shown


# A host with two NUMA nodes, in a mount namespace of its own: $1 and $2 are the CPUs of its nodes.
TWO_NODES = """set -e
nodes=/sys/devices/system/node
mount -t tmpfs none $nodes
mkdir $nodes/node0 $nodes/node1
echo 0-1 | tee $nodes/has_cpu > $nodes/has_memory
echo $1 > $nodes/node0/cpulist
echo $2 > $nodes/node1/cpulist
shift 2
exec "$@"
"""


def test_ranks_are_bound_where_they_divide_evenly_among_numa_nodes():
    cpus = sorted(os.sched_getaffinity(0))[:2]
    if len(cpus) < 2:
        pytest.skip("one CPU alone cannot be two NUMA nodes")
    in_namespace = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", TWO_NODES, "sh", *cpus]
    tried = subprocess.run([str(word) for word in (*in_namespace, "true")], stderr=subprocess.PIPE, text=True)
    if tried.returncode != 0:
        pytest.skip(f"no mount namespace here: {tried.stderr.strip()}")

    def ran_on(*options):
        allowed = ["sh", "-c", "echo $RANK $(sed -n s/Cpus_allowed_list://p /proc/self/status)"]
        both = ["taskset", "-c", f"{cpus[0]},{cpus[1]}"]
        return sorted(run(*both, *in_namespace, TOOL, "run", *options, "--", *allowed).stdout.splitlines())

    assert ran_on("-n", 2) == [f"0 {cpus[0]}", f"1 {cpus[1]}"]
    assert ran_on("-n", 2, "--bind", "numa") == ran_on("-n", 2)
    unbound = ran_on("-n", 2, "--bind", "none")
    assert unbound[0] not in ran_on("-n", 2) and unbound[0][2:] == unbound[1][2:]
    # One rank would leave a node idle, and three share two cores.
    assert ran_on("-n", 1) == unbound[:1]
    assert ran_on("-n", 3)[:2] == unbound


def test_ranks_of_other_launchers_are_listed_when_they_use_the_library():
    # The job's name and address are those of this test, because other jobs of this user may run.
    name = f"other-{os.getpid()}"

    def start(rank, load):
        wait = f"import ctypes, sys\n{load}\nprint('ready', flush=True)\nsys.stdin.read()"
        env = environment(RANK=str(rank), WORLD_SIZE="4", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                          MASTER_PORT="1", TORCHELASTIC_RUN_ID=name)
        child = subprocess.Popen([sys.executable, "-c", wait], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        assert child.stdout.readline() == b"ready\n"
        return child

    def listed():
        jobs = json.loads(run(TOOL, "ps", "--json").stdout)["jobs"]
        return [job for job in jobs if job["name"] == name]

    children = [start(0, "")]
    try:
        assert listed() == []
        children.append(start(1, f"ctypes.CDLL('{LIBRARY}/libdevicemesh.so')"))
        (job,) = listed()
        assert (job["launcher"], job["state"], job["world_size"], job["pid"]) == ("torchrun", "running", 4, os.getpid()), job
        assert [rank["pid"] for rank in job["ranks"]] == [child.pid for child in children], job
        whole, narrow = (on_terminal(columns, TOOL, "ps", "--color", "never") for columns in (200, 50))
        heads = [[line.split() for line in shown.splitlines() if line.startswith("job ")] for shown in (whole, narrow)]
        assert heads[0] == [["job", "pid", "ranks", "elapsed", "state", "memory", "CPU"]], whole
        assert len(heads[1]) > 1 and all(line[:2] == ["job", "pid"] for line in heads[1]), narrow
        assert max(map(len, narrow.splitlines())) <= 50 and "0-1 of 4" in narrow and "CPU" in narrow.split(), narrow
    finally:
        for child in children:
            child.communicate()
