"""tests/c under valgrind's memcheck: reads of what was never written, which AddressSanitizer does not see, and blocks that nobody knows any more. The
library is the one that is shipped."""

import re
import shutil

from harness import CC, CXX, PLANTED, ROOT, STRICT, TARGET, Failure, Skip, fails_with, programs, run

FOLDER = TARGET / "memcheck"
RELEASE = TARGET / "release"
# Nothing but what is lost for good: what the library keeps until the process ends (worlds, counters) is reachable.
VALGRIND = ["valgrind", "--quiet", "--error-exitcode=99", "--leak-check=full", "--show-leak-kinds=definite", "--errors-for-leak-kinds=definite",
            "--num-callers=30", f"--suppressions={ROOT}/tests/gates/memcheck.supp"]
COMPILERS = {".c": [CC, "-std=c11", "-D_GNU_SOURCE"], ".cpp": [CXX, "-std=c++17"]}


def build(compiler, source, program):
    return [*compiler, "-O1", "-g", *STRICT, "-Iinclude", "-Itests/c", source, "-x", "none", f"-L{RELEASE}", "-ldevicemesh", f"-Wl,-rpath,{RELEASE}",
            "-pthread", "-o", program]


def wanted(source, count):
    """One process, or few: each rank takes twenty times its time, and all share the machine."""
    return source.suffix == ".c" and count <= 4


def gate():
    if not shutil.which("valgrind"):
        raise Skip("no valgrind here (Debian: apt-get install valgrind)")
    run(["cargo", "build", "--release", "--quiet"], timeout=1800)
    folder = FOLDER / "planted"
    folder.mkdir(parents=True, exist_ok=True)
    for name, words in {"use_after_free": ["Invalid write of size 4", ": dm_rank ("], "leak": ["definitely lost"]}.items():
        run(build(COMPILERS[".c"], PLANTED / f"{name}.c", folder / name))
        fails_with([*VALGRIND, folder / name], words)

    def start(program, count):
        # The ranks, not the tool that starts them.
        launcher = [RELEASE / "devicemesh", "run", "-n", count, "--prefix", "--grace-period", "60", "--"] if count else []
        return [*launcher, *VALGRIND, program], {"DM_TMP": str(FOLDER / "programs")}
    try:
        return f"{programs(FOLDER / 'programs', COMPILERS, build, start, 50, wanted)} runs"
    except Failure as failure:
        if re.search(r"unhandled (instruction|amd64)", str(failure)):
            raise Skip("this valgrind does not know an instruction of this processor's libc") from None
        raise
