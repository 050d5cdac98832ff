#!/usr/bin/env python3
"""The JAX package on 8 ranks and two dimensions, examples/jax_dp.py, its types, and the wheel used from elsewhere. The rest is in test_jax.py."""

import re
import sys
import sysconfig
import tempfile
from pathlib import Path

from test_jax import COMPILED, LIBRARY, PACKAGE, ROOT, TOOL, on_ranks, prepared, run, unit_tests


def types(python):
    print(run(python, "-m", "mypy", "--cache-dir", ROOT / "target/jax/mypy", cwd=PACKAGE, MYPYPATH=str(ROOT / "bindings/python")).strip(), flush=True)


def example(python):
    for ranks, epochs in ((4, 20), (8, 3)):
        output = on_ranks(python, ranks, ROOT / "examples/jax_dp.py", "--check", "--epochs", epochs, **COMPILED)
        assert re.search(r"check: one process gets the same losses up to \S+ relative", output), output
        assert epochs < 20 or re.search(r"test accuracy (9[0-9]|100)\.\d+ %", output), output
        print(f"examples/jax_dp.py on {ranks} ranks: {output.splitlines()[-1].split('check: ')[1]}", flush=True)


def wheel(python):
    """The wheel, unpacked elsewhere: it finds its handlers, for any Python of this platform."""
    with tempfile.TemporaryDirectory() as folder:
        # The build backend is in the environment, which saves fetching it; the headers are those that were fetched.
        run(python, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, PACKAGE, cwd=folder)
        (made,) = Path(folder).glob("*.whl")
        machine = re.sub(r"[-.]", "_", sysconfig.get_platform())
        assert re.fullmatch(rf"devicemesh_jax-\d+\.\d+\.\d+-py3-none-{machine}\.whl", made.name), made.name
        run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target", Path(folder) / "site", made, cwd=folder)
        clean = {"PYTHONPATH": f"{ROOT / 'bindings/python'}:{folder}/site", "DM_LIBRARY": str(LIBRARY / "libdevicemesh.so")}
        where = run(python, "-c", "import devicemesh_jax._native as n; print(n.library._name)", cwd=folder, **clean).strip()
        assert where == f"{folder}/site/devicemesh_jax/_native/libdevicemesh_jax.so", where
        output = run(TOOL, "run", "-n", 2, "--", python, ROOT / "examples/jax_dp.py", "--epochs", 1, "--check", cwd=folder, **clean)
        assert "check: one process gets the same losses" in output, output
        print(f"wheel: {made.name}, {made.stat().st_size / 1e3:.0f} kB", flush=True)


def main():
    python = prepared()
    types(python)
    unit_tests(python, 8, "along inner", "along outer", "Values")
    example(python)
    wheel(python)
    return 0


if __name__ == "__main__":
    sys.exit(main())
