#!/usr/bin/env python3
"""docs/errors.md: every status of the header has its section, and every message that it quotes is what the library says: made anew by
tests/c/programs/provoke.c, or, where this machine cannot, found in the library's bytes."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(os.environ.get("DM_ROOT", Path(__file__).resolve().parent.parent))
LIBRARY = Path(os.environ.get("DM_LIB_DIR", ROOT / "target/release"))
SCRATCH = Path(os.environ.get("DM_TMP", ROOT / "target/tests"))
BLOCK = re.compile(r"^<!-- (provoke|in the library)([^\n]*) -->\n```text\n(.*?)```", re.M | re.S)
LAUNCHER = re.compile(r"^(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_|TORCHELASTIC_|OMPI_|PMI|PALS_|SLURM_|JOB_COMPLETION_INDEX|DM_)")


def build():
    program = SCRATCH / "provoke"
    command = [os.environ.get("CC", "cc"), "-std=c11", "-D_GNU_SOURCE", "-O1", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{ROOT}/include",
               str(ROOT / "tests/c/programs/provoke.c"), f"-L{LIBRARY}", "-ldevicemesh", f"-Wl,-rpath,{LIBRARY}", "-pthread", "-o", str(program)]
    subprocess.run(command, check=True, timeout=120)
    return program


def said(program, case, ranks):
    launcher = [str(LIBRARY / "devicemesh"), "run", "-n", ranks, "--"] if ranks else []
    environment = {name: value for name, value in os.environ.items() if not LAUNCHER.match(name)}
    done = subprocess.run([*launcher, str(program), case], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{case}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout.rstrip("\n")


def alike(message):
    """Without what differs from run to run: handles, ports, processes."""
    return re.sub(r"\(pid \d+\)|(?<=process )\d+|0x[0-9a-f]{8,}|(?<=127\.0\.0\.1:)\d{4,}", "#", message)


def main():
    SCRATCH.mkdir(parents=True, exist_ok=True)
    page = (ROOT / "docs/errors.md").read_text()
    header = (ROOT / "include/devicemesh.h").read_text()
    statuses = re.findall(r"^#define (DM_STATUS_\w+) \d+$", header, re.M)
    sections = re.split(r"^## ", page, flags=re.M)[1:]
    titles = [section.splitlines()[0] for section in sections]
    assert len(statuses) > 10 and titles == statuses, f"statuses of the header {statuses}\nsections of the page {titles}"

    program, library = build(), (LIBRARY / "libdevicemesh.so").read_bytes()
    made = found = 0
    for status, section in zip(statuses, sections):
        blocks = BLOCK.findall(section)
        assert len(blocks) == section.count("```text"), f"{status}: a message that nothing checks"
        assert blocks or status == "DM_STATUS_OK", f"{status} has no message"
        for kind, words, text in blocks:
            if kind == "provoke":
                case, *ranks = words.split()
                expected = f"{status}: {text.rstrip()}"
                actual = said(program, case, ranks[0] if ranks else None)
                assert alike(actual) == alike(expected), f"{case}\nthe page: {expected}\nthe library: {actual}"
                made += 1
            else:
                for part in re.split(r"\.\.\.|\n", text):
                    assert part.strip().encode() in library, f"{status}: the library has no {part!r}"
                found += 1
    print(f"{len(statuses)} statuses, {made} messages made anew, {found} blocks found in the library")
    return 0


if __name__ == "__main__":
    sys.exit(main())
