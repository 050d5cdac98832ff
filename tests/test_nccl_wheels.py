"""NVIDIA's own NCCL through our loader, on a machine without a device: versions, symbols, ids,
the errors without a driver, and the layout of ncclConfig_t by the compiler (tests/nccl/wheel.c).
The oldest release is always fetched, for its header. The others (170 to 320 MB each) are tested
where they are there; `make test-nccl` fetches them."""

import re
import sys

import pytest

from nccl_wheels import RELEASES, is_there
from support.nccl import FLAGS, library
from support.paths import CC, LINK, ROOT
from support.pinned import NCCL_WHEEL, cuda_headers, nccl_wheel
from support.processes import environment, run

# Fetches the headers of NCCL and CUDA once.
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def layout():
    """Static assertions that ncclConfig_t lies in an nccl.h as hostccl/src/nccl_config.rs says."""
    source = (ROOT / "hostccl/src/nccl_config.rs").read_text()
    fields = [(name, int(at), int(since.replace("_", ""))) for name, at, since in re.findall(r'\("(\w+)", (\d+), ([\d_]+)\)', source)]
    size = int(re.search(r"^const SIZE: usize = (\d+);", source, re.M).group(1))
    head = {
        "size": 0, **{
            name: int(re.search(rf"^const AT_{name.upper()}: usize = (\d+);", source, re.M).group(1))
            for name in ("magic", "version")
        }
    }
    nvls_mode = re.search(r"^const NVLS_HOST_MODE: \(usize, i32\) = \((\d+),", source, re.M).group(1)
    newest = re.search(r"^const SIZE_WITH_NVLS_MODE: usize = (\d+);", source, re.M).group(1)
    assert len(fields) == 12, f"hostccl/src/nccl_config.rs has {len(fields)} fields: {fields}"
    lines = [f'_Static_assert(offsetof(ncclConfig_t, {name}) == {at}, "{name}");' for name, at in head.items()]
    for name, at, since in fields:
        lines += [f"#if NCCL_VERSION_CODE >= {since}", f'_Static_assert(offsetof(ncclConfig_t, {name}) == {at}, "{name}");', "#endif"]
    lines += [
        "#if NCCL_VERSION_CODE >= 22700", f'_Static_assert(sizeof(ncclConfig_t) >= {size}, "our size");', "#endif",
        "#if NCCL_VERSION_CODE < 22800 && NCCL_VERSION_CODE >= 22700",
        f'_Static_assert(sizeof(ncclConfig_t) == {size}, "our size");', "#endif", "#if NCCL_VERSION_CODE >= 23200",
        f'_Static_assert(offsetof(ncclConfig_t, nvlsHostMode) == {nvls_mode} && sizeof(ncclConfig_t) >= {newest}, "nvlsHostMode");',
        "#endif"
    ]
    return "\n".join(lines) + "\n"


@pytest.fixture
def libcuda(programs):
    """The folder of a CUDA driver that only counts."""
    return library(programs, "libcuda.so.1", ["cuda.c"]).parent


def whole(folder, scratch):
    return folder / "lib/libnccl.so.2"


def cut(folder, scratch):
    """The library as tests/gpu/pack.sh packs it: without the code of other GPUs."""
    run(sys.executable, "tests/gpu/cut_nccl.py", folder / "lib/libnccl.so.2", scratch / "cut.so", "90")
    run("strip", scratch / "cut.so")
    return scratch / "cut.so"


@pytest.mark.parametrize("library", [whole, cut])
@pytest.mark.parametrize("pin", [pin for pin in RELEASES if is_there(pin) or pin == NCCL_WHEEL])
def test_release(pin, library, libcuda, tmp_path):
    folder = nccl_wheel(pin)
    path = library(folder, tmp_path)
    (tmp_path / "layout.h").write_text(layout())
    includes = [
        f"-I{tmp_path}", f"-I{ROOT}/include", f"-I{ROOT}/tests/c",
        *(f"-isystem{path}" for path in (folder / "include", *cuda_headers()))
    ]
    run(CC, *FLAGS, *includes, "tests/nccl/wheel.c", *LINK, "-o", tmp_path / "wheel")
    for how, libraries in (("none", ""), ("driver", libcuda)):
        variables = environment(LD_LIBRARY_PATH=libraries, CUDA_VERSION="11040", NCCL_DEBUG="", DM_CCL_LIBRARY="", VIRTUAL_ENV="")
        run(tmp_path / "wheel", path, how, env=variables)
