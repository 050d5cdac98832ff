#!/usr/bin/env python3
"""`make release VERSION=0.2.0`: makes a release of a clean tree, and tags it.

  1. It checks the tree, the version and the changelog, and fetches the tools that make the site.
  2. It writes the version wherever it stands, gives the changelog's section Unreleased the version
     and the date, and records the C ABI. cargo-semver-checks compares the Rust API with that of the
     release before, from 0.2.0 on. Then it commits.
  3. It packs the crates and builds each from the packed files alone (crates.py).
  4. It builds everything else in target/dist/VERSION: sources, binaries, packages, the site and
     checksums (dist.py).
  5. It tags the commit vVERSION. Nothing is pushed and nothing is published: the last lines of
     output are the commands for that.

    release.py VERSION [--dry-run] [--date 2026-12-01]

`--dry-run` takes steps 1 and 2 in a clone of the commit, packs the crates without building them, and
says which tools the other steps lack here. It changes nothing, and takes seconds. When a step of a
real release fails, there is no tag, and the line before the last says how to undo what was done."""

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import binaries
import crates
import dist
import sysroot
from versions import numbers, present, series

ROOT = Path(__file__).resolve().parent.parent
VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")


class Refused(Exception):
    """Why there is no release."""


def git(*arguments, cwd):
    done = subprocess.run(["git", *arguments], cwd=cwd, capture_output=True, text=True)
    if done.returncode != 0:
        raise Refused(f"git {' '.join(map(str, arguments))}: {done.stderr.strip()}")
    return done.stdout.strip()


def releases(root):
    """The versions that have a tag."""
    return [tag[1:] for tag in git("tag", "--list", "v*", cwd=root).split() if VERSION.fullmatch(tag[1:])]


def release_before(root, version):
    """The newest release before a version, with which cargo-semver-checks compares its Rust API.
    None where there is no release from 0.2.0 on."""
    before = [released for released in releases(root) if (0, 2, 0) <= numbers(released) < numbers(version)]
    return max(before, key=numbers, default=None)


def check(root, version):
    """Refuses a tree that is not clean, and a version that cannot follow what is there."""
    if not VERSION.fullmatch(version):
        raise Refused(f"{version!r} is no version such as 1.2.3")
    if changes := git("status", "--porcelain", "--untracked-files=all", cwd=root):
        raise Refused(f"these files are not committed:\n{changes}")
    released = releases(root)
    if version in released:
        raise Refused(f"the tag v{version} is there already")
    # A fix of an older series may be released after a newer series.
    same = [tag for tag in released if series(tag) == series(version)]
    if same and numbers(version) < max(map(numbers, same)):
        raise Refused(f"v{max(same, key=numbers)} is newer than {version}")
    if numbers(version) < numbers(present(root)) and not same:
        raise Refused(f"Cargo.toml has {present(root)}, which is newer than {version}")


def places(version):
    """Where the version stands besides CHANGELOG.md: a file, a pattern whose group is the old text,
    and the new text."""
    major, minor, patch = numbers(version)
    so, code = series(version), 10_000 * major + 100 * minor + patch
    first, after = (100 * minor, 100 * (minor + 1)) if major == 0 else (10_000 * major, 10_000 * (major + 1))
    find = (r"find_package\(devicemesh ([\d.]+) REQUIRED", so)
    return [
        ("Cargo.toml", r'^version = "([\d.]+)"$', version),
        ("Cargo.toml", r'path = "[\w./]+", version = "=([\d.]+)"', version),
        ("include/devicemesh.h", r"^#define DEVICEMESH_VERSION (\d+)$", str(code)),
        ("bindings/python/devicemesh/_library.py", r'^SONAME = "libdevicemesh\.so\.([\d.]+)"$', so),
        ("bindings/python/devicemesh/_library.py", r"^VERSIONS = range\((\d+, \d+)\)$", f"{first}, {after}"),
        ("bindings/jax/pyproject.toml", r'"devicemesh==([\d.]+)\.\*"', so),
        ("packaging/conda/recipe.yaml", r'^  version: "([\d.]+)"$', version),
        ("packaging/spack/package.py", r'^    version\("([\d.]+)"', version),
        ("packaging/vcpkg/devicemesh/vcpkg.json", r'"version-semver": "([\d.]+)"', version),
        *((file, *find) for file in ("README.md", "docs/install.md", "tests/consumer/CMakeLists.txt")),
        ("docs/install.md", r"`lib/lib\w+\.so` -> `\.so\.([\d.]+)`", so),
        ("docs/install.md", r"-> `\.so\.([\d.]+)` \|", version),
        ("docs/install.md", r"its SONAME is `libdevicemesh\.so\.([\d.]+)`", so),
        ("docs/install.md", r"`lib(?:devicemesh|hostccl)(\d[\d.]*)`", so),
        ("docs/install.md", r"GIT_TAG v([\d.]+)", version),
        ("docs/install.md", r"devicemesh-([\d.]+)\.tar\.gz", version),
        ("docs/binding.md", r"libdevicemesh\.so\.([\d.]+)[`\"]", so),
    ]


