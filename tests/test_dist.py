"""What `make dist` packs: archives whose bytes follow from their files, Debian packages in which
every installed file is once, and an old C library that is unpacked as it must be. The binaries of a
release take minutes to build, so small files stand for them here; docs/platforms.md says what was
seen of whole releases.

The bytes of a file must not follow from the machine that makes it. So the tests make it twice: in
two folders, and with two umasks."""

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

from support.installing import SOVERSION, VERSION, run
from support.paths import ROOT

sys.path.insert(0, str(ROOT / "packaging"))
import binaries  # noqa: E402
import deb  # noqa: E402
import dist  # noqa: E402
import licences  # noqa: E402
import sysroot  # noqa: E402

needs_dpkg = pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="no dpkg-deb here (Debian: apt-get install dpkg)")
TIME = 1_700_000_000


def write(path, content, mode=0o644):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    path.chmod(mode)
    return path


def test_an_archive_has_the_bytes_that_its_files_have(tmp_path):
    archives = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        # Other times and another umask, in another order.
        for name in ("b/program", "a") if number == 1 else ("a", "b/program"):
            path = write(folder / name, name, (0o700 if number == 1 else 0o755) if "program" in name else 0o640)
            os.utime(path, (number, number))
        (folder / "link").symlink_to("b/program")
        archives.append(tmp_path / f"{number}.tar.gz")
        dist.pack(archives[-1], dist.files_below(folder, "top"), TIME)
    assert archives[0].read_bytes() == archives[1].read_bytes()
    with tarfile.open(archives[0]) as archive:
        found = [(member.name, oct(member.mode), member.mtime, member.uid, member.linkname) for member in archive]
    assert found == [("top/a", "0o644", TIME, 0, ""), ("top/b/program", "0o755", TIME, 0, ""), ("top/link", "0o777", TIME, 0, "b/program")]


