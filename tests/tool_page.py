#!/usr/bin/env python3
"""Writes the outputs quoted in docs/tool.md anew. tests/test_tool_page.py checks that they are
what the tool prints: process numbers, ports, folders, times and this host's name aside."""

import os
import re
import socket
import sys
import tempfile

from support.paths import LIBRARY, ROOT
from support.ports import Ports
from support.processes import environment, run

PAGE = ROOT / "docs/tool.md"
ADVICE = ROOT / "tool/src/other_launchers.rs"
# (a pattern that differs from run to run, the words that the page has in its place)
CHANGES = [(r"pid \d+", "pid 4711"), (r"reached in \d+ ms", "reached in 1 ms"), (r"127\.0\.0\.1:\d{3,5}", "127.0.0.1:29400"),
           (r"\d{8}T\d{6}Z-\d+", "20261123T093000Z-4711"), (r"\d{4}-\d\d-\d\dT[\d:]{8}\.\d{3}Z", "2026-11-23T09:30:01.123Z"),
           (r"of user \S+ ", "of user anna "), (r"started \d s ago", "started 0 s ago"),
           (r"\b%s\b" % re.escape(socket.gethostname()), "alpha")]


def shell(script, folder):
    """Runs a script of bash, in which `devicemesh` is this tree's tool. Gives its output and its
    exit code."""
    env = environment(without=["DM_STORE", "DM_CCL", "NO_COLOR", "CUDA_VIS"], PATH=f"{LIBRARY}:{os.environ['PATH']}")
    done = run("bash", "-c", script, cwd=folder, env=env, code=None, merged=True)
    return done.stdout, done.returncode


def blocks(text):
    """The console blocks of the page: the lines that begin with a command and end with its
    output."""
    return re.findall(r"^```console\n(.*?)^```", text, flags=re.M | re.S)


def commands(block):
    """(command, quoted output) of a block."""
    parts = [part.partition("\n") for part in re.split(r"^(?=\$ )", block, flags=re.M) if part]
    return [(command, output.rstrip()) for command, _, output in parts]


def with_outputs(text, outputs):
    """The page with these outputs in place of the quoted ones, one for each command in its
    order."""
    outputs = iter(outputs)
    for block in blocks(text):
        lines = [line for command, _ in commands(block) for line in (command, next(outputs)) if line]
        anew = "".join(f"{line}\n" for line in lines)
        text = text.replace(f"```console\n{block}```", f"```console\n{anew}```")
    return text


def printed(command, folder, free_port):
    """Runs a quoted command. Gives its output, with the page's words in place of those that differ,
    and its exit code where it is not 0."""
    ports = {port: free_port() for port in re.findall(r"localhost:(\d+)", command)}
    ours = re.sub(r"localhost:(\d+)", lambda match: f"localhost:{ports[match.group(1)]}", command)
    out, code = shell(ours.removeprefix("$ "), folder)
    for theirs, port in ports.items():
        out = out.replace(f"localhost:{port}", f"localhost:{theirs}")
    for pattern, instead in CHANGES:
        out = re.sub(pattern, instead, out)
    return out.rstrip() + (f"\n(exit code {code})" if code else "")


def refused_options():
    """The rows of the page's table of options that are refused: ([option], what to do instead)."""
    _, _, part = PAGE.read_text().partition("\n### Options that are refused\n")
    rows = re.findall(r"^\| (`-.*?`) \| (.+) \|$", part.partition("\n## ")[0], flags=re.M)
    return [(re.findall(r"`([^`]+)`", options), advice.replace("`", "")) for options, advice in rows]


def options_with_advice():
    """The options, without dashes, for which the tool's source has advice, in the order of the
    source."""
    _, _, table = ADVICE.read_text().partition("const ADVICE:")
    rows = re.findall(r"\(\s*&\[([^\]]+)\],", table.partition("\n];")[0])
    return [name for names in rows for name in re.findall(r'"([^"]+)"', names)]


def main():
    text, ports, outputs = PAGE.read_text(), Ports(), []
    for block in blocks(text):
        with tempfile.TemporaryDirectory() as folder:
            outputs += [printed(command, folder, ports.free) for command, _ in commands(block)]
    PAGE.write_text(with_outputs(text, outputs))
    ports.close()


if __name__ == "__main__":
    sys.exit(main())
