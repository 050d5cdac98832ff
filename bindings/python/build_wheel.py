"""The build backend (PEP 517, PEP 660): cargo builds the library and the tool, and this file packs them into a wheel.

It needs nothing but Python and cargo, so an installation without a network works. The wheel is for
every Python 3, since nothing is compiled against one, and its platform tag says the oldest glibc
that the binaries run on.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sysconfig
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NATIVE = ("libdevicemesh.so", "devicemesh")
# Each of these two has cargo packages and, in NATIVE's order, the files that cargo makes of them.
# SEPARATE is the library and the tool of a checkout. SHARED is those of the wheel, where the tool is
# a function of the library (native/src/lib.rs).
SEPARATE = ("devicemesh", "devicemesh-tool"), NATIVE
SHARED = ("devicemesh-wheel",), ("libdevicemesh_wheel.so", "devicemesh-wheel")
# The licences of the crates. The file is in the sources of a release, and not in the repository.
THIRD_PARTY = ROOT / "THIRD-PARTY-LICENSES"


def build(packages: tuple[str, ...], names: tuple[str, ...]) -> list[Path]:
    """Builds the library and the tool by cargo packages. Returns the paths of the named files."""
    # pip shows what this writes with -v alone, and everything when the build fails.
    print("devicemesh: cargo builds the library and the tool, which takes minutes the first time", flush=True)
    if shutil.which("cargo") is None:
        raise SystemExit("devicemesh: no cargo on the PATH, which compiles the library (https://rustup.rs, or apt-get install cargo; Rust 1.85 or later, and a C linker)")
    # Cargo says where its files are, because that depends on variables and settings of cargo. The
    # machine for which it compiles must be this one, because the wheel's tag says so.
    chosen = [word for package in packages for word in ("--package", package)]
    command = ["cargo", "build", "--release", "--locked", *chosen, "--message-format", "json-render-diagnostics"]
    environment = {name: value for name, value in os.environ.items() if name != "CARGO_BUILD_TARGET"}
    built = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    if built.returncode != 0:
        raise SystemExit(f"devicemesh: {' '.join(command)} in {ROOT} failed with exit code {built.returncode}; its own lines are above")
    messages = [json.loads(line) for line in built.stdout.splitlines() if line.startswith("{")]
    # Maps the name of each file that cargo has made to its path. Where two crates have a file of
    # one name, the later one counts.
    places = {Path(file).name: Path(file) for message in messages if message.get("reason") == "compiler-artifact"
              for file in message["filenames"]}
    return [places[name] for name in names]


def native(into: Path) -> list[Path]:
    """Builds the wheel's library and tool, and copies them without their debug sections."""
    made = []
    for path, name in zip(build(*SHARED), NATIVE):
        copy = into / name
        shutil.copy(path, copy)
        if shutil.which("strip"):
            subprocess.run(["strip", "--strip-debug", copy], check=True)
        made.append(copy)
    return made


def oldest_glibc(binaries: list[Path]) -> str:
    """manylinux_2_N for the newest symbol version of glibc that a binary asks for (PEP 600)."""
    # The versions are in the dynamic string table. Equal bytes elsewhere in the file could only
    # raise the version in the tag.
    versions = {(int(major), int(minor))
                for binary in binaries
                for major, minor in re.findall(rb"\0GLIBC_(\d+)\.(\d+)(?:\.\d+)?(?=\0)", binary.read_bytes())}
    # manylinux has no profile before 2.5 (PEP 513).
    major, minor = max(versions | {(2, 5)})
    return f"manylinux_{major}_{minor}"


def tag(binaries: list[Path]) -> str:
    """The platform tag of binaries that this machine made for itself."""
    machine = re.sub(r"[-.]", "_", sysconfig.get_platform())
    if not machine.startswith("linux_") or platform.libc_ver()[0] != "glibc":
        return machine
    return f"{oldest_glibc(binaries)}_{machine[len('linux_'):]}"


def version() -> str:
    found = re.search(r'^version = "(.+)"', (ROOT / "Cargo.toml").read_text(), re.M)
    assert found, "Cargo.toml has the version"
    return found.group(1)


def licence_files(third_party: Path) -> list[Path]:
    """The files with the licences, with those of other projects' code where they are there."""
    return [path for path in (ROOT / "LICENSE-APACHE", ROOT / "LICENSE-MIT", third_party) if path.exists()]


def licences(third_party: Path) -> dict[str, str]:
    """The licences for a .dist-info folder."""
    return {f"licenses/{path.name}": path.read_text(encoding="utf-8") for path in licence_files(third_party)}


