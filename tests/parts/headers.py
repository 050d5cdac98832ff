"""Cases for the files that users compile and link against: the exported functions, the SONAME, and
the headers."""

import os
import re
import shutil

from support.pinned import cuda_headers, nccl_wheel

from .base import CC, CXX, LIBRARY, ROOT, SCRATCH, STRICT, Failure, Skip, comments, run
from .programs import PEDANTIC

SYSTEM = {"libc.so.6", "libgcc_s.so.1", "libm.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}


def header_functions():
    text = re.sub(r"/\*.*?\*/", "", (ROOT / "include/devicemesh.h").read_text(), flags=re.S)
    return set(re.findall(r"\b(dm_\w+)\(", text))


def plugin_symbols():
    """The structures that NCCL looks for in a profiler plugin (src/ccl/profiler.rs)."""
    return {f"ncclProfiler_v{version}" for version in (3, 4, 5, 6)}


def exports():
    """Exactly the header's functions and the profiler plugin are exported. Each has the SONAME as
    its default version, and the linker adds the version's own name."""
    version = re.search(r'^version = "(\d+)\.(\d+)', (ROOT / "Cargo.toml").read_text(), re.M)
    soname = f"libdevicemesh.so.{version.group(1)}.{version.group(2)}"
    output = run(["nm", "-D", "--defined-only", "--with-symbol-versions", LIBRARY / "libdevicemesh.so"])
    exported = {line.split()[-1] for line in output.splitlines() if line.strip()}
    declared = {f"{name}@@{soname}" for name in header_functions() | plugin_symbols()} | {soname}
    if exported != declared:
        raise Failure(f"only exported: {sorted(exported - declared)}; only declared: {sorted(declared - exported)}")
    dynamic = run(["readelf", "-d", LIBRARY / "libdevicemesh.so"])
    if f"[{soname}]" not in dynamic:
        raise Failure(f"the SONAME is not {soname}:\n{dynamic}")
    if not (LIBRARY / soname).exists():
        raise Failure(f"target/release/{soname} is missing")
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic))
    if not needed <= SYSTEM:
        raise Failure(f"the library needs {sorted(needed)}")


def add_headers(runner):
    """The headers in every order; `make test-all` also puts them beside NVIDIA's own, which are
    fetched once."""
    def compiles(name, text, with_nvidia=False):
        def body():
            languages = {"c++": [CXX, "-std=c++17"]} if "devicemesh.hpp" in text else {"c": [CC, "-std=c11"], "c++": [CXX, "-std=c++17"]}
            include = [f"-isystem{path}" for path in [nccl_wheel() / "include", *cuda_headers()]] if with_nvidia else []
            for language, compiler in languages.items():
                source = SCRATCH / f"{name.replace(' ', '-')}.{'c' if language == 'c' else 'cpp'}"
                source.write_text(text + "\nint main(void) { return dm_version() == 0; }\n")
                run([*compiler, *STRICT, "-Iinclude", *include, "-c", source, "-o", os.devnull])
        runner.add(f"build header {name}", body, "long" if with_nvidia else "quick")

    ours, cpp, host = "#include <devicemesh.h>", "#include <devicemesh.hpp>", "#include <hostccl.h>"
    compiles("alone", ours)
    compiles("devicemesh.hpp alone", cpp)
    compiles("before hostccl.h", f"{ours}\n{host}")
    compiles("after hostccl.h", f"{host}\n{ours}")
    compiles("before nccl.h", f"{ours}\n#include <nccl.h>\nncclComm_t comm(ncclComm_t c);", with_nvidia=True)
    compiles("after nccl.h", f"#include <nccl.h>\n{ours}\nncclComm_t comm(ncclComm_t c);", with_nvidia=True)
    nccl_call = "auto all_reduce(const dm::Mesh &mesh) { return mesh.proc<decltype(&ncclAllReduce)>(\"ncclAllReduce\"); }"
    compiles("devicemesh.hpp before nccl.h", f"{cpp}\n#include <nccl.h>\n{nccl_call}", with_nvidia=True)
    halves = "static_assert(dm::DtypeOf<__half>::value == dm::Dtype::float16 && dm::DtypeOf<__nv_bfloat16>::value == dm::Dtype::bfloat16);"
    compiles("devicemesh.hpp after nccl.h", f"#include <cuda_bf16.h>\n#include <nccl.h>\n{cpp}\n{nccl_call}\n{halves}", with_nvidia=True)


def add_compilers(runner):
    """Adds tests/c as C++17. Adds tests/cpp, which uses all of devicemesh.hpp, with each compiler
    and standard (`make test-all`)."""
    def as_cxx():
        for path in sorted((ROOT / "tests/c").glob("*.c")):
            run([CXX, "-std=c++17", "-x", "c++", "-fsyntax-only", *STRICT, *comments(path)[2], "-Iinclude", "-Itests/c", path])
    runner.add("build tests/c c++17", as_cxx, "long")

    def compiles(compiler, standard):
        def body():
            if not shutil.which(compiler):
                raise Skip(f"no {compiler} here (Debian: apt-get install clang)")
            for path in sorted((ROOT / "tests/cpp").glob("*.cpp")):
                run([compiler, f"-std={standard}", "-fsyntax-only", *STRICT, *PEDANTIC, *comments(path)[2], "-Iinclude", "-Itests/c", path])
        runner.add(f"build tests/cpp {compiler} {standard}", body, "long")

    # add_tests builds tests/cpp as C++17 by $CXX, and tests/test_cpp_header.py compiles a C++20
    # file. The header is the same for all standards, so the first and the last standard show the
    # rest. Old compilers call C++23 c++2b.
    for compiler, standard in (("g++", "c++2b"), ("clang++", "c++17"), ("clang++", "c++2b")):
        compiles(compiler, standard)
