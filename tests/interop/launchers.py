"""The MPI launchers, the Debian packages that have what the interop tests start, and the check of
what the ranks print."""

import re
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

import pytest

from slurm import PROGRAMS

# The Debian package of each program and library.
DEBIAN = {
    **{program: "slurm-wlm" for program in PROGRAMS}, "munged": "munge", "libnss_wrapper.so": "libnss-wrapper",
    "libpmix.so": "libpmix-dev", "mpirun.openmpi": "openmpi-bin", "mpiexec.mpich": "mpich"}
# Open MPI refuses to run as root without these.
ROOT_MAY = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def is_there(name):
    return shutil.which(name) or name.endswith(".so") and any(Path("/usr/lib").glob(f"*/{name}"))


def needs(*names):
    """Skips the test where one of these programs and libraries is missing."""
    missing = sorted({DEBIAN[name] for name in names if not is_there(name)})
    if missing:
        packages = " ".join(missing)
        pytest.skip(f"no {packages} here (`make interop` installs it; Debian: apt-get install {packages})")


@dataclass(frozen=True)
class Launcher:
    """A launcher of MPI programs."""

    # Its name in messages.
    name: str
    # The program and the options that every run needs.
    command: tuple
    # The option that sends a variable to the ranks, and what stands between name and value.
    export: tuple
    # Gives the options for two hosts with `each` ranks on each. Any other host is this machine
    # too: what would run there by ssh is run here by the program that it takes.
    two_hosts: object

    def __str__(self):
        return self.name

    def exported(self, **variables):
        option, between = self.export
        pairs = [(f"{name}={value}",) if between == "=" else (name, value) for name, value in variables.items()]
        return [part for pair in pairs for part in (option, *pair)]


HERE = socket.gethostname()
OPEN_MPI = Launcher(
    "Open MPI", ("mpirun.openmpi", "--oversubscribe"), ("-x", "="),
    lambda ssh, each=1: ["-mca", "plm_rsh_agent", ssh, "-host", f"{HERE}:{each},127.0.0.5:{each}", "-n", 2 * each])
MPICH = Launcher(
    "MPICH", ("mpiexec.mpich",), ("-genv", " "),
    lambda ssh, each=1: ["-launcher", "ssh", "-launcher-exec", ssh, "-hosts", f"{HERE},127.0.0.5", "-ppn", each, "-n", 2 * each])


def fine(output, ranks, line="mesh fine: rank"):
    """Checks that every rank printed the line once, and gives the output."""
    said = sorted(int(rank) for rank in re.findall(rf"{line} (\d+)", output))
    assert said == list(range(ranks)), f'"{line}" of ranks {said}, expected 0 to {ranks - 1}:\n{output}'
    return output
