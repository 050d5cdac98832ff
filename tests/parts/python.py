"""The interpreter that runs the Python tests."""

import fcntl
import shutil
import sys

from .base import ROOT, TARGET, run


def pytest_python():
    """The interpreter of target/pytest-venv, where what tests/requirements.txt pins is installed
    once."""
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
