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
import shlex
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
        folder.parent.mkdir(parents=True, exist_ok=True)
        # A rename needs one file system, and leaves no folder that has a part of the headers.
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            subprocess.run([
                sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
                "--only-binary=:all:", "--python-version=3.11", f"--platform=manylinux_2_27_{platform.machine()}",
                "--dest", scratch, f"jaxlib=={JAXLIB}"
            ], check=True)
            (wheel,) = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(scratch, [name for name in archive.namelist() if name.startswith("jaxlib/include/")])
            try:
                os.rename(f"{scratch}/jaxlib/include", folder)
            except OSError:
                # Another process has put them there meanwhile.
                if not (folder / "xla").exists():
                    raise
    return folder


def compile_handlers(headers: Path, output: Path, compiler: str | None = None, link: list[str] | None = None,
                     more: tuple[str, ...] = ()) -> None:
    """Compiles the handlers. Where no compiler or no arguments of the linker are given, CXX and
    LDFLAGS of the environment are used."""
    output.parent.mkdir(parents=True, exist_ok=True)
    made = output.with_name(f"{output.name}.{os.getpid()}")
    compiler = compiler or os.environ.get("CXX") or "c++"
    words = shlex.split(compiler)
    if shutil.which(words[0]) is None:
        raise SystemExit(f"devicemesh_jax: no C++ compiler {compiler!r} on the PATH (apt-get install g++, or name one in CXX)")
    print(f"devicemesh_jax: {compiler} compiles the XLA handlers", flush=True)
    # The compiler does not get the linker's arguments, because they may name another C library,
    # which has no C++ headers.
    part = made.with_name(f"{made.name}.o")
    subprocess.run([
        *words, "-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-Wall", "-Wextra", *more,
        # assert() in XLA's headers writes their path into the library.
        f"-ffile-prefix-map={ROOT}=/devicemesh", f"-ffile-prefix-map={headers}=/jaxlib",
        f"-I{ROOT / 'include'}", "-isystem", str(headers), "-c", str(HERE / "src/handlers.cpp"), "-o", str(part)
    ], check=True)
    link = shlex.split(os.environ.get("LDFLAGS", "")) if link is None else link
    subprocess.run([*words, "-shared", str(part), "-ldl", "-Wl,-s", *link, "-o", str(made)], check=True)
    part.unlink()
    made.rename(output)


if __name__ == "__main__":
    # A warning stops developers, and not a user whose newer compiler has new warnings.
    compile_handlers(Path(sys.argv[2]) if len(sys.argv) > 2 else fetched_headers(), Path(sys.argv[1]), more=("-Werror",))
