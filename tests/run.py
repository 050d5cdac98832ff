#!/usr/bin/env python3
"""Runs every test of the project; `make test` calls this. Python 3.9 and its standard library.

Steps: the Rust tests; the C and C++ tests of tests/c and tests/cpp (each C file as C11 and as C++17, each C++ file as it is and with sanitizers),
with as many ranks as the file's first comment says; the Python tests; the examples; what is exported; the headers, alone and beside
a real nccl.h; tests/cpp with each compiler and standard; and at the end that nothing was left in /dev/shm or in the process
list. To add a test, add a file.

A C file may begin with comments:  /* ranks: 1 4 8 */  runs it under `devicemesh run -n N` for each N (absent: one process without a launcher);
/* static */  also links it to libdevicemesh.a;  /* flags: -fno-exceptions */  adds to the compiler's. A C++ file may, too.

The Python tests, tests/test_*.py, are run by pytest, which is installed into target/pytest-venv (tests/requirements.txt). Those that judge seconds (marked `alone`) run
after the others, one at a time. No test is tried twice.

The last line is "N passed, N failed" (", N skipped" may follow) and counts each case of pytest.
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
from xml.etree import ElementTree

from support.pinned import Unavailable as Skip
from support.pinned import cuda_headers, nccl_wheel

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
DEADLINE = 180
# A part of many cases, each of which has a limit of its own.
PART_DEADLINE = 1800
SKIPPED = 77


class Failure(Exception):
    def __init__(self, text, code=None, output=""):
        super().__init__(text)
        self.code, self.output = code, output


class Runner:
    def __init__(self, options):
        self.options = options
        self.passed, self.failed, self.skipped = 0, 0, 0
        self.lock = threading.Lock()
        self.cases = []

    def add(self, name, body):
        if not self.options.k or any(part in name for part in self.options.k):
            self.cases.append((name, body))

    def run(self):
        with ThreadPoolExecutor(self.options.jobs) as pool:
            list(pool.map(lambda case: self.one(*case), self.cases))
        self.cases = []

    def one(self, name, body):
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
            elif verdict == "skip":
                self.skipped += count
            else:
                self.failed += count
            print(f"{verdict} {name} ({time.monotonic() - began:.1f} s){text}", flush=True)

    def close(self):
        """The last line."""
        print(f"{self.passed} passed, {self.failed} failed" + (f", {self.skipped} skipped" if self.skipped else ""))


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
    """One of tests/test_*.py that pytest does not run yet. Exit code 77: it could not run here; its last line says why."""
    environment = {"DM_ROOT": str(ROOT), "DM_LIB_DIR": str(RELEASE), "DM_TMP": str(SCRATCH), "CC": CC, "CXX": CXX}
    try:
        run([sys.executable, path], env=environment, timeout=PART_DEADLINE)
    except Failure as failure:
        if failure.code != SKIPPED:
            raise
        raise Skip(failure.output.strip().splitlines()[-1]) from None


def is_script(path):
    return '__name__ == "__main__"' in path.read_text()


def pytest_python():
    """The interpreter of target/pytest-venv, where what tests/requirements.txt pins is installed once."""
    folder = TARGET / "pytest-venv"
    wanted = (ROOT / "tests/requirements.txt").read_text()
    complete = folder / "requirements.txt"
    with open(TARGET / "pytest-venv.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists() or complete.read_text() != wanted:
            shutil.rmtree(folder, ignore_errors=True)
            run([sys.executable, "-m", "venv", folder])
            run([folder / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", "tests/requirements.txt"], timeout=600)
            complete.write_text(wanted)
    return folder / "bin/python"


def pytest_command(options):
    """pytest on the Python tests, by the names that the runner's -k selects."""
    files = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").glob("test_*.py")) if not is_script(path)]
    names = [f"--name={name}" for name in options.k or []]
    return [str(pytest_python()), "-m", "pytest", *names, *files]


def python_tests(runner, options):
    """Runs the Python tests, those marked `alone` after the others, and counts their cases."""
    environment = {**os.environ, "DM_LIB_DIR": str(RELEASE), "CC": CC, "CXX": CXX}
    for what, arguments in (("beside each other", ["-m", "not alone", "-n", str(options.pytest_jobs), "--dist", "worksteal"]), ("alone", ["-m", "alone"])):
        print(f"---- tests/test_*.py, {what}", flush=True)
        report = SCRATCH / f"pytest-{os.getpid()}.xml"
        # As a part of this group, so that Ctrl-C reaches it.
        done = subprocess.run([*pytest_command(options), "-v", "--durations=10", "--durations-min=5", f"--junitxml={report}", *arguments], cwd=ROOT, env=environment)
        if not report.exists():
            print(f"FAIL pytest, {what}: exit code {done.returncode}, and no report", flush=True)
            runner.failed += 1
            continue
        for suite in ElementTree.parse(report).getroot().iter("testsuite"):
            failed, skipped = int(suite.get("failures")) + int(suite.get("errors")), int(suite.get("skipped"))
            runner.failed += failed
            runner.skipped += skipped
            runner.passed += max(int(suite.get("tests")) - failed - skipped, 0)
        # 5: none was selected. Anything but failures is told by the exit code alone.
        runner.failed += done.returncode not in (0, 1, 5)
        report.unlink()


def rust_tests(kind):
    def body():
        output = run(["cargo", "test", "--workspace", "--no-fail-fast", *kind], timeout=1800)
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
    parser.add_argument("--pytest-jobs", type=int, default=3, help="how many Python tests at a time; most of them wait")
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
        if is_script(path):
            runner.add(f"tests/{path.name}", lambda path=path: script(path))
    examples(runner)
    runner.add("build exports and SONAME", exports)
    compile_headers(runner)
    cpp_builds(runner)
    if options.list:
        print("\n".join(name for name, _ in runner.cases), flush=True)
        return subprocess.run([*pytest_command(options), "--collect-only", "-q"], cwd=ROOT).returncode
    runner.run()
    python_tests(runner, options)
    if not options.k:
        runner.one("nothing left behind", leftovers(shm_before))
    runner.close()
    return 1 if runner.failed or not runner.passed else 0


if __name__ == "__main__":
    sys.exit(main())
