#!/usr/bin/env python3
"""Writes the outputs quoted in docs/tutorial.md anew. tests/test_tutorial.py checks that they are
what the commands print."""

import re
import sys
import tempfile
from pathlib import Path

from support.paths import ROOT, SCRATCH
from support.processes import environment, run
from tool_page import blocks, commands, with_outputs

PAGE = ROOT / "docs/tutorial.md"
# The folder that the page makes for the reader, in the root of the repository.
FOLDER = "target/tutorial"
END = "---- end of command"


def programs(text):
    """name -> text of the files that the page has the reader save."""
    return dict(re.findall(r"[Ss]ave [^`\n]*as `([\w.]+)`:\n\n```\w+\n(.*?)^```", text, re.M | re.S))


def printed(text, folder):
    """Runs all commands of the page one after another in one shell, as a reader does, and gives the
    output of each. `folder` takes the place of the folder that the page makes."""
    for name, program in programs(text).items():
        (folder / name).write_text(program)
    asked = [command.removeprefix("$ ") for block in blocks(text) for command, _ in commands(block)]
    script = "".join(f"{command}\necho '{END}' $?\n" for command in asked).replace(FOLDER, str(folder))
    # The jobserver of a make above would only bring warnings.
    env = environment(without=["DM_", "MAKEFLAGS", "MFLAGS", "MAKELEVEL", "NO_COLOR"])
    out = run("bash", "-c", script, cwd=ROOT, env=env, timeout=800, merged=True).stdout
    outputs = re.split(rf"^{END} (\d+)\n", out, flags=re.M)
    assert len(outputs) == 2 * len(asked) + 1, out
    failed = [f"{command}\n{text}" for command, text, code in zip(asked, outputs[::2], outputs[1::2]) if code != "0"]
    assert not failed, "\n".join(failed)
    return outputs[:-1:2]


def main():
    text = PAGE.read_text()
    SCRATCH.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=SCRATCH) as folder:
        outputs = [output.rstrip() for output in printed(text, Path(folder))]
    PAGE.write_text(with_outputs(text, outputs))


if __name__ == "__main__":
    sys.exit(main())
