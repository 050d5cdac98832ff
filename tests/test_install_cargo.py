"""How CMake calls cargo: with the options of the user, and with an error that says what to do where
cargo is too old or missing."""

import re
import shutil

import pytest

from support.installing import CONSUMER, check, cmake, flat, runs
from support.paths import LIBRARY, ROOT

# CMake runs several times; each may wait for another cargo.
pytestmark = pytest.mark.timeout(900)


def test_a_cargo_that_is_too_old(tmp_path):
    old = tmp_path / "cargo"
    old.write_text("#!/bin/sh\necho 'cargo 1.63.0 (fd9c4297c 2022-07-01)'\n")
    old.chmod(0o755)
    output = flat(cmake("-S", ROOT, "-B", tmp_path / "old", f"-DDEVICEMESH_CARGO={old}", code=1))
    check(f"needs Rust 1.85 or later; {old} is of 1.63.0" in output, output)


def test_no_cargo(tmp_path):
    """A machine that has everything that CMake needs, except cargo."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("cc", "c++", "make", "ld", "as", "ar", "ranlib", "nm", "strip", "objdump", "readelf", "sh", "uname"):
        (tools / name).symlink_to(shutil.which(name))
    output = flat(cmake("-S", ROOT, "-B", tmp_path / "none", "-DCMAKE_FIND_USE_CMAKE_SYSTEM_PATH=OFF", code=1,
                        PATH=tools, HOME=tmp_path, CARGO_HOME=tmp_path, CC="", CXX=""))
    check("is built by cargo (Rust 1.85 or later), and none is in PATH" in output, output)


def test_how_cargo_is_called(tmp_path):
    """cargo is called before anything is linked, with what was asked for, and for another
    machine when cross-compiling. The cargo here only puts the finished libraries where they
    belong, and takes its time."""
    folder = tmp_path
    cargo = folder / "cargo"
    cargo.write_text(f"""#!/bin/sh
[ "$1" = --version ] && echo "cargo 1.85.0" && exit
{{ echo "arguments $*"; env | grep '^CARGO_'; }} >'{folder}/log'
while [ $# -gt 0 ]; do
  case $1 in --target-dir) into=$2 ;; --target) machine=$2/ ;; esac
  shift
done
sleep 1
mkdir -p "$into/$machine"release
cp '{LIBRARY}'/lib*.so* '{LIBRARY}'/libdevicemesh.a "$into/$machine"release
""")
    cargo.chmod(0o755)
    common = ["-S", CONSUMER, f"-DDEVICEMESH_SOURCE={ROOT}", f"-DDEVICEMESH_CARGO={cargo}", "-DHOW=add_subdirectory"]
    environment = {"CARGO_BUILD_TARGET": "", "CARGO_TARGET_DIR": ""}
    native, cross = folder / "native", folder / "cross"
    cmake(*common, "-B", native, "-DDEVICEMESH_CARGO_FLAGS=--offline;--quiet", **environment)
    cmake("--build", native, "--parallel", 2, "--target", "shared_c", "static_c", **environment)
    place = native / "devicemesh/cargo"
    runs(native / "shared_c", place / "release")
    log = (folder / "log").read_text()
    check(f"arguments build --locked --profile release --target-dir {place} --offline --quiet\n" in log, log)
    cmake(*common, "-B", cross, "-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=x86_64", **environment)
    cmake("--build", cross, "--target", "shared_c", **environment)
    log = (folder / "log").read_text()
    check(
        "--target x86_64-unknown-linux-gnu\n" in log
        and re.search("^CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_LINKER=/.*cc$", log, re.M), log)
    runs(cross / "shared_c", cross / "devicemesh/cargo/x86_64-unknown-linux-gnu/release")
