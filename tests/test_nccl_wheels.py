#!/usr/bin/env python3
"""NVIDIA's own NCCL through our loader, on a machine without a device: versions, symbols, ids, the errors without a driver, and the layout of
ncclConfig_t by the compiler (tests/nccl/wheel.c). The oldest release is fetched by every `make test` for its header; the others (170 to 320 MB each)
only by `make test-nccl`, and tested by `make test` where they are there.

    tests/test_nccl_wheels.py [--fetch]   with --fetch, or DM_NCCL_WHEELS=fetch: all releases
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(os.environ.get("DM_ROOT", Path(__file__).resolve().parent.parent))
LIBRARY = Path(os.environ.get("DM_LIB_DIR", ROOT / "target/release"))
SCRATCH = Path(os.environ.get("DM_TMP", ROOT / "target/tests")) / "nccl-wheels"
# The oldest, one before and one after ncclCommInitRankScalable, and the newest when this was written.
RELEASES = ["nvidia-nccl-cu12==2.18.3", "nvidia-nccl-cu12==2.22.3", "nvidia-nccl-cu12==2.27.7", "nvidia-nccl-cu13==2.32.3"]
CC = [os.environ.get("CC", "cc"), "-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-Werror"]

sys.path.insert(1, str(Path(__file__).resolve().parent))
from support import pinned  # noqa: E402

specification = importlib.util.spec_from_file_location("suite", ROOT / "tests/run.py")
suite = importlib.util.module_from_spec(specification)
specification.loader.exec_module(suite)


def layout(header):
    """Static assertions that ncclConfig_t lies in that nccl.h as src/ccl/config.rs says."""
    source = (ROOT / "src/ccl/config.rs").read_text()
    fields = [(name, int(at), int(since.replace("_", ""))) for name, at, since in re.findall(r'\("(\w+)", (\d+), ([\d_]+)\)', source)]
    size = int(re.search(r"^const SIZE: usize = (\d+);", source, re.M).group(1))
    head = {"size": 0, **{name: int(re.search(rf"^const AT_{name.upper()}: usize = (\d+);", source, re.M).group(1)) for name in ("magic", "version")}}
    if len(fields) != 12:
        raise suite.Failure(f"src/ccl/config.rs has {len(fields)} fields: {fields}")
    lines = [f'_Static_assert(offsetof(ncclConfig_t, {name}) == {at}, "{name}");' for name, at in head.items()]
    for name, at, since in fields:
        lines += [f"#if NCCL_VERSION_CODE >= {since}", f'_Static_assert(offsetof(ncclConfig_t, {name}) == {at}, "{name}");', "#endif"]
    lines += ["#if NCCL_VERSION_CODE >= 22700", f'_Static_assert(sizeof(ncclConfig_t) >= {size}, "our size");', "#endif",
              "#if NCCL_VERSION_CODE < 22800 && NCCL_VERSION_CODE >= 22700", f'_Static_assert(sizeof(ncclConfig_t) == {size}, "our size");', "#endif"]
    header.write_text("\n".join(lines) + "\n")


def one(pin, libcuda):
    folder = suite.nccl_wheel(pin)
    scratch = SCRATCH / pin.replace("==", "-")
    scratch.mkdir(parents=True, exist_ok=True)
    layout(scratch / "layout.h")
    program = scratch / "wheel"
    includes = [f"-I{scratch}", f"-I{ROOT}/include", f"-I{ROOT}/tests/c", f"-isystem{folder}/include"]
    suite.run([*CC, *includes, *(f"-isystem{path}" for path in suite.cuda_headers()), ROOT / "tests/nccl/wheel.c", f"-L{LIBRARY}", "-ldevicemesh",
               f"-Wl,-rpath,{LIBRARY}", "-o", program])
    said = []
    for how, libraries in (("none", ""), ("driver", str(libcuda.parent))):
        environment = {"LD_LIBRARY_PATH": libraries, "CUDA_VERSION": "11040", "NCCL_DEBUG": "", "DM_CCL_LIBRARY": "", "VIRTUAL_ENV": ""}
        said.append(suite.run([program, folder / "lib/libnccl.so.2", how], env=environment, timeout=120))
    return "".join(said)


def main():
    fetch = "--fetch" in sys.argv or os.environ.get("DM_NCCL_WHEELS") == "fetch"
    SCRATCH.mkdir(parents=True, exist_ok=True)
    libcuda = SCRATCH / "cuda/libcuda.so.1"
    libcuda.parent.mkdir(exist_ok=True)
    subprocess.run([*CC, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", ROOT / "tests/nccl/cuda.c", "-o", libcuda], check=True)
    failed, left_out = [], []
    for pin in RELEASES:
        there = (suite.TARGET / "wheels" / pin.replace("==", "-") / "complete").exists()
        if not (there or fetch or pin == pinned.NCCL_WHEEL):
            left_out.append(pin)
            continue
        try:
            print(f"ok   {pin}\n{one(pin, libcuda)}", flush=True)
        except suite.Skip as why:
            print(f"cannot fetch {pin}: {why}")
            return 77
        except suite.Failure as failure:
            failed.append(pin)
            print(f"FAIL {pin}\n{failure}", flush=True)
    print(f"failed: {failed}" if failed else "all well" + (f"; not fetched (make test-nccl does): {', '.join(left_out)}" if left_out else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
