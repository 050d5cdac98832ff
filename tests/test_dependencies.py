"""Checks of the dependencies that no tool makes: the oldest Rust with which they build, and the
page that says why each is there.

`make deny` asks cargo-deny for licences, sources, versions that are there twice and advisories, and
cargo-machete for dependencies that no source file uses. cargo itself compares checksums."""

import json
import re

import pytest

from support import cargo
from support.paths import ROOT
from support.processes import run


@pytest.fixture(scope="module")
def packages():
    """The packages of Cargo.lock: ours, and the others. Without a network where everything has been
    fetched, as after any build."""
    command = ["cargo", "metadata", "--format-version", "1", "--locked"]
    done = run(*command, "--offline", code=None)
    metadata = json.loads((done if done.returncode == 0 else run(*command)).stdout)
    ours = [package for package in metadata["packages"] if package["id"] in metadata["workspace_members"]]
    return ours, [package for package in metadata["packages"] if package not in ours]


def version(text):
    return tuple(int(part) for part in (text + ".0.0").split(".")[:3])


def too_new(promised, others):
    """The packages that need a later Rust than the one that Cargo.toml promises."""
    return [
        f"{package['name']} needs Rust {package['rust_version']}" for package in others
        if version(package["rust_version"] or "0") > version(promised)
    ]


def unexplained(ours, page):
    """The direct dependencies that have no row in a table of the page."""
    direct = {dependency["name"] for package in ours for dependency in package["dependencies"] if dependency["source"]}
    return [name for name in sorted(direct) if not re.search(rf"^\|.*\b{re.escape(name)}\b.*\|.*\|", page, re.M)]


def test_they_build_with_the_rust_that_is_promised(packages):
    ours, others = packages
    promised = ours[0]["rust_version"]
    assert not too_new(promised, others)
    assert too_new("1.0", others), "no package names a Rust version, so this test sees nothing"


def test_the_page_says_why_each_is_there(packages):
    page = (ROOT / "docs/dependencies.md").read_text()
    assert not unexplained(packages[0], page)
    assert "libc" in unexplained(packages[0], page.replace("libc", "")), "a page without the row is not noticed"


def test_both_lists_of_the_packages_without_tests_are_equal():
    """Cargo would compile everything again for a Rust test that names other packages."""
    rust = (ROOT / "tests/cargo_build/mod.rs").read_text().partition("const WORKSPACE")[2].partition("];")[0]
    assert re.findall(r'"(.+?)"', rust) == cargo.WORKSPACE
