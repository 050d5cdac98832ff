"""A plugin of pytest for run.py: the table of docs/interop.md, written when all tests ran."""

import datetime
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs/interop.md"
TABLE = re.compile(r"(<!-- results -->\n).*(<!-- end of results -->)", re.S)
# The row of each test, by its node id: what was tested, the outcome and a note.
ROWS = {}


def pytest_collection_modifyitems(items):
    for item in items:
        title = item.function.__doc__.splitlines()[0]
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        ROWS[item.nodeid] = [title.format(**parameters), "", ""]


def pytest_runtest_logreport(report):
    row = ROWS[report.nodeid]
    if report.when == "call" or report.outcome != "passed":
        reason = report.longrepr[2].removeprefix("Skipped: ") if report.outcome == "skipped" else ""
        row[1:] = report.outcome, dict(report.user_properties).get("note", reason)


def pytest_terminal_summary(terminalreporter):
    import pytorch
    outcomes = [row[1] for row in ROWS.values()]
    counts = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in ("passed", "failed", "skipped"))
    rows = [f"| {' | '.join(row)} |" for row in ROWS.values()]
    head = f"{datetime.date.today()}: {versions(pytorch.interpreter(fetch=False))}. {counts}."
    table = "\n".join([head, "", "| what | result | note |", "|---|---|---|", *rows, ""])
    PAGE.write_text(TABLE.sub(lambda found: found.group(1) + table + found.group(2), PAGE.read_text()))
    terminalreporter.write_line(f"wrote the table of {PAGE}")


def versions(torch):
    def said(*command):
        return subprocess.run(command, capture_output=True, text=True).stdout

    found = [f"Linux {platform.release()}, {os.cpu_count()} cores, Python {platform.python_version()}"]
    if shutil.which("mpirun.openmpi"):
        found.append("Open MPI " + said("mpirun.openmpi", "--version").splitlines()[0].split()[-1])
    if shutil.which("mpiexec.mpich"):
        found.append("MPICH " + said("mpiexec.mpich", "--version").split("Version:")[1].split()[0])
    if shutil.which("slurmd"):
        found.append("Slurm " + said("slurmd", "-V").split()[-1])
    if torch:
        found.append("torch " + said(torch, "-c", "import torch; print(torch.__version__)").strip())
    return ", ".join(found)
