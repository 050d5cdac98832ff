"""The library beside a real PyTorch, under torchrun, and each store with the other's clients.

The first line of each test's documentation is its row in docs/interop.md (table.py)."""

import contextlib
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from launchers import fine
from support import jax
from support.paths import ROOT, TOOL
from support.processes import environment, run, words
from torch_ranks import HERE, PACKAGE, SIDE, found_torch

# Up to eight processes import PyTorch, which takes minutes on a busy machine.
pytestmark = [pytest.mark.long, pytest.mark.alone, pytest.mark.timeout(500)]


@pytest.fixture
def torch(monkeypatch, tmp_path):
    torch = found_torch()
    # torchrun leaves its logs in TMPDIR.
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return torch


@pytest.fixture
def two_agents(torch, free_port):
    """Runs a script on four ranks under two agents, which meet by c10d, and gives what they
    wrote."""
    def to_its_end(script, **variables):
        meeting = ["--nnodes", 2, "--nproc-per-node", 2, "--max-restarts", 2, "--rdzv-backend", "c10d",
                   "--rdzv-id", "interop", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
        with ThreadPoolExecutor(2) as pool:
            return "".join(pool.map(lambda _: torch.torchrun(*meeting, HERE / script, **variables), range(2)))
    return to_its_end


@contextlib.contextmanager
def torch_servers(torch, *kinds):
    """PyTorch's store servers, one of each kind; gives their ports."""
    server = subprocess.Popen(
        words([torch.python, HERE / "torch_servers.py", *kinds]), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=environment(**torch.variables))
    try:
        yield server.stdout.readline().split()
    finally:
        server.stdin.close()
        server.wait(timeout=20)
        server.stdout.close()


STANDALONE = ("--standalone", "--nproc-per-node", 4)


def test_torchrun_standalone(torch):
    """torchrun --standalone, PyTorch (gloo) and libdevicemesh in each of 4 ranks"""
    fine(torch.torchrun(*STANDALONE, HERE / "side_by_side.py"), 4, SIDE)


def test_tensors(torch):
    """PyTorch's operators and tensors, as the Python package takes or refuses them"""
    output = torch.run(torch.python, ROOT / "bindings/python/tests/test_arguments.py", **PACKAGE)
    assert output.endswith("\nOK\n"), f"not all of the tests ran:\n{output}"  # it would be "OK (skipped=...)"


def test_tutorial(torch):
    """the programs of PyTorch's DeviceMesh tutorial beside the Python package, 8 ranks"""
    output = torch.torchrun("--standalone", "--nproc-per-node", 8, HERE / "tutorial.py", timeout=400, **PACKAGE)
    fine(output, 8, "tutorial fine: rank")


def test_adopted(torch):
    """PyTorch's NCCL communicator adopted through its pointer by the Python package, a rank per GPU"""
    count = int(torch.run(torch.python, "-c", "import torch; print(torch.cuda.device_count())").split()[-1])
    if count == 0:
        pytest.skip("no GPU here")
    output = torch.torchrun("--standalone", "--nproc-per-node", count, ROOT / "tests/gpu/torch_adopt.py", **PACKAGE)
    fine(output, count, "adopted fine: rank")


def test_torchrun_of_jax(torch):
    """torchrun --no-python, examples/jax_dp.py with real JAX in each of 4 ranks"""
    # JAX has an interpreter of its own here, so PyTorch is only the launcher and the store.
    program = [jax.prepared(), ROOT / "examples/jax_dp.py", "--check", "--epochs", 3]
    variables = {**jax.BYTECODE, "PYTHONPATH": f"{ROOT / 'bindings/python'}:{ROOT / 'bindings/jax'}"}
    output = torch.torchrun(*STANDALONE, "--no-python", *program, timeout=400, **variables)
    assert re.search(r"^check: one process gets the same losses up to \S+ relative$", output, re.M), output


def test_torchrun_with_a_static_rendezvous(torch, free_port):
    """torchrun with a static rendezvous, both in each of 4 ranks"""
    address = ["--nnodes", 1, "--nproc-per-node", 4, "--master-addr", "127.0.0.1", "--master-port", free_port()]
    fine(torch.torchrun(*address, HERE / "side_by_side.py"), 4, SIDE)


def test_torchrun_of_two_agents(two_agents):
    """two torchruns --rdzv-endpoint (c10d), both in each of 4 ranks"""
    fine(two_agents("side_by_side.py"), 4, SIDE)


def test_torchrun_that_shares_no_store(torch, tmp_path):
    """torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, 4 ranks: rank 0 serves"""
    output = torch.torchrun(*STANDALONE, "--max-restarts", 1, HERE / "restart.py", DM_MARKER=tmp_path / "restarted",
                            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    fine(output, 4)


def test_torchrun_whose_rank_0_serves_pytorch(torch):
    """torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, where PyTorch's rank 0 serves: both in 4 ranks"""
    fine(torch.torchrun(*STANDALONE, HERE / "side_by_side.py", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"), 4, SIDE)


def test_torchrun_restarts(torch, tmp_path):
    """torchrun --max-restarts, rank 1 leaves in the first attempt"""
    fine(torch.torchrun(*STANDALONE, "--max-restarts", 2, HERE / "restart.py", DM_MARKER=tmp_path / "restarted"), 4)


def test_torchrun_of_two_agents_restarts(two_agents, tmp_path, record_property):
    """two torchruns --max-restarts, rank 1 leaves in the first attempt; the restart counts then differ"""
    output = fine(two_agents("restart.py", DM_MARKER=tmp_path / "restarted"), 4)
    counts = sorted(set(re.findall(r"restart count (\d+)", output)))
    assert counts == ["0", "1"], f"restart counts {counts}, so this was no restart of one agent's ranks alone\n{output}"
    record_property("note", "counts 0 and 1")


def test_our_store_under_pytorch(torch):
    """devicemesh run serves the store, PyTorch (gloo) and libdevicemesh in each of 4 ranks"""
    fine(torch.run(TOOL, "run", "-n", 4, "--", torch.python, HERE / "side_by_side.py"), 4, SIDE)


def test_pytorchs_client_on_our_server(torch, record_property):
    """every operation of PyTorch's TCPStore and PrefixStore on our server"""
    output = torch.run(TOOL, "run", "-n", 2, "--", torch.python, HERE / "torch_client.py")
    fine(output, 2, "every operation fine: rank")
    record_property("note", re.search(r"with (.*)", output).group(1))


@pytest.mark.timeout(1000)
def test_our_client_on_pytorchs_servers(torch):
    """every operation of our client on PyTorch's servers, libuv and legacy"""
    with torch_servers(torch, "libuv", "legacy") as ports:
        command = ["cargo", "test", "--quiet", "--test", "torch_server", "--", "--ignored"]
        output = run(*command, timeout=900, env=environment(DM_TORCH_STORES=" ".join(ports)), merged=True).stdout
    assert "1 passed" in output, output


@pytest.mark.parametrize("kind", ["libuv", "legacy"])
def test_ranks_meet_in_pytorchs_server(torch, start_ranks, programs, kind):
    """4 ranks meet in PyTorch's {kind} server"""
    mesh = programs.c("tests/interop/mesh.c", name="interop-mesh")
    with torch_servers(torch, kind) as (port,):
        ranks = start_ranks([mesh, 2, 2], 4, port, variables={"TORCHELASTIC_USE_AGENT_STORE": "True"})
        fine("".join(ranks.outputs(timeout=60)), 4)
