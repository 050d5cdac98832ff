"""Every piece of C on a page compiles with the header, or is a part of a program, or another test
runs it. What the pieces use from the program around them is declared here."""

import re

import pytest

from support.paths import CC, ROOT
from support.processes import run
from test_links import pages

PIECE = re.compile(r"^```c\n(.*?)^```", re.M | re.S)
# The tests that look at the C of these pages.
ELSEWHERE = {"README.md": "test_readme.py", "docs/mesh.md": "test_mesh_page.py", "docs/site/index.md": "test_site.py",
             **{f"docs/guide/{path.name}": "test_guide.py" for path in (ROOT / "docs/guide").glob("*.md")}}
# The programs whose functions these pages quote.
QUOTED = {"docs/reliability.md": ["examples/survive.c", "examples/recover.c"]}
# The declarations that the program around a page's pieces has made.
AROUND = {
    "docs/launchers.md": "static dm_world *world;",
    "docs/events.md": "extern const dm_mesh *my_mesh;\nextern dm_events *my_events;",
    "docs/log.md": "static FILE *my_file;",
    "docs/nccl.md": "void ncclAllReduce(void);",
}
WITH_C = {str(page.relative_to(ROOT)): PIECE.findall(page.read_text()) for page in pages() if PIECE.search(page.read_text())}


def test_pages_that_are_named_have_c():
    assert {*AROUND, *QUOTED} <= set(WITH_C)


@pytest.mark.parametrize("page", QUOTED)
def test_quoted_c_is_in_its_program(page):
    programs = [(ROOT / name).read_text() for name in QUOTED[page]]
    for piece in WITH_C[page]:
        assert any(piece in program for program in programs), f"{page} quotes what is in none of {QUOTED[page]}:\n{piece}"


@pytest.mark.parametrize("page", sorted({*WITH_C} - {*ELSEWHERE, *QUOTED}))
def test_pieces_of_c_compile(page, tmp_path):
    for piece in WITH_C[page]:
        # Functions stand first, and statements follow the last of them.
        functions, statements = re.fullmatch(r"((?:.*^}\n)?)(.*)", piece, re.M | re.S).groups()
        source = tmp_path / "piece.c"
        source.write_text(f"#include <devicemesh.h>\n#include <stdio.h>\n#include <string.h>\n{AROUND.get(page, '')}\n"
                          f"{functions}\nint main(void)\n{{\n{statements}\nreturn 0;\n}}\n")
        run(CC, "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter", "-fsyntax-only", f"-I{ROOT}/include", source)
