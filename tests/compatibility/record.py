#!/usr/bin/env python3
"""make abi-record: records the C ABI of include/devicemesh.h as that of a release, in
tests/compatibility/records/<SONAME's version>: the header, its layout, the least struct sizes,
and what abidw says. tests/test_compatibility.py holds later headers to it. Only for a release
(CONTRIBUTING.md): a record that is renewed to make the test pass records a broken promise."""

import shutil
import sys
import tempfile
from pathlib import Path

sys.dont_write_bytecode = True
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).resolve().parent), str(ROOT / "packaging")]
import c_abi
import versions

RECORDS = Path(__file__).resolve().parent / "records"
# The version in the SONAME: within it the ABI stays.
SERIES = versions.series(versions.present())


def main():
    if not shutil.which("abidw"):
        print("no abidw here (Debian: apt-get install abigail-tools)", file=sys.stderr)
        return 1
    folder = RECORDS / SERIES
    folder.mkdir(parents=True, exist_ok=True)
    header = (ROOT / "include/devicemesh.h").read_text()
    with tempfile.TemporaryDirectory() as scratch:
        layout = c_abi.layout(header, scratch)
        recorded = folder / "layout.txt"
        if recorded.exists():
            c_abi.compare_layouts(recorded.read_text(), layout, c_abi.sized(header))
        abi = c_abi.abidw(c_abi.stub(header, scratch, f"libdevicemesh.so.{SERIES}"))
    # The least struct_size that a caller may say is the size in the first release of the series.
    # It stays when a struct grows.
    least = folder / "least_sizes.txt"
    known = c_abi.parse(least.read_text()) if least.exists() else {}
    sizes = {f"struct {name}": known.get(f"struct {name}", c_abi.parse(layout)[f"struct {name}"]) for name in c_abi.sized(header)}
    least.write_text("".join(f"{what} {size[0]}\n" for what, size in sizes.items()))
    recorded.write_text(layout)
    (folder / "devicemesh.h").write_text(header)
    (folder / "devicemesh.abi").write_text(abi)
    print(f"recorded in {folder.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except c_abi.Refused as refused:
        print(f"breaks what is recorded, so it needs a new SONAME (a new minor version, below 1.0): {refused}", file=sys.stderr)
        sys.exit(1)
