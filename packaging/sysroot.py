"""An old C library to link against, so that the binaries also run on old systems.

A program that is linked on a machine with glibc 2.36 needs glibc 2.34 or later to run. This file
gets what the linker needs of glibc 2.27, from the packages of Ubuntu 18.04 for x86-64 and for cross-compiling to 64-bit
ARM. The newest function that the library cannot do without is memfd_create, of 2.27. The compiler
and the linker are those of the machine that builds.

The archives are checked against the digests below, and are unpacked with Python alone."""

import hashlib
import io
import os
import shutil
import tarfile
import urllib.request
from pathlib import Path

GLIBC = "2.27"
# Arguments for tarfile's extract and extractall: Python 3.14 refuses more than tar does.
AS_TAR_DOES = {"filter": "tar"} if hasattr(tarfile, "tar_filter") else {}
MIRROR = os.environ.get("DM_UBUNTU_MIRROR", "http://archive.ubuntu.com/ubuntu")
CROSS = "pool/main/c/cross-toolchain-base"
# For each machine: the packages with their digests, and the folders of the startup files and of the
# libraries.
PACKAGES = {
    "x86_64": ({
        "pool/main/g/glibc/libc6_2.27-3ubuntu1_amd64.deb":
            "1e1eb86fd646aa68f7144ec692b837b6b352d215880c6a2d0c92c19d36938427",
        "pool/main/g/glibc/libc6-dev_2.27-3ubuntu1_amd64.deb":
            "e426c70a940a7d0c5c95823a5fd01f26bd8bcb08d109df2f8c96c439da8dc440",
    }, ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"]),
    "aarch64": ({
        f"{CROSS}/libc6-arm64-cross_2.27-3ubuntu1cross1_all.deb":
            "3b7ac882761276bf76653dcf0bb31c1741aa56ec173092db4d7d4af5487962d3",
        f"{CROSS}/libc6-dev-arm64-cross_2.27-3ubuntu1cross1_all.deb":
            "8990471116770194523ac485eb1b65fabc9bb2b130d47bc61cc262f04bf33931",
    }, ["usr/aarch64-linux-gnu/lib"]),
}


def fetched(path, digest):
    with urllib.request.urlopen(f"{MIRROR}/{path}", timeout=120) as answer:
        data = answer.read()
    found = hashlib.sha256(data).hexdigest()
    if found != digest:
        raise SystemExit(f"sysroot: {MIRROR}/{path} has the SHA-256 {found}, not {digest}")
    return data


def members(archive):
    """The members of an ar archive (ar(5)), as pairs of a name and the content."""
    at = 8
    while at + 60 <= len(archive):
        name, size = archive[at:at + 16].decode().strip().rstrip("/"), int(archive[at + 48:at + 58])
        yield name, archive[at + 60:at + 60 + size]
        at += 60 + size + size % 2


def unpack(package, folder):
    """Unpacks the files of a Debian package. Links to the root of the file system become links
    inside the folder, because the linker follows links as the kernel does."""
    (data,) = (content for name, content in members(package) if name.startswith("data.tar"))
    with tarfile.open(fileobj=io.BytesIO(data)) as files:
        for member in files:
            if member.issym() and member.linkname.startswith("/"):
                here = os.path.dirname(member.name)
                member.linkname = os.path.relpath("." + member.linkname, here)
            files.extract(member, folder, **AS_TAR_DOES)


def link_arguments(machine, folder):
    """What the C compiler needs to link against the old library. `folder` keeps the files."""
    packages, libraries = PACKAGES[machine]
    root = Path(folder) / f"glibc-{GLIBC}-{machine}"
    if not root.exists():
        new = root.with_name(f"{root.name}.new")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        for path, digest in packages.items():
            unpack(fetched(path, digest), new)
        new.rename(root)
    # The compiler looks into its own folders before it looks into those of --sysroot.
    places = [root / library for library in libraries]
    # The compiler's own libgcc_s.so.1 is for the C library of this machine. Where the binaries run,
    # they find the one that belongs to the C library there.
    return [f"--sysroot={root}", f"-B{places[0]}", *(f"-L{place}" for place in places), "-Wl,--allow-shlib-undefined"]