def description(readme: Path) -> str:
    """The text of a README for a package index, where links to other files of this repository lead nowhere."""
    return re.sub(r"\[([^\]\n]+)\]\((?!https?:|#)[^)\s]+\)", r"\1", readme.read_text(encoding="utf-8"))


def metadata(third_party: Path = THIRD_PARTY) -> dict[str, str]:
    """The files of the .dist-info folder, except RECORD and WHEEL."""
    project = (HERE / "pyproject.toml").read_text()
    summary = re.search(r'^description = "(.+)"', project, re.M)
    scripts = re.search(r"^\[project.scripts\]\n((?:\w.*\n)+)", project, re.M)
    assert summary and scripts, "pyproject.toml has a description and a script"
    head = (
        f"Metadata-Version: 2.2\nName: devicemesh\nVersion: {version()}\nSummary: {summary.group(1)}\nLicense: Apache-2.0 OR MIT\n"
        "Requires-Python: >=3.9\nProvides-Extra: numpy\nRequires-Dist: numpy; extra == 'numpy'\nDescription-Content-Type: text/markdown\n")
    return {
        "METADATA": head + "\n" + description(HERE / "README.md"),
        "entry_points.txt": "[console_scripts]\n" + scripts.group(1).replace('"', ""),
        **licences(third_party),
    }


def contents(binaries: list[Path]) -> dict[str, bytes | Path]:
    """The files of the package by their names in the wheel."""
    package = HERE / "devicemesh"
    sources = sorted([*package.glob("*.py"), package / "py.typed"])
    native = {f"devicemesh/_native/{path.name}": path for path in binaries}
    return {**{f"devicemesh/{path.name}": path.read_bytes() for path in sources}, **native}


def write(folder: str, files: dict[str, bytes | Path], platform_tag: str, project: str = "devicemesh",
          texts: dict[str, str] | None = None) -> str:
    """Writes the wheel of a project. `texts` are the files of its .dist-info folder; the default is
    metadata(). Equal files give equal bytes."""
    info = f"{project}-{version()}.dist-info"
    files = {**files, **{f"{info}/{name}": text.encode() for name, text in (texts or metadata()).items()}}
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: devicemesh\nRoot-Is-Purelib: false\nTag: py3-none-{platform_tag}\n".encode()
    name = f"{project}-{version()}-py3-none-{platform_tag}.whl"
    record = []
    with zipfile.ZipFile(Path(folder) / name, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as wheel:
        for path, content in files.items():
            data = content.read_bytes() if isinstance(content, Path) else content
            program = isinstance(content, Path) and os.access(content, os.X_OK)
            entry = zipfile.ZipInfo(path, (1980, 1, 1, 0, 0, 0))
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, (0o100755 if program else 0o100644) << 16
            wheel.writestr(entry, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            record.append(f"{path},sha256={digest},{len(data)}")
        wheel.writestr(zipfile.ZipInfo(f"{info}/RECORD", (1980, 1, 1, 0, 0, 0)), "\n".join([*record, f"{info}/RECORD,,", ""]))
    return name


def get_requires_for_build_wheel(config_settings: object = None) -> list[str]:
    return []


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: object = None) -> str:
    """The metadata without a build, so that pip says "Building wheel" while cargo is at work."""
    folder = f"devicemesh-{version()}.dist-info"
    for name, text in metadata().items():
        path = Path(metadata_directory) / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


def build_wheel(wheel_directory: str, config_settings: object = None, metadata_directory: str | None = None) -> str:
    with tempfile.TemporaryDirectory() as folder:
        binaries = native(Path(folder))
        return write(wheel_directory, contents(binaries), tag(binaries))


def get_requires_for_build_editable(config_settings: object = None) -> list[str]:
    return []


def build_editable(wheel_directory: str, config_settings: object = None, metadata_directory: str | None = None) -> str:
    """A wheel that points to the package in the checkout. The package finds the library and the tool
    in the checkout's target/release, so they are copied to that folder where cargo has another
    one."""
    binaries, release = build(*SEPARATE), ROOT / "target/release"
    for binary in binaries:
        if not (release / binary.name).exists() or not binary.samefile(release / binary.name):
            release.mkdir(parents=True, exist_ok=True)
            shutil.copy(binary, release / f"{binary.name}.new")
            os.replace(release / f"{binary.name}.new", release / binary.name)
    platform_tag = tag(binaries)
    return write(wheel_directory, {"devicemesh.pth": f"{HERE}\n".encode()}, platform_tag)


def build_sdist(sdist_directory: str, config_settings: object = None) -> str:
    raise RuntimeError("the sources of the package are the whole repository: `make dist` packs them so that pip can build them")


if __name__ == "__main__":
    import sys

    print(Path(sys.argv[1]) / build_wheel(sys.argv[1]))
