"""docs/mesh.md is right: every `devicemesh show` in it gives the output that is quoted,
every picture is what its command draws, the C code runs in an offline world, and the Python hash
is the tool's. tests/mesh_page.py writes outputs and pictures anew."""

import json
import re

import pytest

from mesh_page import PAGE, PICTURES, drawing_commands, quoted, show
from support.paths import ROOT
from support.processes import run
from trace_picture import PICTURE as TRACE

TEXT = PAGE.read_text()
DRAWINGS = drawing_commands(TEXT)

HARNESS = """
#undef NDEBUG
#include <devicemesh.h>
#include <assert.h>
#include <stdio.h>
#include <string.h>

static void check_ranks(const dm_mesh *view, const int32_t *expected, size_t count)
{
  int32_t ranks[64];
  size_t length = 0;
  assert(dm_ranks(view, ranks, 64, &length) == DM_STATUS_OK && length == count);
  assert(memcmp(ranks, expected, count * sizeof(*ranks)) == 0);
}
/* Asserts that a view has these ranks, in this order. */
#define RANKS_ARE(view, ...) \\
  check_ranks(view, (const int32_t[]){__VA_ARGS__}, sizeof((const int32_t[]){__VA_ARGS__}) / sizeof(int32_t))
"""


@pytest.mark.parametrize("command, output", quoted(TEXT), ids=[command for command, _ in quoted(TEXT)])
def test_quoted_output(command, output):
    assert show(command) == output, "make pictures writes the outputs anew"


@pytest.mark.parametrize("path, command", DRAWINGS, ids=[path.name for path, _ in DRAWINGS])
def test_picture(path, command, tmp_path):
    show(command, tmp_path / path.name)
    assert path.read_bytes() == (tmp_path / path.name).read_bytes(), "make pictures draws it anew"


def test_each_picture_is_made_once_and_used():
    made, there = sorted(path.name for path, _ in DRAWINGS), sorted(path.name for path in PICTURES.glob("*") if path != TRACE)
    used = set(re.findall(r"\]\((?:docs/)?pictures/([^)]+)\)", TEXT + (ROOT / "README.md").read_text()))
    assert made == there == sorted(used)


def test_c_code(programs):
    """The blocks in one program: the first declares what the others use, each of which has names
    of its own."""
    first, *others = re.findall(r"^```c\n(.*?)^```", TEXT, flags=re.M | re.S)
    body = first + "".join(f"{{\n{block}}}\n" for block in others)
    source = programs.folder / "mesh_page.c"
    source.write_text(f"{HARNESS}\nint main(void)\n{{\n{body}\nprintf(\"done\\n\");\nreturn 0;\n}}\n")
    assert run(programs.c(source, "-Wall", "-Wextra", "-Werror")).stdout == "done\n"


@pytest.fixture(scope="module")
def mesh_hash():
    """The page's function in Python."""
    names = {}
    exec(re.search(r"^```python\n(.*?)^```", TEXT, flags=re.M | re.S).group(1), names)
    return names["mesh_hash"]


@pytest.mark.parametrize("mesh", [
    "2,2,2 dp,cp,tp", "4,2 a,b --device-type cpu", "2,2 dp,tp --ranks 7,5,3,1", "2,2,2 dp,cp,tp --rank 6 --slice tp,dp",
    "4,2 pp,tp --rank 6 --range pp=2:2", "1 x", "2,3 größe,tp"
])
def test_hash_in_python(mesh_hash, mesh):
    told = json.loads(show(f"devicemesh show {mesh} --json"))
    dims = [(dim["name"], dim["size"]) for dim in told["dimensions"]]
    assert f"{mesh_hash(told['device_type'], dims, told['ranks']):#018x}" == told["hash"]
