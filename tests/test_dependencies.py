#!/usr/bin/env python3
"""What the project builds upon, by what cargo knows without a network: every crate comes from crates.io with a checksum, under a licence that may be shipped
with ours, and builds with the Rust that Cargo.toml promises; what is linked into the libraries stands in docs/dependencies.md and comes in one version.

Advisories need RustSec's database: `make deny` asks cargo-deny, which fetches it."""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CRATES_IO = "registry+https://github.com/rust-lang/crates.io-index"
# deny.toml has the same: permissive ones, for what is linked in.
LICENCES = {"MIT", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD-2-Clause", "BSD-3-Clause", "ISC", "Unicode-3.0", "Unlicense", "Zlib"}
# Weak copyleft, for tools of the tests that are never linked into what is shipped.
TOOLS = {"cbindgen": "MPL-2.0"}
# Two major versions of a crate that only other crates' macros use while they are compiled.
TWICE = {"syn"}


def allowed(expression, licences):
    """Whether an SPDX expression can be met: of each OR one, of each AND all. ("/" is crates.io's old OR.)"""
    tokens = re.findall(r"\(|\)|\bAND\b|\bOR\b|[^\s()/]+(?: WITH [^\s()/]+)?", expression.replace("/", " OR "))

    def either():
        met = both()
        while tokens and tokens[0] == "OR":
            tokens.pop(0)
            met = both() or met
        return met

    def both():
        met = one()
        while tokens and tokens[0] == "AND":
            tokens.pop(0)
            met = one() and met
        return met

    def one():
        token = tokens.pop(0)
        if token != "(":
            return token in licences
        met = either()
        assert tokens.pop(0) == ")", expression
        return met

    met = either()
    assert not tokens, f"not understood: {expression}"
    return met


def version(text):
    return tuple(int(part) for part in (text + ".0.0").split(".")[:3])


def linked(metadata):
    """The packages that what is shipped consists of, or is built by: the workspace's, and from there no dev-dependencies."""
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    found, waiting = set(), list(metadata["workspace_default_members"])
    while waiting:
        package = waiting.pop()
        if package not in found:
            found.add(package)
            waiting += [dep["pkg"] for dep in nodes[package]["deps"] if any(kind["kind"] != "dev" for kind in dep["dep_kinds"])]
    return found


def wrongs(metadata, lock, page):
    wrong = []
    ours = set(metadata["workspace_members"])
    promised = version(next(package["rust_version"] for package in metadata["packages"] if package["id"] in ours))
    shipped = linked(metadata)
    versions = {}
    for package in metadata["packages"]:
        name, label = package["name"], f"{package['name']} {package['version']}"
        if package["id"] in ours:
            continue
        if package["source"] != CRATES_IO:
            wrong.append(f"{label} comes from {package['source']}, not from crates.io")
        entry = re.search(rf'name = "{re.escape(name)}"\nversion = "{re.escape(package["version"])}"\nsource = .*\nchecksum = "[0-9a-f]{{64}}"', lock)
        if not entry:
            wrong.append(f"{label} has no checksum in Cargo.lock")
        licence = package["license"] or "NONE"
        tools = {TOOLS[name]} if name in TOOLS and package["id"] not in shipped else set()
        if not allowed(licence, LICENCES | tools):
            wrong.append(f"{label} is under {licence}, which is not in the list of tests/test_dependencies.py")
        if version(package["rust_version"] or "0") > promised:
            wrong.append(f"{label} needs Rust {package['rust_version']}, Cargo.toml promises {'.'.join(map(str, promised))}")
        if package["id"] in shipped:
            versions.setdefault(name, set()).add(package["version"])
    wrong += [f"{name} is there as {', '.join(sorted(found))}" for name, found in versions.items() if len(found) > 1 and name not in TWICE]
    direct = {dep["name"] for package in metadata["packages"] if package["id"] in ours for dep in package["dependencies"] if dep["source"]}
    wrong += [f"docs/dependencies.md has no line for {name}" for name in sorted(direct) if not re.search(rf"^\|.*\b{re.escape(name)}\b.*\|.*\|", page, re.M)]
    return wrong


def proved(metadata, lock, page):
    """The check finds what is planted: one defect of each kind."""
    package = next(package for package in metadata["packages"] if package["name"] == "libc")
    for key, value, said in (("source", "git+https://example.org/libc", "not from crates.io"), ("license", "MIT AND GPL-3.0-only", "which is not in the list"),
                             ("license", None, "is under NONE"), ("rust_version", "1.86", "needs Rust 1.86"), ("version", "0.0.1", "no checksum")):
        kept, package[key] = package[key], value
        found = wrongs(metadata, lock, page)
        package[key] = kept
        assert any(said in line and "libc" in line for line in found), (key, value, found)
    assert any("no line for libc" in line for line in wrongs(metadata, lock, "")), "a page without lines is not noticed"
    for expression, met in (("MIT/Apache-2.0", True), ("GPL-3.0-only OR ISC", True), ("(MIT OR GPL-2.0-only) AND Unicode-3.0", True), ("MIT AND (GPL-2.0-only OR MPL-2.0)", False)):
        assert allowed(expression, LICENCES) == met, expression


def main():
    # --locked: what is checked is what is built. Without a network where everything has been fetched, as after any build.
    command = ["cargo", "metadata", "--format-version", "1", "--locked"]
    done = subprocess.run([*command, "--offline"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    metadata, lock, page = json.loads(done.stdout), (ROOT / "Cargo.lock").read_text(), (ROOT / "docs/dependencies.md").read_text()
    proved(metadata, lock, page)
    wrong = wrongs(metadata, lock, page)
    print("\n".join(wrong) or f"{len(metadata['packages'])} packages, {len(linked(metadata))} in what is shipped")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
