"""Makes the binaries of a release, which `make dist` packs. For each machine, these are the
library, libhostccl and the tool, and once more the library and the tool for the wheel, where they
share their machine code. They are linked against an old C library. One more binary is the tool as
one static file.

Cargo's profile `dist` (Cargo.toml) makes them smaller than `cargo build --release` does. Their
bytes depend on the sources and the tools alone, because no file has a path of this machine. Cargo
leaves the compiler's flags out of the names that it derives, because --remap-path-prefix is among
them. The linker's arguments, which have such paths, are in a script."""

import os
import platform
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import sysroot

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "target/dist"
CARGO = FOLDER / "cargo"
# The files of cargo's output that belong to a release.
BINARIES = ["libdevicemesh.so", "libdevicemesh.a", "libhostccl.so", "devicemesh"]
MUSL = "x86_64-unknown-linux-musl"


def run(*command, **options):
    print("$", *command, flush=True)
    subprocess.run([str(word) for word in command], check=True, stdin=subprocess.DEVNULL, **options)


def cross(machine, name):
    """The name of the compiler's program (gcc, strip) that makes files for a machine."""
    return name if machine == platform.machine() else f"{machine}-linux-gnu-{name}"


def compiler(machine, name="gcc"):
    """The C or C++ compiler for a machine."""
    own = {"gcc": "cc", "g++": "c++"}
    return own[name] if machine == platform.machine() else cross(machine, name)


def debian_package(machine, name):
    """Debian's package that has a program (gcc, g++, strip) for a machine."""
    package = {"strip": "binutils"}.get(name, name)
    return package if machine == platform.machine() else f"{package}-{machine.replace('_', '-')}-linux-gnu"


def linker(machine):
    """A script that links against the old C library of a machine."""
    script = FOLDER / f"link-{machine}"
    script.write_text(f'#!/bin/sh\nexec {compiler(machine)} "$@" {shlex.join(sysroot.link_arguments(machine, FOLDER))}\n')
    script.chmod(0o755)
    return script


def remapped():
    """The compiler's flags that replace the folders of this machine in what it writes. A later flag
    wins."""
    cargo_home = Path(os.environ.get("CARGO_HOME", Path.home() / ".cargo"))
    # rustup may take the compiler that the repository asks for, so rustc is called there.
    rustc = {"cwd": ROOT, "check": True, "stdout": subprocess.PIPE, "text": True}
    rust = subprocess.run(["rustc", "--print", "sysroot"], **rustc).stdout.strip()
    commit = re.search(r"^commit-hash: (.+)$", subprocess.run(["rustc", "-vV"], **rustc).stdout, re.M).group(1)
    places = {
        ROOT: "/devicemesh", cargo_home: "/cargo",
        # Where rustup's component rust-src is installed, rustc names the files of the standard
        # library by their place here, and otherwise by this one.
        f"{rust}/lib/rustlib/src/rust": f"/rustc/{commit}",
        # The name of a registry's folder contains a hash of the registry's address, which a mirror
        # changes.
        **{folder: "/crates" for folder in sorted(cargo_home.glob("registry/src/*"))},
    }
    return [f"--remap-path-prefix={place}={name}" for place, name in places.items()]


def cargo(triple, *arguments, linker=None):
    """Calls cargo for a target of Rust, and returns the folder with what it has made."""
    # The crates must be in their folders before these folders are looked for.
    run("cargo", "fetch", "--locked", "--quiet", "--target", triple, cwd=ROOT)
    name = triple.upper().replace("-", "_")
    # The variable with encoded flags goes before all others, and its flags may contain spaces.
    environment = {**os.environ, "CARGO_ENCODED_RUSTFLAGS": "\x1f".join(remapped()), "CARGO_INCREMENTAL": "0"}
    environment["CARGO_TARGET_DIR"] = str(CARGO)
    environment.pop("CARGO_BUILD_TARGET", None)
    if linker:
        environment[f"CARGO_TARGET_{name}_LINKER"] = str(linker)
    run("cargo", *arguments, "--profile", "dist", "--locked", "--quiet", "--target", triple, env=environment, cwd=ROOT)
    return CARGO / f"{triple}/dist"


def build(machine, into):
    """Builds everything for a machine. `into` is a new folder for the files."""
    triple, link = f"{machine}-unknown-linux-gnu", linker(machine)
    made = cargo(triple, "build", "--package", "devicemesh-tool", "--package", "hostccl-capi", linker=link)
    # Cargo does not optimise a library across crates in a call that also makes the library for
    # other crates. So this call comes last, and replaces the library that the tool's call has made.
    cargo(triple, "rustc", "--package", "devicemesh", "--lib", "--crate-type", "cdylib,staticlib", linker=link)
    return copied(machine, {name: made / name for name in BINARIES}, into)


def build_packages(machine, packages, files, into):
    """Builds cargo packages for a machine. `files` maps each name in the new folder `into` to the
    name that cargo gives the file."""
    chosen = [word for package in packages for word in ("--package", package)]
    made = cargo(f"{machine}-unknown-linux-gnu", "build", *chosen, linker=linker(machine))
    return copied(machine, {name: made / file for name, file in files.items()}, into)


def copied(machine, files, into):
    """Copies files that cargo has made into a new folder, without what nothing reads. `files` maps
    their new names to their places."""
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    for name, place in files.items():
        shutil.copy(place, into / name)
        # `devicemesh why` names the functions of the shared libraries in a stack by their symbols.
        # The symbols of the tool would be a fifth of its size, and nothing reads them.
        how = "--strip-all" if name == "devicemesh" else "--strip-debug"
        run(cross(machine, "strip"), how, "--enable-deterministic-archives", into / name)
    return into


def static_tool(into):
    """Builds the tool as one file that needs no C library. It needs Rust's target for musl."""
    made = cargo(MUSL, "build", "--package", "devicemesh-tool", linker=compiler("x86_64"))
    return copied("x86_64", {"devicemesh": made / "devicemesh"}, into)
