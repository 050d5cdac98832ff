"""A job of a launcher that hangs (tests/c/programs/hang.c, started as `hang sleep`), and what
`devicemesh why` must say of it. All hosts and nodes are this machine, so that each `devicemesh
why` finds all ranks."""

import json
import os
import re
import socket
import subprocess

from hangs import PATIENCE, WAYS, check
from support.paths import TOOL
from support.processes import kill_all, run, wait_until, words

SENTENCE = WAYS["sleep"][2]


class Hanging:
    """The job of this command. `name` is what `devicemesh why` takes for the job; None: the
    process of the launcher. It ends with the block."""

    def __init__(self, *command, env, output, name=None):
        self.output = output
        with open(output, "wb") as file:
            self.process = subprocess.Popen(words(command), env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        self.name = str(name or self.process.pid)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.terminate()
        try:
            self.process.wait(20)
        finally:
            kill_all([self.process])

    def wait(self):
        """Waits until the job hangs for `devicemesh why` without a launcher."""
        def hangs():
            assert self.process.poll() is None, self.output.read_text()
            done = run(TOOL, "why", "--json", "--no-stacks", "--timeout", 0, self.name, code=None)
            jobs = json.loads(done.stdout)["jobs"] if done.returncode == 1 else []
            return [SENTENCE in job["summary"] for job in jobs] == [True]
        wait_until(hangs, "the job hangs", PATIENCE)


def right(output, host=socket.gethostname()):
    """Checks the text of `devicemesh why`. Rank 3 is on this host. A launcher may add lines of its
    own."""
    first = re.findall(rf"^\S+: {re.escape(SENTENCE)} [0-9.]+ s; 4 more ranks wait for these in other groups$", output, re.M)
    assert len(first) == 1 and output.count("rank 3 has not called") == 1, output
    last = r"its last call, all-reduce 3 of mesh/dp \(ranks 3, 7\), ended [0-9.]+ s ago"
    cause = rf"^  rank 3 \(pid \d+ on {re.escape(host)}\) sleeps; {last}$"
    assert len(re.findall(cause, output, re.M)) == 1, output
    assert output.count("main at programs/hang.c:") == 1 or "no stacks: " in output, output
    assert "did not answer" not in output, output


def right_in_json(output, hosts):
    """Checks the JSON: eight ranks with a process each, and so many hosts that were asked."""
    (job,) = json.loads(output)["jobs"]
    check({**job, "name": "hang"}, "sleep")
    assert len({rank["pid"] for rank in job["ranks"]}) == 8 and all(os.path.exists(f"/proc/{rank['pid']}") for rank in job["ranks"]), job
    here = {"name": socket.gethostname(), "ranks": [], "silence": None}
    assert job["nodes"] == hosts * [here] and job["name"], job
