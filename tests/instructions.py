#!/usr/bin/env python3
"""`make instructions`: the processor's instructions for one call of the quick functions, counted by
valgrind, against those in tests/instructions.json. A call that takes 10 % more is a failure,
whatever the clock says. With another compiler, C library or valgrind than those recorded 25 % are
allowed, because they generate other code for the same source. `--record` writes what is counted
now. tests/test_instructions.py is the test.

A count is the difference between 2 N calls and N, divided by N, so that what happens once, and
the loop's surroundings, are not in it."""

import json
import os
import platform
import re
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from support.paths import LIBRARY, ROOT
from support.pinned import Unavailable
from support.processes import environment, run
from support.programs import Programs

RECORD = ROOT / "tests/instructions.json"
SAME_TOOLS, OTHER_TOOLS = 0.10, 0.25


def tools():
    """The tools and the processor's features, which decide how many instructions the same source
    becomes."""
    comment = run("readelf", "-p", ".comment", LIBRARY / "libdevicemesh.so").stdout
    rustc = re.search(r"rustc version (.*)", comment)
    processor = Path("/proc/cpuinfo").read_text()
    return {
        "rustc": rustc.group(1).strip() if rustc else "unknown",
        "libc": os.confstr("CS_GNU_LIBC_VERSION"),
        "valgrind": run("valgrind", "--version").stdout.strip(),
        # libc chooses its functions for strings and memory by these.
        "processor": " ".join(feature for feature in ("avx2", "erms", "avx512vl") if re.search(rf"\b{feature}\b", processor)),
        "machine": platform.machine(),
    }


def count(folder):
    """Instructions per call, by the name of the function."""
    program = Programs(folder).c("tests/c/programs/instructions.c", "-Wall", "-Wextra")
    # With a cache that takes all that is freed, an allocation costs the same whatever was allocated
    # before.
    done = run("valgrind", "--tool=callgrind", "--dump-before=mark", f"--callgrind-out-file={folder}/dump", program, code=None, timeout=500,
               env=environment(GLIBC_TUNABLES="glibc.malloc.tcache_count=65535"))
    if done.returncode == -signal.SIGILL and "unhandled instruction" in done.stderr:
        raise Unavailable("this valgrind does not know an instruction of this processor's libc")
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}{done.stderr}"
    total = lambda part: int(re.search(r"^totals: (\d+)", (folder / f"dump.{part}").read_text(), re.M).group(1))
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines, "nothing was counted"
    # The dump between the two runs is that of the cleaning up.
    return {name: round((total(int(first) + 2) - total(int(first))) / int(calls), 1) for name, calls, first in lines}


def tools_here():
    if not shutil.which("valgrind"):
        raise Unavailable("no valgrind here (Debian: apt-get install valgrind)")
    return tools()


def compare(folder):
    """Counts, prints a line for each function, and gives the names of those that are slower than
    allowed."""
    here, recorded = tools_here(), json.loads(RECORD.read_text())
    if recorded["tools"]["machine"] != here["machine"]:
        raise Unavailable(f"recorded on {recorded['tools']['machine']}, and this is {here['machine']}")
    different = [f"{tool} {here[tool]} instead of {known}" for tool, known in recorded["tools"].items() if here[tool] != known]
    allowed = OTHER_TOOLS if different else SAME_TOOLS
    if different:
        print(f"{allowed:.0%} allowed: {', '.join(different)}")
    counted = count(folder)
    missing = recorded["instructions"].keys() ^ counted.keys()
    assert not missing, f"only counted or only recorded: {sorted(missing)}; python3 tests/instructions.py --record"
    slower, faster = [], []
    for name, now in counted.items():
        before = recorded["instructions"][name]
        change = now / before - 1
        print(f"{name:20} {now:12.1f} instructions a call, {before:12.1f} recorded ({change:+.1%})")
        if abs(change) > allowed:
            (slower if change > 0 else faster).append(name)
    if faster:
        print(f"faster by more than {allowed:.0%}, so that it can be recorded: {', '.join(faster)}")
    if slower:
        print(f"slower by more than {allowed:.0%}: {', '.join(slower)}. If that is meant: python3 tests/instructions.py --record")
    return slower


def main():
    with tempfile.TemporaryDirectory() as folder:
        if "--record" in sys.argv[1:]:
            RECORD.write_text(json.dumps({"tools": tools_here(), "instructions": count(Path(folder))}, indent=1) + "\n")
            print(RECORD.read_text(), end="")
            return 0
        return 1 if compare(Path(folder)) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Unavailable as why:
        sys.exit(str(why))
