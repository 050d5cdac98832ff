#!/usr/bin/env python3
"""Names the lines of comments and docstrings in tests/ and benches/ that are longer than 100
columns. The tests in tests/interop may have longer lines, which are rows of docs/interop.md."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
found = []
for path in sorted([*ROOT.glob("tests/**/*.py"), *ROOT.glob("benches/**/*.py")]):
    lines = path.read_text().splitlines()
    prose = {number for number, line in enumerate(lines, 1) if line.lstrip().startswith("# ")}
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            prose.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    long = {number: len(lines[number - 1]) for number in sorted(prose) if len(lines[number - 1]) > 100}
    if not path.match("tests/interop/test_*.py"):
        found += [f"{path.relative_to(ROOT)}:{number} has {columns} columns" for number, columns in long.items()]
raise SystemExit("\n".join(found) or None)
