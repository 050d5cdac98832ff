#!/usr/bin/env python3
"""Installs what `make dist` has made as users do, in a bare Debian without a network (`make
bare-dist`). It needs root and debootstrap. It uses the network only to make the root file systems
and to fetch NumPy for the roads pip and sdist.

    bare_dist.py [--suite trixie] [--machine aarch64] [--roads deb,tree,pip,...] [--dist FOLDER]
                 [--mirror URL] [--keep]

Each road gets a fresh copy of a root with the packages that it needs and no others, installs, and
trains on eight processes with what it has installed (musl: checks on four):

  deb           dpkg installs the four packages; a C program and examples/hsdp_tp.cpp are compiled
                against them
  tree          the tarball of the installed tree in /usr/local, and the same programs
  pip           the wheel from its file alone, in a virtual environment; a project of
                `devicemesh new`
  musl          the static tool where no C library can be found
  sources       the tarball of the sources: `make install` builds it with its own crates, and the
                same programs
  fetchcontent  the same tarball, which CMake's FetchContent unpacks and builds for tests/consumer
                and hsdp_tp.cpp
  sdist         the same tarball, which pip builds; a project of `devicemesh new`
  crates        a Rust project of `devicemesh new` that uses by version the crates that crates.py
                packs from this checkout

The four last roads need Rust 1.85, which Debian 13 (trixie) has. With `--suite bookworm` or
`--suite bullseye` the other roads are taken.

With `--machine aarch64` the root is one of 64-bit ARM, whose programs qemu runs (Debian:
qemu-user-static, registered with the kernel's binfmt_misc). The default is then deb, tree and pip,
because each of the four last roads takes 30 to 100 minutes of processor time, although they compile
without optimisation there. qemu 11.1 compiled a crate in a third of the time of qemu 7.2. The
static tool is for x86-64 only."""

import argparse
import json
import os
import platform
import shutil
import sys
import tarfile
import time
import tomllib
from hashlib import sha256
from pathlib import Path

import bare_root
from bare_root import ROOT, run

sys.path.insert(0, str(ROOT / "packaging"))
import crates  # noqa: E402
import sysroot  # noqa: E402
import versions  # noqa: E402
from deb import ARCHITECTURES  # noqa: E402

VERSION = versions.present()
# tests/consumer/main.c prints the sum over two ranks.
SUM = "cc /made/main.c -ldevicemesh -o sum && devicemesh run -n 2 -- ./sum >said && cat said && test $(grep -c '^sum 1$' said) = 2"
TRAINED = "grep -q 'step 200: loss' said && tail -n 1 said"
# The training example compares its losses with those of one process.
HSDP = "--data /made/examples/data/digits.csv --check >said && tail -n 3 said && grep -q '^check: one process gets the same losses' said"
TRAIN = f"c++ -std=c++17 -O1 /made/examples/hsdp_tp.cpp -ldevicemesh -o hsdp_tp && devicemesh run -n 8 -- ./hsdp_tp {HSDP}"


def unpack(archive, folder):
    """Unpacks a tarball without its top folder."""
    folder.mkdir(parents=True, exist_ok=True)
    run("tar", "-xzf", archive, "-C", folder, "--strip-components=1")


def one(dist, pattern):
    found = list(dist.glob(pattern))
    if len(found) != 1:
        sys.exit(f"bare dist: {dist} has {len(found)} files like {pattern}; `make dist` makes one")
    return found[0]


def deb(dist, work, machine):
    for path in dist.glob(f"*_{ARCHITECTURES[machine]}.deb"):
        shutil.copy(path, work)
    return [
        "dpkg -i /made/*.deb", f"dpkg -V libdevicemesh{versions.series(VERSION)} libdevicemesh-dev devicemesh", SUM, TRAIN,
        "cat /usr/share/man/man1/devicemesh.1.gz | gzip -t"
    ]


def tree(dist, work, machine):
    unpack(one(dist, f"*-{machine}-linux.tar.gz"), work.parent / "usr/local")
    return ["ldconfig", SUM, TRAIN]


def with_pip(package, work, machine):
    """Installs a file with pip in a virtual environment, and trains."""
    shutil.copy(package, work)
    # The project calculates with NumPy, whose wheel is fetched for the Python of the root.
    python = next((work.parent / "usr/lib").glob("python3.*")).name.removeprefix("python")
    run(sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--no-deps", "--python-version", python,
        f"--platform=manylinux_2_27_{machine}", f"--platform=manylinux2014_{machine}", "--dest", work, "numpy")
    return [
        # An emulated Python would take minutes to compile NumPy's modules.
        f"python3 -m venv /env && /env/bin/pip install --quiet --no-compile --no-index /made/numpy*.whl /made/{package.name}",
        "/env/bin/devicemesh new trainer --python",
        f"cd trainer && PATH=/env/bin:$PATH devicemesh run -n 8 -- python train.py >said && {TRAINED}",
    ]


