"""How the tests call cargo for what it builds unoptimised, in target/debug."""

import os

from .paths import TARGET

# The packages that no test needs: criterion and cbindgen take half a minute to compile. `make
# check` has the tests of devicemesh-header, and tests/test_python.py builds the wheel's binaries.
WITHOUT = ["devicemesh-benches", "devicemesh-header", "devicemesh-wheel"]
# The packages and features of each call of cargo. With others, cargo would compile the libraries
# again, because a library's features depend on the packages beside it.
WORKSPACE = ["--workspace", *(word for name in WITHOUT for word in ("--exclude", name)), "--features", "cudarc"]


def build_variables():
    """Variables for each call of cargo that builds the Rust tests or what they share, also for the
    calls that Rust tests make themselves. All calls need the same ones, because cargo compiles
    everything again for others.

    In a checkout where nobody has worked yet, cargo builds without debug information, a crate in
    four parts, and without what would speed up the next build, because that takes the processors
    less time. In a checkout where somebody has called cargo, the folder `incremental` holds files.
    (cargo makes the empty folder in any case.) There the tests use what those calls have built.
    .ci/run has these settings, too."""
    folder = TARGET / "debug/incremental"
    if folder.exists() and any(folder.iterdir()):
        return {}
    quick = {"CARGO_INCREMENTAL": "0", "CARGO_PROFILE_DEV_DEBUG": "0", "CARGO_PROFILE_DEV_CODEGEN_UNITS": "4"}
    return {name: os.environ.get(name, value) for name, value in quick.items()}
