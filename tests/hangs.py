#!/usr/bin/env python3
"""Jobs of eight ranks that hang in every way (tests/c/programs/hang.c), on one host or on four,
and what `devicemesh why` must say of them.

    tests/hangs.py --times 100 [--hosts] [--ways skip,die]

makes each hang that many times, asks, and counts the right answers and how long they took. On four
hosts (tests/netlab.py, each with its own /proc) another host is asked each time."""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from netlab import Lab
from support.paths import CC, LINK, ROOT, TOOL
from support.processes import children, environment, gone, run, wait_until, words

# How long a job may take to come to its hang, on a busy machine.
PATIENCE = 60.0
HOSTS = ["alpha", "beta", "gamma", "delta"]
# For each way: the kind of the first finding, its ranks, and a part of its sentence.
WAYS = {
    "sleep": ("behind", [3], "rank 3 has not called all-reduce 6 of mesh/tp (ranks 0-3); the other 3 ranks have waited in it for"),
    "spin": ("behind", [3], "rank 3 has not called all-reduce 6 of mesh/tp (ranks 0-3); the other 3 ranks have waited in it for"),
    "stop": ("stopped", [3], "the other 3 ranks have waited in all-reduce 6 of mesh/tp (ranks 0-3) for"),
    # The other ranks have failed in all-reduce 6, or still wait in it on a busy machine.
    "die": ("gone", [3], "rank 3 has died: its process is gone; the other 3 ranks "),
    "store": ("behind", [3], "rank 3 has not called dm_flatten(dims=(dp, tp), name=all); the other 7 ranks have waited in it for"),
    "group": ("queued", [3], "rank 3 has put all-reduce 6 of mesh/tp (ranks 0-3) into a group of calls and has not ended the group"),
    "count": ("differs", [3], "rank 3 calls all-reduce of 8 float32 (sum) as call 6 of mesh/tp (ranks 0-3), "
                              "and the other 3 ranks call all-reduce of 4 float32 (sum)"),
    "dimension": ("behind", [3], "rank 3 has not called all-reduce 6 of mesh/tp (ranks 0-3)"),
    "skip": ("behind", [3], "rank 3 has not called all-reduce 7 of mesh/tp (ranks 0-3); the other 3 ranks have waited in it for"),
    "crossed": ("crossed", None, "two dimensions are crossed: rank "),
    "join": ("not joined", [3], "rank 3 has not joined the world; the other 7 ranks have waited in dm_world_init("),
}