def write_version(root, version):
    """Writes the version wherever it stands."""
    for name, pattern, new in places(version):
        path = root / name
        text, count = re.subn(pattern, lambda found: found[0].replace(found[1], new), path.read_text(), flags=re.M)
        if count == 0:
            raise Refused(f"{name} has no text like {pattern}, so the version cannot be written there")
        path.write_text(text)
    # Cargo.lock names the versions of the workspace's own crates.
    run("cargo", "update", "--workspace", "--offline", "--quiet", cwd=root)


def dated(changelog, version, date):
    """The changelog in which the section Unreleased has become that of a version."""
    found = re.search(r"^## \[Unreleased\]\n(.*?)(?=^## \[|\Z)", changelog, re.M | re.S)
    if not found or not found[1].strip():
        raise Refused("CHANGELOG.md has nothing under [Unreleased]")
    if re.search(rf"^## \[{re.escape(version)}\]", changelog, re.M):
        raise Refused(f"CHANGELOG.md has a section [{version}] already")
    # The introduction may say what the unreleased changes are to become.
    promise = re.search(r'The changes under Unreleased become ([\d.]+); "before" means ([\d.]+) there\.', changelog)
    if promise and promise[1] != version:
        raise Refused(f"CHANGELOG.md says that the changes under Unreleased become {promise[1]}, not {version}")
    changelog = changelog.replace(found[0], f"## [Unreleased]\n\n## [{version}] - {date}\n{found[1]}")
    if promise:
        changelog = changelog.replace(promise[0], f'Under {version}, "before" means {promise[2]}.')
    return changelog


def prepare(root, version, date):
    """Step 2, without the commit."""
    path = root / "CHANGELOG.md"
    changelog = dated(path.read_text(), version, date)
    write_version(root, version)
    path.write_text(changelog)
    if shutil.which("abidw"):
        run(sys.executable, "tests/compatibility/record.py", cwd=root)


def run(*command, cwd, **options):
    done = subprocess.run([str(word) for word in command], cwd=cwd, stdin=subprocess.DEVNULL, **options)
    if done.returncode != 0:
        raise Refused(f"{' '.join(map(str, command))}: exit code {done.returncode}")


def compare_rust_api(root, version):
    """Refuses a version that breaks the Rust API more than Cargo's rules for versions allow."""
    if before := release_before(root, version):
        run("cargo", "semver-checks", "--package", "devicemesh", "--baseline-rev", f"v{before}", cwd=root)


def lacking(version):
    """The tools and targets that a release needs, and this machine does not have."""
    missing = dist.lacking(dist.PARTS, set(sysroot.PACKAGES))
    tools = {"abidw": "abigail-tools", "lintian": "lintian"}
    missing += [f"{tool} (Debian: {package})" for tool, package in tools.items() if not shutil.which(tool)]
    if shutil.which("cargo") and (why := crates.lacks()):
        missing.append(why)
    if subprocess.run(["git", "var", "GIT_COMMITTER_IDENT"], cwd=ROOT, capture_output=True).returncode != 0:
        missing.append("git's user.name and user.email (git config)")
    if release_before(ROOT, version) and not shutil.which("cargo-semver-checks"):
        missing.append("cargo-semver-checks (cargo install cargo-semver-checks --locked)")
    return missing


