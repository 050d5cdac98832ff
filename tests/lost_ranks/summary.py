"""A plugin of pytest for tests/soak.py: the table of the random deaths, at the end of the
session and in docs/reliability.md."""

import json
import os
import time

from .random_cases import Table, write_report

TABLE = Table()
BEGAN = time.monotonic()


def pytest_addoption(parser):
    parser.addoption("--report", action="store_true", help="write the table into docs/reliability.md")


def pytest_runtest_logreport(report):
    death = dict(report.user_properties).get("death")
    if report.when == "teardown" and death:
        TABLE.add(**json.loads(death))


def pytest_terminal_summary(terminalreporter, config):
    if not TABLE.rows:
        return
    seed = int(os.environ["DM_SEED"])
    terminalreporter.write_line("\n".join(TABLE.lines()))
    hosts = " --hosts" if any("test_lost_hosts" in argument for argument in config.args) else ""
    for number in sorted(TABLE.failed):
        terminalreporter.write_line(f"again: python3 tests/soak.py{hosts} --seed {seed} --only {number}")
    if config.option.report:
        write_report(TABLE, seed, config.option.random_deaths, config.option.numprocesses, time.monotonic() - BEGAN)
