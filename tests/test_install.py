"""Installs with make and with CMake, moves the prefix, and builds and runs the projects of
tests/consumer against what lies there: by find_package, pkg-config, add_subdirectory and
FetchContent, in C and C++, shared and static. Also what is refused, and that uninstalling
removes exactly what was installed. cargo works in target/ as everywhere, so nothing is compiled
a second time. Takes a minute, because CMake configures a project a dozen times."""

import hashlib
import os
import re
import shlex
import shutil
import tarfile
from pathlib import Path

import pytest

from support.installing import CONSUMER, SOVERSION, VERSION, check, cmake, flat, run, runs, tree
from support.paths import CC, CXX, LIBRARY, ROOT, TARGET

PROGRAMS = ("shared_c", "static_c", "shared_cpp", "static_cpp", "hostccl")
STATIC_LIBS = (ROOT / "packaging/native-static-libs.txt").read_text().split()
# CMake and cargo run many times; each may wait for another cargo.
pytestmark = pytest.mark.timeout(900)
needs_pkg_config = pytest.mark.skipif(not shutil.which("pkg-config"), reason="no pkg-config here (Debian: apt-get install pkg-config)")


def build_consumer(folder, *settings, programs=PROGRAMS, linked_to, env=None):
    """Builds the programs of tests/consumer in this folder, and runs them."""
    cmake("-S", CONSUMER, "-B", folder, *settings, **(env or {}))
    cmake("--build", folder, "--parallel", 2, *(["--target", *programs] if programs != PROGRAMS else []), **(env or {}))
    for program in programs:
        soname = f"lib{'hostccl' if program == 'hostccl' else 'devicemesh'}.so.{SOVERSION}"
        runs(folder / program, None if program.startswith("static") else linked_to, soname)


@pytest.fixture(scope="session")
def built(programs):
    """The folder in which CMake has built this project."""
    folder = programs.folder / "cmake-build"

    def build(done):
        cmake("-S", ROOT, "-B", folder, f"-DDEVICEMESH_CARGO_TARGET_DIR={TARGET}", "-DCMAKE_INSTALL_LIBDIR=lib")
        cmake("--build", folder)
        done.touch()
    programs.once("cmake-build-done", build)
    return folder


@pytest.fixture(scope="session")
def moved(programs, built):
    """A prefix that CMake has installed into, and that was moved after that, so that nothing can
    be found where it was first."""
    return programs.once("moved here", lambda prefix: cmake("--install", built, "--prefix", prefix))


def test_make_and_cmake_install_the_same(moved, tmp_path):
    run("make", "install", f"DESTDIR={tmp_path}", "PREFIX=/opt/mesh")
    one, other = tree(tmp_path / "opt/mesh"), tree(moved)
    different = [file for file in sorted({*one, *other}) if one.get(file) != other.get(file)]
    check(not different, f"make and CMake install different {different}")
    for library in ("devicemesh", "hostccl"):
        check(
            one.get(f"lib/lib{library}.so") == f"lib{library}.so.{SOVERSION}",
            f"lib{library}.so links to {one.get(f'lib/lib{library}.so')}")
        check(one.get(f"lib/lib{library}.so.{SOVERSION}") == f"lib{library}.so.{VERSION}", f"no link lib{library}.so.{SOVERSION}")
        check(f"[lib{library}.so.{SOVERSION}]" in run("readelf", "-d", moved / f"lib/lib{library}.so"), f"lib{library}.so has no SONAME")
    wanted = {"lib/libdevicemesh.a", "bin/devicemesh", "include/devicemesh.h", "include/devicemesh.hpp", "include/hostccl.h",
              "lib/pkgconfig/devicemesh.pc", "lib/cmake/devicemesh/devicemeshConfig.cmake", "share/doc/devicemesh/LICENSE-MIT"}
    check(wanted <= set(one), f"not installed: {sorted(wanted - set(one))}")
    texts = [
        file for file, content in one.items()
        if file.endswith((".pc", ".cmake")) and str(tmp_path).encode() in content[1] + other[file][1]
    ]
    check(not texts, f"paths of this machine in {texts}")


