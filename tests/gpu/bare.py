#!/usr/bin/env python3
"""Runs a command beside the packed folder in an empty root, as the device machine is without cargo,
registry and network: the C library, bash, coreutils and their like, and Python's standard library.

    bare.py PACKED OUT COMMAND...      PACKED is at /packed there, OUT at /out

It needs unshare and root or user namespaces. The root is a temporary file system of a mount
namespace, so nothing is left of it, and every process in it ends with the command."""

import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

PROGRAMS = [
    "bash", "sh", "awk", "sed", "grep", "tar", "xz", "timeout", "env", "date", "sleep", "cat", "ls", "cp", "mv", "rm",
    "mkdir", "mktemp", "touch", "head", "tail", "tr", "cut", "sort", "uname", "nproc", "dirname", "basename",
    "readlink", "taskset", "ldconfig", "df", "true", "kill", "id", "wc", "chmod"
]


def libraries(program):
    """The files of the dynamic loader and the libraries that a program is linked with."""
    said = subprocess.run(["ldd", program], capture_output=True, text=True).stdout
    return [word for line in said.splitlines() for word in line.split() if word.startswith("/")]


def put(root, path, name=None):
    """Copies one file of this machine to the same place in the root."""
    target = root / (name or path).lstrip("/")
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(os.path.realpath(path), target)


def fill(root, packed, out):
    for name in PROGRAMS:
        found = shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin")
        if found:
            for path in (found, *libraries(found)):
                put(root, path, f"/usr/bin/{name}" if path == found else None)
    # What the packed programs need of the machine: libm and libgcc_s beside the C library.
    for path in {
            library
            for name in ("devicemesh", "meshes")
            for library in libraries(packed / name)
            if not library.startswith(str(packed))
    }:
        put(root, path)
    # What NCCL names beside them: other files of the C library, and the C++ library.
    folder = Path(next(path for path in libraries(packed / "meshes") if path.endswith("/libc.so.6"))).parent
    for name in ("libpthread.so.0", "libdl.so.2", "librt.so.1", "libm.so.6", "libresolv.so.2", "libstdc++.so.6", "libgcc_s.so.1"):
        if (folder / name).exists():
            put(root, str(folder / name))
    # Python with its standard library and nothing else.
    python, standard = os.path.realpath(sys.executable), sysconfig.get_path("stdlib")
    for path in (python, *libraries(python), *(each for module in Path(standard, "lib-dynload").glob("*.so")
                                               for each in libraries(module))):
        put(root, path)
    (root / "usr/bin/python3").symlink_to(python) if not (root / "usr/bin/python3").exists() else None
    mount(root, standard, standard, "--rbind")
    for name in ("dist-packages", "site-packages"):
        if Path(standard, name).is_dir():
            subprocess.run(["mount", "-t", "tmpfs", "none", f"{root}{standard}/{name}"], check=True)
    (root / "bin").exists() or (root / "bin").symlink_to("usr/bin")
    for name in ("tmp", "root", "etc", "proc", "dev/shm", "sys"):
        (root / name).mkdir(parents=True, exist_ok=True)
    for device in ("null", "zero", "random", "urandom"):
        (root / "dev" / device).touch()
        mount(root, f"/dev/{device}", f"/dev/{device}", "--bind")
    subprocess.run(["mount", "-t", "proc", "proc", root / "proc"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "shm", root / "dev/shm"], check=True)
    # The store connects as user and host; these files name both.
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n")
    mount(root, packed, "/packed", "--bind")
    mount(root, out, "/out", "--bind")


def mount(root, what, where, how):
    target = Path(f"{root}{where}")
    if Path(what).is_dir():
        target.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", how, what, target], check=True)


def raise_loopback():
    """A new network namespace has a loopback that is down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(probe, 0x8913, request))[1]  # SIOCGIFFLAGS
        fcntl.ioctl(probe, 0x8914, struct.pack("16sH14x", b"lo", flags | 1))  # SIOCSIFFLAGS, IFF_UP


def main():
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    if sys.argv[1] != "--inside":
        packed, out = (str(Path(name).resolve(strict=True)) for name in sys.argv[1:3])
        with tempfile.TemporaryDirectory(prefix="devicemesh-bare-") as root:
            inside = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--net", "--fork", "--kill-child",
                      sys.executable, __file__, "--inside", root, packed, out, *sys.argv[3:]]
            sys.exit(subprocess.run(inside).returncode)
    root, packed, out = (Path(name) for name in sys.argv[2:5])
    subprocess.run(["mount", "-t", "tmpfs", "root", root], check=True)
    fill(root, packed, out)
    raise_loopback()
    os.chroot(root)
    os.chdir("/packed")
    os.execvpe(sys.argv[5], sys.argv[5:], {"PATH": "/usr/bin:/bin", "HOME": "/root", "LANG": "C.UTF-8"})


if __name__ == "__main__":
    main()