def pip(dist, work, machine):
    return with_pip(one(dist, f"devicemesh-*{machine}.whl"), work, machine)


def sdist(dist, work, machine):
    return with_pip(one(dist, f"devicemesh-{VERSION}.tar.gz"), work, machine)


def musl(dist, work, _):
    unpack(one(dist, "*-linux-musl.tar.gz"), work)
    # Nothing but the tool and a folder for its memory is there.
    return [
        "mkdir -p /empty/proc /empty/dev/shm /empty/tmp && cp /made/devicemesh /empty && mount -t proc proc /empty/proc",
        "chroot /empty /devicemesh show 2,4 replicate,shard --rank 6",
        '/made/devicemesh run -n 4 -- /made/devicemesh check --sizes 1K >said || code=$?; tail -n 3 said; test "${code:-0}" = 0',
    ]


def sources(dist, work, _):
    unpack(one(dist, f"devicemesh-{VERSION}.tar.gz"), work / "source")
    return ["make --quiet -C /made/source install", "ldconfig", SUM, TRAIN]


def fetchcontent(dist, work, _):
    archive = one(dist, f"devicemesh-{VERSION}.tar.gz")
    shutil.copy(archive, work)
    shutil.copytree(ROOT / "tests/consumer", work / "consumer")
    tool = "/made/build/_deps/devicemesh-build/cargo/release/devicemesh"
    return [
        "cmake -S /made/consumer -B /made/build -DHOW=FetchContent -DEXAMPLES=/made/examples"
        f" -DDEVICEMESH_URL=file:///made/{archive.name} -DDEVICEMESH_SHA256={sha256(archive.read_bytes()).hexdigest()}",
        "cmake --build /made/build --parallel 2",
        *(f"{tool} run -n 2 -- /made/build/{name} >said && cat said && test $(grep -c '^sum 1$' said) = 2"
          for name in ("shared_c", "static_c", "shared_cpp", "static_cpp")),
        "/made/build/hostccl | grep '^sum 1$'",
        f"{tool} run -n 8 -- /made/build/hsdp_tp {HSDP}",
    ]


def crate_road(dist, work, _):
    """The crates of the tarball and ours, as folders that take the place of crates.io."""
    unpack(one(dist, f"devicemesh-{VERSION}.tar.gz"), work / "source")
    # Below the tarball, cargo would find the tarball's own settings, too.
    registry = (work / "source/vendor").rename(work / "registry")
    shutil.rmtree(work / "source")
    for name, crate in crates.pack(work / "packed", build=False, allow_changes=True).items():
        with tarfile.open(crate) as archive:
            archive.extractall(registry, **sysroot.AS_TAR_DOES)
        (registry / f"{name}-{VERSION}/.cargo-checksum.json").write_text(json.dumps({"files": {}, "package": sha256(crate.read_bytes()).hexdigest()}))
    project = work / "trainer"
    (project / ".cargo").mkdir(parents=True)
    (project / "src").mkdir()
    (project / ".cargo/config.toml").write_text('[source.crates-io]\nreplace-with = "here"\n[source.here]\ndirectory = "/made/registry"\n')
    shutil.copy(ROOT / "tool/templates/cargo/main.rs", project / "src/main.rs")
    (project / "Cargo.toml").write_text(
        f'[package]\nname = "trainer"\nversion = "0.1.0"\nedition = "2024"\n[dependencies]\ndevicemesh = "{VERSION}"\n')
    install = "cargo install --quiet --offline --locked --path . --root /usr/local --config /made/trainer/.cargo/config.toml"
    return [
        f"cd /made/registry/devicemesh-tool-{VERSION} && {install}",
        "cd /made/trainer && cargo build --quiet --release --offline",
        f"cd /made/trainer && devicemesh run -n 8 -- target/release/trainer >said && {TRAINED}",
    ]


ROADS = {
    "deb": deb, "tree": tree, "pip": pip, "musl": musl, "sources": sources, "fetchcontent": fetchcontent, "sdist": sdist,
    "crates": crate_road
}
# The roads that need no cargo, with the packages of their root. Roads with one name share a root.
COMPILER, PYTHON = ("-compiler", ["mount", "gcc", "g++", "libc6-dev"]), ("-python", ["mount", "python3", "python3-venv"])
LIGHT = {"deb": COMPILER, "tree": COMPILER, "pip": PYTHON, "musl": PYTHON}
CARGO = [*bare_root.PACKAGES, *bare_root.WISHED]
PACKAGES = {**LIGHT, "fetchcontent": ("-cmake", [*CARGO, "cmake"])}
# The suites of Debian whose Rust is older than 1.85.
WITHOUT_RUST = ("bookworm", "bullseye")


