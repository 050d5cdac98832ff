"""Runs the models of tests/memory_order: the lock-free protocols of the product's own source, under
loom, with weak memory.

Each model must hold. Then each memory order of the protocols is weakened once, and a model must
fail. Each weakened order is a planted defect. The gate compares what it has found with the tables
of docs/memory-order.md, and fails if a table has changed. With WRITE_TABLES=1 it writes the
tables."""

import difflib
import os
import re

from harness import ROOT, TARGET, Failure, run

PACKAGE = ROOT / "tests/memory_order/Cargo.toml"
FOLDER = TARGET / "memory_order"
PAGE = ROOT / "docs/memory-order.md"
WRITE = "WRITE_TABLES"
# Seconds for one program: for all of its models, as the source stands and with each order weakened.
# A program takes less than two minutes where the machine has nothing else to do.
LONGEST = 2400


def gate():
    run(["cargo", "build", "--quiet", "--locked", "--manifest-path", PACKAGE, "--target-dir", FOLDER], timeout=1800)
    before = page = PAGE.read_text()
    models = orders = 0
    for program in ("engine", "handles"):
        output = run([FOLDER / "debug" / program], timeout=LONGEST)
        lines = [line for line in output.splitlines() if line.startswith("| ")]
        held = output.count(" holds in ")
        if not held:
            raise Failure(f"{program} has run no model:\n{output}")
        without = [name for name in files_with_orders(program) if not any(line.startswith(f"| {name} |") for line in lines)]
        if without:
            raise Failure(f"{program} has no row for the memory orders of {', '.join(without)}:\n{output}")
        models += held
        orders += sum("no model reaches it" not in line for line in lines)
        rows = "".join(f"{line}\n" for line in lines)
        marks = f"(<!-- what {program} finds -->\n(?:\\|.*\n){{2}})(?:\\|.*\n)*(<!-- end -->)"
        page, found = re.subn(marks, lambda mark, rows=rows: mark[1] + rows + mark[2], page)
        if found != 1:
            raise Failure(f"{PAGE.name} has no place for the table of {program}")
    name = str(PAGE.relative_to(ROOT))
    if page != before and os.environ.get(WRITE) != "1":
        lines = [text.splitlines(keepends=True) for text in (before, page)]
        difference = "".join(difflib.unified_diff(*lines, name, f"{name}, as the gate finds it", n=0))
        raise Failure(f"{difference}the tables of {name} have changed: read the difference, and run {WRITE}=1 make gates ARGS=loom "
                      "to write them")
    if page != before:
        PAGE.write_text(page)
    return f"{models} models hold, and {orders} orders were weakened"


def files_with_orders(program):
    """The product's files that the program includes and in which memory orders are stronger than
    relaxed, as the tables name them."""
    included, found = 0, []
    for source in sorted((PACKAGE.parent / "src" / program).rglob("*.rs")):
        for name in re.findall(r'^\s*#\[path = "(.+)"\]$', source.read_text(), re.M):
            included += 1
            file = (source.parent / name).resolve()
            product = file.read_text().split("#[cfg(test)]\nmod tests {")[0]
            code = "\n".join(line.split("//")[0] for line in product.splitlines() if not line.startswith("use "))
            if re.search(r"\b(Acquire|Release|AcqRel|SeqCst)\b", code):
                found.append(str(file).rsplit("src/", 1)[1])
    if not found:
        raise Failure(f"{program} includes {included} files of the product, and none has a memory order")
    return found
