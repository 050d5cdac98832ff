"""`make release` (packaging/release.py): what it refuses, what it writes, and its dry run on a copy
of this tree. The builds of a release take minutes, so nothing here makes one."""

import re
import shutil
import subprocess
import sys

import pytest

from support.paths import ROOT
from support.processes import run

sys.path.insert(0, str(ROOT / "packaging"))
import crates  # noqa: E402
import release  # noqa: E402

VERSION = release.present(ROOT)
AUTHOR = ["-c", "user.name=a", "-c", "user.email=a@b"]


def git(folder, *arguments):
    return run("git", *AUTHOR, *arguments, cwd=folder).stdout

@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A repository with one commit, which has the files of this tree as they are now."""
    folder = tmp_path_factory.mktemp("release") / "copy"
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-co", "--exclude-standard", "-z"], check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        place = folder / name
        if (ROOT / name).is_symlink() or (ROOT / name).exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place, follow_symlinks=False)
    for command in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message", "all"]):
        git(folder, *command)
    return folder


def refused(copy, version):
    with pytest.raises(release.Refused) as why:
        release.check(copy, version)
    return str(why.value)


def test_versions_that_cannot_be_released(copy):
    major, minor, patch = release.numbers(VERSION)
    release.check(copy, VERSION)
    assert refused(copy, "1.2") == "'1.2' is no version such as 1.2.3"
    assert refused(copy, "01.2.3") == "'01.2.3' is no version such as 1.2.3"
    assert refused(copy, "0.0.1") == f"Cargo.toml has {VERSION}, which is newer than 0.0.1"
    git(copy, "tag", f"v{VERSION}")
    git(copy, "tag", f"v{major}.{minor}.{patch + 4}")
    try:
        assert refused(copy, VERSION) == f"the tag v{VERSION} is there already"
        assert refused(copy, f"{major}.{minor}.{patch + 1}") == f"v{major}.{minor}.{patch + 4} is newer than {major}.{minor}.{patch + 1}"
        release.check(copy, f"{major}.{minor}.{patch + 5}")
    finally:
        git(copy, "tag", "--delete", f"v{VERSION}", f"v{major}.{minor}.{patch + 4}")


def test_the_release_whose_rust_api_must_be_kept(copy):
    tags = ["v0.1.0", "v0.2.0", "v0.2.10", "v0.2.9", "v0.3.0", "v0.3.0-rc1"]
    for tag in tags:
        git(copy, "tag", tag)
    try:
        before = {version: release.release_before(copy, version) for version in ("0.2.0", "0.2.1", "0.2.11", "0.3.0", "1.0.0")}
    finally:
        git(copy, "tag", "--delete", *tags)
    assert before == {"0.2.0": None, "0.2.1": "0.2.0", "0.2.11": "0.2.10", "0.3.0": "0.2.10", "1.0.0": "0.3.0"}


def test_a_tree_that_is_not_clean(copy):
    (copy / "forgotten.txt").touch()
    try:
        assert refused(copy, VERSION) == "these files are not committed:\n?? forgotten.txt"
    finally:
        (copy / "forgotten.txt").unlink()


CHANGELOG = """# Changelog

Some rules. The changes under Unreleased become 0.2.0; "before" means 0.1.0 there.

## [Unreleased]

### New
- something

## [0.1.0] - 2026-01-01
- all
"""


def test_the_changelog_gets_the_version_and_the_date():
    assert release.dated(CHANGELOG, "0.2.0", "2026-12-01") == """# Changelog

Some rules. Under 0.2.0, "before" means 0.1.0.

## [Unreleased]

## [0.2.0] - 2026-12-01

### New
- something

