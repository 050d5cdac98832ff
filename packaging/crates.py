#!/usr/bin/env python3
"""`make crates`: packs the crates for crates.io, and builds each from the packed files alone.

    crates.py [--list] [--out FOLDER]

The crates go into FOLDER (target/crates), one .crate file each. They depend on each other by
version, and cargo resolves these versions among the packed files, so nothing of the repository is
used in the builds. `--list` packs without building, which takes seconds.

Somebody who has the token publishes the crates with `cargo publish --workspace --locked`. Cargo
takes them in the order of their dependencies."""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The first cargo that packs crates which depend on each other before any of them is published.
CARGO = (1, 90)


def lacks():
    """Why cargo cannot pack the crates here, or None."""
    said = subprocess.run(["cargo", "--version"], check=True, capture_output=True, text=True).stdout
    found = tuple(int(part) for part in re.search(r"(\d+)\.(\d+)", said).groups())
    return None if found >= CARGO else f"packing the crates needs cargo {CARGO[0]}.{CARGO[1]} or later; here is {said.strip()}"


def published():
    """The packages of the workspace that may be published, by name."""
    told = subprocess.run(["cargo", "metadata", "--no-deps", "--format-version", "1"], cwd=ROOT, check=True, capture_output=True, text=True)
    return {package["name"]: package for package in json.loads(told.stdout)["packages"] if package["publish"] != []}


def pack(out, build, allow_changes=False):
    """Packs all crates into `out`, and returns their files by package name."""
    names, out = published(), out.resolve()
    # A build is kept for the next time. Without a build, several calls may run at one time.
    scratch = ROOT / "target/crates-build" if build else out / "scratch"
    command = ["cargo", "package", "--quiet", "--locked", *(word for name in names for word in ("--package", name))]
    command += [] if build else ["--no-verify"]
    command += ["--allow-dirty"] if allow_changes else []
    # Cargo builds the packed crates only to see that they compile, so debug information is left
    # out.
    environment = {**os.environ, "CARGO_TARGET_DIR": str(scratch), "CARGO_PROFILE_DEV_DEBUG": "0", "CARGO_INCREMENTAL": "0"}
    environment.pop("CARGO_BUILD_TARGET", None)
    shutil.rmtree(scratch / "package", ignore_errors=True)
    subprocess.run(command, cwd=ROOT, check=True, env=environment, stdin=subprocess.DEVNULL)
    out.mkdir(parents=True, exist_ok=True)
    made = {}
    for name, package in names.items():
        file = f"{name}-{package['version']}.crate"
        made[name] = Path(shutil.copy(scratch / "package" / file, out / file))
    return made


def files(crate):
    """The files in a .crate, by their path below its folder."""
    with tarfile.open(crate) as archive:
        return {member.name.partition("/")[2]: archive.extractfile(member).read() for member in archive if member.isfile()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="pack, and do not build")
    parser.add_argument("--out", type=Path, default=ROOT / "target/crates")
    parser.add_argument("--allow-dirty", action="store_true", help="also with changes that are not committed")
    options = parser.parse_args()
    if why := lacks():
        sys.exit(f"crates: {why}")
    for name, crate in pack(options.out, not options.list, options.allow_dirty).items():
        print(f"{name}: {len(files(crate))} files, {crate.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
