#!/usr/bin/env python3
"""The example of docs/binding.md on four ranks: the library through ctypes, with no binding."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(os.environ.get("DM_ROOT", Path(__file__).resolve().parent.parent))
LIBRARY = Path(os.environ.get("DM_LIB_DIR", ROOT / "target/release"))
SCRATCH = Path(os.environ.get("DM_TMP", ROOT / "target/tests"))

CHECKS = """
assert list(values) == [2.0, 4.0, 6.0], list(values)
text, length = ctypes.create_string_buffer(100), ctypes.c_size_t()
check(lib.dm_describe(mesh, text, ctypes.c_size_t(100), ctypes.byref(length)))
assert text.value == b"DeviceMesh((dp=2, tp=2), 'cpu', stride=(2, 1))" and length.value == len(text.value) + 1
try:
    check(lib.dm_get_comm(ctypes.c_void_p(12345), b"tp", ctypes.byref(ctypes.c_void_p())))
    raise AssertionError("a made-up handle was taken")
except RuntimeError as error:
    assert "not a live dm_mesh" in str(error), error
print("fine")
"""


def main():
    page = (ROOT / "docs/binding.md").read_text()
    example = re.search(r"```python\n(.*?)```", page, re.S).group(1)
    example = example.replace('"libdevicemesh.so"', repr(str(LIBRARY / "libdevicemesh.so")))
    before, after = example.split("check(lib.dm_finalize(mesh))")
    SCRATCH.mkdir(parents=True, exist_ok=True)
    program = SCRATCH / "ctypes_example.py"
    program.write_text(before + CHECKS + "check(lib.dm_finalize(mesh))" + after)
    done = subprocess.run([LIBRARY / "devicemesh", "run", "-n", "4", "--", sys.executable, program],
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    # Python writes the text and the line break apart, so lines of different ranks may run into each other.
    assert done.stdout.count("fine") == 4, done.stdout
    print("4 ranks through ctypes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
