"""examples/all_reduce.rs, which uses the Rust crate without the C ABI, alone and on four
processes."""

import pytest

from support.cargo import WORKSPACE, build_variables
from support.paths import TARGET
from support.processes import environment, launch, run


@pytest.mark.timeout(900)  # cargo compiles the library
@pytest.mark.parametrize("ranks", [1, 4])
def test_all_reduce(ranks):
    # The build of the Rust tests makes the example, too.
    run("cargo", "build", "--quiet", *WORKSPACE, "--example", "all_reduce", timeout=850, env=environment(**build_variables()))
    said = launch(ranks, TARGET / "debug/examples/all_reduce").stdout
    lines = sorted(line.replace("on cuda", "on cpu") for line in said.splitlines() if line.startswith("rank "))
    assert lines == [f"rank {rank} on cpu: 1048576 elements are {ranks}, 0 are not {ranks}" for rank in range(ranks)], said
