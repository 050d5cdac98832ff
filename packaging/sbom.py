"""The bill of materials of a release: which crates are linked into its files (CycloneDX 1.5, JSON).

`make dist` writes it, from what `cargo metadata` says and from the checksums in Cargo.lock. Crates
that only the tests or the build use are left out. Equal sources give equal bytes: the serial number
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
SHIPPED = ["devicemesh", "devicemesh-tool", "hostccl-capi"]
TRIPLES = ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"]


def metadata(triple):
    """Returns what cargo says of the workspace for a machine. It needs no network where the crates
    are there, as after any build."""
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--filter-platform", triple]
    for more in (["--offline"], []):
        done = subprocess.run([*command, *more], cwd=ROOT, capture_output=True, text=True)
        if done.returncode == 0:
            return json.loads(done.stdout)
    raise SystemExit(f"sbom: {' '.join(command)}: {done.stderr.strip()}")


def checksums(lock):
    """The SHA-256 of each crate by its name and version."""
    entries = re.findall(r'^name = "(.+)"\nversion = "(.+)"\nsource = ".+"\nchecksum = "([0-9a-f]{64})"$', lock, re.M)
    return {(name, version): digest for name, version, digest in entries}


def linked(told):
    """For each package that is linked into what is shipped: the packages that it links."""
    nodes = {node["id"]: node for node in told["resolve"]["nodes"]}
    names = {package["id"]: package["name"] for package in told["packages"]}
    of_build = {package["id"] for package in told["packages"] if any("proc-macro" in target["kind"] for target in package["targets"])}
    found, waiting = {}, [package for package in told["workspace_members"] if names[package] in SHIPPED]
    while waiting:
        package = waiting.pop()
        if package in found:
            continue
        found[package] = sorted(
            dependency["pkg"] for dependency in nodes[package]["deps"]
            if any(kind["kind"] is None for kind in dependency["dep_kinds"]) and dependency["pkg"] not in of_build)
        waiting += found[package]
    return found


def reference(package):
    return f"pkg:cargo/{package['name']}@{package['version']}"


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
    digests, packages, edges = checksums((ROOT / "Cargo.lock").read_text()), {}, {}
    for triple in TRIPLES:
        told = metadata(triple)
        known = {package["id"]: package for package in told["packages"]}
        for package, needed in linked(told).items():
            packages[reference(known[package])] = known[package]
            edges.setdefault(reference(known[package]), set()).update(reference(known[other]) for other in needed)
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
