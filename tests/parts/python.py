"""The interpreter that runs the Python tests."""

from support.pinned import virtual_environment

from .base import ROOT


def pytest_python():
    """The interpreter of target/pytest-venv, where what tests/requirements.txt pins is installed
    once.

    Raises Skip where Python cannot make virtual environments, and Failure where pip fails."""
    return virtual_environment("pytest-venv", ROOT / "tests/requirements.txt")
