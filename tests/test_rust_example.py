#!/usr/bin/env python3
"""examples/all_reduce.rs, which uses the Rust crate without the C ABI, alone and on four processes."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RELEASE = ROOT / "target" / "release"


def main():
    # Unoptimised, as the Rust tests: what it depends on is built already.
    subprocess.run(["cargo", "build", "--quiet", "--example", "all_reduce", "--features", "cudarc"], cwd=ROOT, check=True)
    program = ROOT / "target" / "debug" / "examples" / "all_reduce"
    for ranks in (1, 4):
        done = subprocess.run([RELEASE / "devicemesh", "run", "-n", str(ranks), "--", program], capture_output=True, text=True, timeout=120)
        lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))
        expected = [f"rank {rank} on cpu: 1048576 elements are {ranks}, 0 are not {ranks}" for rank in range(ranks)]
        on_gpu = [line.replace("on cuda", "on cpu") for line in lines]
        if done.returncode != 0 or on_gpu != expected:
            print(f"{ranks} ranks: exit code {done.returncode}\n{done.stdout}\n{done.stderr}\nexpected {expected}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
