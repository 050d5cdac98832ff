#!/usr/bin/env python3
"""`make dist`: everything that a release consists of, in target/dist/VERSION.

  devicemesh-VERSION.tar.gz                   the sources with all crates; builds without a network,
                                              also by pip (it is PyPI's sdist)
  devicemesh-VERSION-MACHINE-linux.tar.gz     what `make install` installs, for unpacking anywhere
  devicemesh-VERSION-x86_64-linux-musl.tar.gz the tool as one static file
  devicemesh-VERSION-py3-none-....whl         library, tool and Python package, for each machine
  devicemesh_jax-VERSION-py3-none-....whl     the handlers for JAX, for each machine
  libdevicemesh..._VERSION_ARCH.deb           Debian packages, for each machine (deb.py)
  devicemesh-VERSION-site.tar.gz              the pages and references as a site (docs/site/build.py)
  devicemesh-VERSION.cdx.json                 which crates the release contains (CycloneDX, sbom.py)
  SHA256SUMS

The archives, wheels and packages have the licences of the crates in them (licences.py).

The binaries run with glibc 2.27 and later (binaries.py, sysroot.py). Equal sources and equal tools
give equal bytes: times are those of the commit, and no file has a path of this machine or a mode
that follows from its umask.

    dist.py [--machines x86_64,aarch64] [--parts sources,wheels,...] [--out FOLDER] [--uncommitted]

With --parts, --machines or --uncommitted the files go into target/dist/VERSION-part, because they
are no release.

It needs cargo, and for another machine than this one that machine's Rust target and compilers. It
says what is missing before it builds anything. The old C library, the headers of jaxlib and the
site's tools are fetched once, by Python and pip."""

import argparse
import gzip
import hashlib
import importlib.util
import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import binaries
import deb
import licences
import sbom
import sysroot
import versions
from binaries import run

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bindings/jax"), str(ROOT / "bindings/python")]
import build_jax_wheel  # noqa: E402
import build_wheel  # noqa: E402

WORK = ROOT / "target/dist/work"
THIRD_PARTY = WORK / licences.NAME
PARTS = ["sources", "trees", "musl", "wheels", "jax", "debs", "site", "sbom"]
# INSTALLED are the parts that contain what `make install` installs. BUILT are all parts that are
# compiled for each machine.
INSTALLED = {"trees", "debs"}
BUILT = {*INSTALLED, "wheels"}


def output(*command, **options):
    return subprocess.run([str(word) for word in command], check=True, stdout=subprocess.PIPE, **options).stdout


def lacking(parts, machines):
    """The tools and targets that these parts need for these machines, and this machine does not
    have."""
    own = platform.machine()
    # The tool of this machine writes the man page for all.
    built = {*machines, *([own] if INSTALLED & set(parts) else [])} if BUILT & set(parts) else set()
    musl = "musl" in parts and "x86_64" in machines
    compiled = [*built, *(["x86_64"] if musl else [])]
    tools = {"cargo": "cargo", "rustc": "rustc", "git": "git"}
    tools.update({binaries.cross(machine, "strip"): binaries.debian_package(machine, "strip") for machine in compiled})
    tools.update({binaries.compiler(machine): binaries.debian_package(machine, "gcc") for machine in compiled})
    if "jax" in parts:
        tools.update({binaries.compiler(machine, "g++"): binaries.debian_package(machine, "g++") for machine in machines})
    if "debs" in parts:
        tools["dpkg-deb"] = "dpkg"
    missing = [f"{tool} (Debian: {package})" for tool, package in sorted(tools.items()) if not shutil.which(tool)]
    # The site's tools are installed into an environment of their own.
    if "site" in parts and not all(map(importlib.util.find_spec, ("venv", "ensurepip"))):
        missing.append("Python's venv (Debian: python3-venv)")
    if "jax" in parts and not importlib.util.find_spec("pip"):
        missing.append("pip (Debian: python3-pip)")
    if shutil.which("rustc"):
        rust = output("rustc", "--print", "sysroot", cwd=ROOT).decode().strip()
        for target in [*(f"{machine}-unknown-linux-gnu" for machine in sorted(built)), *([binaries.MUSL] if musl else [])]:
            if not (Path(rust) / "lib/rustlib" / target).exists():
                missing.append(f"Rust's target {target} (rustup target add {target})")
    return missing


def committed(allow_changes):
    """The time of the commit in seconds. The sources of a release are those of a commit."""
    changes = output("git", "status", "--porcelain", "--untracked-files=all", cwd=ROOT).decode()
    if changes and not allow_changes:
        sys.exit(f"dist: these files are not committed (--uncommitted leaves them out of the sources):\n{changes}")
    return int(output("git", "log", "-1", "--format=%ct", cwd=ROOT))


