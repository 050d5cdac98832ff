"""An interpreter with JAX, and the handlers of the JAX package, made once under target/jax.

`python -m support.jax` makes them ahead of the tests, while something else uses the processor."""

import fcntl
import os
import shutil
import subprocess
import sys

from .paths import ROOT, TARGET
from .pinned import Unavailable, fetched_by_pip
from .processes import run

PACKAGE = ROOT / "bindings/jax"
FOLDER = TARGET / "jax"
HANDLERS = FOLDER / "libdevicemesh_jax.so"
# The last JAX for Python 3.11. DM_JAX_VERSION names another one, for example 0.7.2, the oldest that
# is supported; the handlers are the same for all.
JAX = os.environ.get("DM_JAX_VERSION") or "0.10.2"
PINNED = [f"jax=={JAX}", f"jaxlib=={JAX}", "numpy==2.4.6", "scipy==1.17.1", "ml_dtypes==0.5.4", "opt_einsum==3.4.0"]
# The package that checks the types.
TOOLS = ["mypy==1.18.2"]
# Python compiles the modules that a test imports, and no others, into a folder of their own.
BYTECODE = {"PYTHONPYCACHEPREFIX": str(FOLDER / f"bytecode-{JAX}")}


def install(folder, pins, name):
    """Installs pinned packages into the virtual environment `folder` once; `name` marks that it was
    done."""
    complete = folder / f"{name}.txt"
    if complete.exists() and complete.read_text() == "\n".join(pins):
        return
    command = [folder / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", *pins]
    fetched_by_pip(*command)
    complete.write_text("\n".join(pins))


def interpreter():
    """A Python with JAX, fetched once (150 MB)."""
    if sys.version_info < (3, 11):
        raise Unavailable(f"JAX {JAX} needs Python 3.11, this is {sys.version.split()[0]}")
    folder = FOLDER / f"venv-{JAX}"
    if not (folder / "jax.txt").exists():
        shutil.rmtree(folder, ignore_errors=True)
        made = run(sys.executable, "-m", "venv", folder, code=None, merged=True)
        if made.returncode != 0:
            raise Unavailable("venv does not work here (Debian: apt-get install python3-venv)")
    install(folder, PINNED, "jax")
    return folder / "bin/python"


def build_handlers(python):
    """Builds the handlers, unless they are newer than what they are built from."""
    sources = [*(PACKAGE / "src").iterdir(), PACKAGE / "build_handlers.py", ROOT / "include/devicemesh.h"]
    if HANDLERS.exists() and all(HANDLERS.stat().st_mtime > source.stat().st_mtime for source in sources):
        return
    done = run(python, PACKAGE / "build_handlers.py", HANDLERS, code=None, timeout=400, merged=True)
    if done.returncode != 0 and not (FOLDER / "headers-0.7.2/xla").exists():
        raise Unavailable("the headers of jaxlib 0.7.2 could not be fetched")
    assert done.returncode == 0, done.stdout


def prepared(tools=False):
    """The interpreter, with the handlers built; `tools` adds TOOLS. One process at a time makes
    them."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        python = interpreter()
        build_handlers(python)
        if tools:
            install(python.parents[1], TOOLS, "tools")
    return python


if __name__ == "__main__":
    try:
        # The ranks of a test find the bytecode of what this imports.
        subprocess.run([prepared(), "-c", "import jax.numpy"], check=True, env={**os.environ, **BYTECODE})
    except Unavailable as why:
        print(why)
