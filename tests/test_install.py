#!/usr/bin/env python3
"""Installs with make and with CMake, moves the prefix, and builds and runs the projects of tests/consumer against what lies there: by find_package,
pkg-config, add_subdirectory and FetchContent, in C and C++, shared and static. Also what is refused, and that uninstalling removes exactly what was
installed. cargo works in target/ as everywhere, so nothing is compiled a second time."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import run as suite
from support import pinned
from run import CC, CXX, RELEASE, ROOT, TARGET, Failure, Skip

SCRATCH = suite.SCRATCH / "install"
MOVED = SCRATCH / "moved here"
CONSUMER = ROOT / "tests/consumer"
PROGRAMS = ("shared_c", "static_c", "shared_cpp", "static_cpp", "hostccl")
VERSION = re.search(r'^version = "(.+)"', (ROOT / "Cargo.toml").read_text(), re.M).group(1)
SOVERSION = ".".join(VERSION.split(".")[: 2 if VERSION.startswith("0.") else 1])
STATIC_LIBS = (ROOT / "packaging/native-static-libs.txt").read_text().split()


def run(*command, code=0, **env):
    return suite.run(command, timeout=900, env={"DESTDIR": "", **env}, code=code)


def check(holds, message):
    if not holds:
        raise Failure(message)


def cmake(*arguments, **how):
    return run(pinned.cmake(), *arguments, **how)


def fresh(name):
    folder = SCRATCH / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def tree(folder):
    """Every file of a folder: links by where they point, others by mode and content."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else (oct(path.stat().st_mode), path.read_bytes())
        for path in sorted(folder.rglob("*")) if path.is_symlink() or path.is_file()
    }


def runs(program, linked_to=None, soname=f"libdevicemesh.so.{SOVERSION}"):
    """The program sums over two ranks; it needs the shared library, at that place, or none of ours."""
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", run("readelf", "-d", program))
    ours = [name for name in needed if re.match("lib(devicemesh|hostccl|nccl|cuda)", name)]
    check(ours == ([soname] if linked_to else []), f"{program} needs {needed}")
    if linked_to:
        place = re.search(rf"{re.escape(soname)} => (.+) \(0x", run("ldd", program)).group(1)
        check(Path(place).parent == linked_to, f"{program} finds {place}, expected it in {linked_to}")
    launcher = [] if "hostccl" in program.name else [RELEASE / "devicemesh", "run", "-n", 2, "--"]
    output = run(*launcher, program)
    check(output.count("sum 1") == (2 if launcher else 1), f"{program}: {output}")


def build_consumer(name, *settings, programs=PROGRAMS, linked_to, env=None):
    folder = fresh(name)
    cmake("-S", CONSUMER, "-B", folder, *settings, **(env or {}))
    cmake("--build", folder, "--parallel", 2, *(["--target", *programs] if programs != PROGRAMS else []), **(env or {}))
    for program in programs:
        soname = f"lib{'hostccl' if program == 'hostccl' else 'devicemesh'}.so.{SOVERSION}"
        runs(folder / program, None if program.startswith("static") else linked_to, soname)
    return folder


