#!/usr/bin/env python3
"""`make interop`: the library under real launchers and beside a real PyTorch.

It installs Debian's Open MPI, MPICH and Slurm when it is root and they are missing, and PyTorch
into target/interop/venv (some 5 GB; or DM_INTEROP_PYTHON names an interpreter that has it). Then
pytest runs tests/interop/test_*.py; what could not be had is a visible skip. A run of all tests
writes its table into docs/interop.md. `make test-all` runs the same tests, and fetches nothing.
"""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(1, str(HERE.parent))
from parts.base import ROOT, Failure, run  # noqa: E402
from parts.python import pytest_python  # noqa: E402
from support.machine import forget_machine  # noqa: E402

# The Debian packages that the tests of each file need.
PACKAGES = {
    "test_mpi.py": ["openmpi-bin", "mpich"],
    "test_mpi_hosts.py": ["openmpi-bin", "mpich", "openssh-server", "openssh-client"],
    "test_slurm.py": ["slurm-wlm", "munge", "libnss-wrapper", "libpmix-dev", "openmpi-bin"],
}


def install(packages):
    """Installs those Debian packages that are missing, where that can be done."""
    installed = lambda package: subprocess.run(["dpkg", "-s", package], capture_output=True).returncode == 0
    missing = [package for package in packages if not installed(package)]
    if missing and os.geteuid() == 0:
        environment = {"DEBIAN_FRONTEND": "noninteractive"}
        with contextlib.suppress(Failure):
            run(["apt-get", "update"], timeout=300, env=environment)
            run(["apt-get", "install", "-y", "--no-install-recommends", *missing], timeout=600, env=environment)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-k", action="append", metavar="TEXT",
                        help="only tests whose name contains this; docs/interop.md stays as it is")
    parser.add_argument("--list", action="store_true", help="name the tests and stop")
    options = parser.parse_args()
    os.chdir(ROOT)
    forget_machine()
    command = [pytest_python(), "-m", "pytest", *(f"--name={name}" for name in options.k or []), "tests/interop"]
    names = subprocess.run([*command, "--collect-only", "-q"], stdout=subprocess.PIPE, text=True).stdout
    if options.list:
        print(names, end="")
        return 0
    if shutil.which("apt-get"):
        install(sorted({package for file, packages in PACKAGES.items() if file in names for package in packages}))
    if "test_torch.py" in names or "torchrun" in names:
        import pytorch
        pytorch.interpreter()
    subprocess.run(["cargo", "build", "--release", "--quiet"], check=True)
    table = [] if options.k else ["-p", "interop.table"]
    return subprocess.run([*command, "-v", *table], env={**os.environ, "PYTHONPATH": str(HERE.parent)}).returncode


if __name__ == "__main__":
    sys.exit(main())
