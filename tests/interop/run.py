#!/usr/bin/env python3
"""`make interop`: the library under real launchers and beside a real PyTorch. Needs a network, or
what it fetches there already.

It installs Debian's Open MPI, MPICH and Slurm when it is root and they are missing, and PyTorch
into target/interop/venv (some 5 GB; or DM_INTEROP_PYTHON names an interpreter that has it). What
cannot be had is a visible skip. Each case runs real processes with a deadline. The last line is
"N passed, N failed, N skipped"; a run of all cases writes its table into docs/interop.md.
"""

import argparse
import contextlib
import datetime
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytorch
from slurm import PROGRAMS, Slurm, free_ports

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(1, str(ROOT / "tests"))
from parts import base as suite  # noqa: E402

Failure, Skip, run = suite.Failure, suite.Skip, suite.run

SCRATCH = ROOT / "target/interop"
DEBIAN = {"mpirun.openmpi": "openmpi-bin", "mpiexec.mpich": "mpich", "munged": "munge", "libnss_wrapper.so": "libnss-wrapper",
          **{program: "slurm-wlm" for program in PROGRAMS if program != "munged"}}
TABLE = re.compile(r"(<!-- results -->\n).*(<!-- end of results -->)", re.S)
CASES = []


def case(what):
    """Registers a case; its return value, if any, is the note in the table."""
    def register(body):
        CASES.append((what, body))
        return body
    return register


def there(program):
    return shutil.which(program) or program.endswith(".so") and any(Path("/usr/lib").glob(f"*/{program}"))


def need(*programs):
    """Programs and libraries, installed when that can be done."""
    missing = sorted({DEBIAN[program] for program in programs if not there(program)})
    if missing and os.geteuid() == 0 and shutil.which("apt-get"):
        environment = {"DEBIAN_FRONTEND": "noninteractive"}
        with contextlib.suppress(Failure):
            run(["apt-get", "update"], timeout=300, env=environment)
            run(["apt-get", "install", "-y", "--no-install-recommends", *missing], timeout=600, env=environment)
    if not all(there(program) for program in programs):
        raise Skip(f"apt-get install {' '.join(missing)}")


def fine(output, ranks, line="mesh fine: rank"):
    """That every rank said so once."""
    said = sorted(int(rank) for rank in re.findall(rf"{line} (\d+)", output))
    if said != list(range(ranks)):
        raise Failure(f'"{line}" of ranks {said}, expected 0 to {ranks - 1}:\n{output}')
    return output


def build(source):
    program = SCRATCH / source.stem
    run([suite.CC, "-std=c11", "-D_GNU_SOURCE", "-O1", "-g", *suite.STRICT, "-Iinclude", "-Itests/c", source, *suite.LINK, "-o", program])
    return program


# --- MPI ---

OPEN_MPI, MPICH = ["mpirun.openmpi", "--oversubscribe"], ["mpiexec.mpich"]
MESH = SCRATCH / "mesh"
# Any other host is this one too: what would run there through ssh runs here.
SSH = SCRATCH / "not_ssh"
TWO_HOSTS = {
    "mpirun.openmpi": ["-mca", "plm_rsh_agent", SSH, "-host", f"{socket.gethostname()}:1,127.0.0.5:1", "-n", 2],
    "mpiexec.mpich": ["-launcher", "ssh", "-launcher-exec", SSH, "-hosts", f"{socket.gethostname()},127.0.0.5", "-n", 2],
}
ROOT_MAY = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def mpi(launcher, *arguments, **options):
    need(launcher[0])
    return run([*launcher, *arguments], env=ROOT_MAY, timeout=60, **options)


def mpi_cases(name, launcher, export):
    @case(f"{name}, 4 ranks, nothing set")
    def plain():
        fine(mpi(launcher, "-n", 4, MESH, 2, 2), 4)

    @case(f"{name}, 4 ranks, each under a shell")
    def wrapped():
        fine(mpi(launcher, "-n", 4, "sh", "-c", f"{MESH} 2 2; exit $?"), 4)

    @case(f"{name}, tests/c/collectives.c on 4 ranks")
    def collectives():
        mpi(launcher, "-n", 4, build(ROOT / "tests/c/collectives.c"))

    @case(f"{name}, two hosts, nothing set")
    def hosts():
        need(launcher[0])
        command = [str(part) for part in [*launcher, *TWO_HOSTS[launcher[0]], MESH, 1, 2]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **ROOT_MAY})
        if done.returncode == 0 or "no address to meet at" not in done.stderr or "MASTER_ADDR" not in done.stderr:
            raise Failure(f"expected a refusal that names MASTER_ADDR: {done.returncode}\n{done.stdout}{done.stderr}")
        return "refused at once, says what to set"

    @case(f"{name}, two hosts, MASTER_ADDR and MASTER_PORT exported by it")
    def hosts_with_address():
        exported = export({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])})
        fine(mpi(launcher, *exported, *TWO_HOSTS[launcher[0]], MESH, 1, 2), 2)


