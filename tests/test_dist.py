"""What `make dist` packs: archives whose bytes follow from their files, Debian packages in which
every installed file is once, and an old C library that is unpacked as it must be. The binaries of a
release take minutes to build, so small files stand for them here; docs/platforms.md says what was
seen of whole releases."""

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile

import pytest

from support.installing import SOVERSION, VERSION, run
from support.paths import ROOT, TOOL

sys.path.insert(0, str(ROOT / "packaging"))
import binaries  # noqa: E402
import deb  # noqa: E402
import dist  # noqa: E402
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
    """pip asks the backend for the metadata alone, because a build takes minutes. tests/bare_dist.py builds."""
    top = tmp_path / f"devicemesh-{VERSION}"
    for name in ("Cargo.toml", "LICENSE-APACHE", "LICENSE-MIT", "bindings/python/build_wheel.py", "bindings/python/pyproject.toml",
                 "bindings/python/README.md"):
        write(top / name, (ROOT / name).read_text())
    for name, text in dist.sdist_files().items():
        write(top / name, text)
    archive = tmp_path / f"{top.name}.tar.gz"
    dist.pack(archive, dist.files_below(top, top.name), TIME)
    assert re.match(rf"Metadata-Version: 2.1\nName: devicemesh\nVersion: {VERSION}\n", (top / "PKG-INFO").read_text())
    said = run(sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", archive, PIP_DISABLE_PIP_VERSION_CHECK="1")
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


def install_tree(made, tree):
    """Installs the binaries in `made` below `tree` as Debian's packages have them."""
    places = {"PREFIX": "/usr", "LIBDIR": "/usr/lib/x86_64-linux-gnu", "INCLUDEDIR": "/usr/include", "BINDIR": "/usr/bin",
              "DATADIR": "/usr/share", "MANDIR": "/usr/share/man"}
    run("sh", ROOT / "packaging/install.sh", "install", DESTDIR=str(tree), RELEASE=str(made), TOOL=str(TOOL), **places)
    return tree


@needs_dpkg
def test_every_installed_file_is_in_one_debian_package(tmp_path):
    made = tmp_path / "made"
    for name in binaries.BINARIES:
        write(made / name, name, 0o755)
    tree = install_tree(made, tmp_path / "tree")
    os.environ["SOURCE_DATE_EPOCH"] = str(TIME)
    first, second = tmp_path / "first", tmp_path / "second"
    for out in (first, second):
        out.mkdir()
        deb.packages(tree, "x86_64", VERSION, TIME, out)
    names = {path.name for path in first.iterdir()}
    packages = [f"libdevicemesh{SOVERSION}", f"libhostccl{SOVERSION}", "libdevicemesh-dev", "devicemesh"]
    assert names == {f"{name}_{VERSION}-1_amd64.deb" for name in packages}
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)
    packed = []
    for name in packages:
        path = first / f"{name}_{VERSION}-1_amd64.deb"
        files = [line.split(None, 5)[5].split(" -> ")[0].removeprefix("./")
                 for line in run("dpkg-deb", "--contents", path).splitlines() if not line.startswith("d")]
        own = [file for file in files if file.startswith((f"usr/share/doc/{name}/", "usr/share/lintian/"))]
        assert sorted(file.rpartition("/")[2] for file in own) == ["changelog.Debian.gz", "copyright", name], files
        packed += [file for file in files if file not in own]
        assert run("dpkg-deb", "--field", path, "Installed-Size").strip().isdigit()
    installed = [str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_symlink() or path.is_file()]
    # Debian has the licences in the file copyright, and pages of the manual are compressed.
    expected = [f"{file}.gz" if "/man/" in file else file for file in installed if "/doc/devicemesh/" not in file]
    assert sorted(packed) == sorted(expected)
    assert f"usr/lib/x86_64-linux-gnu/libdevicemesh.so.{VERSION}" in packed
