"""Shared by the parts of the suite and the gates: paths, and a function that runs a command."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from support import processes  # noqa: E402
from support.paths import CC, CXX, LIBRARY, LINK, ROOT, SCRATCH, STRICT, TARGET, TOOL  # noqa: E402,F401
from support.pinned import Unavailable as Skip  # noqa: E402,F401  (a case that cannot run here)
from support.processes import Failed as Failure  # noqa: E402,F401  (a case that failed)

# Seconds that one command may take.
DEADLINE = 180


def run(command, timeout=DEADLINE, env=None, code=0, cwd=ROOT):
    """Runs a command in a process group of its own and returns its output; `env` adds variables.

    Any exit code but `code` is a Failure, and so is a command that takes longer than `timeout`."""
    variables = processes.environment(**(env or {}))
    return processes.run(*command, timeout=timeout, env=variables, code=code, cwd=cwd, merged=True).stdout


def comments(path):
    """Returns what the first comments of a C or C++ test ask for: numbers of ranks, a static
    build, flags."""
    head = path.read_text()[:2000]
    ranks = re.search(r"/\* ranks: ([\d ]+)\*/", head)
    flags = re.search(r"/\* flags: (.+?) \*/", head)
    counts = [int(count) for count in ranks.group(1).split()] if ranks else [0]
    return counts, "/* static */" in head, flags.group(1).split() if flags else []
