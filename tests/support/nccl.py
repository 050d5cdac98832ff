"""Jobs of device type cuda without a device: programs of tests/nccl over a recorder that stands
where NCCL would (tests/nccl/recorder, over libhostccl) and a libcuda that only counts
(tests/nccl/cuda.c)."""

import re
import shutil
from pathlib import Path

import pytest

from . import processes
from .paths import CC, LIBRARY, LINK, ROOT, TOOL

HERE = ROOT / "tests/nccl"
# The files of the library that stands in NCCL's place.
RECORDER = sorted((HERE / "recorder").glob("*.c"))
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-Werror"]
# The limits that the library sets on a communicator from which others are split.
LEAST = "minCTAs=1 maxCTAs=1 collnetEnable=0 nvlsCTAs=1"


def check(condition, text):
    assert condition, text


def library(programs, soname, sources, *flags):
    """A library from C files of tests/nccl, in a folder of its own, under the name by which the
    loader looks for it."""
    name = "-".join([soname.partition(".")[0], *(Path(source).stem for source in sources), *flags])

    def make(folder):
        folder.mkdir()
        processes.run(CC, *FLAGS, f"-I{ROOT}/include", *(HERE / source for source in sources), *flags, "-shared",
                      "-fPIC", f"-Wl,-soname,{soname}", "-ldl", "-pthread", "-o", folder / soname)
    return programs.once(name, make) / soname


class Job:
    """A program of tests/nccl, run by default over a recorder and a driver that lack nothing."""

    def __init__(self, programs, folder, program, *sources):
        """`sources` are further C files of the program."""
        self.programs, self.folder = programs, folder
        self.program = programs.c(f"tests/nccl/{program}.c", "-Wall", "-Wextra", "-Werror", *sources,
                                  name=f"nccl-{program}", link=[*LINK, "-ldl"])

    def library(self, soname, sources, *flags):
        return library(self.programs, soname, sources, *flags)

    def recorder(self, *lacks):
        return self.library("libnccl.so.2", RECORDER, *[f"-DLACKS_{part}" for part in lacks])

    def driver(self, *flags):
        return self.library("libcuda.so.1", ["cuda.c"], *flags)

    def __call__(self, what, ranks=8, library=None, cuda=None, code=0, timeout=90, wrapper=(), **variables):
        """The output of the ranks, and each rank's record. False as `library` or `cuda` leaves
        it out. `wrapper` is a command that runs each rank."""
        logs = self.folder / "log"
        shutil.rmtree(logs, ignore_errors=True)
        logs.mkdir()
        variables = {"RECORDER_HOST": LIBRARY / "libhostccl.so", "RECORDER_LOG": logs, **variables}
        variables["LD_LIBRARY_PATH"] = (cuda or self.driver()).parent if cuda is not False else ""
        if library is not False:
            variables["RECORDER"] = library or self.recorder()
        env = processes.environment(without=["NCCL_", "CUDA_", "DM_CCL"], **variables)
        output = processes.run(TOOL, "run", "-n", ranks, "--prefix", "--failure-grace", 10, "--", *wrapper, self.program,
                               what, env=env, code=code, timeout=timeout, merged=True).stdout
        records = {int(path.name): path.read_text().splitlines() for path in logs.iterdir()}
        for rank, lines in records.items():
            wrong = [line for line in lines if re.search("STALE|BUSY|NULL in|bad config|NONBLOCKING|is id", line)]
            check(not wrong or what in ("adopt", "group of another"),
                  f"{what} {variables}: rank {rank} broke NCCL's rules: {wrong}\n" + "\n".join(lines))
        return output, records


def between(lines, first, last):
    """The lines of a record between two notes. c2 is the communicator along the dimension."""
    return lines[lines.index(f"# {first}") + 1:lines.index(f"# {last}")]


def job_of(program):
    """A fixture that gives a Job of this program for each test."""
    return pytest.fixture(lambda programs, tmp_path: Job(programs, tmp_path, program))