def two_ways():
    """make and CMake install the same; CMake's is then moved, for the cases that follow."""
    built, by_make, by_cmake = fresh("build"), fresh("make"), SCRATCH / "cmake"
    for folder in (by_cmake, MOVED):
        shutil.rmtree(folder, ignore_errors=True)
    run("make", "install", f"DESTDIR={by_make}", "PREFIX=/opt/mesh")
    cmake("-S", ROOT, "-B", built, f"-DDEVICEMESH_CARGO_TARGET_DIR={TARGET}", f"-DCMAKE_INSTALL_PREFIX={by_cmake}",
          "-DCMAKE_INSTALL_LIBDIR=lib")
    cmake("--build", built)
    cmake("--install", built)
    one, other = tree(by_make / "opt/mesh"), tree(by_cmake)
    different = [file for file in sorted({*one, *other}) if one.get(file) != other.get(file)]
    check(not different, f"make and CMake install different {different}")
    lib = "lib/"
    for library in ("devicemesh", "hostccl"):
        check(one.get(f"{lib}lib{library}.so") == f"lib{library}.so.{SOVERSION}", f"lib{library}.so links to {one.get(f'{lib}lib{library}.so')}")
        check(one.get(f"{lib}lib{library}.so.{SOVERSION}") == f"lib{library}.so.{VERSION}", f"no link lib{library}.so.{SOVERSION}")
        check(f"[lib{library}.so.{SOVERSION}]" in run("readelf", "-d", by_cmake / f"{lib}lib{library}.so"), f"lib{library}.so has no SONAME")
    wanted = {f"{lib}libdevicemesh.a", "bin/devicemesh", "include/devicemesh.h", "include/devicemesh.hpp", "include/hostccl.h",
              f"{lib}pkgconfig/devicemesh.pc", f"{lib}cmake/devicemesh/devicemeshConfig.cmake", "share/doc/devicemesh/LICENSE-MIT"}
    check(wanted <= set(one), f"not installed: {sorted(wanted - set(one))}")
    texts = [file for file, content in one.items() if file.endswith((".pc", ".cmake")) and str(by_make).encode() in content[1] + other[file][1]]
    check(not texts, f"paths of this machine in {texts}")
    parts = fresh("components")
    cmake("--install", built, "--prefix", parts, "--component", "devicemesh_runtime")
    check(sorted(file for file in tree(parts) if not file.startswith("share/")) == [f"{lib}libdevicemesh.so.{SOVERSION}", f"{lib}libdevicemesh.so.{VERSION}"],
          f"the component devicemesh_runtime is {sorted(tree(parts))}")
    # Nothing can be found where it was installed first.
    by_cmake.rename(MOVED)
    check(run(MOVED / "bin/devicemesh", "--version").split()[-1] == VERSION, "the tool does not run")


def other_folders():
    """Libraries and headers in folders of other depths, as Debian has them: both ways write the same files, and these find the folders after a move."""
    by_make, by_cmake, moved = fresh("deep-make"), fresh("deep-cmake"), SCRATCH / "deep"
    shutil.rmtree(moved, ignore_errors=True)
    run("make", "install", f"PREFIX={by_make}", f"LIBDIR={by_make}/lib/some-machine", f"INCLUDEDIR={by_make}/include/mesh")
    cmake("-S", ROOT, "-B", by_cmake, f"-DDEVICEMESH_CARGO_TARGET_DIR={TARGET}", "-DCMAKE_INSTALL_LIBDIR=lib/some-machine", "-DCMAKE_INSTALL_INCLUDEDIR=include/mesh")
    made = {path.name: path.read_text() for path in (by_make / "lib/some-machine").rglob("*") if path.suffix in (".pc", ".cmake") and not path.is_symlink()}
    for path in (by_cmake / "install").glob("*.*[ce]"):
        check(path.read_text() == made[path.name], f"{path.name} by CMake\n{path.read_text()}\nand by make\n{made[path.name]}")
    by_make.rename(moved)
    output = asks("asks-deep", """
find_package(devicemesh REQUIRED COMPONENTS shared static)
foreach(property INTERFACE_INCLUDE_DIRECTORIES IMPORTED_LOCATION)
  get_target_property(value devicemesh::devicemesh ${property})
  message(STATUS "[${value}]")
endforeach()
""", f"-Ddevicemesh_DIR={moved}/lib/some-machine/cmake/devicemesh")
    check(f"[{moved}/include/mesh]" in output and f"[{moved}/lib/some-machine/libdevicemesh.so.{VERSION}]" in output, output)
    if shutil.which("pkg-config"):
        flags = pkg_config_flags(moved / "lib/some-machine", "--cflags", "--libs", "devicemesh")
        check([os.path.normpath(flag[2:]) for flag in flags[:2]] == [f"{moved}/include/mesh", f"{moved}/lib/some-machine"], f"{flags}")


def find_package():
    build_consumer("by-find-package", f"-DCMAKE_PREFIX_PATH={MOVED}", linked_to=MOVED / "lib")


def pkg_config_flags(folder, *arguments):
    return shlex.split(run("pkg-config", *arguments, PKG_CONFIG_PATH=str(folder / "pkgconfig"), PKG_CONFIG_ALLOW_SYSTEM_CFLAGS="1"))


