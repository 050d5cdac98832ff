"""The pieces of C on pages that show no whole program compile with the header. What they use from
the program around them is declared here. (docs/mesh.md, docs/guide, docs/threads.md and README.md
have tests that run theirs.)"""

import re

import pytest

from support.paths import CC, ROOT
from support.processes import run

# The declarations that the program around a page's pieces has made.
AROUND = {
    "launchers.md": "static dm_world *world;",
    "events.md": "extern const dm_mesh *my_mesh;\nextern dm_events *my_events;",
    "log.md": "static FILE *my_file;",
    "nccl.md": "void ncclAllReduce(void);",
}


@pytest.mark.parametrize("page", AROUND)
def test_pieces_of_c_compile(page, tmp_path):
    pieces = re.findall(r"^```c\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.M | re.S)
    assert pieces, f"{page} has no C any more"
    for piece in pieces:
        # Functions stand first, and statements follow the last of them.
        functions, statements = re.fullmatch(r"((?:.*^}\n)?)(.*)", piece, re.M | re.S).groups()
        source = tmp_path / "piece.c"
        source.write_text(f"#include <devicemesh.h>\n#include <stdio.h>\n#include <string.h>\n{AROUND[page]}\n"
                          f"{functions}\nint main(void)\n{{\n{statements}\nreturn 0;\n}}\n")
        run(CC, "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter", "-fsyntax-only", f"-I{ROOT}/include", source)
