"""Builds libdevicemesh_jax.so, the XLA handlers, against the oldest headers of XLA's FFI that are
supported: those of jaxlib 0.7.2.

XLA takes handlers of its own or an older FFI version and refuses newer ones, so this one binary
serves jaxlib 0.7.2 and later. The headers come out of jaxlib's wheel; nothing of XLA is linked.

    python build_handlers.py OUTPUT [HEADERS]

Without HEADERS, a folder that holds xla/ffi/api, they are fetched into target/ once.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
JAXLIB = "0.7.2"


def fetched_headers() -> Path:
    folder = ROOT / f"target/jax/headers-{JAXLIB}"
    if not (folder / "xla").exists():
        # Any interpreter can fetch it: the headers are the same for all.
        with tempfile.TemporaryDirectory() as scratch:
            subprocess.run([
                sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
                "--only-binary=:all:", "--python-version=3.11", f"--platform=manylinux_2_27_{platform.machine()}",
                "--dest", scratch, f"jaxlib=={JAXLIB}"
            ], check=True)
            (wheel,) = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(scratch, [name for name in archive.namelist() if name.startswith("jaxlib/include/")])
            folder.mkdir(parents=True, exist_ok=True)
            shutil.move(f"{scratch}/jaxlib/include/xla", folder / "xla")
    return folder


def compile_handlers(headers: Path, output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    made = output.with_name(f"{output.name}.{os.getpid()}")
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler.split()[0]) is None:
        raise SystemExit(f"devicemesh_jax: no C++ compiler {compiler!r} on the PATH (apt-get install g++, or name one in CXX)")
    print(f"devicemesh_jax: {compiler} compiles the XLA handlers", flush=True)
    # LDFLAGS is for the linker alone, because it may name another C library that has no C++
    # headers.
    part = made.with_name(f"{made.name}.o")
    subprocess.run([
        *compiler.split(), "-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-Wall", "-Wextra", "-Werror",
        f"-I{ROOT / 'include'}", "-isystem", str(headers), "-c", str(HERE / "src/handlers.cpp"), "-o", str(part)
    ], check=True)
    flags = os.environ.get("LDFLAGS", "").split()
    subprocess.run([*compiler.split(), "-shared", str(part), "-ldl", "-Wl,-s", *flags, "-o", str(made)], check=True)
    part.unlink()
    made.rename(output)


if __name__ == "__main__":
    compile_handlers(Path(sys.argv[2]) if len(sys.argv) > 2 else fetched_headers(), Path(sys.argv[1]))
