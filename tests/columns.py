#!/usr/bin/env python3
"""Names the lines of comments and docstrings that are longer than 100 columns: those of the Python
files in tests/ and benches/, and the comments of all Rust files. Rows of tables and examples may be
longer, and so may the lines of tests in tests/interop, which are rows of docs/interop.md."""

import ast
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def python_prose(path, lines):
    if path.match("tests/interop/test_*.py"):
        return set()
    prose = {number for number, line in enumerate(lines, 1) if line.lstrip().startswith("# ")}
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            prose.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return prose


def rust_prose(lines):
    """Leaves out rows of tables, the lines between ``` and those that are indented as examples."""
    prose, in_example = set(), False
    for number, line in enumerate(lines, 1):
        comment = re.match(r"\s*//[/!]?(.*)", line)
        if comment and comment[1].startswith(" ```"):
            in_example = not in_example
        elif comment and not in_example and not comment[1].startswith((" |", "     ", " word ", " target/")):
            prose.add(number)
    return prose


found = []
files = subprocess.run(["git", "ls-files", "tests/*.py", "benches/*.py", "*.rs"], cwd=ROOT, check=True, capture_output=True)
for name in files.stdout.decode().split():
    lines = (ROOT / name).read_text().splitlines()
    prose = rust_prose(lines) if name.endswith(".rs") else python_prose(ROOT / name, lines)
    long = {number: len(lines[number - 1]) for number in sorted(prose) if len(lines[number - 1]) > 100}
    found += [f"{name}:{number} has {columns} columns" for number, columns in long.items()]
raise SystemExit("\n".join(found) or None)