mpi_cases("Open MPI", OPEN_MPI, lambda pairs: [part for name, value in pairs.items() for part in ("-x", f"{name}={value}")])
mpi_cases("MPICH", MPICH, lambda pairs: [part for name, value in pairs.items() for part in ("-genv", name, value)])


@case("three Open MPI and three MPICH jobs of 2 ranks at once")
def at_once():
    need(OPEN_MPI[0], MPICH[0])
    with ThreadPoolExecutor(6) as pool:
        for output in pool.map(lambda launcher: mpi(launcher, "-n", 2, MESH, 1, 2), 3 * [OPEN_MPI, MPICH]):
            fine(output, 2)


# --- Slurm ---

SLURM = Slurm(SCRATCH / "slurm")


def slurm(*command):
    need(*PROGRAMS)
    if os.geteuid() != 0:
        raise Skip("its daemons want root")
    SLURM.start()
    return run(command, env={**SLURM.environment, **ROOT_MAY}, timeout=90)


def batch(script, *options):
    path, output = SCRATCH / "batch.sh", SCRATCH / "batch.out"
    path.write_text(f"#!/bin/sh\n{script}\n")
    output.unlink(missing_ok=True)
    slurm("sbatch", "--wait", "-o", output, *options, path)
    return output.read_text()


@case("srun, 4 tasks on one node")
def srun():
    fine(slurm("srun", "-N", 1, "-n", 4, MESH, 2, 2), 4)


@case("srun, 4 tasks on two nodes (3 and 1)")
def srun_nodes():
    need("libnss_wrapper.so")
    fine(slurm("srun", "-N", 2, "-n", 4, *SLURM.resolving, MESH, 2, 2), 4)


for plugin in ("pmi2", "pmix"):
    @case(f"srun --mpi={plugin}, the same")
    def srun_mpi(plugin=plugin):
        if plugin not in slurm("srun", "--mpi=list"):
            raise Skip("this Slurm is built without it")
        need("libnss_wrapper.so")
        fine(slurm("srun", f"--mpi={plugin}", "-N", 2, "-n", 4, *SLURM.resolving, MESH, 2, 2), 4)


@case("sbatch of 4 tasks: two steps of 2 at once, then the script itself")
def steps():
    output = batch(f"srun --exact -N 1 -n 2 {MESH} 1 2 &\nsrun --exact -N 1 -n 2 {MESH} 2 1 &\nwait\n{MESH} 1 1", "-N", 1, "-n", 4)
    if sorted(re.findall(r"rank (\d of \d)", output)) != ["0 of 1", "0 of 2", "0 of 2", "1 of 2", "1 of 2"]:
        raise Failure(output)
    return "the script is a world of one"


@case("sbatch on two nodes: mpirun of Open MPI, 2 ranks on one of them")
def mpirun_in_batch():
    need(OPEN_MPI[0])
    fine(batch(f"{' '.join(OPEN_MPI)} -n 2 {MESH} 1 2", "-N", 2, "-n", 4), 2)


# --- PyTorch ---

def torch():
    """An interpreter with PyTorch."""
    python = pytorch.interpreter()
    if python is None:
        raise Skip(f"no PyTorch here: pip install {' '.join(pytorch.PINNED)}, and DM_INTEROP_PYTHON names the interpreter")
    return python


