"""The log of real ranks: DM_LOG, the lines and their levels, who is lost, deadlines that come near
(tests/c/programs/logs.c). tests/c/log.c has the callback, and tests/cpp/log.cpp that of C++.

It takes about 11 s, because only waits of more than 5 s are told of before they end."""

import os
import re
import signal
import subprocess

import pytest

from support.processes import environment, rest_of, run

LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z devicemesh (error|warn|info|debug) (rank \d+|pid \d+): ([ -~]+)")


def records(output):
    """(level, who, text) of each line of the log, and the other lines. Every line that looks like
    one of the log must be one."""
    lines = output.splitlines()
    found = [LINE.fullmatch(line) for line in lines]
    others = [line for line, match in zip(lines, found) if not match]
    assert not [line for line in others if "devicemesh " in line or "Z dev" in line], others
    return [match.groups() for match in found if match], others


def texts(output, level):
    return [text for of, _, text in records(output)[0] if of == level]


@pytest.fixture
def logs(programs):
    return programs.c("tests/c/programs/logs.c")


def test_each_level(logs, start_ranks):
    """Each level logs its lines, with the rank, and nothing more. A secret is never shown, and
    text from outside acts on no terminal."""
    for level, wanted in [(None, []), ("error", []), ("warn", []), ("info", ["info"]), ("debug", ["info", "debug"])]:
        variables = {"DM_STORE_SECRET": "hush-hush-hush", **({"DM_LOG": level} if level else {})}
        for rank, output in enumerate(start_ranks([logs, "mesh"], 4, variables=variables).outputs()):
            lines, others = records(output)
            assert others == [], output
            assert {of for of, _, _ in lines} == set(wanted), output
            assert {who for _, who, _ in lines} <= {f"rank {rank}"}, output
            assert "hush" not in output
            if level in ("info", "debug"):
                info = texts(output, "info")
                assert len(info) == 4, info
                assert re.fullmatch(
                    r"joined a world of 4 ranks in [\d.]+ ms: launcher the environment, "
                    rf"local rank {rank}, device type cpu, the embedded host engine \(NCCL [\d.]+\) at /\S+/libdevicemesh\.so\S*, "
                    r"met in tcp://127\.0\.0\.1:\d+, libdevicemesh [\d.]+",
                    info[0],
                ), info[0]
                assert re.fullmatch(
                    r"the communicator of DeviceMesh\(\(dp=4\).* \(4 ranks: \(0, 1, 2, 3\)\) was made by id in [\d.]+ ms",
                    info[1],
                ), info[1]
                assert "dimension all of " in info[2] and " shares the communicator of " in info[2], info[2]
                assert info[3].startswith("dm_finalize ends DeviceMesh((dp=4)"), info[3]
            if level == "debug":
                debug = "\n".join(texts(output, "debug"))
                for part in [
                        rf"rank {rank} of 4 and local rank {rank} come from the environment",
                        "DM_CCL_LIBRARY is not set", r"has met rank 0 in tcp://",
                        r"call 1 is agreed after [\d.]+ ms: dm_init\(shape=\(4\), names=\(dp\)\)",
                        r"call 2 is done on all ranks after [\d.]+ ms: dm_flatten",
                        r"DM_STATUS_NOT_FOUND: dimension a\\n2026 devicemesh error \\x1b\[31m"
                ]:
                    assert re.search(part, debug), (part, debug)


def test_value_that_is_no_level(logs):
    done = run(logs, "mesh", env=environment(DM_LOG="verbose\n", RANK=0, WORLD_SIZE=1))
    lines, others = records(done.stderr)
    assert len(lines) == 1 and not others, done.stderr
    assert lines[0][0] == "warn" and 'DM_LOG is "verbose\\n", not error, warn, info, debug or off' in lines[0][2]


def test_callback_taken_back(logs):
    done = run(logs, "stderr", env=environment(RANK=0, WORLD_SIZE=1))
    info = texts(done.stderr, "info")
    assert [text.split()[0] for text in info][-1] == "dm_finalize" and not any("joined" in text for text in info), info


def test_forked_child(logs, start_ranks):
    """The child's call fails, and nothing of it is in the log."""
    for output in start_ranks([logs, "fork"], 2, variables={"DM_LOG": "debug"}).outputs():
        assert "dm_finalize ends" in output and "DM_STATUS_UNSUPPORTED" not in output, output


def test_lost_rank(logs, start_ranks):
    """Survivors warn of the lost rank, once each, and say how they noticed it."""
    ranks = start_ranks([logs, "lost"], 3, variables={"DM_LOG": "warn"})
    for rank in ranks:
        assert rank.stdout.readline() == "ready\n"
    os.kill(ranks[2].pid, signal.SIGKILL)
    for number in (0, 1):
        output, _ = rest_of(ranks[number], 120)
        warned = texts(output, "warn")
        assert ranks[number].returncode == 0, output
        assert sum(text.startswith("rank 2 is lost (") for text in warned) == 1, warned
        failed = [text for text in warned if " has failed: " in text]
        assert len(failed) == 1 and failed[0].startswith("the communicator of DeviceMesh((dp=3)") and "rank 2" in failed[0], warned
        assert warned[-1].startswith("dm_abort ends DeviceMesh((dp=3)"), warned


@pytest.mark.lengthy
def test_deadline_comes_near(logs, start_ranks):
    """At half and at 90 % of 10 s the ranks that wait name the one that is missing, in an agreement
    and on the host engine. The two jobs wait side by side. A rank that a busy machine holds up for
    the last second would not say the second line."""
    jobs = {case: start_ranks([logs, case], 3, variables={"DM_LOG": "warn"}, stdin=subprocess.PIPE) for case in ("late", "stuck")}
    for case, call in [("late", r"dm_flatten\(dims=\(dp\), name=all\) as call 2"), ("stuck", r"ncclAllReduce\(1 x float32, sum\)")]:
        for number in (0, 2):
            output = jobs[case][number].communicate(timeout=120)[0]
            near = [text for text in texts(output, "warn") if " have passed" in text]
            assert len(near) == 2, output
            for percent, text in zip((50, 90), near):
                assert re.search(rf"{call}.* waits for rank 1\b.*: {percent} % of its 10000 ms have passed", text), text
        output = jobs[case][1].communicate("go\n", timeout=120)[0]
        assert " have passed" not in output, output
