"""Measures which lines of the library, the tool and the host engine run in the Rust tests, in the
programs of tests/c and tests/cpp, and in the Python tests that TESTS names.

LLVM counts (-C instrument-coverage). rustup's llvm-tools read the counters, because their format
is that of this compiler. The other Python tests (launchers, JAX) are not counted, and neither are
ranks that are killed, because they write no counters. target/coverage/html shows each line."""

import json
import shutil

from harness import COMPILERS, HOST, ROOT, SYSROOT, TARGET, Failure, builder, component, launcher, programs, run
from parts.python import pytest_python
from support.cargo import WORKSPACE

FOLDER = TARGET / "coverage"
TOOLS = SYSROOT / "lib/rustlib" / HOST / "bin"
# Files that are not ours, and files that are tests.
OUTSIDE = r"/registry/|/rustc/|/rustlib/|/tests/|/tests\.rs$|/benches/|/examples/|build\.rs$"
NCCL = [f"tests/test_nccl{part}.py" for part in ("", "_joining", "_ends", "_hangs", "_operations")]
# These reach what only programs of several processes do.
OTHERS = ["check", "events", "mesh_page", "profiler", "recover", "show_pictures", "why"]
TESTS = [*NCCL, *(f"tests/test_{name}.py" for name in OTHERS)]
# The gate fails below this. It is well below today's figure, so only a change that leaves much
# untested fails.
LEAST = 85.0


def environment():
    # Each program has one file for each core, and its processes add to that file.
    return {"RUSTFLAGS": "-Cinstrument-coverage", "LLVM_PROFILE_FILE": str(FOLDER / "raw/%4m.profraw"), "CARGO_PROFILE_DEV_OPT_LEVEL": "1"}


def cargo(*command):
    return run(["cargo", *command, "--target-dir", FOLDER / "build"], env=environment(), timeout=2400)


def test_programs():
    """The Rust tests' own executables, which hold the code that they ran."""
    found = []
    for line in cargo("test", *WORKSPACE, "--no-run", "--quiet", "--message-format=json").splitlines():
        if line.startswith("{"):
            message = json.loads(line)
            if message.get("executable"):
                found.append(message["executable"])
    return found


def gate():
    component("llvm-tools", f"lib/rustlib/{HOST}/bin/llvm-cov")
    shutil.rmtree(FOLDER / "raw", ignore_errors=True)
    cargo("build", *WORKSPACE, "--quiet")
    objects = test_programs()
    cargo("test", *WORKSPACE, "--quiet", "--no-fail-fast")
    library = FOLDER / "build/debug"

    def start(program, count):
        return [*launcher(library, count), program], {**environment(), "DM_TMP": str(FOLDER / "programs")}
    programs(FOLDER / "programs", COMPILERS, builder(library), start, 10)
    run([pytest_python(), "-m", "pytest", "-q", *TESTS], env={**environment(), "DM_LIB_DIR": str(library)}, timeout=1800)
    # Programs that tests start with an empty environment write into the current folder.
    for stray in [path for place in (ROOT, ROOT / "hostccl", ROOT / "hostccl/reduce", ROOT / "hostccl/capi") for path in place.glob("default_*.profraw")]:
        shutil.move(stray, FOLDER / "raw" / stray.name)
    return figures([*objects, str(library / "libdevicemesh.so"), str(library / "devicemesh")])


def figures(objects):
    merged = FOLDER / "merged.profdata"
    counters = (FOLDER / "raw").glob("*.profraw")
    run([TOOLS / "llvm-profdata", "merge", "--sparse", "--failure-mode=all", *counters, "-o", merged], timeout=600)
    named = [objects[0], *(f"--object={path}" for path in objects[1:])]
    shared = [f"--instr-profile={merged}", f"--ignore-filename-regex={OUTSIDE}", *named]
    exported = run([TOOLS / "llvm-cov", "export", "--summary-only", *shared], timeout=600)
    # llvm-cov first warns of functions that differ between two programs.
    totals = json.loads(exported[exported.index("\n{") + 1 if not exported.startswith("{") else 0:])["data"][0]
    run([TOOLS / "llvm-cov", "show", "--format=html", f"--output-dir={FOLDER}/html", *shared], timeout=600)
    table = sorted((entry["summary"]["lines"]["percent"], entry["filename"]) for entry in totals["files"])
    for percent, name in table[:10]:
        print(f"     {percent:5.1f} % {name.removeprefix(str(ROOT) + '/')}", flush=True)
    part = totals["totals"]
    line = (f"coverage: lines {part['lines']['percent']:.1f} % of {part['lines']['count']:,}, "
            f"functions {part['functions']['percent']:.1f} %, regions {part['regions']['percent']:.1f} %")
    if part["lines"]["percent"] < LEAST:
        raise Failure(f"{line}; at least {LEAST} % of the lines are expected")
    return line
