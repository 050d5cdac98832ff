#!/usr/bin/env python3
"""The processor's instructions for one call of the quick functions, counted by valgrind, against those in tests/instructions.json: a call that takes 10 %
more is a failure, whatever the clock says. With another compiler, C library or valgrind than those recorded 25 % are allowed, since they
generate other code for the same source. `--record` writes what is counted now.

A count is the difference between 2 N calls and N, divided by N, so that what happens once, and the loop's surroundings, are not in it."""

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(os.environ.get("DM_ROOT", Path(__file__).resolve().parent.parent))
LIBRARY = Path(os.environ.get("DM_LIB_DIR", ROOT / "target/release"))
SCRATCH = Path(os.environ.get("DM_TMP", ROOT / "target/tests"))
RECORD = ROOT / "tests/instructions.json"
SAME_TOOLS, OTHER_TOOLS = 0.10, 0.25
SKIPPED = 77


class Skip(Exception):
    pass


def output_of(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def tools():
    """What decides how many instructions the same source becomes."""
    comment = output_of("readelf", "-p", ".comment", LIBRARY / "libdevicemesh.so")
    rustc = re.search(r"rustc version (.*)", comment)
    processor = Path("/proc/cpuinfo").read_text()
    return {
        "rustc": rustc.group(1).strip() if rustc else "unknown",
        "libc": os.confstr("CS_GNU_LIBC_VERSION"),
        "valgrind": output_of("valgrind", "--version").strip(),
        # libc chooses its functions for strings and memory by these.
        "processor": " ".join(feature for feature in ("avx2", "erms", "avx512vl") if re.search(rf"\b{feature}\b", processor)),
        "machine": platform.machine(),
    }


def count():
    """Instructions per call, by the name of the function."""
    folder = SCRATCH / "instructions"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    program, dumps = folder / "instructions", folder / "dump"
    subprocess.run([os.environ.get("CC", "cc"), "-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-I", ROOT / "include",
                    ROOT / "tests/c/programs/instructions.c", f"-L{LIBRARY}", f"-Wl,-rpath,{LIBRARY}", "-ldevicemesh", "-o", program], check=True)
    # With a cache that takes all that is freed, an allocation costs the same whatever was allocated before.
    environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.tcache_count=65535"}
    done = subprocess.run(["valgrind", "--tool=callgrind", "--dump-before=mark", f"--callgrind-out-file={dumps}", program],
                          env=environment, capture_output=True, text=True, timeout=500)
    if done.returncode == -signal.SIGILL and "unhandled instruction" in done.stderr:
        raise Skip("this valgrind does not know an instruction of this processor's libc")
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}{done.stderr}"
    total = lambda part: int(re.search(r"^totals: (\d+)", (folder / f"dump.{part}").read_text(), re.M).group(1))
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines, "nothing was counted"
    # The dump between the two runs is that of the cleaning up.
    return {name: round((total(int(first) + 2) - total(int(first))) / int(calls), 1) for name, calls, first in lines}


def main():
    if not shutil.which("valgrind"):
        raise Skip("no valgrind here (Debian: apt-get install valgrind)")
    here = tools()
    if "--record" in sys.argv[1:]:
        RECORD.write_text(json.dumps({"tools": here, "instructions": count()}, indent=1) + "\n")
        print(RECORD.read_text(), end="")
        return 0
    recorded = json.loads(RECORD.read_text())
    if recorded["tools"]["machine"] != here["machine"]:
        raise Skip(f"recorded on {recorded['tools']['machine']}, and this is {here['machine']}")
    different = [f"{tool} {here[tool]} instead of {known}" for tool, known in recorded["tools"].items() if here[tool] != known]
    allowed = OTHER_TOOLS if different else SAME_TOOLS
    if different:
        print(f"{allowed:.0%} allowed: {', '.join(different)}")
    counted = count()
    missing = recorded["instructions"].keys() ^ counted.keys()
    assert not missing, f"only counted or only recorded: {sorted(missing)}; {Path(__file__).name} --record"
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
        print(f"slower by more than {allowed:.0%}: {', '.join(slower)}. If that is meant: python3 tests/test_instructions.py --record")
    return 1 if slower else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Skip as why:
        print(why)
        sys.exit(SKIPPED)
