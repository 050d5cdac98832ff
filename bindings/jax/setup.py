"""The wheel: the package and the handlers, for every Python 3 on this platform. The rest of the
metadata is in pyproject.toml."""

import re
import shutil
import sys
from pathlib import Path

import jaxlib
from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "python")]
import build_handlers  # noqa: E402
from build_wheel import oldest_glibc  # noqa: E402


class WithHandlers(build_py):
    def run(self):
        super().run()
        # pip's own build environment has that jaxlib.
        installed = jaxlib.__version__ == build_handlers.JAXLIB
        headers = Path(jaxlib.__file__).parent / "include" if installed else build_handlers.fetched_headers()
        build_handlers.compile_handlers(headers, Path(self.build_lib) / "devicemesh_jax/_native/libdevicemesh_jax.so")


# For each version V of libstdc++'s symbols (GLIBCXX_3.4.V), the N of the manylinux profile 2_N from
# which on systems have them, as auditwheel lists it. Versions below 25 need no more than 2_27.
PROFILES = {25: 28, 26: 31, 27: 31, 28: 31, 29: 34, 30: 35, 31: 39, 32: 39, 33: 39}


def oldest_platform(handlers):
    """Returns manylinux_2_N for the C library and the C++ library that the handlers need. Static
    linking of the C++ library does not help, because Debian 12's needs a new glibc itself."""
    (library,) = handlers
    versions = [int(version) for version in re.findall(rb"\0GLIBCXX_3\.4\.(\d+)(?=\0)", library.read_bytes())]
    needed = PROFILES.get(max(versions, default=0), 27 if max(versions, default=0) < 25 else max(PROFILES.values()))
    return f"manylinux_2_{max(needed, int(oldest_glibc(handlers).rpartition('_')[2]))}"


class ForThisPlatform(bdist_wheel):
    def get_tag(self):
        # Compiled, but against no Python. The platform says on which systems the handlers run.
        platform = super().get_tag()[2]
        handlers = list(Path(self.bdist_dir).glob("**/libdevicemesh_jax.so"))
        if platform.startswith("linux_") and handlers:
            platform = f"{oldest_platform(handlers)}_{platform[len('linux_'):]}"
        return "py3", "none", platform


class Compiled(Distribution):
    def has_ext_modules(self):
        return True


version = re.search(r'^version = "(.+)"', (HERE.parents[1] / "Cargo.toml").read_text(), re.M).group(1)
# What comes up on the way goes under target/, not beside the sources.
made = build_handlers.ROOT / "target/jax/wheel"
made.mkdir(parents=True, exist_ok=True)
# It names files by their whole path: those of another place, once the checkout has been moved or
# copied, end the build.
shutil.rmtree(made / "devicemesh_jax.egg-info", ignore_errors=True)
setup(
    version=version, cmdclass={"build_py": WithHandlers, "bdist_wheel": ForThisPlatform}, distclass=Compiled,
    options={"build": {"build_base": str(made / "build")}, "egg_info": {"egg_base": str(made)}})
