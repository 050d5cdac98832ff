"""The bill of materials of a release: which crates are linked into its files (CycloneDX 1.5, JSON).

`make dist` writes it, from what `cargo tree` and `cargo metadata` say and from the checksums in
Cargo.lock. Crates that only the tests or the build use are left out. Equal sources give equal bytes: the serial number
follows from the content, and the time is that of the commit.

cargo-cyclonedx would write one such file for each package of the workspace, with random serial
numbers, and takes minutes to build."""

import json
import re
import subprocess
import time as clock
import uuid
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The packages whose output a release ships.
SHIPPED = ["devicemesh", "devicemesh-tool", "devicemesh-wheel", "hostccl-capi"]
TRIPLES = ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu", "x86_64-unknown-linux-musl"]


def cargo(*command):
    """Returns what cargo says of the workspace. It needs no network where the crates are there, as
    after any build."""
    for more in (["--offline"], []):
        done = subprocess.run(["cargo", *command, "--locked", *more], cwd=ROOT, capture_output=True, text=True)
        if done.returncode == 0:
            return done.stdout
    raise SystemExit(f"sbom: cargo {' '.join(command)}: {done.stderr.strip()}")


def checksums(lock):
    """The SHA-256 of each crate by its name and version."""
    entries = re.findall(r'^name = "(.+)"\nversion = "(.+)"\nsource = ".+"\nchecksum = "([0-9a-f]{64})"$', lock, re.M)
    return {(name, version): digest for name, version, digest in entries}


def linked():
    """The packages that are linked into what is shipped, and for each of them the packages that it
    links, by their references. `cargo metadata` cannot say this, because it also lists optional
    packages whose features are off."""
    packages, edges = {}, {}
    for triple in TRIPLES:
        known = {reference(package): package
                 for package in json.loads(cargo("metadata", "--format-version", "1", "--filter-platform", triple))["packages"]}
        shipped = [word for name in SHIPPED for word in ("--package", name)]
        told = cargo("tree", *shipped, "--edges", "normal,no-proc-macro", "--target", triple, "--prefix", "depth", "--format", "{p}")
        # The packages from a shipped one down to that of the line before.
        above = []
        for depth, name, version in re.findall(r"^(\d+)(\S+) v(\S+)", told, re.M):
            package = f"pkg:cargo/{name}@{version}"
            packages[package] = known[package]
            edges.setdefault(package, set())
            above[int(depth):] = [package]
            if len(above) > 1:
                edges[above[-2]].add(package)
    return packages, edges


def reference(package):
    return f"pkg:cargo/{package['name']}@{package['version']}"


def folder(package):
    """The folder in which cargo has the sources of a package."""
    return Path(package["manifest_path"]).parent


def component(package, digests):
    """One crate, as CycloneDX has it."""
    told = {
        "type": "library", "bom-ref": reference(package), "name": package["name"], "version": package["version"], "purl": reference(package),
        "licenses": [{"expression": package["license"].replace("/", " OR ")}],
    }
    if package["description"]:
        told["description"] = " ".join(package["description"].split())
    if digest := digests.get((package["name"], package["version"])):
        told["hashes"] = [{"alg": "SHA-256", "content": digest}]
    if package["repository"]:
        told["externalReferences"] = [{"type": "vcs", "url": package["repository"]}]
    return told


def document(version, time):
    """The whole text."""
    digests, (packages, edges) = checksums((ROOT / "Cargo.lock").read_text()), linked()
    root = f"pkg:generic/libdevicemesh@{version}"
    edges[root] = {name for name in edges if re.fullmatch(rf"pkg:cargo/({'|'.join(SHIPPED)})@.*", name)}
    body = {
        "metadata": {
            "timestamp": clock.strftime("%Y-%m-%dT%H:%M:%SZ", clock.gmtime(time)),
            "component": {
                "type": "library", "bom-ref": root, "name": "libdevicemesh", "version": version, "purl": root,
                "licenses": [{"expression": "Apache-2.0 OR MIT"}]
            },
        },
        "components": [component(packages[name], digests) for name in sorted(packages)],
        "dependencies": [{"ref": name, "dependsOn": sorted(edges[name])} for name in sorted(edges)],
    }
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(body, sort_keys=True))
    whole = {"bomFormat": "CycloneDX", "specVersion": "1.5", "serialNumber": f"urn:uuid:{serial}", "version": 1, **body}
    return json.dumps(whole, indent=1) + "\n"