def test_the_tool_of_a_moved_prefix(moved):
    check(run(moved / "bin/devicemesh", "--version").split()[-1] == VERSION, "the tool does not run")


def test_component_of_the_runtime(built, tmp_path):
    cmake("--install", built, "--prefix", tmp_path, "--component", "devicemesh_runtime")
    files = sorted(file for file in tree(tmp_path) if not file.startswith("share/"))
    check(files == [f"lib/libdevicemesh.so.{SOVERSION}", f"lib/libdevicemesh.so.{VERSION}"], f"the component devicemesh_runtime is {files}")


@pytest.mark.long
def test_other_folders(asks, tmp_path):
    """Libraries and headers in folders of other depths, as Debian has them: both ways write the
    same files, and these find the folders after a move."""
    by_make, by_cmake, deep = tmp_path / "deep-make", tmp_path / "deep-cmake", tmp_path / "deep"
    run("make", "install", f"PREFIX={by_make}", f"LIBDIR={by_make}/lib/some-machine", f"INCLUDEDIR={by_make}/include/mesh")
    cmake("-S", ROOT, "-B", by_cmake, f"-DDEVICEMESH_CARGO_TARGET_DIR={TARGET}",
          "-DCMAKE_INSTALL_LIBDIR=lib/some-machine", "-DCMAKE_INSTALL_INCLUDEDIR=include/mesh")
    made = {
        path.name: path.read_text()
        for path in (by_make / "lib/some-machine").rglob("*")
        if path.suffix in (".pc", ".cmake") and not path.is_symlink()
    }
    for path in (by_cmake / "install").glob("*.*[ce]"):
        check(path.read_text() == made[path.name], f"{path.name} by CMake\n{path.read_text()}\nand by make\n{made[path.name]}")
    by_make.rename(deep)
    output = asks("""
find_package(devicemesh REQUIRED COMPONENTS shared static)
foreach(property INTERFACE_INCLUDE_DIRECTORIES IMPORTED_LOCATION)
  get_target_property(value devicemesh::devicemesh ${property})
  message(STATUS "[${value}]")
endforeach()
""", f"-Ddevicemesh_DIR={deep}/lib/some-machine/cmake/devicemesh")
    check(f"[{deep}/include/mesh]" in output and f"[{deep}/lib/some-machine/libdevicemesh.so.{VERSION}]" in output, output)
    if shutil.which("pkg-config"):
        flags = pkg_config_flags(deep / "lib/some-machine", "--cflags", "--libs", "devicemesh")
        check([os.path.normpath(flag[2:]) for flag in flags[:2]] == [f"{deep}/include/mesh", f"{deep}/lib/some-machine"], f"{flags}")


def test_find_package(moved, tmp_path):
    build_consumer(tmp_path, f"-DCMAKE_PREFIX_PATH={moved}", linked_to=moved / "lib")


@pytest.mark.long
def test_find_package_where_vcpkg_has_it(moved, tmp_path):
    """In vcpkg the CMake package lies in share/devicemesh. The port for vcpkg adapts the paths in
    devicemeshPlaces.cmake to this folder."""
    installed = tmp_path / "installed"
    shutil.copytree(moved, installed, symlinks=True)
    package = installed / "share/devicemesh"
    (installed / "lib/cmake/devicemesh").rename(package)
    port = (ROOT / "packaging/vcpkg/devicemesh/portfile.cmake").read_text()
    replaced = re.findall(r'^vcpkg_replace_string\("\$\{places\}" \[\[(.+)\]\] \[\[(.+)\]\]\)$', port, re.M)
    check(len(replaced) == 2, f"the port replaces {replaced}")
    places = (package / "devicemeshPlaces.cmake").read_text()
    for before, after in replaced:
        check(places.count(before) == 1, f"not once in devicemeshPlaces.cmake: {before}")
        places = places.replace(before, after)
    (package / "devicemeshPlaces.cmake").write_text(places)
    build_consumer(tmp_path / "build", f"-DCMAKE_PREFIX_PATH={installed}", programs=("shared_cpp", "static_c"), linked_to=installed / "lib")


