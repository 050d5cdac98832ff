"""Ranks that have PyTorch, started by torchrun."""

from pathlib import Path

import pytest

import pytorch
from support.paths import LIBRARY, ROOT
from support.processes import environment, run

HERE = Path(__file__).resolve().parent
# Each rank of side_by_side.py prints this at its end.
SIDE = "side by side fine: rank"
PACKAGE = {"PYTHONPATH": str(ROOT / "bindings/python")}


class Torch:
    """An interpreter with PyTorch, and how its ranks are started."""

    def __init__(self, python):
        self.python = python
        # The variables of every rank.
        library = str(LIBRARY / "libdevicemesh.so")
        self.variables = {"DM_LIBRARY": library, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}

    def run(self, *command, timeout=170, **variables):
        """Runs a command to its end with those variables and gives what it wrote."""
        return run(*command, env=environment(**self.variables, **variables), timeout=timeout, merged=True).stdout

    def torchrun(self, *arguments, **how):
        """Runs torchrun with these arguments, the script of the ranks among them."""
        return self.run(self.python, "-m", "torch.distributed.run", "--monitor-interval", "0.5", *arguments, **how)


def found_torch():
    """The PyTorch of this machine. Skips the test where there is none."""
    python = pytorch.interpreter(fetch=False)
    if python is None:
        pytest.skip(f"no PyTorch here (`make interop` fetches it; or pip install {' '.join(pytorch.PINNED)}, "
                    "and DM_INTEROP_PYTHON names the interpreter)")
    return Torch(python)
