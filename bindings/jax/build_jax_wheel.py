"""The build backend (PEP 517, PEP 660): the package and the handlers, for every Python 3 on this
platform.

It writes the wheel with bindings/python/build_wheel.py, so equal files give equal bytes, whatever
the umask is.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "python")]
import build_handlers  # noqa: E402
import build_wheel as python_wheel  # noqa: E402

NAME = "devicemesh_jax"
HANDLERS = f"{NAME}/_native/libdevicemesh_jax.so"
# For each version V of libstdc++'s symbols (GLIBCXX_3.4.V), the N of the manylinux profile 2_N from
# which on systems have them, as auditwheel lists it. Versions below 25 need no more than 2_27.
PROFILES = {25: 28, 26: 31, 27: 31, 28: 31, 29: 34, 30: 35, 31: 39, 32: 39, 33: 39}


def oldest_platform(handlers: Path) -> str:
    """Returns manylinux_2_N for the C library and the C++ library that the handlers need. Static
    linking of the C++ library does not help, because Debian 12's needs a new glibc itself."""
    newest = max((int(version) for version in re.findall(rb"\0GLIBCXX_3\.4\.(\d+)(?=\0)", handlers.read_bytes())), default=0)
    if newest >= 25 and newest not in PROFILES:
        raise SystemExit(f"devicemesh_jax: the handlers need GLIBCXX_3.4.{newest}, which PROFILES in {Path(__file__).name} does not have: "
                         "add the manylinux profile that has it")
    return f"manylinux_2_{max(PROFILES.get(newest, 27), int(python_wheel.oldest_glibc([handlers]).rpartition('_')[2]))}"


def metadata(third_party: Path = python_wheel.THIRD_PARTY) -> dict[str, str]:
    """The files of the .dist-info folder, except RECORD and WHEEL."""
    project = (HERE / "pyproject.toml").read_text()
    values = {key: json.loads(value) for key, value in re.findall(r'^([\w-]+) = (".*"|\[.*\])$', project, re.M)}
    head = "".join(f"{line}\n" for line in [
        "Metadata-Version: 2.2", f"Name: {values['name']}", f"Version: {python_wheel.version()}", f"Summary: {values['description']}",
        "License: Apache-2.0 OR MIT", f"Requires-Python: {values['requires-python']}",
        *(f"Requires-Dist: {name}" for name in values["dependencies"]), "Description-Content-Type: text/markdown"])
    return {"METADATA": f"{head}\n{python_wheel.description(HERE / 'README.md')}", **python_wheel.licences(third_party)}


def headers() -> Path:
    """The folder with XLA's headers. pip's own build environment has the jaxlib that pyproject.toml
    names."""
    try:
        installed = importlib.metadata.distribution("jaxlib")
    except importlib.metadata.PackageNotFoundError:
        return build_handlers.fetched_headers()
    return Path(installed.locate_file("jaxlib/include")) if installed.version == build_handlers.JAXLIB else build_handlers.fetched_headers()


def write(folder: str, machine: str | None = None, compiler: str | None = None, link: list[str] | None = None,
          third_party: Path = python_wheel.THIRD_PARTY) -> str:
    """Compiles the handlers and writes the wheel, and returns the wheel's name. Without a machine,
    the wheel is for this one."""
    with tempfile.TemporaryDirectory() as scratch:
        handlers = Path(scratch) / Path(HANDLERS).name
        build_handlers.compile_handlers(headers(), handlers, compiler, link)
        tag = python_wheel.tag([handlers])
        # Only systems with glibc have manylinux profiles.
        if machine or tag.startswith("manylinux_"):
            tag = f"{oldest_platform(handlers)}_{machine or platform.machine()}"
        files = {f"{NAME}/{path.name}": path.read_bytes() for path in sorted([*(HERE / NAME).glob("*.py"), HERE / NAME / "py.typed"])}
        return python_wheel.write(folder, {**files, HANDLERS: handlers}, tag, NAME, metadata(third_party))


def get_requires_for_build_wheel(config_settings: object = None) -> list[str]:
    return []


def build_wheel(wheel_directory: str, config_settings: object = None, metadata_directory: str | None = None) -> str:
    return write(wheel_directory)


def build_sdist(sdist_directory: str, config_settings: object = None) -> str:
    raise RuntimeError("the handlers are compiled against headers of the whole repository: install a wheel, or from a checkout")


def get_requires_for_build_editable(config_settings: object = None) -> list[str]:
    return []


def build_editable(wheel_directory: str, config_settings: object = None, metadata_directory: str | None = None) -> str:
    """A wheel that points to the package in the checkout. The package finds the handlers where
    `make jax` puts them."""
    handlers = build_handlers.ROOT / "target/jax/libdevicemesh_jax.so"
    build_handlers.compile_handlers(headers(), handlers)
    return python_wheel.write(wheel_directory, {f"{NAME}.pth": f"{HERE}\n".encode()}, python_wheel.tag([handlers]), NAME, metadata())