def test_changes_that_are_not_committed_are_named(tmp_path, monkeypatch):
    for command in (["git", "init", "-q"], ["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "one"]):
        subprocess.run(command, cwd=tmp_path, check=True)
    monkeypatch.setattr(dist, "ROOT", tmp_path)
    assert dist.committed(False) > TIME
    write(tmp_path / "forgotten.txt", "")
    with pytest.raises(SystemExit, match="not committed.*\n.*forgotten.txt"):
        dist.committed(False)


def test_pip_takes_the_sources_as_an_sdist(tmp_path):
    """pip asks the backend for the metadata alone, because a build takes minutes.
    tests/bare_dist.py builds."""
    top = tmp_path / f"devicemesh-{VERSION}"
    for name in ("Cargo.toml", "LICENSE-APACHE", "LICENSE-MIT", "bindings/python/build_wheel.py", "bindings/python/pyproject.toml",
                 "bindings/python/README.md"):
        write(top / name, (ROOT / name).read_text())
    for name, text in dist.sdist_files().items():
        write(top / name, text)
    archive = tmp_path / f"{top.name}.tar.gz"
    dist.pack(archive, dist.files_below(top, top.name), TIME)
    assert re.match(rf"Metadata-Version: 2.2\nName: devicemesh\nVersion: {VERSION}\n", (top / "PKG-INFO").read_text())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    if tuple(map(int, re.match(r"pip (\d+)\.(\d+)", run(*pip, "--version")).groups())) < (22, 2):
        pytest.skip("this pip has no --dry-run")
    said = run(*pip, "install", "--dry-run", "--no-index", archive)
    assert f"Would install devicemesh-{VERSION}\n" in said


def ar(members):
    """An ar archive with these files."""
    whole = b"!<arch>\n"
    for name, content in members.items():
        whole += f"{name:<16}{0:<12}{0:<6}{0:<6}{644:<8}{len(content):<10}`\n".encode() + content + b"\n" * (len(content) % 2)
    return whole


def test_an_old_c_library_is_unpacked_with_links_that_stay_inside(tmp_path):
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:xz") as archive:
        for name, target in {"./usr/lib/libdl.so": "/lib/libdl.so.2", "./usr/lib/libm.so": "libm.so.6"}.items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)
        member = tarfile.TarInfo("./lib/libdl.so.2")
        member.size = 3
        archive.addfile(member, io.BytesIO(b"old"))
    sysroot.unpack(ar({"debian-binary": b"2.0\n", "control.tar.xz": b"odd", "data.tar.xz": data.getvalue()}), tmp_path)
    assert os.readlink(tmp_path / "usr/lib/libdl.so") == "../../lib/libdl.so.2"
    assert (tmp_path / "usr/lib/libdl.so").read_bytes() == b"old"
    assert os.readlink(tmp_path / "usr/lib/libm.so") == "libm.so.6"


def test_a_file_with_another_digest_is_refused(tmp_path, monkeypatch):
    write(tmp_path / "package.deb", "something else")
    monkeypatch.setattr(sysroot, "MIRROR", tmp_path.as_uri())
    with pytest.raises(SystemExit, match="package.deb has the SHA-256 [0-9a-f]{64}, not 00"):
        sysroot.fetched("package.deb", "00")


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """Makes files that stand for the binaries of a machine, and puts them and what is made of them
    into a folder of a name, under a umask. The tool prints its arguments for a man page."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", str(TIME))
    monkeypatch.setattr(dist.platform, "machine", lambda: "x86_64")
    before = os.umask(0)

    def make(name, umask):
        os.umask(umask)
        folder = tmp_path / name
        for file in binaries.BINARIES:
            write(folder / "x86_64" / file, file, 0o777 & ~umask)
        write(folder / "x86_64/devicemesh", '#!/bin/sh\nif [ "$1 $2" = "man --dir" ]; then echo page >"$3/devicemesh.1"; else echo "$*"; fi\n', 0o777 & ~umask)
        monkeypatch.setattr(dist, "WORK", folder)
        monkeypatch.setattr(dist, "THIRD_PARTY", write(folder / licences.NAME, "No warranty.\n\nSome crate\n"))
        (folder / "out").mkdir()
        return folder
    yield make
    os.umask(before)


def installed(folder):
    return dist.installed("x86_64", folder / "x86_64", folder / "tree", "/usr", "/usr/lib/x86_64-linux-gnu")


def equal_files(first, second):
    """The names of the files in two folders, whose bytes must be equal."""
    names = sorted(path.name for path in first.iterdir())
    assert names and names == sorted(path.name for path in second.iterdir())
    different = [name for name in names if (first / name).read_bytes() != (second / name).read_bytes()]
    assert not different, f"not equal: {different}"
    return names


def test_a_tool_that_prints_no_man_page_ends_the_release(stand_ins):
    folder = stand_ins("one", 0o022)
    write(folder / "x86_64/devicemesh", "#!/bin/sh\n[ $1 = completions ] && echo some\n", 0o755)
    with pytest.raises(SystemExit, match="x86_64/devicemesh did not print share/man/man1/devicemesh.1"):
        installed(folder)


def test_the_python_wheel_does_not_follow_from_the_umask(stand_ins):
    folders = [stand_ins("one", 0o022), None]
    dist.wheel(folders[0] / "out", "x86_64", folders[0] / "x86_64")
    folders[1] = stand_ins("two", 0o077)
    dist.wheel(folders[1] / "out", "x86_64", folders[1] / "x86_64")
    (name,) = equal_files(folders[0] / "out", folders[1] / "out")
    with zipfile.ZipFile(folders[0] / "out" / name) as wheel:
        texts = {path.rpartition("/")[2]: wheel.read(path) for path in wheel.namelist() if "/licenses/" in path}
    assert set(texts) == {"LICENSE-APACHE", "LICENSE-MIT", licences.NAME} and b"Some crate" in texts[licences.NAME]


HANDLERS = """#include <xla/ffi.h>
extern "C" __attribute__((visibility("default"))) int devicemesh_all_reduce(int *buffer) { return checked(buffer); }
"""
HEADER = """#include <cassert>
inline int checked(int *buffer) { assert(buffer != nullptr); return *buffer; }
"""


def test_the_jax_wheel_does_not_follow_from_the_umask_nor_from_a_folder(stand_ins, monkeypatch):
    """pip's build environment has the headers in a folder of a random name, and assert() writes the
    path of a header into the library. The stand-in for the handlers has such an assert()."""
    jax_wheel, folders = dist.build_jax_wheel, []
    for name, umask in {"one": 0o022, "two and more": 0o077}.items():
        folders.append(stand_ins(name, umask))
        write(folders[-1] / "handlers/src/handlers.cpp", HANDLERS)
        header = write(folders[-1] / "include/xla/ffi.h", HEADER)
        monkeypatch.setattr(jax_wheel.build_handlers, "HERE", folders[-1] / "handlers")
        monkeypatch.setattr(jax_wheel, "headers", lambda: header.parents[1])
        jax_wheel.write(str(folders[-1] / "out"), "x86_64", third_party=dist.THIRD_PARTY)
    (wheel,) = equal_files(folders[0] / "out", folders[1] / "out")
    assert re.fullmatch(rf"devicemesh_jax-{VERSION}-py3-none-manylinux_2_\d+_x86_64.whl", wheel), wheel
    with zipfile.ZipFile(folders[0] / "out" / wheel) as archive:
        assert b"/jaxlib/xla/ffi.h" in archive.read(jax_wheel.HANDLERS)
        told = archive.read(f"devicemesh_jax-{VERSION}.dist-info/METADATA").decode()
        assert f"devicemesh_jax-{VERSION}.dist-info/licenses/{licences.NAME}" in archive.namelist()
    for line in ("Name: devicemesh-jax", f"Requires-Dist: devicemesh=={SOVERSION}.*", "Requires-Python: >=3.11"):
        assert f"\n{line}\n" in told, told[:600]
    assert "](../" not in told, "a link that leads nowhere on PyPI"


def test_a_newer_c_plus_plus_library_needs_a_known_profile(tmp_path):
    """A tag that is too low would let pip install handlers that do not load."""
    library = tmp_path / "libdevicemesh_jax.so"
    library.write_bytes(b"\0GLIBC_2.34\0GLIBCXX_3.4.30\0GLIBCXX_3.4.9\0")
    assert dist.build_jax_wheel.oldest_platform(library) == "manylinux_2_35"
    library.write_bytes(b"\0GLIBC_2.17\0GLIBCXX_3.4.99\0")
    with pytest.raises(SystemExit, match="GLIBCXX_3.4.99, which PROFILES in build_jax_wheel.py does not have"):
        dist.build_jax_wheel.oldest_platform(library)


def test_the_compiler_names_no_folder_of_this_machine(tmp_path, monkeypatch):
    """The place in a panic's message is that of a crate in cargo's folder, whose name has a
    space."""
    crate = write(tmp_path / "some home/registry/src/mirror-12/one-1.0/lib.rs", "pub fn third(values: &[u8]) -> u8 { values[3] }\n")
    monkeypatch.setenv("CARGO_HOME", str(tmp_path / "some home"))
    flags = binaries.remapped()
    run("rustc", "--crate-type=lib", "--crate-name=one", "--emit=obj", "-o", tmp_path / "one.o", crate, *flags)
    made = (tmp_path / "one.o").read_bytes()
    assert b"/crates/one-1.0/lib.rs" in made and b"some home" not in made
    # The component rust-src may be installed or not.
    assert re.search(r"/lib/rustlib/src/rust=/rustc/\w+$", flags[2]), flags


def test_a_part_of_a_release_does_not_replace_a_whole_one():
    machines = set(sysroot.PACKAGES)
    assert dist.folder_of("1.2.3", dist.PARTS, machines, False) == ROOT / "target/dist/1.2.3"
    for parts, wanted, uncommitted in ((["wheels"], machines, False), (dist.PARTS, {"x86_64"}, False), (dist.PARTS, machines, True)):
        assert dist.folder_of("1.2.3", parts, wanted, uncommitted) == ROOT / "target/dist/1.2.3-part"


def test_everything_that_is_missing_is_named_before_a_build(monkeypatch):
    monkeypatch.setattr(dist.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(dist.shutil, "which", lambda name: None)
    assert dist.lacking(["sbom"], {"x86_64"}) == ["cargo (Debian: cargo)", "git (Debian: git)", "rustc (Debian: rustc)"]
    missing = dist.lacking(dist.PARTS, {"x86_64", "aarch64"})
    for tool in ("aarch64-linux-gnu-g++ (Debian: g++-aarch64-linux-gnu)", "aarch64-linux-gnu-strip (Debian: binutils-aarch64-linux-gnu)",
                 "cc (Debian: gcc)", "c++ (Debian: g++)", "strip (Debian: binutils)", "dpkg-deb (Debian: dpkg)"):
        assert tool in missing, (tool, missing)
    monkeypatch.setattr(dist.platform, "machine", lambda: "aarch64")
    assert "x86_64-linux-gnu-strip (Debian: binutils-x86-64-linux-gnu)" in dist.lacking(["musl"], {"x86_64"})


@needs_dpkg
def test_every_installed_file_is_in_one_debian_package(stand_ins):
    outs = []
    for name, umask in (("one", 0o022), ("two", 0o077)):
        folder = stand_ins(name, umask)
        tree = installed(folder)
        deb.packages(tree, "x86_64", VERSION, TIME, folder / "out", dist.THIRD_PARTY.read_text())
        outs.append(folder / "out")
    first, names = outs[0], set(equal_files(*outs))
    packages = [f"libdevicemesh{SOVERSION}", f"libhostccl{SOVERSION}", "libdevicemesh-dev", "devicemesh"]
    assert names == {f"{name}_{VERSION}-1_amd64.deb" for name in packages}
    packed = []
    for name in packages:
        path = first / f"{name}_{VERSION}-1_amd64.deb"
        files = [line.split(None, 5)[5].split(" -> ")[0].removeprefix("./")
                 for line in run("dpkg-deb", "--contents", path).splitlines() if not line.startswith("d")]
        own = [file for file in files if file.startswith((f"usr/share/doc/{name}/", "usr/share/lintian/"))]
        assert sorted(file.rpartition("/")[2] for file in own) == ["changelog.Debian.gz", "copyright", name], files
        packed += [file for file in files if file not in own]
        assert run("dpkg-deb", "--field", path, "Installed-Size").strip().isdigit()
        copyright = run("sh", "-c", f"dpkg-deb --fsys-tarfile '{path}' | tar -xO './usr/share/doc/{name}/copyright'")
        assert "\nComment:\n No warranty.\n .\n Some crate\n\nLicense: " in copyright
    files = [str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_symlink() or path.is_file()]
    # Debian has the licences in the file copyright, compressed pages of the manual, and a folder of
    # its own for zsh.
    expected = [f"{file}.gz" if "/man/" in file else file.replace("/site-functions/", "/vendor-completions/") for file in files
                if "/doc/devicemesh/" not in file]
    assert sorted(packed) == sorted(expected)
    assert f"usr/lib/x86_64-linux-gnu/libdevicemesh.so.{VERSION}" in packed
