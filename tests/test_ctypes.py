"""The example of docs/binding.md on four ranks: the library through ctypes, with no binding."""

import re
import sys

from support.installing import SOVERSION
from support.paths import LIBRARY, ROOT
from support.processes import launch

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


def test_example_of_the_page(tmp_path):
    example = re.search(r"```python\n(.*?)```", (ROOT / "docs/binding.md").read_text(), re.S).group(1)
    example = example.replace(f'"libdevicemesh.so.{SOVERSION}"', repr(str(LIBRARY / "libdevicemesh.so")))
    before, after = example.split("check(lib.dm_finalize(mesh, None))")
    program = tmp_path / "example.py"
    program.write_text(before + CHECKS + "check(lib.dm_finalize(mesh, None))" + after)
    # Python writes a text and its line break apart, so lines of different ranks may run into each
    # other.
    said = launch(4, sys.executable, program).stdout
    assert said.count("fine") == 4, said
