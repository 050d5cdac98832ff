"""Functions that the gates share: they add components of the toolchain, check planted defects, and
run the programs of tests/c and tests/cpp."""

import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from parts.base import CC, CXX, ROOT, STRICT, TARGET, Failure, Skip, comments, run  # noqa: E402,F401

PLANTED = ROOT / "tests/gates/planted"
# The compiler and the flags for a program of each language.
COMPILERS = {".c": [CC, "-std=c11", "-D_GNU_SOURCE"], ".cpp": [CXX, "-std=c++17"]}
HOST = next(line.split()[1] for line in subprocess.run(["rustc", "-vV"], check=True, capture_output=True, text=True).stdout.splitlines()
            if line.startswith("host:"))
SYSROOT = Path(subprocess.run(["rustc", "--print", "sysroot"], check=True, capture_output=True, text=True).stdout.strip())


def component(name, proof):
    """Has rustup add a component of this toolchain, unless the path `proof` below the sysroot shows
    that it is there. Raises Skip where rustup cannot."""
    if not any(SYSROOT.glob(proof)):
        try:
            run(["rustup", "component", "add", name], timeout=600)
        except (Failure, FileNotFoundError) as why:
            raise Skip(f"no {name} here (rustup component add {name}): {str(why).splitlines()[0]}") from None
        if not any(SYSROOT.glob(proof)):
            raise Skip(f"rustup added {name}, but {SYSROOT}/{proof} is not there")


def fails_with(command, expected, env=None):
    """Checks that `command` fails and reports the planted defect with all of the `expected`
    words."""
    done = subprocess.run([str(part) for part in command], env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    missing = [text for text in expected if text not in done.stdout]
    if done.returncode == 0 or missing:
        raise Failure(f"$ {' '.join(map(str, command))}\n{done.stdout}\nexit code {done.returncode}; "
                      f"a planted defect must be reported, with {missing or expected}")


def builder(library):
    """A function that gives the command which builds a program with the library of this folder."""
    def build(compiler, source, program):
        link = [f"-L{library}", "-ldevicemesh", f"-Wl,-rpath,{library}", "-pthread"]
        return [*compiler, "-O1", "-g", *STRICT, "-Iinclude", "-Itests/c", source, "-x", "none", *link, "-o", program]
    return build


def launcher(library, count):
    """The words that start what follows on that many ranks: none for 0 ranks."""
    return [library / "devicemesh", "run", "-n", count, "--prefix", "--failure-grace", "60", "--"] if count else []


def programs(folder, compilers, build, start, slow, only=None):
    """Builds and runs the programs of tests/c and tests/cpp, and returns how many runs passed.

    `build(compiler, source, program)` returns the command that builds a program, and
    `start(program, ranks)` the command that runs it and its environment. Each program runs on the
    numbers of ranks that its first comment names, those for which `only(source, ranks)` holds.
    Bounds on time are `slow` times as long. Every failure is printed, the first five of them
    whole."""
    folder.mkdir(parents=True, exist_ok=True)
    passed, failures = 0, []
    for source in sorted([*(ROOT / "tests/c").glob("*.c"), *(ROOT / "tests/cpp").glob("*.cpp")]):
        ranks, _, flags = comments(source)
        program = folder / source.stem.replace(".", "-")
        if source.suffix == ".cpp":
            program = folder / f"{source.stem}-cpp"
        compiler = compilers[source.suffix]
        counts = [count for count in ranks if only is None or only(source, count)]
        if not counts:
            continue
        run([*build([*compiler, *flags], source, program)])
        for count in counts:
            began = time.monotonic()
            label = f"{source.relative_to(ROOT)}" + (f" x{count}" if count else "")
            try:
                command, environment = start(program, count)
                run(command, env={**environment, "DM_TEST_SLOWNESS": str(slow)}, timeout=120 * min(slow, 5))
                passed += 1
                print(f"     ok   {label} ({time.monotonic() - began:.1f} s)", flush=True)
            except Failure as failure:
                failures.append(label)
                print(f"     FAIL {label}\n{failure if len(failures) <= 5 else str(failure)[-2000:]}", flush=True)
    if failures:
        raise Failure(f"{len(failures)} of {passed + len(failures)} failed: {', '.join(failures)}")
    return passed
