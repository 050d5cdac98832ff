"""Runs tests/c under valgrind's memcheck, with the library as it is shipped.

memcheck sees reads of memory that was never written, which AddressSanitizer does not see, and
blocks to which no pointer is left."""

import re
import shutil

from harness import COMPILERS, PLANTED, ROOT, TARGET, Failure, Skip, builder, fails_with, launcher, programs, run

FOLDER = TARGET / "memcheck"
RELEASE = TARGET / "release"
# Only blocks to which no pointer is left are errors. The library keeps some blocks (worlds,
# counters) until the process ends, and those stay reachable.
VALGRIND = ["valgrind", "--quiet", "--error-exitcode=99", "--leak-check=full", "--show-leak-kinds=definite",
            "--errors-for-leak-kinds=definite", "--num-callers=30", f"--suppressions={ROOT}/tests/gates/memcheck.supp"]


def wanted(source, count):
    """Whether a C file runs here on this number of ranks. A rank takes twenty times its time, and
    all ranks share the machine, so there are at most four."""
    return source.suffix == ".c" and count <= 4


def gate():
    if not shutil.which("valgrind"):
        raise Skip("no valgrind here (Debian: apt-get install valgrind)")
    run(["cargo", "build", "--release", "--quiet"], timeout=1800)
    folder, build = FOLDER / "planted", builder(RELEASE)
    folder.mkdir(parents=True, exist_ok=True)
    for name, words in {"use_after_free": ["Invalid write of size 4", ": dm_rank ("], "leak": ["definitely lost"]}.items():
        run(build(COMPILERS[".c"], PLANTED / f"{name}.c", folder / name))
        try:
            fails_with([*VALGRIND, folder / name], words)
        except Failure as failure:
            if re.search(r"unhandled (instruction|amd64)", str(failure)):
                raise Skip("this valgrind does not know an instruction of this processor's libc") from None
            raise

    def start(program, count):
        # valgrind runs the ranks. The tool that starts them runs without it.
        return [*launcher(RELEASE, count), *VALGRIND, program], {"DM_TMP": str(FOLDER / "programs")}
    return f"{programs(FOLDER / 'programs', COMPILERS, build, start, 50, wanted)} runs"
