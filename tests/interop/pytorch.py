"""An interpreter that has PyTorch: the one that DM_INTEROP_PYTHON names, else a virtual
environment under target/interop, made when it is missing."""

import functools
import os
import subprocess
import sys
from pathlib import Path

ENVIRONMENT = Path(__file__).resolve().parent.parent.parent / "target/interop/venv"
PINNED = ["torch==2.15.0", "numpy"]


@functools.lru_cache(None)
def interpreter(fetch=True):
    """Its path, or None where it cannot be had, or is not there and must not be fetched."""
    python = Path(os.environ.get("DM_INTEROP_PYTHON", ENVIRONMENT / "bin/python"))
    if fetch and not python.exists() and ENVIRONMENT in python.parents:
        made = subprocess.run([sys.executable, "-m", "venv", ENVIRONMENT], capture_output=True)
        if made.returncode == 0:
            subprocess.run([python, "-m", "pip", "install", "--quiet", *PINNED], capture_output=True, timeout=3600)
    if not python.exists():
        return None
    imported = subprocess.run([python, "-c", "import torch.distributed"], capture_output=True)
    return python if imported.returncode == 0 else None
