"""The crates as crates.io would get them (packaging/crates.py). Each crate has what its build and a
reader need, and they depend on each other by the version of the workspace. `make crates`, which a
release runs, builds the crates from the packed files alone: that compiles everything again."""

import re
import sys

import pytest

from support.paths import ROOT

sys.path.insert(0, str(ROOT / "packaging"))
import crates  # noqa: E402
import versions  # noqa: E402

WORKSPACE = versions.present()
pytestmark = [pytest.mark.long, pytest.mark.skipif(crates.lacks() is not None, reason=str(crates.lacks()))]
NAMES = {"devicemesh", "devicemesh-recording", "devicemesh-tool", "hostccl", "hostccl-capi", "hostccl-reduce"}


@pytest.fixture(scope="session")
def packed(programs):
    """The files of each crate, by package name. All workers of pytest-xdist share the crates."""
    folder = programs.once("crates", lambda folder: crates.pack(folder, build=False, allow_changes=True))
    return {path.name.removesuffix(f"-{WORKSPACE}.crate"): crates.files(path) for path in folder.glob("*.crate")}


def test_the_crates_are_those_that_the_release_has(packed):
    assert set(packed) == NAMES


def test_each_has_a_page_its_licences_and_what_crates_io_asks_for(packed):
    manifests = crates.published()
    for name, files in packed.items():
        for licence in ("LICENSE-APACHE", "LICENSE-MIT"):
            assert files[licence] == (ROOT / licence).read_bytes(), f"{name} has another {licence}"
        assert files["README.md"].startswith(b"# "), name
        package = manifests[name]
        assert package["license"] == "Apache-2.0 OR MIT" and package["rust_version"] and package["description"], name
        assert 1 <= len(package["keywords"]) <= 5 and 1 <= len(package["categories"]) <= 5, name
        # crates.io takes keywords of up to 20 characters, and no description of over 1,000.
        assert all(re.fullmatch(r"[a-z][\w+-]{0,19}", word) for word in package["keywords"]), name


def test_each_has_the_files_that_its_sources_include(packed):
    count = 0
    for name, files in packed.items():
        for path, content in files.items():
            if not re.search(r"(^|/)src/.*\.rs$", path):
                continue
            for included in re.findall(rb'include_(?:str|bytes)!\("([^"]+)"\)', content):
                parts = path.split("/")[:-1]
                for part in included.decode().split("/"):
                    parts = parts[:-1] if part == ".." and parts else [*parts, part]
                place = "/".join(parts)
                # The fuzzers' inputs are for tests, which run in the repository alone.
                if place.startswith("..") and b"cfg(any(test, fuzzing))" in packed["hostccl"]["src/lib.rs"]:
                    continue
                assert place in files, f"{name}: {path} includes {place}"
                count += 1
    assert count >= 8, f"only {count} included files were found"


def test_nothing_else_of_the_repository_is_in_them(packed):
    allowed = r"(src|templates|include|examples)/.*|docs/rust\.md|build\.rs|Cargo\.(toml|toml\.orig|lock)|README\.md|CHANGELOG\.md|LICENSE-\w+|\.cargo_vcs_info\.json"
    strays = [f"{name}: {path}" for name, files in packed.items() for path in files if not re.fullmatch(allowed, path)]
    assert not strays, strays


def test_they_depend_on_each_other_by_the_version_of_the_workspace(packed):
    found = []
    for name, files in packed.items():
        manifest = files["Cargo.toml"].decode()
        assert f'\nversion = "{WORKSPACE}"\n' in manifest, name
        for section in re.findall(r"^\[dependencies\.[\w-]+\]\n(?:.+\n)+", manifest, re.M):
            key = re.match(r"\[dependencies\.([\w-]+)\]", section).group(1)
            package = re.search(r'^package = "(.+)"$', section, re.M)
            package = package.group(1) if package else key
            if package in NAMES:
                assert f'version = "={WORKSPACE}"' in section, f"{name}: {section}"
                found.append((name, package))
            assert "path =" not in section and "git =" not in section, f"{name}: {section}"
    assert sorted(found) == [
        ("devicemesh", "devicemesh-recording"), ("devicemesh", "hostccl"), ("devicemesh-tool", "devicemesh"), ("devicemesh-tool", "devicemesh-recording"),
        ("hostccl", "devicemesh-recording"), ("hostccl", "hostccl-reduce"), ("hostccl-capi", "hostccl")
    ]
