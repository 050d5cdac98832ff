"""Settings of a machine that would change what the tests see: variables, the locale, and the
rights of new files.

tests/run.py, the gates and pytest's conftest call `forget_machine` once, before anything else
runs. A test sets what it needs."""

import os
import re
from pathlib import Path

# Variables by which launchers tell a process its rank.
LAUNCHER = (
    r"RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_.*|GROUP_RANK|TORCHELASTIC_.*|OMPI_.*|PMI.*|PALS_.*|SLURM_.*"
    r"|JOB_COMPLETION_INDEX|MPI_LOCAL.*")
# Variables that decide about colours and widths (crate anstream; under CI a terminal gets colours
# even with TERM=dumb).
OUTPUT = r"CI|NO_COLOR|FORCE_COLOR|CLICOLOR|CLICOLOR_FORCE|PY_COLORS|PYTHON_COLORS|CARGO_TERM_.*|COLUMNS|LINES"
# The variables of the library, of the programs of the tests, and of the libraries beside them.
LIBRARIES = (
    r"DM_.*|HOSTCCL_.*|NCCL_.*|RCCL_.*|CUDA_VISIBLE_DEVICES|HIP_VISIBLE_DEVICES|ROCR_VISIBLE_DEVICES|OMP_.*|JAX_.*"
    r"|XLA_.*|VIRTUAL_ENV|CONDA_PREFIX")
# Variables that make Python, pip, Rust, git, make, cmake, Go and the C compiler behave in another
# way. The tests look for what cargo builds below target/, and a git hook sets GIT_DIR.
TOOLS = (
    r"PYTHON.*|RUST_BACKTRACE|RUST_LIB_BACKTRACE|RUST_LOG|RUST_TEST_.*|CARGO_TARGET_DIR|CARGO_BUILD_TARGET"
    r"|CARGO_BUILD_TARGET_DIR|GIT_.*|MAKEFLAGS|MFLAGS|MAKELEVEL|MAKEOVERRIDES|DESTDIR|PREFIX|LIBDIR|INCLUDEDIR|BINDIR"
    r"|DATADIR|MANDIR|CFLAGS|CXXFLAGS|CPPFLAGS|LDFLAGS|CMAKE_.*|GOROOT|GOBIN|GOOS|GOARCH|GOEXPERIMENT|GO111MODULE|CGO_.*"
    r"|PIP_(USER|TARGET|PREFIX|ROOT|REQUIRE_VIRTUALENV|NO_BINARY)")
CHANGES = re.compile(f"{LAUNCHER}|{OUTPUT}|{LIBRARIES}|{TOOLS}")
# The variables that tell the tests something, and PYTHONPYCACHEPREFIX, which says where Python may
# write.
WANTED = re.compile(
    r"DM_(LIB_DIR|SEED|LIVES|JAX_VERSION|TEST_SLOWNESS|INTEROP_PYTHON|TORCH_STORES)|GIT_SSL_.*|PYTHONPYCACHEPREFIX")
# Libraries that must not take the place of those under test.
OTHERS = ("libdevicemesh.so*", "libhostccl.so*", "libnccl.so*", "librccl.so*")
# The locale in which programs say what the tests read, for every machine.
LOCALE = "C.UTF-8"


def has_others(folder):
    return any(found for pattern in OTHERS for found in Path(folder).glob(pattern))


def forget_machine():
    """Gives this process, and all that it starts, the surroundings that the tests expect."""
    for name in list(os.environ):
        if CHANGES.fullmatch(name) and not WANTED.fullmatch(name):
            del os.environ[name]
    for name in [name for name in os.environ if name == "LANGUAGE" or name.startswith("LC_")]:
        del os.environ[name]
    os.environ["LC_ALL"] = LOCALE
    # The loader looks there before the folder that a program was linked with.
    folders = os.environ.pop("LD_LIBRARY_PATH", "").split(os.pathsep)
    kept = [folder for folder in folders if folder and not has_others(folder)]
    if kept:
        os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(kept)
    # Some tests run programs as other users, who must be able to read them.
    os.umask(0o022)
