#!/usr/bin/env python3
"""The calls of a mesh at 8, 1,024 and 1,048,576 ranks: ours through the C ABI (benches/mesh,
criterion) and PyTorch's with its fake backend, in turn.

`make bench-mesh` (PyTorch from DM_BENCH_PYTHON, else that of `make interop`). Prints medians over
the rounds of the processor time of a call, with the spread, the median of the rounds' ratios,
memory, and the machine. PyTorch at 1,048,576 ranks takes most of a minute and has one round."""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys

from common import ROOT, built, in_turn, interpreter, machine, spread, time_text, today

# As in benches/mesh/worlds.rs.
SHAPES = {8: (2, 2, 2, 1), 1024: (8, 4, 8, 4), 1048576: (64, 32, 64, 8)}
LARGEST = max(SHAPES)
CALLS = [
    "dm_init", "dm_init_ranks", "dm_slice", "dm_flatten", "dm_unflatten", "dm_free", "dm_get_local_rank",
    "dm_get_coordinate", "dm_hash", "dm_equal"
]
FROM_THREADS = [f"dm_get_local_rank/{LARGEST}", "dm_get_comm/1", "dm_get_comm/8", f"dm_slice_and_dm_free/{LARGEST}"]
THREAD_KINDS = {
    "/1_threads": "1 thread: processor time", "/1_threads_clock": "clock", "/4_threads": "4 threads: processor time",
    "/4_threads_clock": "clock"
}
CRITERION = ROOT / "target/criterion-mesh"


def ours(bench):
    """Criterion's medians, in seconds, by the benchmarks' names."""
    shutil.rmtree(CRITERION, ignore_errors=True)
    run([bench, "--bench"], env={**os.environ, "CRITERION_HOME": str(CRITERION)})
    medians = {}
    for about in CRITERION.glob("**/new/benchmark.json"):
        estimates = json.loads(about.with_name("estimates.json").read_text())
        medians[json.loads(about.read_text())["full_id"]] = estimates["median"]["point_estimate"] * 1e-9
    return medians


def theirs(python, ranks):
    return json.loads(run([python, ROOT / "benches/mesh_pytorch.py", *map(str, SHAPES[ranks])]).splitlines()[-1])


def run(command, env=None):
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{command[0]}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def memory_text(size):
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.0f} kB" if size else "less than a page (4 kB)"


def ratio_text(ratios):
    middle = statistics.median(ratios) if ratios else 0
    return "" if not ratios else f"{middle:,.0f}" if middle >= 10 else f"{middle:.1f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ours-only", action="store_true", help="without PyTorch")
    options = parser.parse_args()
    bench, python = built("bench", "mesh"), interpreter(not options.ours_only)
    our_rounds, their_rounds = [], {ranks: [] for ranks in SHAPES}
    for round_number in range(options.rounds):
        for name in in_turn(["ours", *(SHAPES if python else [])], round_number):
            if name == "ours":
                our_rounds.append(ours(bench))
            elif name != LARGEST or round_number == 0:
                their_rounds[name].append(theirs(python, name))
    version = f"PyTorch {their_rounds[LARGEST][0]['version']}" if python else "no PyTorch"
    print(f"{machine()}, {today()}; {options.rounds} rounds in turn, {version}" + (f" (1 round at {LARGEST} ranks)" if python else ""))
    print(f"{'ranks':>7} {'call':18} {'ours: median (min - max)':34} {'PyTorch':34} {'PyTorch / ours':>14}")
    for ranks in SHAPES:
        for call in CALLS:
            pairs = [(mine[f"{call}/{ranks}"], other.get(call)) for mine, other in zip(our_rounds, their_rounds[ranks])]
            ratios = [other / mine for mine, other in pairs if other]
            print(f"{ranks:>7} {call:18} {spread([mine[f'{call}/{ranks}'] for mine in our_rounds]):34} "
                  f"{spread([other for _, other in pairs if other]):34} {ratio_text(ratios):>14}".rstrip())
    print(f"\n{'call/ranks':30} " + " ".join(f"{kind:30}" for kind in THREAD_KINDS.values()).rstrip())
    for name in FROM_THREADS:
        print(f"{name:30} " + " ".join(f"{spread([mine[name + kind] for mine in our_rounds]):30}" for kind in THREAD_KINDS).rstrip())
    if python:
        groups = [round["dm_get_comm"] for round in their_rounds[8]]
        print(f"{'PyTorch get_group, 8 ranks':30} {spread(groups)}")
    print(f"\nmemory that dm_init of {LARGEST} ranks takes at most: {memory_text(int(run([bench, 'memory', 'plain'])))}, "
          f"with a list of ranks {memory_text(int(run([bench, 'memory', 'ranks'])))}"
          + (f"; PyTorch {memory_text(their_rounds[LARGEST][0]['memory'])}" if python else ""))
    print(f"the mesh algebra in Rust, {LARGEST} ranks: " + ", ".join(
        f"{name.split('/')[1]} {time_text(statistics.median(mine[name] for mine in our_rounds))}"
        for name in our_rounds[0] if name.startswith("algebra/")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
