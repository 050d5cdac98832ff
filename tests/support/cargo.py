"""How the tests call cargo for what it builds unoptimised, in target/debug."""

import os

from .paths import TARGET


def build_variables():
    """Variables for each call of cargo that builds the Rust tests or what they share.

    In a checkout where nobody has worked yet, cargo builds without debug information, a crate in
    four parts, and without what would speed up the next build, because that takes the processors
    less time. A checkout in which somebody has called cargo has the folder `incremental`. There the
    tests use what those calls have built. .ci/run has these settings, too."""
    if (TARGET / "debug/incremental").exists():
        return {}
    quick = {"CARGO_INCREMENTAL": "0", "CARGO_PROFILE_DEV_DEBUG": "0", "CARGO_PROFILE_DEV_CODEGEN_UNITS": "4"}
    return {name: os.environ.get(name, value) for name, value in quick.items()}
