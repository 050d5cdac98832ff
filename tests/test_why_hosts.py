"""`devicemesh why` over several hosts: four hosts of tests/netlab.py, each with its own /proc, and
two ranks on each. On any host the tool says the one sentence for the whole job.

A case takes some seconds, mostly for the start of a job on four hosts. The ways to hang that are
alike for the road between the hosts run in `make test-all` alone; tests/hangs.py repeats all."""

import json
import os
import signal
import subprocess
import time

import pytest

from hangs import HOSTS, WAYS, FourHosts, check, until
from netlab import Lab
from support.paths import TOOL
from support.processes import children, environment, run, wait_until, words

QUICK = ["stop", "die", "count", "join"]


@pytest.fixture
def jobs(programs, tmp_path):
    with Lab(HOSTS, tmp_path / "lab", own_pids=True) as lab:
        jobs = FourHosts(programs.c("tests/c/programs/hang.c", "-Wall", "-Wextra"), lab)
        jobs.nodes = {}
        yield jobs
        jobs.end()


def hangs_in(jobs, way):
    """Each host says the same of the job, and how long the waits are."""
    jobs.start(way)
    until(jobs, way)
    said = []
    for host in HOSTS:
        report, code = jobs.why("--after", "0.3s", host=host)
        assert code == 1 and len(report["jobs"]) == 1 and report["host"] == host, report
        (job,) = report["jobs"]
        check(job, way)
        assert [node["silence"] for node in job["nodes"]] == [None] * 4, job["nodes"]
        assert {tuple(node["ranks"]) for node in job["nodes"]} == {(0, 1), (2, 3), (4, 5), (6, 7)}, job["nodes"]
        said.append((job["findings"][0]["kind"], job["findings"][0]["group"], job["findings"][0]["call"]))
    assert way == "crossed" or len(set(said)) == 1, said


@pytest.mark.parametrize("way", QUICK)
def test_every_host_says_the_one_sentence(jobs, way):
    hangs_in(jobs, way)


@pytest.mark.long
@pytest.mark.parametrize("way", [way for way in WAYS if way not in QUICK])
def test_every_host_says_the_one_sentence_for_the_other_ways(jobs, way):
    hangs_in(jobs, way)


@pytest.mark.lengthy
def test_one_job_asked_in_every_way(jobs, tmp_path):
    """One job: with a secret, the stack of a rank of another host, a node that is stopped, several
    processes of srun, and copies in a folder."""
    secret = {"DM_STORE_SECRET": "a secret"}
    command = words([TOOL, "run", "--nnodes", 4, "--rdzv-endpoint", "alpha:29400", "-n", 2, "--failure-grace", "1h"])
    jobs.nodes = {
        host: jobs.lab.spawn(host, [*command, "--node-rank", str(number), "--", str(jobs.program), "sleep"],
                             env=environment(**secret), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for number, host in enumerate(HOSTS)
    }
    # The secret is that of the tool, and not of the shell in which somebody asks.
    until(jobs, "sleep")
    said, code = jobs.why("--after", "0.3s", host="delta", json_wanted=False)
    assert code == 1 and said.startswith("hang: rank 3 has not called all-reduce 6 of mesh/tp (ranks 0-3)"), said
    assert "rank 3 (pid " in said and " on beta) sleeps; its last call, all-reduce 3 of mesh/dp (ranks 3, 7), ended" in said, said
    assert "main at programs/hang.c:" in said or "no stacks: " in said, said

    # Without the others, this host knows its own ranks alone.
    alone, _ = jobs.why("--after", "0.3s", "--timeout", "0", host="alpha")
    assert [rank["state"] for rank in alone["jobs"][0]["ranks"]].count("elsewhere") == 6, alone

    def by_srun(hosts, *options):
        """Starts one process on each of these hosts, as srun does."""
        step = {"SLURM_JOB_ID": 7, "SLURM_STEP_ID": 1, "SLURM_STEP_NODELIST": ",".join(hosts), "SLURM_STEP_NUM_TASKS": len(hosts),
                "SLURM_STEP_NUM_NODES": len(hosts), "SLURM_LOCALID": 0}
        return [
            jobs.lab.spawn(host, words([TOOL, "why", "--after", "0.3s", *options]),
                           env=environment(**step, SLURM_PROCID=number, SLURM_NODEID=number),
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for number, host in enumerate(hosts)
        ]

    # srun starts one process alone where it gets --jobid and no number of nodes.
    (one,) = by_srun(["alpha"], "--timeout", "0")
    out, err = one.communicate(timeout=60)
    assert one.returncode == 1 and "`srun --jobid=7 --overlap -N NODES --ntasks-per-node=1 devicemesh why`" in err, (out, err)

    asked = by_srun(HOSTS)
    outputs = [process.communicate(timeout=60) for process in asked]
    assert [process.returncode for process in asked] == [1, 0, 0, 0], outputs
    assert outputs[0][0].startswith("hang: rank 3 has not called all-reduce 6 of mesh/tp (ranks 0-3)"), outputs
    assert outputs[1:] == [("", "")] * 3, outputs
    assert "main at programs/hang.c:" in outputs[0][0] or "no stacks: " in outputs[0][0], outputs

    # Copies know what the processes did, and how long the calls have waited.
    folder = tmp_path / "copies"
    for host in HOSTS:
        saved = jobs.lab.spawn(host, words([TOOL, "why", "--save", folder]), stdout=subprocess.PIPE, text=True)
        assert saved.communicate(timeout=60)[0] == f"2 recordings saved in {folder}\n"
    copied = json.loads(run(TOOL, "why", "--json", "--after", "0.3s", folder, code=1).stdout)["jobs"][0]
    check({**copied, "name": "hang"}, "sleep")
    assert {rank["state"] for rank in copied["ranks"]} <= {"sleeps", "computes"}, copied

    # A host whose tool does not answer is named with its ranks. The others are judged.
    keeper = jobs.lab.hosts["gamma"].inner_pid(jobs.nodes["gamma"])
    (keeper,) = children(keeper)
    os.kill(keeper, signal.SIGSTOP)
    began = time.monotonic()
    # The other hosts must answer in this time.
    report, code = jobs.why("--after", "0.3s", "--timeout", "3s", host="alpha")
    os.kill(keeper, signal.SIGCONT)
    assert code == 1 and time.monotonic() - began < 12, report
    (job,) = report["jobs"]
    assert job["findings"][0]["ranks"] == [3], job
    silent = [(node["name"], node["ranks"], node["silence"]) for node in job["nodes"] if node["silence"]]
    assert silent == [("node 2 (gamma)", [4, 5], "did not answer within 3 s")], silent
    # When it goes on, it answers again.
    wait_until(lambda: all(node["silence"] is None for node in jobs.why(host="alpha")[0]["jobs"][0]["nodes"]), "gamma answers again")
