#!/usr/bin/env python3
"""Runs README's commands on this commit in a bare Debian 13 (`make bare-root`). It needs root,
debootstrap and a network.

debootstrap makes the root file system, with the packages that README names and no others. Debian 13
has Rust 1.85, the oldest that is promised, so this also shows that the project builds with it.

    bare_root.py [--suite trixie] [--tests "-k NAME"] [--keep]

Only the certificates, the name servers and pip's settings are copied from this machine. `--tests`
passes arguments to `make test`. target/bare-root keeps what debootstrap made for the next time, and
drops the copy in which the commands ran (`--keep` keeps it too).

Without debootstrap, or without root, the same commands run in a clone with an empty environment and
an empty home. The last line says which of the two it was."""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "target/bare-root"
# README names cargo (Rust 1.85 or later), a C and C++ compiler, make and Python 3. A minimal root
# lacks certificates too.
PACKAGES = ["cargo", "gcc", "g++", "make", "python3", "ca-certificates"]
# Tests that need these are skipped where they are missing.
WISHED = ["python3-venv"]
MIRROR = "http://deb.debian.org/debian"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


def run(*command, **options):
    print("$", *command, flush=True)
    began = time.monotonic()
    done = subprocess.run([str(part) for part in command], stdin=subprocess.DEVNULL, **options)
    print(f"exit code {done.returncode}, {time.monotonic() - began:.0f} s", flush=True)
    if done.returncode != 0:
        sys.exit(f"bare root: this command ended with exit code {done.returncode}: {' '.join(map(str, command))}")


def pristine(suite, name="", packages=(*PACKAGES, *WISHED), mirror=MIRROR, architecture=None):
    """The root that debootstrap makes, once for each suite and each name of a list of packages. The
    architecture is Debian's name of a machine; the default is this one."""
    base = FOLDER / f"{suite}{name}"
    if not (base / "complete").exists():
        shutil.rmtree(base, ignore_errors=True)
        base.mkdir(parents=True)
        machine = [f"--arch={architecture}"] if architecture else []
        run("debootstrap", "--variant=minbase", *machine, f"--include={','.join(packages)}", suite, base / "root", mirror)
        (base / "complete").touch()
    return base / "root"


def settings():
    """The variables by which programs reach the network from here: proxies, and a certificate
    authority."""
    names = {"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "CARGO_HTTP_CAINFO"}
    return {name: value for name, value in os.environ.items() if name.upper() in names}


def copy_settings(root):
    shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
    if CERTIFICATES.exists():
        shutil.copy(CERTIFICATES, root / CERTIFICATES.relative_to("/"))
    for name in ("/etc/pip.conf", "/root/.config/pip/pip.conf", "/root/.pip/pip.conf", "/root/.cargo/config.toml"):
        if Path(name).exists():
            (root / name[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(name, root / name[1:])


def commands(tests):
    return ["make demo", f"make test ARGS='{tests}'" if tests else "make test"]


def in_root(options):
    base, work = pristine(options.suite), FOLDER / f"{options.suite}-work"
    shutil.rmtree(work, ignore_errors=True)
    run("cp", "-a", base, work)
    copy_settings(work)
    run("git", "clone", "--quiet", "--no-hardlinks", ROOT, work / "root/libdevicemesh")
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8", **settings()}
    # Each command has namespaces of its own, so its mounts and processes end with it.
    mounts = "mount -t proc proc /proc && mount -t sysfs -o ro sys /sys && mount -t tmpfs shm /dev/shm && "
    inside = mounts + "cd /root/libdevicemesh && cargo --version && cc --version | head -1 && "
    prepare = f"mount --rbind /dev {work}/dev && mount --make-rslave {work}/dev && "
    try:
        for command in commands(options.tests):
            run("unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c",
                prepare + f'exec chroot {work} sh -c "$1"', "sh", inside + command, env=environment)
    finally:
        if not options.keep:
            shutil.rmtree(work, ignore_errors=True)
    print(f"bare root: README's commands work in a bare Debian {options.suite}")


def in_clone(options, why):
    """Runs the commands in a clone, with an empty home and an environment that names only the
    toolchain."""
    work = FOLDER / "clone"
    shutil.rmtree(work, ignore_errors=True)
    (work / "home").mkdir(parents=True)
    run("git", "clone", "--quiet", "--no-hardlinks", ROOT, work / "libdevicemesh")
    environment = {
        "PATH": f"{Path(shutil.which('cargo') or '/usr/bin/cargo').parent}:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(work / "home"), **settings()
    }
    rustup = Path(os.environ.get("RUSTUP_HOME") or "~/.rustup").expanduser()
    if rustup.exists():
        environment["RUSTUP_HOME"] = str(rustup)
    for command in commands(options.tests):
        run("sh", "-c", command, cwd=work / "libdevicemesh", env=environment)
    if not options.keep:
        shutil.rmtree(work, ignore_errors=True)
    print(f"bare root: {why}; README's commands work in a clone with an empty home")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", default="trixie")
    parser.add_argument("--tests", default="", help="arguments for tests/run.py, for example: -k mesh.c")
    parser.add_argument("--keep", action="store_true", help="leave the root that was used")
    parser.add_argument("--no-root", action="store_true", help="a clone with an empty environment, even where a root can be made")
    options = parser.parse_args()
    os.chdir(ROOT)
    if options.no_root:
        in_clone(options, "no root was wanted")
    elif os.geteuid():
        in_clone(options, "not root here")
    elif not shutil.which("debootstrap"):
        in_clone(options, "no debootstrap here")
    else:
        in_root(options)


if __name__ == "__main__":
    main()