def torch_environment():
    return {"DM_LIBRARY": str(suite.RELEASE / "libdevicemesh.so"), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def torchrun(*arguments, script, timeout=170, **environment):
    command = [torch(), "-m", "torch.distributed.run", "--monitor-interval", "0.5", *arguments, HERE / script]
    return run(command, env={**torch_environment(), **environment}, timeout=timeout)


def two_agents(script, **environment):
    rendezvous = ["--nnodes", 2, "--nproc-per-node", 2, "--max-restarts", 2, "--rdzv-backend", "c10d", "--rdzv-id", "interop",
                  "--rdzv-endpoint", f"127.0.0.1:{free_ports(1)[0]}"]
    torch()
    with ThreadPoolExecutor(2) as pool:
        return "".join(pool.map(lambda _: torchrun(*rendezvous, script=script, **environment), range(2)))


def marker():
    path = SCRATCH / "restarted"
    path.unlink(missing_ok=True)
    return str(path)


SIDE = "side by side fine: rank"


@case("torchrun --standalone, PyTorch (gloo) and libdevicemesh in each of 4 ranks")
def standalone():
    fine(torchrun("--standalone", "--nproc-per-node", 4, script="side_by_side.py"), 4, SIDE)


@case("PyTorch's operators and tensors, as the Python package takes or refuses them")
def tensors():
    package = ROOT / "bindings/python"
    output = run([torch(), package / "tests/test_arguments.py"], env={**torch_environment(), "PYTHONPATH": str(package)}, timeout=170)
    if not output.endswith("\nOK\n"):  # or "OK (skipped=...)"
        raise Failure(f"not all of the tests ran:\n{output}")


@case("the programs of PyTorch's DeviceMesh tutorial beside the Python package, 8 ranks")
def tutorial():
    # Eight processes that import PyTorch: minutes on a machine that is busy.
    output = torchrun("--standalone", "--nproc-per-node", 8, script="tutorial.py", timeout=400, PYTHONPATH=str(ROOT / "bindings/python"))
    fine(output, 8, "tutorial fine: rank")


@case("PyTorch's NCCL communicator adopted through its pointer by the Python package, a rank per GPU")
def adopted():
    count = int(run([torch(), "-c", "import torch; print(torch.cuda.device_count())"]).split()[-1])
    if count == 0:
        raise Skip("no GPU here")
    output = torchrun("--standalone", "--nproc-per-node", count, script="../gpu/torch_adopt.py", PYTHONPATH=str(ROOT / "bindings/python"))
    fine(output, count, "adopted fine: rank")


@case("torchrun --no-python, examples/jax_dp.py with real JAX in each of 4 ranks")
def jax_example():
    from support import jax
    # JAX has an interpreter of its own here, so PyTorch is only the launcher and the store.
    command = [torch(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 4, "--no-python", jax.prepared(), ROOT / "examples/jax_dp.py",
               "--check", "--epochs", 3]
    environment = {**torch_environment(), **jax.BYTECODE, "PYTHONPATH": f"{ROOT / 'bindings/python'}:{ROOT / 'bindings/jax'}"}
    output = run(command, env=environment, timeout=400)
    if not re.search(r"^check: one process gets the same losses up to \S+ relative$", output, re.M):
        raise Failure(f"no check of the losses in:\n{output}")


@case("torchrun with a static rendezvous, both in each of 4 ranks")
def static():
    port = free_ports(1)[0]
    fine(torchrun("--nnodes", 1, "--nproc-per-node", 4, "--master-addr", "127.0.0.1", "--master-port", port, script="side_by_side.py"), 4, SIDE)


@case("two torchruns --rdzv-endpoint (c10d), both in each of 4 ranks")
def c10d():
    fine(two_agents("side_by_side.py"), 4, SIDE)


@case("torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, 4 ranks: rank 0 serves")
def unshared():
    output = torchrun("--standalone", "--nproc-per-node", 4, "--max-restarts", 1, script="restart.py", DM_MARKER=marker(),
                      TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    fine(output, 4)


@case("the same, where PyTorch's rank 0 serves already: both in each of 4 ranks")
def unshared_side_by_side():
    fine(torchrun("--standalone", "--nproc-per-node", 4, script="side_by_side.py", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"), 4, SIDE)


@case("torchrun --max-restarts, rank 1 leaves in the first attempt")
def restart():
    fine(torchrun("--standalone", "--nproc-per-node", 4, "--max-restarts", 2, script="restart.py", DM_MARKER=marker()), 4)


@case("the same with two torchruns, whose restart counts then differ")
def restart_of_one():
    output = fine(two_agents("restart.py", DM_MARKER=marker()), 4)
    counts = sorted(set(re.findall(r"restart count (\d+)", output)))
    if counts != ["0", "1"]:
        raise Failure(f"restart counts {counts}, so this was no restart of one agent's ranks alone\n{output}")
    return "counts 0 and 1"


@case("torchrun under srun and its own variables first: 2 nodes of 2 ranks")
def torchrun_in_slurm():
    wrapper = SCRATCH / "torchrun.sh"
    wrapper.write_text(f"#!/bin/sh\nexec {torch()} -m torch.distributed.run --nnodes 2 --nproc-per-node 2 --node-rank $SLURM_NODEID "
                       f"--master-addr 127.0.0.1 --master-port {free_ports(1)[0]} {HERE}/side_by_side.py\n")
    wrapper.chmod(0o755)
    fine(slurm("srun", "-N", 2, "-n", 2, "--export", ",".join(["ALL", *(f"{name}={value}" for name, value in torch_environment().items())]),
               wrapper), 4, SIDE)


@case("devicemesh run serves the store, PyTorch (gloo) and libdevicemesh in each of 4 ranks")
def our_store():
    fine(run([suite.TOOL, "run", "-n", 4, "--", torch(), HERE / "side_by_side.py"], env=torch_environment()), 4, SIDE)


@case("every operation of PyTorch's TCPStore and PrefixStore on our server")
def their_client():
    output = run([suite.TOOL, "run", "-n", 2, "--", torch(), HERE / "torch_client.py"], env=torch_environment())
    fine(output, 2, "every operation fine: rank")
    return re.search(r"with (.*)", output).group(1)


@contextlib.contextmanager
def their_servers(*kinds):
    server = subprocess.Popen([torch(), HERE / "torch_servers.py", *kinds], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                              env={**os.environ, **torch_environment()})
    try:
        yield server.stdout.readline().split()
    finally:
        server.stdin.close()
        server.wait(timeout=20)


@case("every operation of our client on PyTorch's servers, libuv and legacy")
def our_client():
    with their_servers("libuv", "legacy") as ports:
        output = run(["cargo", "test", "--quiet", "--test", "torch_server", "--", "--ignored"], timeout=900,
                     env={"DM_TORCH_STORES": " ".join(ports)})
    if "1 passed" not in output:
        raise Failure(output)


for kind in ("libuv", "legacy"):
    @case(f"4 ranks meet in PyTorch's {kind} server")
    def in_their_store(kind=kind):
        with their_servers(kind) as (port,):
            environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": "4"}
            with ThreadPoolExecutor(4) as pool:
                fine("".join(pool.map(lambda rank: run([MESH, 2, 2], env={**environment, "RANK": str(rank)}, timeout=60), range(4))), 4)


# --- the run ---

def versions():
    first = lambda *command: subprocess.run(command, capture_output=True, text=True).stdout.split("\n")[0]
    found = [f"Linux {platform.release()}, {os.cpu_count()} cores, Python {platform.python_version()}"]
    if shutil.which("mpirun.openmpi"):
        found.append("Open MPI " + first("mpirun.openmpi", "--version").split()[-1])
    if shutil.which("mpiexec.mpich"):
        found.append("MPICH " + subprocess.run(["mpiexec.mpich", "--version"], capture_output=True, text=True).stdout.split("Version:")[1].split()[0])
    if shutil.which("slurmd"):
        found.append("Slurm " + first("slurmd", "-V").split()[-1])
    if pytorch.interpreter():
        found.append("torch " + first(pytorch.interpreter(), "-c", "import torch; print(torch.__version__)"))
    return ", ".join(found)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-k", action="append", metavar="TEXT", help="only cases whose name contains this; docs/interop.md stays as it is")
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    options = parser.parse_args()
    os.chdir(ROOT)
    chosen = [(what, body) for what, body in CASES if not options.k or any(text in what for text in options.k)]
    if options.list:
        print(*(what for what, _ in chosen), sep="\n")
        return 0
    SCRATCH.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cargo", "build", "--release", "--quiet"], check=True)
    build(HERE / "mesh.c")
    SSH.write_text('#!/bin/sh\nwhile case "$1" in -*) ;; *) false ;; esac; do shift; done\nshift\nexec sh -c "$*"\n')
    SSH.chmod(0o755)
    counts, rows = {"passed": 0, "failed": 0, "skipped": 0}, []
    try:
        for what, body in chosen:
            began = time.monotonic()
            try:
                verdict, note = "passed", body() or ""
            except Skip as why:
                verdict, note = "skipped", str(why)
            except Exception as error:  # a broken case is a failed case, not a broken run
                verdict, note = "failed", f"{type(error).__name__}: {error}"
            counts[verdict] += 1
            rows.append(f"| {what} | {verdict} | {note.splitlines()[0] if note else ''} |")
            print(f"{verdict} {what} ({time.monotonic() - began:.1f} s){': ' if note else ''}{note}", flush=True)
    finally:
        SLURM.stop()
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    if not options.k:
        document = ROOT / "docs/interop.md"
        table = "\n".join([f"{datetime.date.today()}: {versions()}. {summary}.", "", "| what | result | note |", "|---|---|---|", *rows, ""])
        document.write_text(TABLE.sub(lambda found: found.group(1) + table + found.group(2), document.read_text()))
    print(summary)
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
