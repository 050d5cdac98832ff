"""The interpreter that runs the Python tests."""

import fcntl
import shutil
import sys

from .base import ROOT, TARGET, Failure, Skip, run


def pytest_python():
    """The interpreter of target/pytest-venv, where what tests/requirements.txt pins is installed
    once.

    Raises Skip where Python cannot make virtual environments, and Failure where pip fails."""
    folder = TARGET / "pytest-venv"
    wanted = (ROOT / "tests/requirements.txt").read_text()
    complete = folder / "requirements.txt"
    with open(TARGET / "pytest-venv.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists() or complete.read_text() != wanted:
            shutil.rmtree(folder, ignore_errors=True)
            try:
                run([sys.executable, "-m", "venv", folder])
            except Failure:
                shutil.rmtree(folder, ignore_errors=True)
                raise Skip("venv does not work here (Debian: apt-get install python3-venv)") from None
            pip = [folder / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            run([*pip, "-r", "tests/requirements.txt"], timeout=600)
            complete.write_text(wanted)
    return folder / "bin/python"