def fetched_first():
    """What a release would fetch, because it is not in target/ yet."""
    places = {
        "Sphinx and doxygen": "site-venv/requirements.txt",
        "the headers of jaxlib": f"jax/headers-{dist.build_jax_wheel.build_handlers.JAXLIB}/xla",
        **{f"the old C library for {machine}": f"dist/glibc-{sysroot.GLIBC}-{machine}" for machine in sysroot.PACKAGES}
    }
    return [what for what, place in places.items() if not (ROOT / "target" / place).exists()]


def dry_run(version, date):
    check(ROOT, version)
    with tempfile.TemporaryDirectory() as scratch:
        clone = Path(scratch) / "clone"
        git("clone", "--quiet", "--no-hardlinks", ROOT, clone, cwd=ROOT)
        prepare(clone, version, date)
        print(git("diff", "--stat", cwd=clone))
        if git("status", "--porcelain", "--", "CHANGELOG.md", cwd=clone) == "":
            raise Refused("the changelog did not change")
        # Cargo compares the versions of the crates with Cargo.lock here.
        run(sys.executable, "packaging/crates.py", "--list", "--allow-dirty", "--out", Path(scratch) / "crates", cwd=clone,
            env={**os.environ, "CARGO_NET_OFFLINE": os.environ.get("CARGO_NET_OFFLINE", "true")})
    for what in lacking(version):
        print(f"a release here would need {what}")
    if missing := fetched_first():
        print(f"a release here would fetch {', '.join(missing)}, so it would need the network")
    print(f"dry run: {version} could be released from {git('rev-parse', '--short', 'HEAD', cwd=ROOT)}")


def release(version, date):
    check(ROOT, version)
    if missing := lacking(version):
        raise Refused("this machine lacks " + ", ".join(missing))
    before = git("rev-parse", "HEAD", cwd=ROOT)
    # Sphinx and doxygen are fetched into target/ before anything is changed.
    run(sys.executable, "docs/site/build.py", "--tools", cwd=ROOT)
    try:
        prepare(ROOT, version, date)
        compare_rust_api(ROOT, version)
        git("add", "--all", cwd=ROOT)
        git("commit", "--quiet", "--message", f"Release {version}", cwd=ROOT)
        made = git("rev-parse", "HEAD", cwd=ROOT)
        run(sys.executable, "packaging/crates.py", cwd=ROOT)
        # Cargo would not see that a linker or the old C library has changed.
        shutil.rmtree(binaries.CARGO, ignore_errors=True)
        run(sys.executable, "packaging/dist.py", cwd=ROOT)
        # dist.py takes the sources from HEAD, and the binaries from the files here.
        if git("rev-parse", "HEAD", cwd=ROOT) != made or git("status", "--porcelain", "--untracked-files=all", cwd=ROOT):
            raise Refused("somebody has changed the tree meanwhile")
        git("tag", "--annotate", f"v{version}", "--message", f"libdevicemesh {version}", made, cwd=ROOT)
    except BaseException:
        # The tree was clean before. What somebody else has changed meanwhile would be lost.
        print(f"to undo this: git reset --hard {before} && git clean -fd tests/compatibility", file=sys.stderr)
        raise
    print(f"""v{version} is tagged, and its files are in target/dist/{version}. To publish it:
  git push origin HEAD v{version}
  cargo publish --workspace --locked
  twine upload target/dist/{version}/*.whl target/dist/{version}/devicemesh-{version}.tar.gz""")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--date", default=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"))
    options = parser.parse_args()
    try:
        (dry_run if options.dry_run else release)(options.version, options.date)
    except Refused as why:
        sys.exit(f"release: {why}")


if __name__ == "__main__":
    main()
