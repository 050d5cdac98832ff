#!/usr/bin/env python3
"""docs/mesh.md says what is so: every `devicemesh show` in it gives the output that is quoted, every picture is what its command draws, the C code runs in
an offline world, and the Python hash is the tool's. `--update` writes pictures and quoted outputs anew (make pictures)."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(os.environ.get("DM_ROOT", Path(__file__).resolve().parent.parent))
LIBRARY = Path(os.environ.get("DM_LIB_DIR", ROOT / "target/release"))
SCRATCH = Path(os.environ.get("DM_TMP", ROOT / "target/tests"))
PAGE = ROOT / "docs/mesh.md"
PICTURES = ROOT / "docs/pictures"
README_PICTURE = "devicemesh show 2,4 replicate,shard --rank 6 --hosts 2x4 --svg -o docs/pictures/readme.svg"

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


def show(command, output=None):
    """What a quoted command prints, or writes to `output`."""
    words = shlex.split(command)
    assert words[:2] == ["devicemesh", "show"], command
    words[0] = str(LIBRARY / "devicemesh")
    if output:
        words[words.index("-o") + 1] = str(output)
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 or "-o" not in words, f"$ {command}\n{done.stderr}"
    return done.stdout + done.stderr


def quoted(text, update):
    """Every console block, with what its commands print now."""
    wrong, count = [], 0

    def block(match):
        nonlocal count
        out = ""
        for part in re.split(r"^(?=\$ )", match.group(1), flags=re.M):
            command, _, expected = part.partition("\n")
            if not command:
                continue
            printed = show(command.removeprefix("$ "))
            count += 1
            if printed.rstrip() != expected.rstrip():
                wrong.append(f"{command}\nexpected:\n{expected}\nprinted:\n{printed}")
            out += f"{command}\n{printed.rstrip()}\n"
        return f"```console\n{out}```"

    text = re.sub(r"^```console\n(.*?)^```", block, text, flags=re.M | re.S)
    assert update or not wrong, f"{len(wrong)} outputs differ (make pictures writes them anew)\n" + "\n".join(wrong)
    return text, count


def pictures(text, update):
    commands = [README_PICTURE, *re.findall(r"`(devicemesh show [^`]*-o docs/pictures/[^`]*)`", text)]
    made = {}
    for command in commands:
        path = PICTURES / Path(shlex.split(command)[-1]).name
        assert path.name not in made, f"{path.name} is made twice"
        made[path.name] = command
        new = path if update else SCRATCH / path.name
        show(command, new)
        assert path.exists() and new.read_bytes() == path.read_bytes(), f"{path} is not what `{command}` draws: make pictures"
    there = {path.name for path in PICTURES.glob("*")}
    used = set(re.findall(r"\]\((?:docs/)?pictures/([^)]+)\)", text + (ROOT / "README.md").read_text()))
    assert set(made) == there == used, f"made {sorted(made)}, there {sorted(there)}, used {sorted(used)}"
    return len(made)


def c_code(text):
    """The blocks in one program: the first declares what the others use, each of which has names of its own."""
    first, *others = re.findall(r"^```c\n(.*?)^```", text, flags=re.M | re.S)
    body = first + "".join(f"{{\n{block}}}\n" for block in others)
    source, program = SCRATCH / "mesh_page.c", SCRATCH / "mesh_page"
    source.write_text(f"{HARNESS}\nint main(void)\n{{\n{body}\nprintf(\"done\\n\");\nreturn 0;\n}}\n")
    compiler = os.environ.get("CC", "cc")
    build = [compiler, "-std=c11", "-g", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}/include", str(source), f"-L{LIBRARY}",
             "-ldevicemesh", f"-Wl,-rpath,{LIBRARY}", "-o", str(program)]
    for command in (build, [str(program)]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"$ {' '.join(command)}\n{done.stdout}{done.stderr}"
    assert done.stdout == "done\n", done.stdout
    return 1 + len(others)


def hashes(text):
    names = {}
    exec(re.search(r"^```python\n(.*?)^```", text, flags=re.M | re.S).group(1), names)
    meshes = ("2,2,2 dp,cp,tp", "4,2 a,b --device-type cpu", "2,2 dp,tp --ranks 7,5,3,1", "2,2,2 dp,cp,tp --rank 6 --slice tp,dp",
              "4,2 pp,tp --rank 6 --range pp=2:2", "1 x", "2,3 größe,tp")
    for mesh in meshes:
        told = json.loads(show(f"devicemesh show {mesh} --json"))
        dims = [(dim["name"], dim["size"]) for dim in told["dimensions"]]
        ours = names["mesh_hash"](told["device_type"], dims, told["ranks"])
        assert f"{ours:#018x}" == told["hash"], f"{mesh}: the page's hash is {ours:#018x}, the tool's {told['hash']}"
    return len(meshes)


def main():
    update = sys.argv[1:] == ["--update"]
    SCRATCH.mkdir(parents=True, exist_ok=True)
    PICTURES.mkdir(exist_ok=True)
    text = PAGE.read_text()
    text, outputs = quoted(text, update)
    if update:
        PAGE.write_text(text)
    drawn = pictures(text, update)
    print(f"{outputs} outputs, {drawn} pictures, {c_code(text)} blocks of C, {hashes(text)} hashes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