def pkg_config_flags(folder, *arguments):
    return shlex.split(run("pkg-config", *arguments, PKG_CONFIG_PATH=str(folder / "pkgconfig"), PKG_CONFIG_ALLOW_SYSTEM_CFLAGS="1"))


@needs_pkg_config
@pytest.mark.parametrize("language, compiler", [("c", [CC, "-std=c11"]), ("cpp", [CXX, "-std=c++17"])], ids=["c", "cpp"])
@pytest.mark.parametrize("kind, module", [("shared", "devicemesh"), ("static", "devicemesh-static")], ids=["shared", "static"])
def test_pkg_config(moved, tmp_path, language, compiler, kind, module):
    lib, program = moved / "lib", tmp_path / f"{kind}_{language}"
    run(*compiler, CONSUMER / f"main.{language}", *pkg_config_flags(lib, "--cflags", "--libs", module), f"-Wl,-rpath,{lib}", "-o", program)
    runs(program, lib if kind == "shared" else None)


@needs_pkg_config
def test_pkg_config_of_the_engine(moved, tmp_path):
    lib = moved / "lib"
    run(CC, "-std=c11", CONSUMER / "hostccl.c", *pkg_config_flags(lib, "--cflags", "--libs", "hostccl"),
        f"-Wl,-rpath,{lib}", "-o", tmp_path / "hostccl")
    runs(tmp_path / "hostccl", lib, f"libhostccl.so.{SOVERSION}")


@needs_pkg_config
def test_pkg_config_says_the_version(moved):
    check(pkg_config_flags(moved / "lib", "--modversion", "devicemesh") == [VERSION], "devicemesh.pc has another version")


@needs_pkg_config
def test_pkg_config_where_the_static_library_is_alone(moved, tmp_path):
    """--static is all that is needed."""
    (tmp_path / "lib").mkdir(parents=True)
    for part in ("include", "lib/libdevicemesh.a"):
        (tmp_path / part).symlink_to(moved / part)
    shutil.copytree(moved / "lib/pkgconfig", tmp_path / "lib/pkgconfig")
    flags = pkg_config_flags(tmp_path / "lib", "--static", "--cflags", "--libs", "devicemesh")
    run(CC, "-std=c11", CONSUMER / "main.c", *flags, "-o", tmp_path / "static_only")
    runs(tmp_path / "static_only")


INCLUDED = [f"-DDEVICEMESH_SOURCE={ROOT}", f"-DDEVICEMESH_CARGO_TARGET_DIR={TARGET}", "-DCMAKE_BUILD_TYPE=Debug"]


@pytest.mark.long
def test_add_subdirectory(tmp_path):
    build_consumer(tmp_path / "build", "-DHOW=add_subdirectory", *INCLUDED, linked_to=LIBRARY)
    cmake("--install", tmp_path / "build", "--prefix", tmp_path / "installed")
    check(not tree(tmp_path / "installed"), f"a project that includes this one installs {sorted(tree(tmp_path / 'installed'))}")


# FetchContent calls add_subdirectory.
@pytest.mark.long
def test_fetchcontent(tmp_path):
    build_consumer(tmp_path, "-DHOW=FetchContent", *INCLUDED, programs=("shared_cpp", "static_c"), linked_to=LIBRARY)


def test_fetchcontent_of_a_tarball(tmp_path):
    """CMake configures the project with what it unpacks. tests/bare_dist.py also builds it."""
    archive = tmp_path / "devicemesh.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        for name in ("CMakeLists.txt", "Cargo.toml", "cmake", "include", "packaging"):
            packed.add(ROOT / name, f"devicemesh-{VERSION}/{name}")
    cmake("-S", CONSUMER, "-B", tmp_path / "build", "-DHOW=FetchContent", f"-DDEVICEMESH_URL={archive.as_uri()}",
          f"-DDEVICEMESH_SHA256={hashlib.sha256(archive.read_bytes()).hexdigest()}")
    check((tmp_path / "build/_deps/devicemesh-src/Cargo.toml").exists(), "nothing was unpacked")


def test_source_tree(tmp_path):
    build_consumer(tmp_path, f"-Ddevicemesh_DIR={ROOT}/cmake", programs=("shared_c", "static_c", "hostccl"), linked_to=LIBRARY)


