"""examples/demo_hosts.py (`make demo-hosts`): the training on four hosts has the losses of the one
on one host. Takes some seconds, because it trains twice."""

import re
import sys

import pytest

from support.paths import ROOT, TOOL
from support.processes import run


@pytest.mark.long
@pytest.mark.parametrize("how", [["--loopback"], []], ids=["loopback", "namespaces"])
def test_losses_are_those_of_one_host(programs, how):
    program = programs.cpp("examples/hsdp_tp.cpp", "-O3")
    said = run(sys.executable, ROOT / "examples/demo_hosts.py", "--tool", TOOL, "--program", program, *how, timeout=170).stdout
    for host, ranks in zip(("alpha", "beta", "gamma", "delta"), ("0 and 1", "2 and 3", "4 and 5", "6 and 7")):
        assert re.search(rf"^{host} +ranks {ranks}, on a machine", said, re.M), said
    rows = re.findall(r"^ +(\d+) +(\d\.\d+) +(\d\.\d+)$", said, re.M)
    assert len(rows) == 20 and float(rows[-1][1]) < float(rows[0][1]) / 5, said
    assert "the losses differ by at most" in said
