"""``python -m devicemesh``: the tool devicemesh of the library, for example
``python -m devicemesh run -n 4 -- python train.py``."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Optional

HERE = Path(__file__).resolve().parent


def tool() -> Optional[str]:
    """The path of the tool: that of the wheel, that of the checkout with this file, or one on the
    PATH."""
    for path in (HERE / "_native/devicemesh", HERE.parent.parent.parent / "target/release/devicemesh"):
        if path.exists():
            return str(path)
    return shutil.which("devicemesh")


def main() -> None:
    program = tool()
    if program is None:
        sys.exit("devicemesh: the tool is neither in this package nor on the PATH")
    try:
        # The tool takes the place of this process, so signals reach it and the exit code is its
        # own.
        os.execv(program, ["devicemesh", *sys.argv[1:]])
    except OSError as error:
        sys.exit(f"devicemesh: {program}: {error.strerror}")


if __name__ == "__main__":
    main()