@pytest.fixture
def asks(moved, tmp_path):
    """Gives what a project without languages says that asks for the package."""
    def project(text, *settings, code=0, **variables):
        folder = tmp_path / "asks"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "CMakeLists.txt").write_text("cmake_minimum_required(VERSION 3.19)\nproject(asks NONE)\n" + text)
        return cmake("-S", folder, "-B", folder / "build", f"-Ddevicemesh_DIR={moved}/lib/cmake/devicemesh", *settings,
                     code=code, **variables)
    return project


def test_source_tree_with_other_folders_of_cargo(asks):
    """A relative folder counts from the repository, and cargo makes one for each machine."""
    output = flat(asks("find_package(devicemesh REQUIRED)\n", f"-Ddevicemesh_DIR={ROOT}/cmake", code=1,
                       CARGO_TARGET_DIR="else/where", CARGO_BUILD_TARGET="some-machine"))
    check(f"{ROOT}/else/where/some-machine/release/libdevicemesh.so is missing" in output, output)


def test_versions(moved, asks):
    major, minor, patch = (int(part) for part in VERSION.split("."))
    suits = ["", f"{major}.{minor}", VERSION, f"{VERSION} EXACT", f"{major}.{minor}...{major}.{minor + 1}"]
    wrong = [f"{major}.{minor + 1}", f"{major}.{minor}.{patch + 1}", f"{major + 1}.0", f"{major}.{minor}.{patch + 1} EXACT",
             f"{major}.{minor + 1}...{major + 1}.0", f"{major}.0...<{VERSION}"] + ([f"{major}.{minor - 1}"] if minor else [])
    body = "".join(f"""
unset(devicemesh_FOUND)
set(devicemesh_DIR "{moved}/lib/cmake/devicemesh" CACHE PATH "" FORCE)
find_package(devicemesh {version} QUIET CONFIG)
message(STATUS "[{version}] ${{devicemesh_FOUND}}")
""" for version in suits + wrong)
    output = asks(body)
    for version in suits + wrong:
        said = re.search(rf"-- \[{re.escape(version)}\] (\d|TRUE|FALSE)", output)
        found = said is not None and said.group(1) in ("1", "TRUE")
        check(found == (version in suits), f"version {version!r} is {'found' if found else 'not found'} in {VERSION}:\n{output}")


def test_another_minor_version(asks):
    """CMake's error says which version is there, and where to read on."""
    output = flat(asks("find_package(devicemesh 0.1 REQUIRED)\n", code=1))
    check(
        'compatible with requested version "0.1"' in output
        and f"version: {VERSION}, which is not compatible with 0.1: see" in output, output)


def test_a_later_minor_version(asks):
    major, minor, _ = VERSION.split(".")
    later = f"{major}.{int(minor) + 1}"
    output = flat(asks(f"find_package(devicemesh {later} REQUIRED)\n", code=1))
    check(f"version: {VERSION}, which is older than the {later} that was asked for" in output and "CHANGELOG" not in output, output)


def test_a_project_with_old_policies(asks):
    """CMake 4 has no old policy for IN_LIST any more."""
    output = asks('if(CMAKE_VERSION VERSION_LESS 4)\n  cmake_policy(SET CMP0057 OLD)\nendif()\n'
                  'find_package(devicemesh REQUIRED COMPONENTS shared)\n'
                  'message(STATUS "found ${devicemesh_FOUND}")\n')
    check("-- found 1" in output or "-- found TRUE" in output, output)


def test_a_component_that_is_not_there(asks):
    output = asks("find_package(devicemesh REQUIRED COMPONENTS shared shiny)\n", code=1)
    check("there is no component shiny" in output, output)


def test_an_optional_component(asks):
    output = asks("""
find_package(devicemesh REQUIRED COMPONENTS static OPTIONAL_COMPONENTS shiny)
message(STATUS "[${devicemesh_static_FOUND} ${devicemesh_shiny_FOUND}]")
if(TARGET devicemesh::nccl)
  message(FATAL_ERROR "nobody asked for NCCL")
endif()
""")
    check("[TRUE ]" in output, output)


