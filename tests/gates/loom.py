"""Runs the models of tests/memory_order: the lock-free protocols of the product's own source, under
loom, with weak memory.

Each model must hold. Then each memory order of the protocols is weakened once, and a model must
fail. So the defects that this gate plants are all of these orders. The gate writes what it has found
into the tables of docs/memory-order.md, and fails if a table was another one before."""

import re

from harness import ROOT, TARGET, Failure, run

PACKAGE = ROOT / "tests/memory_order/Cargo.toml"
FOLDER = TARGET / "memory_order"
PAGE = ROOT / "docs/memory-order.md"
# A model takes half a minute at most where the machine has nothing else to do.
LONGEST = 2400


def gate():
    run(["cargo", "build", "--quiet", "--locked", "--manifest-path", PACKAGE, "--target-dir", FOLDER], timeout=1800)
    before = page = PAGE.read_text()
    counts = []
    for program in ("engine", "handles"):
        output = run([FOLDER / "debug" / program], timeout=LONGEST)
        lines = [f"{line}\n" for line in output.splitlines() if line.startswith("| ")]
        rows = "".join(lines)
        counts.append((output.count(" holds in "), sum("no model reaches it" not in line for line in lines)))
        marks = f"(<!-- what {program} finds -->\n(?:\\|.*\n){{2}})(?:\\|.*\n)*(<!-- end -->)"
        page, found = re.subn(marks, lambda mark, rows=rows: mark[1] + rows + mark[2], page)
        if found != 1:
            raise Failure(f"{PAGE.name} has no place for the table of {program}")
    if page != before:
        PAGE.write_text(page)
        raise Failure(f"the tables of {PAGE.relative_to(ROOT)} were other ones. They are written anew: look at the difference, and run the gate again")
    models, orders = (sum(numbers) for numbers in zip(*counts))
    return f"{models} models hold, and {orders} orders were weakened"
