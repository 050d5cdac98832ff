"""The Debian packages of an installed tree. `make dist` calls this.

  libdevicemesh0.2     the shared library
  libhostccl0.2        the host engine alone, for programs that are written against nccl.h
  libdevicemesh-dev    headers, static library, CMake package and pkg-config files
  devicemesh           the tool, with its man page and completions

dpkg-deb (package dpkg) packs them. It takes the times from SOURCE_DATE_EPOCH, so equal trees give
equal bytes. Where lintian is installed, it must find neither errors nor warnings in the
packages."""

import gzip
import hashlib
import os
import shutil
import subprocess
import time as clock
from pathlib import Path

from sysroot import GLIBC
from versions import series

ROOT = Path(__file__).resolve().parent.parent
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
MAINTAINER = "The libdevicemesh authors <maintainers@libdevicemesh.invalid>"
ABOUT = """\
 A job says that it is (replicate=2, shard=4), and gets a ready communicator for
 every dimension of that mesh: a raw ncclComm_t of NCCL on GPUs, or of the
 embedded host engine without a GPU. Ranks that ask for different meshes get an
 error that says who disagrees.
"""
COPYRIGHT = """\
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: libdevicemesh

Files: *
Copyright: 2026 The libdevicemesh authors
License: Apache-2.0 or Expat
{comment}
License: Apache-2.0
 On Debian systems, the whole text is in /usr/share/common-licenses/Apache-2.0.

License: Expat
"""


# The tags that lintian is told not to report, and why.
OVERRIDES = {
    "initial-upload-closes-no-bugs": "These packages are made by the project, and are no upload to Debian, so there is no bug to close.",
    "unstripped-binary-or-object": "`devicemesh why` names the functions in a stack by the symbols of the library.",
}


def described(version):
    """For each package: its section, its relations, what it is, and which files it has."""
    so, own = series(version), f"(= {version}-1)"
    # libgcc1 is the name that libgcc-s1 had before Debian 11 and Ubuntu 20.04.
    libraries = f"libc6 (>= {GLIBC}), libgcc-s1 (>= 3.3) | libgcc1 (>= 1:3.3)"
    library = {"Section": "libs", "Multi-Arch": "same", "Depends": libraries}
    return {
        f"libdevicemesh{so}": (
            library, "meshes of ranks with a communicator for each dimension",
            lambda path: f"/libdevicemesh.so.{so}" in path),
        f"libhostccl{so}": (
            library, "NCCL's calls between processes without a GPU",
            lambda path: f"/libhostccl.so.{so}" in path),
        "libdevicemesh-dev": (
            {"Section": "libdevel", "Multi-Arch": "same", "Depends": f"libdevicemesh{so} {own}, libhostccl{so} {own}"},
            "meshes of ranks with a communicator for each dimension (development)",
            lambda path: path.startswith("usr/include/") or path.endswith((".a", ".pc", ".cmake", ".so"))),
        "devicemesh": (
            {"Section": "utils", "Multi-Arch": "foreign", "Depends": libraries},
            "starts, checks and explains jobs of libdevicemesh",
            lambda path: path.startswith(("usr/bin/", "usr/share/man/", "usr/share/bash-completion/",
                                          "usr/share/zsh/", "usr/share/fish/"))),
    }


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def indented(text):
    """A text as the continuation of a field in Debian's files."""
    return "".join(f" {line}\n" if line.strip() else " .\n" for line in text.splitlines())


def add_documents(folder, name, version, time, section, third_party):
    """Writes the files that Debian wants in every package: copyright, changelog, and the overrides
    for lintian."""
    licence = (ROOT / "LICENSE-MIT").read_text().split("\n\n", 2)[2].strip()
    text = COPYRIGHT.format(comment=f"Comment:\n{indented(third_party)}") + indented(licence)
    write(folder / f"usr/share/doc/{name}/copyright", text)
    date = clock.strftime("%a, %d %b %Y %H:%M:%S +0000", clock.gmtime(time))
    log = f"libdevicemesh ({version}-1) unstable; urgency=medium\n\n  * New upstream release.\n\n -- {MAINTAINER}  {date}\n"
    write(folder / f"usr/share/doc/{name}/changelog.Debian.gz", gzip.compress(log.encode(), 9, mtime=0))
    told = [tag for tag in OVERRIDES if section == "libs" or tag != "unstripped-binary-or-object"]
    write(folder / f"usr/share/lintian/overrides/{name}", "".join(f"# {OVERRIDES[tag]}\n{name}: {tag}\n" for tag in told))


def package(tree, name, described_as, architecture, version, time, out, third_party):
    fields, summary, belongs = described_as
    folder = tree.parent / f"{tree.name}-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    for path in sorted(tree.rglob("*")):
        place = str(path.relative_to(tree))
        if belongs(place) and (path.is_symlink() or path.is_file()):
            # Debian's zsh does not look in /usr/share/zsh/site-functions.
            packed = folder / place.replace("share/zsh/site-functions", "share/zsh/vendor-completions")
            packed.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, packed, follow_symlinks=False)
    for page in folder.glob("usr/share/man/*/*"):
        write(page.with_name(f"{page.name}.gz"), gzip.compress(page.read_bytes(), 9, mtime=0))
        page.unlink()
    add_documents(folder, name, version, time, fields["Section"], third_party)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    sums = [f"{hashlib.md5(path.read_bytes()).hexdigest()}  {path.relative_to(folder)}\n" for path in files]
    write(folder / "DEBIAN/md5sums", "".join(sums))
    size = sum(-(-path.stat().st_size // 1024) for path in files)
    control = {
        "Package": name, "Source": "libdevicemesh", "Version": f"{version}-1", "Architecture": architecture,
        "Maintainer": MAINTAINER, "Installed-Size": size, **fields, "Priority": "optional", "Description": summary
    }
    write(folder / "DEBIAN/control", "".join(f"{key}: {value}\n" for key, value in control.items()) + ABOUT)
    if fields["Section"] == "libs":
        library = name.removesuffix(series(version))
        write(folder / "DEBIAN/shlibs", f"{library} {series(version)} {name} (>= {version})\n")
        write(folder / "DEBIAN/triggers", "activate-noawait ldconfig\n")
    for path in [folder, *folder.rglob("*")]:
        if path.is_symlink():
            continue
        is_program = path.is_dir() or "usr/bin" in path.as_posix()
        path.chmod(0o755 if is_program else 0o644)
        os.utime(path, (time, time))
    subprocess.run(["dpkg-deb", "--root-owner-group", "--build", "-Zxz", folder, out], check=True, stdout=subprocess.DEVNULL)


def packages(tree, machine, version, time, out, third_party):
    """Makes the packages of `tree`, an installation of a machine's binaries below /usr, in `out`.
    `third_party` is the text with the licences of the crates."""
    for name, about in described(version).items():
        package(tree, name, about, ARCHITECTURES[machine], version, time, Path(out), third_party)


def lint(packages):
    """Lets lintian look for errors and warnings. Lintian takes minutes, because it reads every
    binary."""
    if shutil.which("lintian") is None:
        print("deb: lintian is not installed, so the Debian packages were not checked")
    elif subprocess.run(["lintian", "--allow-root", "--fail-on", "error,warning", *packages]).returncode != 0:
        raise SystemExit("deb: lintian found errors or warnings in the Debian packages (above)")