def without_optimisation(cargo_home):
    """Makes cargo compile without optimisation, and also the packages with a level of their own."""
    with open(ROOT / "Cargo.toml", "rb") as manifest:
        packages = tomllib.load(manifest)["profile"]["release"]["package"]
    cargo_home.mkdir()
    (cargo_home / "config.toml").write_text("[profile.release]\nopt-level = 0\ndebug = false\n[profile.release.package]\n"
                                            + "".join(f"{package}.opt-level = 0\n" for package in packages))


def take(name, options):
    of_root, packages = PACKAGES.get(name, ("", CARGO))
    foreign = "" if options.machine == platform.machine() else f"-{options.machine}"
    base = bare_root.pristine(options.suite, of_root + foreign, packages, options.mirror, ARCHITECTURES[options.machine])
    root = bare_root.FOLDER / f"{options.suite}-{name}{foreign}"
    shutil.rmtree(root, ignore_errors=True)
    run("cp", "-a", base, root)
    work = root / "made"
    work.mkdir()
    shutil.copy(ROOT / "tests/consumer/main.c", work)
    shutil.copytree(ROOT / "examples", work / "examples")
    environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}
    if foreign:
        without_optimisation(root / "root/.cargo")
    prepare = f"ip link set lo up 2>/dev/null; mount --rbind /dev {root}/dev && mount --make-rslave {root}/dev && "
    mounts = "mount -t proc proc /proc && mount -t sysfs -o ro sys /sys && mount -t tmpfs shm /dev/shm && cd /root && "
    began = time.monotonic()
    try:
        commands = ROADS[name](options.dist, work, options.machine)
        # Mounts and processes end with the namespaces of each command. In the new network namespace
        # only the loopback device is there.
        for command in commands:
            run("unshare", "--mount", "--pid", "--net", "--fork", "--kill-child", "sh", "-c",
                prepare + f'exec chroot {root} sh -ec "$1"', "sh", mounts + command, env=environment)
    finally:
        if not options.keep:
            shutil.rmtree(root, ignore_errors=True)
    return time.monotonic() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", default="trixie")
    parser.add_argument("--machine", choices=list(ARCHITECTURES), default=platform.machine())
    parser.add_argument("--roads", help="the default is every road that this suite has, without cargo's if the machine is emulated")
    parser.add_argument("--mirror", default=bare_root.MIRROR,
                        help="where debootstrap finds the suite; old ones are at http://archive.debian.org/debian")
    parser.add_argument("--dist", type=Path, default=ROOT / f"target/dist/{VERSION}")
    parser.add_argument("--keep", action="store_true", help="leave the roots that were used")
    options = parser.parse_args()
    options.dist = options.dist.resolve()
    is_foreign = options.machine != platform.machine()
    possible = [name for name in ROADS if name in LIGHT or options.suite not in WITHOUT_RUST]
    if options.machine != "x86_64":
        possible.remove("musl")
    roads = options.roads.split(",") if options.roads else [name for name in possible if name in LIGHT or not is_foreign]
    if unknown := set(roads) - set(ROADS):
        parser.error(f"no road {', '.join(sorted(unknown))}; there are {', '.join(ROADS)}")
    if impossible := set(roads) - set(possible):
        parser.error(f"{', '.join(sorted(impossible))}: not possible with {options.suite} on {options.machine}, only {', '.join(possible)}")
    if os.geteuid() or not shutil.which("debootstrap"):
        sys.exit("bare dist: it needs root and debootstrap (Debian: apt-get install debootstrap)")
    if is_foreign:
        emulator = Path(f"/proc/sys/fs/binfmt_misc/qemu-{options.machine}")
        registered = emulator.read_text() if emulator.exists() else ""
        flags = registered.partition("flags: ")[2].split("\n")[0]
        # The flag F lets the kernel open the emulator now, so the roots do not need it. P keeps a
        # program's own name, by which the tool knows its second process.
        if not registered.startswith("enabled") or not {"F", "P"} <= set(flags):
            sys.exit(f"bare dist: the kernel has no {emulator} with the flags F and P "
                     "(Debian: mount binfmt_misc, and apt-get install qemu-user-static)")
    os.chdir(ROOT)
    run("sha256sum", "--check", "--quiet", "SHA256SUMS", cwd=options.dist)
    took = {name: take(name, options) for name in roads}
    for name, seconds in took.items():
        print(f"bare dist: {name} works in a bare Debian {options.suite} on {options.machine} without a network ({seconds:.0f} s)")


if __name__ == "__main__":
    main()