def folder_of(version, parts, machines, uncommitted):
    """The folder for the files. A part of a release has another folder than a whole release, because
    the folder is emptied first."""
    whole = set(parts) == set(PARTS) and set(machines) == set(sysroot.PACKAGES) and not uncommitted
    return ROOT / f"target/dist/{version}{'' if whole else '-part'}"


def pack(path, entries, time):
    """Writes a .tar.gz whose bytes follow from the entries: pairs of a name and a file on disk."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, file in sorted(entries):
            member = archive.gettarinfo(file, name)
            member.uid = member.gid = 0
            member.uname = member.gname = "root"
            member.mtime = time
            member.mode = 0o777 if member.issym() else 0o755 if member.mode & 0o100 else 0o644
            if member.islnk():
                member.type, member.linkname, member.size = tarfile.REGTYPE, "", os.path.getsize(file)
            with open(file, "rb") if member.isreg() else io.BytesIO() as content:
                archive.addfile(member, content if member.isreg() else None)
    with open(path, "wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=time) as packed:
        packed.write(buffer.getvalue())
    told(path)


def files_below(folder, prefix):
    return [(f"{prefix}/{path.relative_to(folder)}", path)
            for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]


def sdist_files():
    """The files at the top by which pip takes the sources as an sdist (PEP 517, PEP 643)."""
    project, place = (ROOT / "bindings/python/pyproject.toml").read_text(), "bindings/python"
    changes = {'backend-path = ["."]': f'backend-path = ["{place}"]', 'readme = "README.md"': f'readme = "{place}/README.md"'}
    for old, new in changes.items():
        if project.count(old) != 1:
            sys.exit(f"dist: {place}/pyproject.toml has {project.count(old)} lines {old}")
        project = project.replace(old, new)
    return {"pyproject.toml": project, "PKG-INFO": build_wheel.metadata()["METADATA"]}


# Cargo's settings in the tarball of the sources.
VENDORED = """\
# The crates of this release, so that cargo needs no network.
[source.crates-io]
replace-with = "vendor"

[source.vendor]
directory = "vendor"
"""


def sources(out, version, time):
    """The files of the commit, and the crates that Cargo.lock names; cargo finds the crates."""
    folder = WORK / "sources"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(output("git", "archive", "HEAD", cwd=ROOT))) as archive:
        archive.extractall(folder, **sysroot.AS_TAR_DOES)
    run("cargo", "vendor", "--locked", "--versioned-dirs", "--quiet", "vendor", cwd=folder)
    (folder / ".cargo").mkdir()
    (folder / ".cargo/config.toml").write_text(VENDORED)
    # A cargo that has fetched nothing yet must find all crates there.
    empty = {**os.environ, "CARGO_HOME": str(folder / "none")}
    output("cargo", "metadata", "--offline", "--locked", "--format-version", "1", cwd=folder, env=empty)
    shutil.rmtree(folder / "none", ignore_errors=True)
    for name, text in sdist_files().items():
        (folder / name).write_text(text)
    shutil.copy(THIRD_PARTY, folder)
    pack(out / f"devicemesh-{version}.tar.gz", files_below(folder, f"devicemesh-{version}"), time)


def installed(machine, made, folder, prefix, libdir):
    """Installs the binaries of a machine below a folder, as `make install` does, with the licences
    of the crates."""
    shutil.rmtree(folder, ignore_errors=True)
    places = {"PREFIX": prefix, "LIBDIR": libdir, "INCLUDEDIR": f"{prefix}/include", "BINDIR": f"{prefix}/bin",
              "DATADIR": f"{prefix}/share", "MANDIR": f"{prefix}/share/man"}
    # The tool writes its own man page and completions. A tool of another machine cannot run here.
    tool = made if machine == platform.machine() else WORK / platform.machine()
    environment = {**os.environ, **places, "RELEASE": str(made), "DESTDIR": str(folder), "TOOL": str(tool / "devicemesh")}
    run("sh", "packaging/install.sh", "install", env=environment, cwd=ROOT)
    share = folder / f"{prefix}/share".lstrip("/")
    for file in ("man/man1/devicemesh.1", "bash-completion/completions/devicemesh", "zsh/site-functions/_devicemesh",
                 "fish/vendor_completions.d/devicemesh.fish"):
        if not (share / file).exists():
            sys.exit(f"dist: {environment['TOOL']} did not print share/{file}")
    shutil.copy(THIRD_PARTY, share / "doc/devicemesh")
    return folder


def told(path):
    print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB", flush=True)


def wheel(out, machine, made):
    """The wheel of the Python package, with a machine's binaries from the folder `made`."""
    native = [made / name for name in build_wheel.NATIVE]
    tag = f"{build_wheel.oldest_glibc(native)}_{machine}"
    told(out / build_wheel.write(str(out), build_wheel.contents(native), tag, texts=build_wheel.metadata(THIRD_PARTY)))