## [0.1.0] - 2026-01-01
- all
"""


@pytest.mark.parametrize("text, version, why", [
    (CHANGELOG.replace("### New\n- something\n", ""), "0.2.0", r"nothing under \[Unreleased\]"),
    (CHANGELOG, "0.3.0", "says that the changes under Unreleased become 0.2.0, not 0.3.0"),
    (CHANGELOG.replace("Unreleased become 0.2.0", "x"), "0.1.0", r"has a section \[0.1.0\] already"),
])
def test_a_changelog_that_does_not_fit(text, version, why):
    with pytest.raises(release.Refused, match=why):
        release.dated(text, version, "2026-12-01")


def test_the_version_is_written_wherever_it_stands(copy):
    """With another version every place changes, and cargo accepts what was written."""
    release.write_version(copy, "0.7.3")
    try:
        changed = set(git(copy, "diff", "--name-only").split())
        assert changed == {name for name, _, _ in release.places("0.7.3")} | {"Cargo.lock"}
        assert "#define DEVICEMESH_VERSION 703\n" in (copy / "include/devicemesh.h").read_text()
        python = (copy / "bindings/python/devicemesh/_library.py").read_text()
        assert 'SONAME = "libdevicemesh.so.0.7"' in python and "VERSIONS = range(700, 800)" in python
        assert (copy / "Cargo.toml").read_text().count('version = "=0.7.3"') == 6
        run("cargo", "metadata", "--locked", "--offline", "--format-version", "1", "--no-deps", cwd=copy)
        # No other file that users build with names the series of this version. git grep exits with
        # 1 when it finds nothing.
        old = rf"devicemesh(\.so)?[ .]{re.escape(release.series(VERSION))}\b"
        places = ["*.py", "*.cmake", "*.in", "CMakeLists.txt", "README.md", "docs/binding.md"]
        found = run("git", "grep", "-nE", old, "--", *places, cwd=copy, code=None).stdout
        left = [line for line in found.splitlines() if not re.match(r"(tests|cmake|packaging)/|.*#", line)]
        assert not left, left
        page = (copy / "docs/install.md").read_text()
        # The page also says what happens to programs of older versions. Nothing else has this one.
        page = page[:page.index("## What stays compatible")]
        series = release.series(VERSION)
        assert not [text for text in (VERSION, f"libdevicemesh{series}", f".so.{series}") if text in page]
        assert all(text in page for text in ("`.so.0.7` -> `.so.0.7.3`", "`libdevicemesh.so.0.7`", "`libhostccl0.7`", "GIT_TAG v0.7.3"))
    finally:
        git(copy, "checkout", "--quiet", "--force", "HEAD")


def test_a_place_that_is_gone_is_named(copy):
    (copy / "bindings/python/devicemesh/_library.py").write_text("")
    try:
        with pytest.raises(release.Refused, match="_library.py has no text like .*SONAME"):
            release.write_version(copy, "0.7.3")
    finally:
        git(copy, "checkout", "--quiet", "--force", "HEAD")


def test_tools_that_only_a_release_needs_are_known(monkeypatch):
    """Each of them would end the release after its commit, or leave a check out."""
    monkeypatch.setattr(release.shutil, "which", lambda name: None if name == "lintian" else f"/usr/bin/{name}")
    monkeypatch.setattr(release.crates, "lacks", lambda: "cargo is too old")
    monkeypatch.setattr(release.dist, "lacking", lambda parts, machines: [])
    monkeypatch.setattr(release, "release_before", lambda root, version: None)
    monkeypatch.setattr(release.subprocess, "run", lambda *command, **_: subprocess.CompletedProcess(command, 1))
    missing = release.lacking("0.2.0")
    assert {"lintian (Debian: lintian)", "cargo is too old", "git's user.name and user.email (git config)"} <= set(missing), missing


def test_what_the_site_needs_is_known(monkeypatch):
    """A release refuses a machine without venv before it commits anything."""
    venv = "Python's venv (Debian: python3-venv)"
    assert venv not in release.lacking(VERSION)
    monkeypatch.setattr(release.dist.importlib.util, "find_spec", lambda name: None)
    assert venv in release.lacking(VERSION)


def test_the_tools_of_the_site_are_fetched_before_the_commit(monkeypatch):
    """Where they cannot be fetched, the release ends before it has changed anything."""
    commands = []

    def fail(*command, cwd):
        commands.append(command[1:])
        raise release.Refused("no Sphinx")

    for name, value in (("check", lambda *_: None), ("lacking", lambda version: []), ("run", fail), ("prepare", None)):
        monkeypatch.setattr(release, name, value)
    with pytest.raises(release.Refused, match="no Sphinx"):
        release.release(VERSION, "2026-12-01")
    assert commands == [("docs/site/build.py", "--tools")]


@pytest.mark.long
@pytest.mark.skipif(crates.lacks() is not None, reason=str(crates.lacks()))
def test_a_dry_run_works_and_changes_nothing(copy):
    before = git(copy, "rev-parse", "HEAD"), git(copy, "status", "--porcelain"), git(copy, "tag")
    said = run(sys.executable, "packaging/release.py", VERSION, "--dry-run", "--date", "2026-12-01", cwd=copy, timeout=170).stdout
    assert re.search(rf"^dry run: {re.escape(VERSION)} could be released from [0-9a-f]+$", said, re.M), said
    assert "CHANGELOG.md" in said and "devicemesh-tool: " in said, said
    assert "a release here would fetch Sphinx and doxygen, the headers of jaxlib, the old C library for x86_64, " in said, "the copy has no target/"
    assert (git(copy, "rev-parse", "HEAD"), git(copy, "status", "--porcelain"), git(copy, "tag")) == before
