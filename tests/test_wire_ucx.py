"""The engine's wire over UCX with the library of PyPI's wheel libucx-cu12 (43 MB, fetched once).
The Rust tests run it with the machine's library, where there is one (Debian: libucx0)."""

import pytest

from support.paths import ROOT
from support.pinned import wheels
from support.processes import environment, run

# It fetches the wheel, and compiles the engine's tests if they are not there.
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

PIN = "libucx-cu12==1.22.0"


def test_wire_over_the_wheels_ucx():
    folder = wheels([PIN], r"libucx/lib/|libucx_cu12\.libs/")
    library = folder / "libucx/lib/libucp.so.0"
    assert library.exists(), f"{PIN} has no {library.relative_to(folder)}"
    said = run("cargo", "test", "--quiet", "--package", "hostccl", "--lib", "wire::ucx", "--", "--nocapture",
               cwd=ROOT, env=environment(DM_UCX_LIBRARY=library), timeout=800)
    assert "test result: ok" in said.stdout and "skipped:" not in said.stdout, said.stdout