def pkg_config():
    if not shutil.which("pkg-config"):
        raise Skip("no pkg-config here (Debian: apt-get install pkg-config)")
    lib, folder = MOVED / "lib", fresh("by-pkg-config")
    rpath = f"-Wl,-rpath,{lib}"
    for language, compiler in (("c", [CC, "-std=c11"]), ("cpp", [CXX, "-std=c++17"])):
        for kind, module in (("shared", "devicemesh"), ("static", "devicemesh-static")):
            program = folder / f"{kind}_{language}"
            run(*compiler, CONSUMER / f"main.{language}", *pkg_config_flags(lib, "--cflags", "--libs", module), rpath, "-o", program)
            runs(program, lib if kind == "shared" else None)
    run(CC, "-std=c11", CONSUMER / "hostccl.c", *pkg_config_flags(lib, "--cflags", "--libs", "hostccl"), rpath, "-o", folder / "hostccl")
    runs(folder / "hostccl", lib, f"libhostccl.so.{SOVERSION}")
    check(pkg_config_flags(lib, "--modversion", "devicemesh") == [VERSION], "devicemesh.pc has another version")

    # Where the static library alone is installed, --static is all that is needed.
    only_static = folder / "only-static"
    (only_static / "lib").mkdir(parents=True)
    for part in ("include", "lib/libdevicemesh.a"):
        (only_static / part).symlink_to(MOVED / part)
    shutil.copytree(lib / "pkgconfig", only_static / "lib/pkgconfig")
    flags = pkg_config_flags(only_static / "lib", "--static", "--cflags", "--libs", "devicemesh")
    run(CC, "-std=c11", CONSUMER / "main.c", *flags, "-o", folder / "static_only")
    runs(folder / "static_only")


def add_subdirectory():
    common = [f"-DDEVICEMESH_SOURCE={ROOT}", f"-DDEVICEMESH_CARGO_TARGET_DIR={TARGET}", "-DCMAKE_BUILD_TYPE=Debug"]
    folder = build_consumer("by-add-subdirectory", "-DHOW=add_subdirectory", *common, linked_to=RELEASE)
    cmake("--install", folder, "--prefix", folder / "installed")
    check(not tree(folder / "installed"), f"a project that includes this one installs {sorted(tree(folder / 'installed'))}")
    build_consumer("by-fetchcontent", "-DHOW=FetchContent", *common, programs=("shared_cpp", "static_c"), linked_to=RELEASE)


def source_tree():
    build_consumer("by-source-tree", f"-Ddevicemesh_DIR={ROOT}/cmake", programs=("shared_c", "static_c", "hostccl"), linked_to=RELEASE)


def asks(name, text, *settings, code=0, **env):
    """What a project without languages says that asks for the package."""
    folder = fresh(name)
    (folder / "CMakeLists.txt").write_text("cmake_minimum_required(VERSION 3.19)\nproject(asks NONE)\n" + text)
    return cmake("-S", folder, "-B", folder / "build", f"-Ddevicemesh_DIR={MOVED}/lib/cmake/devicemesh", *settings, code=code, **env)


def versions():
    major, minor, patch = (int(part) for part in VERSION.split("."))
    suits = ["", f"{major}.{minor}", VERSION, f"{VERSION} EXACT", f"{major}.{minor}...{major}.{minor + 1}"]
    wrong = [f"{major}.{minor + 1}", f"{major}.{minor}.{patch + 1}", f"{major + 1}.0", f"{major}.{minor}.{patch + 1} EXACT",
             f"{major}.{minor + 1}...{major + 1}.0", f"{major}.0...<{VERSION}"] + ([f"{major}.{minor - 1}"] if minor else [])
    body = "".join(f"""
unset(devicemesh_FOUND)
set(devicemesh_DIR "{MOVED}/lib/cmake/devicemesh" CACHE PATH "" FORCE)
find_package(devicemesh {version} QUIET CONFIG)
message(STATUS "[{version}] ${{devicemesh_FOUND}}")
""" for version in suits + wrong)
    output = asks("versions", body)
    for version in suits + wrong:
        said = re.search(rf"-- \[{re.escape(version)}\] (\d|TRUE|FALSE)", output)
        found = said is not None and said.group(1) in ("1", "TRUE")
        check(found == (version in suits), f"version {version!r} is {'found' if found else 'not found'} in {VERSION}:\n{output}")


def components():
    output = asks("components", "find_package(devicemesh REQUIRED COMPONENTS shared shiny)\n", code=1)
    check("there is no component shiny" in output, output)
    output = asks("optional", """
find_package(devicemesh REQUIRED COMPONENTS static OPTIONAL_COMPONENTS shiny)
message(STATUS "[${devicemesh_static_FOUND} ${devicemesh_shiny_FOUND}]")
if(TARGET devicemesh::nccl)
  message(FATAL_ERROR "nobody asked for NCCL")
endif()
""")
    check("[TRUE ]" in output, output)


