#!/usr/bin/env python3
"""`make pictures`: writes the outputs quoted in docs/mesh.md and the pictures of docs/pictures
anew. tests/test_mesh_page.py checks that they are what the tool prints and draws."""

import re
import shlex

from support.paths import ROOT, TOOL
from support.processes import environment, run
from tool_page import blocks, commands

PAGE = ROOT / "docs/mesh.md"
PICTURES = ROOT / "docs/pictures"
README_PICTURE = "devicemesh show 2,4 replicate,shard --rank 6 --hosts 2x4 --svg -o docs/pictures/readme.svg"


def show(command, output=None):
    """Runs a quoted `devicemesh show` and gives its output. `output` replaces the file that the
    command would write."""
    words = shlex.split(command)
    assert words[:2] == ["devicemesh", "show"], command
    words[0] = TOOL
    if output:
        words[words.index("-o") + 1] = output
    # A refused command line is quoted, too.
    done = run(*words, env=environment(without=["NO_COLOR"]), code=0 if output else None, timeout=60)
    return (done.stdout + done.stderr).rstrip()


def quoted(text):
    """The commands in console blocks and the outputs that the page has for them."""
    return [(command.removeprefix("$ "), output) for block in blocks(text) for command, output in commands(block)]


def drawing_commands(text):
    """The pictures' paths and the commands that draw them."""
    commands = [README_PICTURE, *re.findall(r"`(devicemesh show [^`]*-o docs/pictures/[^`]*)`", text)]
    return [(ROOT / shlex.split(command)[-1], command) for command in commands]


def main():
    text = PAGE.read_text()
    for command, output in quoted(text):
        text = text.replace(f"$ {command}\n{output}\n", f"$ {command}\n{show(command)}\n")
    PAGE.write_text(text)
    PICTURES.mkdir(exist_ok=True)
    for path, command in drawing_commands(text):
        show(command, path)


if __name__ == "__main__":
    main()
