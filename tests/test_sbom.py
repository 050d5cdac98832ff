"""The bill of materials of a release (packaging/sbom.py): it has every crate that is linked into
the library and the tool, with the checksum of Cargo.lock, and no crate of the tests alone. The text
with the licences (packaging/licences.py) has those of each of these crates."""

import json
import re
import sys

import pytest

from support.paths import ROOT

sys.path.insert(0, str(ROOT / "packaging"))
import licences  # noqa: E402
import sbom  # noqa: E402

TIME = 1_700_000_000

@pytest.fixture(scope="module")
def bill():
    return json.loads(sbom.document("1.2.3", TIME))


def names(bill):
    return {component["name"] for component in bill["components"]}


def test_it_has_what_is_linked_and_nothing_else(bill):
    assert {"devicemesh", "hostccl", "hostccl-reduce", "devicemesh-recording", "devicemesh-tool", "hostccl-capi", "libc", "snow", "clap", "framehop"} <= names(bill)
    # Tests, benchmarks, build scripts and macros are not in the files of a release.
    assert not names(bill) & {"proptest", "criterion", "cbindgen", "arbitrary", "serde_derive", "syn", "thiserror-impl", "cudarc"}
    # flate2 and gimli can use these crates, and do not, because no feature asks for them.
    assert not names(bill) & {"zlib-rs", "stable_deref_trait"}


def test_each_crate_has_its_licence_and_its_checksum(bill):
    lock = (ROOT / "Cargo.lock").read_text()
    ours = {"devicemesh", "hostccl", "hostccl-reduce", "devicemesh-recording", "devicemesh-tool", "devicemesh-wheel", "hostccl-capi"}
    for component in bill["components"]:
        assert component["licenses"][0]["expression"], component
        assert component["purl"] == f"pkg:cargo/{component['name']}@{component['version']}"
        if component["name"] in ours:
            continue
        (entry,) = component["hashes"]
        assert re.search(rf'name = "{component["name"]}"\nversion = "{re.escape(component["version"])}"\n.*\nchecksum = "{entry["content"]}"', lock)


def test_every_crate_is_reached_from_what_is_shipped(bill):
    edges = {entry["ref"]: entry["dependsOn"] for entry in bill["dependencies"]}
    reached, waiting = set(), [bill["metadata"]["component"]["bom-ref"]]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += edges[name]
    assert reached == set(edges) == {component["bom-ref"] for component in bill["components"]} | {"pkg:generic/libdevicemesh@1.2.3"}
    assert "pkg:cargo/snow" in " ".join(edges[next(name for name in edges if name.startswith("pkg:cargo/hostccl@"))])


@pytest.mark.long
def test_equal_sources_give_equal_bytes(bill):
    again = json.loads(sbom.document("1.2.3", TIME))
    assert again == bill
    assert bill["metadata"]["timestamp"] == "2023-11-14T22:13:20Z"
    assert json.loads(sbom.document("1.2.4", TIME))["serialNumber"] != bill["serialNumber"]


@pytest.mark.long
def test_the_licences_of_each_crate_are_there(bill):
    text, packages = licences.document(), sbom.linked()[0].values()
    assert licences.document() == text
    for package in packages:
        named = f"{package['name']} {package['version']} (" in text
        assert named == (package["source"] is not None), package["name"]
        for licence in licences.texts(package) if package["source"] else []:
            assert licence in text, package["name"]
    # BSD and ISC ask for their notices, and have no other licence beside them.
    for notice in ("Isis Agora Lovecruft", "Henry de Valence", "Simonas Kazlauskas", "Rich Felker"):
        assert notice.lower() in text.lower(), notice
    assert str(ROOT) not in text and "TERMS AND CONDITIONS FOR USE, REPRODUCTION" not in text


def test_the_licence_of_apache_stays_where_it_is_the_only_one(tmp_path):
    package = {"name": "one", "manifest_path": str(tmp_path / "Cargo.toml")}
    with pytest.raises(SystemExit, match="has no file with the licence of one"):
        licences.texts(package)
    (tmp_path / "LICENSE-APACHE").write_text("    Apache License\n  Version 2.0, January 2004\n")
    assert licences.texts(package) == ["Apache License\n  Version 2.0, January 2004"]
    (tmp_path / "license.md").write_text("Copyright someone\n")
    assert licences.texts(package) == ["Copyright someone"]
