"""NCCL's profiler plugin interface: a program that plays NCCL's part (tests/c/programs/profiler.c)
tells the library of its calls, and they are in the recording."""

import json
import re
from collections import Counter

import pytest

from support.paths import LIBRARY, TOOL
from support.processes import environment, run

COLLECTIVE, MESSAGE, KERNEL, COPIES = 2, 4, 64, 4096
KINDS = {3: COLLECTIVE | MESSAGE, 4: COLLECTIVE | MESSAGE | KERNEL, 5: COLLECTIVE | MESSAGE | KERNEL,
         6: COLLECTIVE | MESSAGE | KERNEL | COPIES}


@pytest.fixture
def profiler(programs):
    return programs.c("tests/c/programs/profiler.c")


def recorded(profiler, version, folder, *more, **variables):
    """What the program writes, and the calls in the recording: their names and their states."""
    said = run(profiler, LIBRARY / "libdevicemesh.so", version, *more, env=environment(DM_TRACE_DIR=folder, **variables)).stdout
    run(TOOL, "trace", folder, "-o", folder / "trace.json")
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return said, [(event["name"], event["args"].get("state", "done")) for event in events if event["ph"] == "X"]


@pytest.mark.parametrize("version", KINDS)
def test_calls_are_recorded(profiler, version, tmp_path):
    said, calls = recorded(profiler, version, tmp_path)
    assert f"init 0 kinds {KINDS[version]}" in said and "fine" in said, said
    has_kernels = KINDS[version] & KERNEL
    done, issued = "done" if has_kernels else "handed to a stream", "handed to a stream"
    expected = [
        ("tp: all-reduce 4 KiB", done),
        ("tp: broadcast 20 B", done),
        # Version 3 does not say how large the communicator is.
        ("tp: reduce-scatter 14 B" if version > 3 else "tp: reduce-scatter", issued),
        *([("tp: all-to-all 128 B", issued)] if KINDS[version] & COPIES else []),
        ("tp: send 24 B", done),
        ("tp: recv 40 B", issued),
        ("tp: all-reduce 40 B", "not ended"),
    ]
    assert calls == expected, calls


def test_late_handles_are_ignored(profiler, tmp_path):
    said, calls = recorded(profiler, 5, tmp_path, "many")
    assert "fine" in said and len(calls) == 2048, said
    assert Counter(calls) == {("tp: all-gather 2 B", "handed to a stream"): 2048}


@pytest.mark.parametrize("version", [4, 5, 6])
def test_a_kernel_that_does_not_end_is_a_slow_call(profiler, version):
    """Version 3 does not tell of kernels."""
    said = run(profiler, LIBRARY / "libdevicemesh.so", version, "slow").stdout
    assert re.search(r"^slow reduce-scatter 2 of tp, rank 1 of 2: rank 1 has waited in reduce-scatter 2 of tp for \d+\.\d s: "
                     r"rank 0 is not seen on this host, and no other rank is missing$", said, re.M), said


def test_without_a_recording_nccl_goes_on_without_the_plugin(profiler):
    said = run(profiler, LIBRARY / "libdevicemesh.so", 5, env=environment(DM_RECORDER=0)).stdout
    assert said.startswith("init 2 kinds 0"), said