def nccl():
    """The component nccl: NCCLConfig.cmake before nccl.pc before NCCL_ROOT; headers alone."""
    folder = fresh("nccls")
    for name in ("config", "module", "root"):
        (folder / name / "include").mkdir(parents=True)
        (folder / name / "include/nccl.h").write_text(f"/* {name} */\n")
    (folder / "config/NCCLConfig.cmake").write_text("""
add_library(NCCL::nccl SHARED IMPORTED)
set_target_properties(NCCL::nccl PROPERTIES IMPORTED_LOCATION /nowhere/libnccl.so INTERFACE_INCLUDE_DIRECTORIES "${CMAKE_CURRENT_LIST_DIR}/include")
""")
    (folder / "module/nccl.pc").write_text(f"includedir={folder}/module/include\nName: nccl\nDescription: NCCL\nVersion: 2.27.7\nCflags: -I${{includedir}}\nLibs: -lnccl\n")
    ask = """
find_package(devicemesh REQUIRED COMPONENTS shared nccl)
get_target_property(include devicemesh::nccl INTERFACE_INCLUDE_DIRECTORIES)
get_target_property(libraries devicemesh::nccl INTERFACE_LINK_LIBRARIES)
message(STATUS "[${include}] [${libraries}]")
"""
    config = [f"-DNCCL_DIR={folder}/config"]
    module = {"PKG_CONFIG_PATH": str(folder / "module")}
    root = [f"-DNCCL_ROOT={folder}/root"]
    cases = [("config", [*config, *root], module), ("root", root, {}), ("root", [], {"NCCL_ROOT": str(folder / "root")})]
    if shutil.which("pkg-config"):
        cases.append(("module", root, module))
    for expected, settings, env in cases:
        output = asks("asks-nccl", ask, *settings, **env)
        said = re.search(r"-- \[(.+)\] \[(.+)\]", output)
        check(said and said.group(1).split(";")[0] == f"{folder}/{expected}/include", f"expected nccl.h of {expected}:\n{output}")
        check(said.group(2).endswith("NOTFOUND"), f"devicemesh::nccl links {said.group(2)}")
    if not Path("/usr/include/nccl.h").exists():
        output = " ".join(asks("asks-nccl", ask, f"-DNCCL_ROOT={folder}/nowhere", code=1).split())
        check("NCCL_ROOT" in output and "has no include/nccl.h" in output, output)


def refused_cargo():
    folder = fresh("cargos")
    old = folder / "cargo"
    old.write_text("#!/bin/sh\necho 'cargo 1.63.0 (fd9c4297c 2022-07-01)'\n")
    old.chmod(0o755)
    flat = lambda output: " ".join(output.split())
    output = flat(cmake("-S", ROOT, "-B", folder / "old", f"-DDEVICEMESH_CARGO={old}", code=1))
    check(f"needs Rust 1.85 or later; {old} is of 1.63.0" in output, output)
    # A machine with all that CMake wants, but cargo.
    tools = fresh("tools")
    for name in ("cc", "c++", "make", "ld", "as", "ar", "ranlib", "nm", "strip", "objdump", "readelf", "sh", "uname"):
        (tools / name).symlink_to(shutil.which(name))
    output = flat(cmake("-S", ROOT, "-B", folder / "none", "-DCMAKE_FIND_USE_CMAKE_SYSTEM_PATH=OFF", code=1,
                        PATH=str(tools), HOME=str(folder), CARGO_HOME=str(folder), CC="", CXX=""))
    check("is built by cargo (Rust 1.85 or later), and none is in PATH" in output, output)


