"""Real torchrun on two hosts of tests/netlab.py: both meshes, PyTorch's and the library's of device
type cpu, over hosts.

The first line of each test's documentation is its row in docs/interop.md (table.py)."""

import pytest

from launchers import fine
from netlab import DEVICE, Lab
from support.processes import environment, words
from torch_ranks import HERE, SIDE, found_torch

# Four processes import PyTorch, which takes minutes on a busy machine.
pytestmark = [pytest.mark.long, pytest.mark.alone, pytest.mark.timeout(500)]


@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_torchrun_on_two_hosts(tmp_path, monkeypatch, backend):
    """torchrun with an agent on each of two hosts, both in each of 4 ranks"""
    torch = found_torch()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with Lab(["alpha", "beta"], tmp_path / "hosts") as lab:
        agents = []
        for node, host in enumerate(lab.hosts):
            where = ["--rdzv-backend", "c10d", "--rdzv-id", "interop", "--rdzv-endpoint", "alpha:29400"]
            where = where if backend == "c10d" else ["--node-rank", node, "--master-addr", "alpha", "--master-port", 29400]
            command = [
                torch.python, "-m", "torch.distributed.run", "--monitor-interval", "0.5", "--nnodes", 2,
                "--nproc-per-node", 2, *where, HERE / "side_by_side.py"
            ]
            variables = {**torch.variables, "GLOO_SOCKET_IFNAME": DEVICE, "DM_HOSTCCL_HOST": host}
            with open(tmp_path / f"{host}.log", "w") as log:
                agents.append(lab.spawn(host, words(command), env=environment(**variables), stdout=log, stderr=log))
        codes = [agent.wait(400) for agent in agents]
        said = "".join((tmp_path / f"{host}.log").read_text() for host in lab.hosts)
        assert codes == [0, 0], said
        fine(said, 4, SIDE)
