#!/usr/bin/env python3
"""The JAX package on 4 ranks, against real JAX: every collective, order, errors, ranks that are lost, beside jax.distributed. test_jax_8_ranks.py does the rest.

DM_JAX_VERSION is another JAX than the pinned one, for example 0.7.2, the oldest that is supported: the handlers are the same.
"""

import fcntl
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(os.environ.get("DM_ROOT", Path(__file__).resolve().parent.parent))
LIBRARY = Path(os.environ.get("DM_LIB_DIR", ROOT / "target/release"))
PACKAGE = ROOT / "bindings/jax"
TOOL = LIBRARY / "devicemesh"
# The last JAX for Python 3.11.
JAX = os.environ.get("DM_JAX_VERSION") or "0.10.2"
PINNED = [f"jax=={JAX}", f"jaxlib=={JAX}", "numpy==2.4.6", "scipy==1.17.1", "ml_dtypes==0.5.4", "opt_einsum==3.4.0", "setuptools==80.9.0", "mypy==1.18.2"]
# What XLA has compiled, for the next run: on a machine that has run these tests before they take about half the processor's time. What a handler is asked
# is decided when a program runs, so one that was loaded is no lesser test.
COMPILED = {"JAX_COMPILATION_CACHE_DIR": str(ROOT / f"target/jax/compiled-{JAX}"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
HANDLERS = ROOT / "target/jax/libdevicemesh_jax.so"
SYSTEM = {"libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6", "libdl.so.2", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
SKIPPED = 77


def skip(why):
    print(why)
    sys.exit(SKIPPED)


def run(*command, cwd=PACKAGE / "tests", timeout=500, **environment):
    done = subprocess.run([str(part) for part in command], cwd=cwd, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment}, timeout=timeout,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, f"$ {' '.join(map(str, command))}\n{done.stdout}\nexit code {done.returncode}"
    return done.stdout


def environment():
    """An interpreter with JAX, fetched once (150 MB)."""
    if sys.version_info < (3, 11):
        skip(f"JAX {JAX} needs Python 3.11, this is {sys.version.split()[0]}")
    folder = ROOT / f"target/jax/venv-{JAX}"
    python, complete = folder / "bin/python", folder / "complete"
    if not complete.exists() or complete.read_text() != "\n".join(PINNED):
        shutil.rmtree(folder, ignore_errors=True)
        made = subprocess.run([sys.executable, "-m", "venv", folder], capture_output=True, text=True)
        if made.returncode == 0:
            made = subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PINNED], capture_output=True, text=True, timeout=400)
        if made.returncode != 0:
            print(made.stdout + made.stderr)
            skip(f"no environment with JAX could be made (nothing is cached in {folder}): {'; '.join(PINNED)}")
        complete.write_text("\n".join(PINNED))
    return python


def handlers(python):
    """The library of handlers needs nothing of XLA or Python, and exports only what is ours."""
    headers = ROOT / "target/jax/headers-0.7.2/xla"
    fetched = subprocess.run([python, PACKAGE / "build_handlers.py", HANDLERS], capture_output=True, text=True, timeout=400)
    if fetched.returncode != 0 and not headers.exists():
        print(fetched.stdout + fetched.stderr)
        skip("the headers of jaxlib 0.7.2 could not be fetched")
    assert fetched.returncode == 0, fetched.stdout + fetched.stderr
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", run("readelf", "-d", HANDLERS)))
    assert needed <= SYSTEM, f"{HANDLERS.name} needs {sorted(needed)}"
    exported = {line.split()[-1] for line in run("nm", "-D", "--defined-only", HANDLERS).splitlines() if " T " in line}
    source = (PACKAGE / "src/handlers.cpp").read_text()
    ours = {f"devicemesh_{name}" for name in re.findall(r"^HANDLER\((\w+),", source, re.M)} | {"devicemesh_jax_connect", "devicemesh_jax_group"}
    assert exported == ours and len(ours) == 9, exported ^ ours


def on_ranks(python, count, *arguments, **environment):
    paths = f"{ROOT / 'bindings/python'}:{PACKAGE}"
    return run(TOOL, "run", "-n", count, "--prefix", "--", python, *arguments, PYTHONPATH=paths,
               DM_LIBRARY=str(LIBRARY / "libdevicemesh.so"), DM_JAX_LIBRARY=str(HANDLERS), **environment)


def unit_tests(python, ranks, *selected):
    # One start for all, as JAX is imported by every rank; and not every test runs on 8.
    chosen = [f"-k={name}" for name in (*selected, "Order", "FiniteDifferences")]
    output = on_ranks(python, ranks, "-m", "unittest", *chosen, "test_collectives", "test_errors", "test_order", "test_finite_differences", **COMPILED)
    (count,) = re.findall(r"^\[rank 0\] Ran (\d+) tests", output, re.M)
    assert int(count) > 25, output
    print(f"{count} tests on {ranks} ranks", flush=True)


def lost(python):
    for how, leaves in (("died", 3), ("aborted", 4)):
        output = on_ranks(python, 4, "lost.py", how, timeout=120)
        assert output.count("goes on") == leaves, output
        assert "Traceback" not in output, f"the end of the processes is quiet\n{output}"
        first = max(float(number) for number in re.findall(r"after (\d+\.\d+) s", output))
        print(f"a rank that {how if how == 'died' else 'is aborted'}: no other hangs, the last error after {first:.2f} s", flush=True)


def distributed(python):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    output = on_ranks(python, 4, "distributed.py", JAX_COORDINATOR=address, timeout=200)
    assert output.count("fine") == 4, output
    print("jax.distributed: XLA's collectives and ours agree on mesh_to_jax(mesh)", flush=True)


def prepared():
    """The interpreter, with the handlers built; one process at a time makes them."""
    (ROOT / "target/jax").mkdir(parents=True, exist_ok=True)
    with open(ROOT / "target/jax/lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        python = environment()
        handlers(python)
    return python


def main():
    python = prepared()
    lost(python)
    distributed(python)
    unit_tests(python, 4, "along all", "Values", "Errors")
    return 0


if __name__ == "__main__":
    sys.exit(main())
