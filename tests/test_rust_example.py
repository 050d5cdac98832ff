"""The examples in Rust, which use the crate without the C ABI: examples/all_reduce.rs alone and on
four processes, and examples/recover.rs with a rank that is killed."""

import pytest

from support.cargo import WORKSPACE, build_variables
from support.healing import check_comes_back
from support.paths import TARGET
from support.processes import environment, launch, run


@pytest.fixture(scope="module")
def examples():
    """The folder with the examples. The build of the Rust tests makes them, too."""
    run("cargo", "build", "--quiet", *WORKSPACE, "--example", "all_reduce", "--example", "recover", timeout=850,
        env=environment(**build_variables()))
    return TARGET / "debug/examples"


@pytest.mark.timeout(900)  # cargo compiles the library
@pytest.mark.parametrize("ranks", [1, 4])
def test_all_reduce(examples, ranks):
    said = launch(ranks, examples / "all_reduce").stdout
    lines = sorted(line.replace("on cuda", "on cpu") for line in said.splitlines() if line.startswith("rank "))
    assert lines == [f"rank {rank} on cpu: 1048576 elements are {ranks}, 0 are not {ranks}" for rank in range(ranks)], said


@pytest.mark.timeout(900)  # cargo compiles the library
def test_recover(examples):
    check_comes_back([examples / "recover"])
