"""Functions that the benchmarks beside PyTorch share."""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests/interop"))
import pytorch  # noqa: E402


def built(kind, bench):
    """A program of benches/Cargo.toml, built in release with the libraries beside it. `kind` is
    "bench" or "bin"."""
    command = ["cargo", "build", "--release", "--package", "devicemesh-benches", f"--{kind}", bench, "--message-format=json"]
    built = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    messages = [json.loads(line) for line in built.stdout.splitlines() if line.startswith("{")]
    return next(message["executable"] for message in messages
                if message.get("target", {}).get("name") == bench and message.get("executable"))


def interpreter(wanted=True):
    """A Python interpreter with PyTorch: the one that DM_BENCH_PYTHON names, else the one that
    tests/interop/pytorch.py finds or makes. If there is none, prints a line and gives None."""
    if not wanted:
        return None
    if "DM_BENCH_PYTHON" in os.environ:
        os.environ["DM_INTEROP_PYTHON"] = os.environ["DM_BENCH_PYTHON"]
    python = pytorch.interpreter()
    if python is None:
        print("no PyTorch here (DM_BENCH_PYTHON names an interpreter that has it): ours alone")
    return python


def time_text(seconds):
    for unit, scale in (("s", 1), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def spread(values):
    """The median of times, with the least and the largest one."""
    values = list(values)
    if not values:
        return ""
    text = time_text(statistics.median(values))
    return text if len(values) == 1 else f"{text} ({time_text(min(values))} - {time_text(max(values))})"


def machine():
    model = next((line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "")
    return f"{os.cpu_count()} x {model}, Linux {platform.release()}"


def today():
    return time.strftime("%Y-%m-%d")


def in_turn(contestants, round_number):
    """The contestants in an order that changes with the round, so that each is first as often as
    last."""
    order = list(contestants)
    return order if round_number % 2 == 0 else order[::-1]
