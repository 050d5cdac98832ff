"""docs/guide and docs/threads.md: the code on a page is that of its program, and the program
prints what the page shows. Each is built with all warnings as errors and run on as many
processes as the page says. A program checks its own results and says so by its exit code."""

import re
import shlex
import sys

import pytest

from support.paths import LIBRARY, ROOT, STRICT, TOOL
from support.processes import environment, run

LANGUAGES = {".cpp": "cpp", ".c": "c", ".py": "python"}
PAGES = [page for page in sorted((ROOT / "docs/guide").glob("*.md")) if page.name != "README.md"] + [ROOT / "docs/threads.md"]


def source_of(page):
    """The program that a page names."""
    named = re.search(r"hole (?:program|of it): \[(examples/guide/[\w.]+)\]", page.read_text())
    assert named, f"{page.name} names no program"
    return ROOT / named.group(1)


@pytest.fixture
def runnable(programs):
    """Gives a quoted command with this tree's tool, the program as it is built here, and this
    interpreter."""
    def command(text, source):
        words = shlex.split(text)
        assert words[:2] == ["devicemesh", "run"], text
        make = programs.cpp if source.suffix == ".cpp" else programs.c
        named = {
            f"target/examples/guide/{source.stem}": lambda: make(source.relative_to(
                ROOT), *STRICT, name=f"guide-{source.stem}"), "python3": lambda: sys.executable
        }
        return [TOOL, *(named[word]() if word in named else word for word in words[1:])]
    return command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_quotes_its_program(page):
    text, source = page.read_text(), source_of(page)
    program = source.read_text()
    blocks = re.findall(rf"^```{LANGUAGES[source.suffix]}\n(.*?)^```", text, re.M | re.S)
    assert blocks, f"{page.name} quotes nothing of {source.name}"
    for block in blocks:
        assert block in program, f"{page.name} quotes what is not in {source.name}:\n{block}"


@pytest.mark.parametrize("page", [page if page.stem == "hsdp" else pytest.param(page, marks=pytest.mark.long) for page in PAGES],
                         ids=lambda page: page.stem)
def test_output_of_the_program(runnable, page):
    text, source = page.read_text(), source_of(page)
    shown = re.findall(r"^```console\n\$ ([^\n]+)\n(.*?)^```", text, re.M | re.S)
    assert shown, f"{page.name} shows no output"
    variables = environment(PYTHONPATH=ROOT / "bindings/python", DM_LIBRARY=LIBRARY / "libdevicemesh.so")
    for command, expected in shown:
        assert run(*runnable(command, source), env=variables).stdout == expected, command


def test_each_program_has_a_page():
    there = {path for path in (ROOT / "examples/guide").iterdir() if path.suffix in LANGUAGES}
    assert {source_of(page) for page in PAGES} == there