NCCL_CONFIG = """
add_library(NCCL::nccl SHARED IMPORTED)
set_target_properties(NCCL::nccl PROPERTIES IMPORTED_LOCATION /nowhere/libnccl.so
                      INTERFACE_INCLUDE_DIRECTORIES "${CMAKE_CURRENT_LIST_DIR}/include")
"""
ASK_FOR_NCCL = """
find_package(devicemesh REQUIRED COMPONENTS shared nccl)
get_target_property(include devicemesh::nccl INTERFACE_INCLUDE_DIRECTORIES)
get_target_property(libraries devicemesh::nccl INTERFACE_LINK_LIBRARIES)
message(STATUS "[${include}] [${libraries}]")
"""


@pytest.fixture
def nccls(tmp_path):
    """Headers of NCCL in three folders, which CMake, pkg-config and NCCL_ROOT find."""
    folder = tmp_path / "nccls"
    for name in ("config", "module", "root"):
        (folder / name / "include").mkdir(parents=True)
        (folder / name / "include/nccl.h").write_text(f"/* {name} */\n")
    (folder / "config/NCCLConfig.cmake").write_text(NCCL_CONFIG)
    (folder / "module/nccl.pc").write_text(
        f"includedir={folder}/module/include\nName: nccl\nDescription: NCCL\nVersion: 2.27.7\nCflags: -I${{includedir}}\nLibs: -lnccl\n"
    )
    return folder


# NCCLConfig.cmake goes before nccl.pc, and that before NCCL_ROOT.
@pytest.mark.parametrize("expected, settings, variables", [
    ("config", ["-DNCCL_DIR={}/config", "-DNCCL_ROOT={}/root"], {"PKG_CONFIG_PATH": "{}/module"}),
    ("root", ["-DNCCL_ROOT={}/root"], {}),
    ("root", [], {"NCCL_ROOT": "{}/root"}),
    pytest.param("module", ["-DNCCL_ROOT={}/root"], {"PKG_CONFIG_PATH": "{}/module"}, marks=needs_pkg_config),
], ids=["config", "setting", "variable", "module"])
def test_component_nccl(asks, nccls, expected, settings, variables):
    output = asks(ASK_FOR_NCCL, *(text.format(nccls) for text in settings),
                  **{name: text.format(nccls)
                     for name, text in variables.items()})
    said = re.search(r"-- \[(.+)\] \[(.+)\]", output)
    check(said and said.group(1).split(";")[0] == f"{nccls}/{expected}/include", f"expected nccl.h of {expected}:\n{output}")
    check(said.group(2).endswith("NOTFOUND"), f"devicemesh::nccl links {said.group(2)}")


@pytest.mark.skipif(Path("/usr/include/nccl.h").exists(), reason="NCCL is installed here")
def test_component_nccl_without_nccl(asks, nccls):
    output = " ".join(asks(ASK_FOR_NCCL, f"-DNCCL_ROOT={nccls}/nowhere", code=1).split())
    check("NCCL_ROOT" in output and "has no include/nccl.h" in output, output)


def test_tool_files(tmp_path):
    """The tool's completions and manual pages are installed where shells and man look. A tool
    that prints none, or cannot run, is no failure."""
    folder = tmp_path
    tool = folder / "devicemesh"
    tool.write_text('#!/bin/sh\ncase "$*" in man\\ --dir*) echo page >"$3/devicemesh.1"; echo of run >"$3/devicemesh-run.1" ;; completions\\ bash|completions\\ fish) echo "$*" ;; *) echo half; exit 2 ;; esac\n')
    tool.chmod(0o755)
    run("sh", "packaging/tool_files.sh", tool, folder / "out")
    said = {file: content[1].decode() for file, content in tree(folder / "out").items()}
    check(said == {"man/man1/devicemesh.1": "page\n", "man/man1/devicemesh-run.1": "of run\n", "share/bash-completion/completions/devicemesh": "completions bash\n",
                   "share/fish/vendor_completions.d/devicemesh.fish": "completions fish\n"}, f"{said}")
    run("sh", "packaging/tool_files.sh", folder / "no-tool", folder / "none")
    check(not tree(folder / "none"), "files of a tool that cannot run")