def jax_wheel(out, machine):
    """The wheel of the JAX package, whose handlers are compiled for a machine."""
    link = sysroot.link_arguments(machine, binaries.FOLDER)
    told(out / build_jax_wheel.write(str(out), machine, binaries.compiler(machine, "g++"), link, THIRD_PARTY))


def site(out, version, time):
    """The site, whose tools are fetched once."""
    run(sys.executable, ROOT / "docs/site/build.py", "--out", WORK / "site")
    name = f"devicemesh-{version}-site"
    # Sphinx reads .buildinfo in its next build only.
    files = [(place, path) for place, path in files_below(WORK / "site/html", name) if path.name != ".buildinfo"]
    pack(out / f"{name}.tar.gz", files, time)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", default="x86_64,aarch64")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--uncommitted", action="store_true")
    options = parser.parse_args()
    machines, parts = options.machines.split(","), options.parts.split(",")
    if unknown := set(parts) - set(PARTS) or set(machines) - set(sysroot.PACKAGES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    # The tool of this machine writes the man page for all, so it is built first.
    own = platform.machine()
    machines = [own, *(machine for machine in machines if machine != own)]
    wanted = set(options.machines.split(","))
    if missing := lacking(parts, wanted):
        sys.exit(f"dist: this machine lacks {', '.join(missing)} (--parts and --machines leave out what needs it)")
    time, version = committed(options.uncommitted), versions.present()
    os.environ["SOURCE_DATE_EPOCH"] = str(time)
    # Modes of files must not follow from the umask of this machine.
    os.umask(0o022)
    out = (options.out or folder_of(version, parts, wanted, options.uncommitted)).resolve()
    if options.out is None:
        shutil.rmtree(out, ignore_errors=True)
    elif out.exists() and any(out.iterdir()):
        parser.error(f"{out} has files already; --out takes a folder that is empty or not there")
    out.mkdir(parents=True, exist_ok=True)
    THIRD_PARTY.parent.mkdir(parents=True, exist_ok=True)
    THIRD_PARTY.write_text(licences.document(), encoding="utf-8")
    if "sources" in parts:
        sources(out, version, time)
    for machine in machines if BUILT & set(parts) else []:
        if INSTALLED & set(parts):
            made = binaries.build(machine, WORK / machine)
        if machine not in wanted:
            continue
        if "trees" in parts:
            name = f"devicemesh-{version}-{machine}-linux"
            tree = installed(machine, made, WORK / f"tree-{machine}", "/usr/local", "/usr/local/lib") / "usr/local"
            pack(out / f"{name}.tar.gz", files_below(tree, name), time)
        if "wheels" in parts:
            packages, files = build_wheel.SHARED
            native = binaries.build_packages(machine, packages, dict(zip(build_wheel.NATIVE, files)), WORK / f"wheel-{machine}")
            wheel(out, machine, native)
        if "debs" in parts:
            libdir = f"/usr/lib/{machine}-linux-gnu"
            tree = installed(machine, made, WORK / f"deb-{machine}", "/usr", libdir)
            deb.packages(tree, machine, version, time, out, THIRD_PARTY.read_text(encoding="utf-8"))
    if "musl" in parts and "x86_64" in wanted:
        name = f"devicemesh-{version}-x86_64-linux-musl"
        tool = binaries.static_tool(WORK / "musl")
        texts = [(f"{name}/{path.name}", path) for path in build_wheel.licence_files(THIRD_PARTY)]
        pack(out / f"{name}.tar.gz", [*files_below(tool, name), *texts], time)
    if "jax" in parts:
        for machine in sorted(wanted):
            jax_wheel(out, machine)
    if "site" in parts:
        site(out, version, time)
    if "sbom" in parts:
        (out / f"devicemesh-{version}.cdx.json").write_text(sbom.document(version, time))
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(out.iterdir())]
    (out / "SHA256SUMS").write_text("".join(sums))
    print(f"{len(sums)} files in {out}")
    if "debs" in parts:
        deb.lint(out.glob("*.deb"))


if __name__ == "__main__":
    main()
