"""Shared by the parts of the suite and the gates: paths, and a function that runs a command."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from support.pinned import Unavailable as Skip  # noqa: E402,F401  (a case that cannot run here)

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "target"
RELEASE = TARGET / "release"
SCRATCH = TARGET / "tests"
TOOL = RELEASE / "devicemesh"
CC = os.environ.get("CC", "cc")
CXX = os.environ.get("CXX", "c++")
STRICT = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]
LINK = [f"-L{RELEASE}", "-ldevicemesh", f"-Wl,-rpath,{RELEASE}", "-pthread"]
# Seconds that one command may take.
DEADLINE = 180


class Failure(Exception):
    """A case has failed. `code` and `output` are those of the command, where a command failed."""

    def __init__(self, text, code=None, output=""):
        super().__init__(text)
        self.code, self.output = code, output


def run(command, timeout=DEADLINE, env=None, code=0, cwd=ROOT):
    """Runs a command in a process group of its own and returns its output.

    Any exit code but `code` is a Failure, and so is a command that takes longer than `timeout`."""
    command = [str(part) for part in command]
    process = subprocess.Popen(
        command, cwd=cwd, env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        output = process.communicate(timeout=timeout)[0].decode(errors="replace")
    except subprocess.TimeoutExpired:
        # SIGTERM comes first, because the tool ends its ranks then.
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
                output = process.communicate(timeout=10)[0].decode(errors="replace")
                break
            except (subprocess.TimeoutExpired, ProcessLookupError):
                output = ""
        raise Failure(f"$ {' '.join(command)}\n{output}\nnot done after {timeout} s")
    if process.returncode != code:
        raise Failure(f"$ {' '.join(command)}\n{output}\nexit code {process.returncode}, expected {code}", process.returncode, output)
    return output


def comments(path):
    """What the first comments of a C or C++ test ask for: numbers of ranks, a static build,
    flags."""
    head = path.read_text()[:2000]
    ranks = re.search(r"/\* ranks: ([\d ]+)\*/", head)
    flags = re.search(r"/\* flags: (.+?) \*/", head)
    return ([int(count) for count in ranks.group(1).split()] if ranks else [0]), "/* static */" in head, flags.group(1).split() if flags else []