def test_uninstall(tmp_path):
    """Uninstalling removes exactly what was installed."""
    prefix = tmp_path
    where = [f"PREFIX={prefix}", f"LIBDIR={prefix}/lib64"]
    (prefix / "lib64").mkdir()
    (prefix / "lib64/libother.so").touch()
    run("make", "install", *where)
    check(len(tree(prefix)) > 15, f"installed are {sorted(tree(prefix))}")
    # The tool, which prints some of the installed files, need not be there any more.
    run("make", "uninstall", *where, "RELEASE=/nowhere")
    check(list(tree(prefix)) == ["lib64/libother.so"], f"left are {sorted(tree(prefix))}")


@pytest.mark.parametrize("folder", ["seen", "elsewhere"])
def test_a_loader_that_does_not_look_there(tmp_path, folder):
    """The loader's cache may name the folder by a link, as /lib is one on Debian."""
    (tmp_path / "seen").symlink_to(tmp_path / "prefix/lib")
    (tmp_path / "elsewhere").mkdir()
    ldconfig = tmp_path / "bin/ldconfig"
    ldconfig.parent.mkdir()
    for name in ("libdevicemesh.so.0", f"libdevicemesh.so.{SOVERSION}"):
        (tmp_path / "elsewhere" / name).touch()
        with open(ldconfig, "a") as script:
            script.write(f"echo '\t{name} (libc6,x86-64) => {tmp_path}/{folder}/{name}'\n")
    ldconfig.write_text("#!/bin/sh\n" + ldconfig.read_text())
    ldconfig.chmod(0o755)
    output = run("make", "install", f"PREFIX={tmp_path}/prefix", PATH=f"{ldconfig.parent}:{os.environ['PATH']}")
    check(("The loader does not look in" in output) == (folder == "elsewhere"), output)


def test_an_action_that_is_not_known():
    output = run("sh", "packaging/install.sh", "remove", code=2)
    check("unknown action remove: it is install or uninstall" in output, output)


@pytest.mark.long
def test_make_builds_anew_for_each_source_and_for_no_test(tmp_path):
    """make goes by times, and cargo by what it compiles. A file that only make has on its list
    would make `sudo make install` call cargo after each `make build`."""
    for name in ("libdevicemesh.so", "libhostccl.so", "devicemesh"):
        (tmp_path / name).touch()

    def outdated(*changed):
        """Whether make would call cargo after these files have changed."""
        said = run("make", "--dry-run", f"RELEASE={tmp_path}", *(f"--what-if={name}" for name in changed), "install", "CARGO=echo")
        return "echo build --release" in said

    check(not outdated(), "make builds though nothing has changed")
    tests = [str(path.relative_to(ROOT)) for folder in ("src", "hostccl", "recording", "tool") for path in (ROOT / folder).rglob("*.rs")
             if path.name == "tests.rs" or path.stem.endswith("_tests") or "tests" in path.parts]
    check(len(tests) > 20 and not outdated(*tests), "make builds for tests")
    for name in ("src/lib.rs", "hostccl/src/lib.rs", "hostccl/capi/src/lib.rs", "tool/src/lib.rs", "tool/Cargo.toml", "Cargo.lock",
                 "tool/templates/cargo/main.rs"):
        check((ROOT / name).exists() and outdated(name), f"make does not build after a change of {name}")


def test_static_libs(tmp_path):
    """packaging/native-static-libs.txt is what rustc says of the library as it was built."""
    folder = tmp_path
    (folder / "all.rs").write_text("extern crate devicemesh;\n")
    output = run("rustc", "--edition", "2024", "--crate-type", "staticlib", "--crate-name", "all", folder / "all.rs",
                 "--extern", f"devicemesh={LIBRARY}/libdevicemesh.rlib", "-L", f"dependency={LIBRARY}/deps", "--print",
                 "native-static-libs", "-o", folder / "all.a")
    said = re.search(r"native-static-libs: (.+)", output).group(1).split()
    first = list(dict.fromkeys(said))
    check(STATIC_LIBS == first, f"packaging/native-static-libs.txt has {STATIC_LIBS}, rustc says {said}")