def driven_cargo():
    """How cargo is called: before anything is linked, with what was asked for, and for another machine when cross-compiling. By a cargo that only puts the
    finished libraries where they belong, and takes its time."""
    folder = fresh("driven")
    cargo = folder / "cargo"
    cargo.write_text(f"""#!/bin/sh
[ "$1" = --version ] && echo "cargo 1.85.0" && exit
{{ echo "arguments $*"; env | grep '^CARGO_'; }} >'{folder}/log'
while [ $# -gt 0 ]; do
  case $1 in --target-dir) into=$2 ;; --target) machine=$2/ ;; esac
  shift
done
sleep 1
mkdir -p "$into/$machine"release
cp '{RELEASE}'/lib*.so* '{RELEASE}'/libdevicemesh.a "$into/$machine"release
""")
    cargo.chmod(0o755)
    common = ["-S", CONSUMER, f"-DDEVICEMESH_SOURCE={ROOT}", f"-DDEVICEMESH_CARGO={cargo}", "-DHOW=add_subdirectory"]
    environment = {"CARGO_BUILD_TARGET": "", "CARGO_TARGET_DIR": ""}
    native, cross = folder / "native", folder / "cross"
    cmake(*common, "-B", native, "-DDEVICEMESH_CARGO_FLAGS=--offline;--quiet", **environment)
    cmake("--build", native, "--parallel", 2, "--target", "shared_c", "static_c", **environment)
    place = native / "devicemesh/cargo"
    runs(native / "shared_c", place / "release")
    log = (folder / "log").read_text()
    check(f"arguments build --locked --profile release --target-dir {place} --offline --quiet\n" in log, log)
    cmake(*common, "-B", cross, "-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=x86_64", **environment)
    cmake("--build", cross, "--target", "shared_c", **environment)
    log = (folder / "log").read_text()
    check("--target x86_64-unknown-linux-gnu\n" in log and re.search("^CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_LINKER=/.*cc$", log, re.M), log)
    runs(cross / "shared_c", cross / "devicemesh/cargo/x86_64-unknown-linux-gnu/release")


def tool_files():
    """What the tool says of itself is installed where shells and man look; a tool that says nothing, or cannot run, is no failure."""
    folder = fresh("tool-files")
    tool = folder / "devicemesh"
    tool.write_text('#!/bin/sh\ncase "$*" in man|completions\\ bash|completions\\ fish) echo "$*" ;; *) echo half; exit 2 ;; esac\n')
    tool.chmod(0o755)
    run("sh", "packaging/tool_files.sh", tool, folder / "out")
    said = {file: content[1].decode() for file, content in tree(folder / "out").items()}
    check(said == {"man/man1/devicemesh.1": "man\n", "share/bash-completion/completions/devicemesh": "completions bash\n",
                   "share/fish/vendor_completions.d/devicemesh.fish": "completions fish\n"}, f"{said}")
    run("sh", "packaging/tool_files.sh", folder / "no-tool", folder / "none")
    check(not tree(folder / "none"), "files of a tool that cannot run")


def uninstall():
    prefix = fresh("uninstalled")
    where = [f"PREFIX={prefix}", f"LIBDIR={prefix}/lib64"]
    (prefix / "lib64").mkdir()
    (prefix / "lib64/libother.so").touch()
    run("make", "install", *where)
    check(len(tree(prefix)) > 15, f"installed are {sorted(tree(prefix))}")
    run("make", "uninstall", *where)
    check(list(tree(prefix)) == ["lib64/libother.so"], f"left are {sorted(tree(prefix))}")


def static_libs():
    """packaging/native-static-libs.txt is what rustc says of the library as it was built."""
    folder = fresh("static-libs")
    (folder / "all.rs").write_text("extern crate devicemesh;\n")
    output = run("rustc", "--edition", "2024", "--crate-type", "staticlib", "--crate-name", "all", folder / "all.rs", "--extern",
                 f"devicemesh={RELEASE}/libdevicemesh.rlib", "-L", f"dependency={RELEASE}/deps", "--print", "native-static-libs", "-o", folder / "all.a")
    said = re.search(r"native-static-libs: (.+)", output).group(1).split()
    first = list(dict.fromkeys(said))
    check(STATIC_LIBS == first, f"packaging/native-static-libs.txt has {STATIC_LIBS}, rustc says {said}")


CASES = [static_libs, two_ways, other_folders, find_package, pkg_config, add_subdirectory, source_tree, versions, components, nccl, refused_cargo, driven_cargo,
         tool_files, uninstall]


def main():
    os.chdir(ROOT)
    SCRATCH.mkdir(parents=True, exist_ok=True)
    failed, skipped = 0, []
    for case in CASES:
        began = time.monotonic()
        try:
            case()
            print(f"ok   {case.__name__} ({time.monotonic() - began:.1f} s)", flush=True)
        except Skip as why:
            skipped.append(str(why))
            print(f"skip {case.__name__}: {why}", flush=True)
        except Failure as failure:
            failed += 1
            print(f"FAIL {case.__name__}\n{failure}", flush=True)
    if not failed:
        shutil.rmtree(SCRATCH, ignore_errors=True)
    if skipped:
        print("all but: " + "; ".join(skipped))
    return 1 if failed else suite.SKIPPED if skipped else 0


if __name__ == "__main__":
    sys.exit(main())
