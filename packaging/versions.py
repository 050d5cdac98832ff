"""The version of the project, which Cargo.toml has, and what follows from it."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def present(root=ROOT):
    """The version in Cargo.toml."""
    return re.search(r'^version = "(.+)"$', (root / "Cargo.toml").read_text(), re.M).group(1)


def numbers(version):
    return tuple(int(part) for part in version.split("."))


def series(version):
    """The version in the SONAME: with the minor version until 1.0."""
    return version.rpartition(".")[0] if version.startswith("0.") else version.partition(".")[0]
