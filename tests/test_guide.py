#!/usr/bin/env python3
"""docs/guide and docs/threads.md: the code on a page is that of its program, and the program prints what the page shows. Each is built with all warnings as errors and run on as many
processes as the page says; it checks its own results and says so by its exit code."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(os.environ.get("DM_ROOT", Path(__file__).resolve().parent.parent))
LIBRARY = Path(os.environ.get("DM_LIB_DIR", ROOT / "target/release"))
SCRATCH = Path(os.environ.get("DM_TMP", ROOT / "target/tests")) / "guide"
PAGES = ROOT / "docs/guide"
PROGRAMS = ROOT / "examples/guide"
LANGUAGES = {".cpp": "cpp", ".c": "c", ".py": "python"}


def build(source):
    compiler = {".cpp": [os.environ.get("CXX", "c++"), "-std=c++17"], ".c": [os.environ.get("CC", "cc"), "-std=c11"]}[source.suffix]
    program = SCRATCH / source.stem
    command = [*compiler, "-O2", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{ROOT}/include", str(source), f"-L{LIBRARY}", "-ldevicemesh",
               f"-Wl,-rpath,{LIBRARY}", "-pthread", "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, f"$ {' '.join(command)}\n{done.stderr}"
    return program


def runnable(command, source):
    """The quoted command, with this tree's tool, the program that was built here, and this interpreter."""
    words = shlex.split(command)
    assert words[:2] == ["devicemesh", "run"], command
    words[0] = str(LIBRARY / "devicemesh")
    named = {f"target/examples/guide/{source.stem}": lambda: str(build(source)), "python3": lambda: sys.executable}
    return [named[word]() if word in named else word for word in words]


def check(page):
    """What is on a page: (blocks of code, commands)."""
    text = page.read_text()
    named = re.search(r"hole (?:program|of it): \[(examples/guide/[\w.]+)\]", text)
    assert named, f"{page.name} names no program"
    source = ROOT / named.group(1)
    program = source.read_text()
    blocks = re.findall(rf"^```{LANGUAGES[source.suffix]}\n(.*?)^```", text, re.M | re.S)
    assert blocks, f"{page.name} quotes nothing of {source.name}"
    for block in blocks:
        assert block in program, f"{page.name} quotes what is not in {source.name}:\n{block}"

    shown = re.findall(r"^```console\n\$ ([^\n]+)\n(.*?)^```", text, re.M | re.S)
    assert shown, f"{page.name} shows no output"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "bindings/python"), "DM_LIBRARY": str(LIBRARY / "libdevicemesh.so")}
    for command, expected in shown:
        done = subprocess.run(runnable(command, source), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, f"$ {command}\n{done.stdout}{done.stderr}\nexit code {done.returncode}"
        assert done.stdout == expected, f"$ {command}\nthe page:\n{expected}\nthe program:\n{done.stdout}"
    return source, len(blocks), len(shown)


def main():
    SCRATCH.mkdir(parents=True, exist_ok=True)
    pages = [page for page in sorted(PAGES.glob("*.md")) if page.name != "README.md"] + [ROOT / "docs/threads.md"]
    checked = [check(page) for page in pages]
    sources = {source for source, _, _ in checked}
    there = {path for path in PROGRAMS.iterdir() if path.suffix in LANGUAGES}
    assert sources == there, f"programs without a page: {sorted(str(path) for path in there - sources)}"
    print(f"{len(checked)} pages, {sum(count for _, count, _ in checked)} blocks of code, {sum(count for _, _, count in checked)} outputs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