class OneHost:
    """Jobs on this host."""

    def __init__(self, program):
        self.program = program

    def start(self, way, **variables):
        command = [TOOL, "run", "-n", 8, "--failure-grace", "1h", "--", self.program, way]
        env = environment(**variables)
        self.job = subprocess.Popen(words(command), env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def pid(self):
        return self.job.pid

    def why(self, *options):
        """Asks for the job. Gives the report, or the message of the tool, and its exit code."""
        return asked(*options, self.pid())

    def end(self):
        if self.job.poll() is None:
            end([self.job], [self.job.pid])


class FourHosts:
    """Jobs of four nodes with two ranks each."""

    def __init__(self, program, lab):
        self.program, self.lab, self.port, self.turn = program, lab, 29400, 0

    def start(self, way, options=(), **variables):
        self.port += 1
        command = [TOOL, "run", "--nnodes", 4, "--rdzv-endpoint", f"alpha:{self.port}", "-n", 2, "--failure-grace", "1h"]
        command = words([*command, *options, "--", self.program, way])
        env = environment(without=["DM_STORE_SECRET"], **variables)
        # Node 0 is on alpha, so the ranks are on the hosts in their order.
        self.nodes = {
            host: self.lab.spawn(host, [*command[:2], "--node-rank", str(number), *command[2:]], env=env, stdin=subprocess.DEVNULL,
                                 stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            for number, host in enumerate(HOSTS)
        }

    def why(self, *options, host=None, json_wanted=True, **variables):
        """Asks on a host, or on one host after the other."""
        self.turn += 1
        host = host or HOSTS[self.turn % 4]
        command = words([TOOL, "why", *(["--json"] if json_wanted else []), *options])
        asked = self.lab.spawn(host, command, env=environment(**variables), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        out, err = asked.communicate(timeout=PATIENCE)
        self.lab.processes.remove(asked)
        return (json.loads(out) if out and json_wanted else out or err), asked.returncode

    def end(self):
        nodes = list(self.nodes.values())
        end(nodes, [self.lab.hosts[host].inner_pid(node) for host, node in self.nodes.items()])
        for node in nodes:
            self.lab.processes.remove(node)


def asked(*arguments):
    """What `devicemesh why` says as JSON, or its message, and its exit code."""
    done = run(TOOL, "why", "--json", *arguments, code=None)
    return (json.loads(done.stdout) if done.stdout else done.stderr), done.returncode


def end(processes, tools):
    """Kills the tools. Their keepers end the ranks."""
    keepers = [pid for tool in filter(None, tools) for pid in children_of(tool)]
    for tool in filter(None, tools):
        with contextlib.suppress(ProcessLookupError):
            os.kill(tool, signal.SIGKILL)
    for process in processes:
        process.wait(60)
    wait_until(lambda: all(gone(keeper) for keeper in keepers), "the keepers end")


def children_of(pid):
    try:
        return children(pid)
    except OSError:
        return []


def until(jobs, way, *options, also="", **how):
    """Asks until the report is the one of a job that hangs in this way (check), and its first
    sentence also has these words. Before that, a rank that waits for a processor may be the one
    that is behind. Gives the job of the report."""
    last = time.monotonic() + PATIENCE
    while True:
        report, code = jobs.why("--after", "0.3s", *options, **how)
        found = report["jobs"] if code in (0, 1) else []
        # A rank that has not been started yet has no process, like one that is gone.
        has_begun = way == "join" or any(group["name"] == "mesh/tp" for job in found for group in job["groups"])
        try:
            assert has_begun and code == 1 and len(found) == 1 and found[0]["stuck"] and found[0]["findings"], report
            check(found[0], way)
            assert also in found[0]["summary"], found[0]["summary"]
            return found[0]
        except AssertionError as wrong:
            assert time.monotonic() < last, f"not {way}: {wrong}: {report}"
        time.sleep(0.1)


def check(job, way):
    """The report of a job that hangs in this way names the rank and the call."""
    kind, ranks, sentence = WAYS[way]
    first = job["findings"][0]
    assert first["kind"] == kind, first
    assert way != "die" or "in all-reduce 6 of mesh/tp (ranks 0-3)" in first["sentence"], first
    assert sentence in first["sentence"] and job["summary"] == first["sentence"], first
    assert ranks in (None, first["ranks"]), first
    assert len(job["ranks"]) == 8 and job["name"] == "hang", job


def count(jobs, way, times):
    """How many of so many answers are right, how long each took, and what was wrong."""
    right, took, wrong = 0, [], []
    for _ in range(times):
        jobs.start(way)
        try:
            until(jobs, way)
            began = time.monotonic()
            report, code = jobs.why("--after", "0.3s")
            took.append(time.monotonic() - began)
            assert code == 1 and len(report["jobs"]) == 1, report
            check(report["jobs"][0], way)
            right += 1
        except (AssertionError, KeyError, TypeError, IndexError) as error:
            wrong.append(f"{way}: {error}")
        finally:
            jobs.end()
    return right, took, wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--hosts", action="store_true", help="on four hosts")
    parser.add_argument("--ways", default=",".join(WAYS))
    options = parser.parse_args()
    ways = options.ways.split(",")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        program = Path(folder) / "hang"
        run(CC, "-std=c11", "-D_GNU_SOURCE", "-Og", "-g", f"-I{ROOT}/include", f"-I{ROOT}/tests/c",
            ROOT / "tests/c/programs/hang.c", *LINK, "-o", program)
        jobs = OneHost(program)
        if options.hosts:
            jobs = FourHosts(program, stack.enter_context(Lab(HOSTS, f"{folder}/lab", own_pids=True)))
        complaints = []
        for way in ways:
            right, took, wrong = count(jobs, way, options.times)
            complaints += wrong
            took.sort()
            slow = sum(one > 1 for one in took)
            print(f"{way:10} {right:4} of {options.times} right; median {took[len(took) // 2]:.2f} s, longest {took[-1]:.2f} s, "
                  f"{slow} over 1 s" if took else f"{way:10} {right:4} of {options.times} right", flush=True)
    print("\n".join(complaints[:20]))
    return bool(complaints)


if __name__ == "__main__":
    sys.exit(main())
