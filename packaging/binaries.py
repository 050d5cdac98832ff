"""Makes the binaries of a release, which `make dist` packs: the library, libhostccl and the tool
for a machine, linked against an old C library, and the tool as one static file.

Cargo's profile `dist` (Cargo.toml) makes them smaller than `cargo build --release` does. Their
bytes depend on the sources and the compiler alone, because no file has a path of this machine. The
linker's arguments, which have such paths, are in a script and not in the flags of the compiler,
because cargo derives the names of symbols from those flags."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import sysroot

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "target/dist"
# The files of cargo's output that belong to a release.
LIBRARIES = ["libdevicemesh.so", "libdevicemesh.a"]
BINARIES = [*LIBRARIES, "libhostccl.so", "devicemesh"]
MUSL = "x86_64-unknown-linux-musl"


def run(*command, **options):
    print("$", *command, flush=True)
    subprocess.run([str(word) for word in command], check=True, stdin=subprocess.DEVNULL, **options)


def cross(machine, name):
    """The name of a program of the compiler's that works for a machine."""
    return name if machine == platform.machine() else f"{machine}-linux-gnu-{name}"


def needed(program, machine):
    if shutil.which(program) is None:
        sys.exit(f"dist: no {program} on the PATH, which makes binaries for {machine} (Debian: gcc-{machine.replace('_', '-')}-linux-gnu)")
    return program


def compiler(machine, name="gcc"):
    """The C or C++ compiler for a machine."""
    own = {"gcc": "cc", "g++": "c++"}
    return needed(own[name] if machine == platform.machine() else cross(machine, name), machine)


def linker(machine):
    """A script that links against the old C library of a machine."""
    arguments = " ".join(f"'{word}'" for word in sysroot.link_arguments(machine, FOLDER))
    script = FOLDER / f"link-{machine}"
    script.write_text(f'#!/bin/sh\nexec {compiler(machine)} "$@" {arguments}\n')
    script.chmod(0o755)
    return script


def cargo(triple, *arguments, linker=None):
    """Calls cargo for a target of Rust, and returns the folder with what it has made."""
    cargo_home = Path(os.environ.get("CARGO_HOME", Path.home() / ".cargo"))
    flags = [f"--remap-path-prefix={ROOT}=/devicemesh", f"--remap-path-prefix={cargo_home}=/cargo"]
    name = triple.upper().replace("-", "_")
    environment = {**os.environ, f"CARGO_TARGET_{name}_RUSTFLAGS": " ".join(flags), "CARGO_INCREMENTAL": "0"}
    environment["CARGO_TARGET_DIR"] = str(FOLDER / "cargo")
    # These would take the place of the flags above.
    for other in ("RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS", "CARGO_BUILD_TARGET"):
        environment.pop(other, None)
    if linker:
        environment[f"CARGO_TARGET_{name}_LINKER"] = str(linker)
    run("cargo", *arguments, "--profile", "dist", "--locked", "--quiet", "--target", triple, env=environment, cwd=ROOT)
    return FOLDER / f"cargo/{triple}/dist"


def build(machine, into):
    """Builds everything for a machine. `into` is a new folder for the files."""
    triple, link = f"{machine}-unknown-linux-gnu", linker(machine)
    made = cargo(triple, "build", "--package", "devicemesh-tool", "--package", "hostccl-capi", linker=link)
    # Cargo does not optimise a library across crates in a call that also makes the library for
    # other crates. So this call comes last, and replaces the library that the tool's call has made.
    cargo(triple, "rustc", "--package", "devicemesh", "--lib", "--crate-type", "cdylib,staticlib", linker=link)
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    for name in BINARIES:
        shutil.copy(made / name, into / name)
        # `devicemesh why` names the functions of the shared libraries in a stack by their symbols.
        # The symbols of the tool would be a fifth of its size, and nothing reads them.
        how = "--strip-all" if name == "devicemesh" else "--strip-debug"
        run(needed(cross(machine, "strip"), machine), how, "--enable-deterministic-archives", into / name)
    return into


def static_tool(into):
    """Builds the tool as one file that needs no C library. It needs Rust's target for musl."""
    made = cargo(MUSL, "build", "--package", "devicemesh-tool")
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    shutil.copy(made / "devicemesh", into / "devicemesh")
    run("strip", "--strip-all", into / "devicemesh")
    return into
