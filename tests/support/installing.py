"""Functions for the tests of installing: commands, the contents of folders, and programs that were
built against an installed library."""

import os
import re
import sys
from pathlib import Path

from support import pinned, processes
from support.paths import ROOT, TOOL

sys.path.insert(0, str(ROOT / "packaging"))
import versions  # noqa: E402

CONSUMER = ROOT / "tests/consumer"
VERSION = versions.present()
SOVERSION = versions.series(VERSION)


def run(*command, code=0, **variables):
    """Runs a command without DESTDIR, unless it is given, and gives its output."""
    return processes.run(*command, timeout=800, env=processes.environment(**{"DESTDIR": "", **variables}), code=code, merged=True).stdout


def check(holds, message):
    assert holds, message


def cmake(*arguments, **how):
    return run(pinned.cmake(), *arguments, **how)


def tree(folder):
    """Every file of a folder: links by their target, other files by mode and content."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else (oct(path.stat().st_mode), path.read_bytes())
        for path in sorted(folder.rglob("*")) if path.is_symlink() or path.is_file()
    }


def runs(program, linked_to=None, soname=f"libdevicemesh.so.{SOVERSION}"):
    """Runs a program, which sums over two ranks. It needs the shared library at that place, or no
    library of ours."""
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", run("readelf", "-d", program))
    ours = [name for name in needed if re.match("lib(devicemesh|hostccl|nccl|cuda)", name)]
    check(ours == ([soname] if linked_to else []), f"{program} needs {needed}")
    if linked_to:
        place = re.search(rf"{re.escape(soname)} => (.+) \(0x", run("ldd", program)).group(1)
        check(Path(place).parent == linked_to, f"{program} finds {place}, expected it in {linked_to}")
    launcher = [] if "hostccl" in program.name else [TOOL, "run", "-n", 2, "--"]
    output = run(*launcher, program)
    check(output.count("sum 1") == (2 if launcher else 1), f"{program}: {output}")


def flat(output):
    return " ".join(output.split())
