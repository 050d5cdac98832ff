#!/usr/bin/env python3
"""NVIDIA's releases of NCCL that tests/test_nccl_wheels.py loads. `tests/nccl_wheels.py --fetch`
fetches all of them (1.1 GB), once; without --fetch it says which are there."""

import sys

from support.paths import TARGET
from support.pinned import NCCL_WHEEL, nccl_wheel

# The oldest, one before and one after ncclCommInitRankScalable, and the newest when this was
# written.
RELEASES = [NCCL_WHEEL, "nvidia-nccl-cu12==2.22.3", "nvidia-nccl-cu12==2.27.7", "nvidia-nccl-cu13==2.32.3"]


def is_there(pin):
    return (TARGET / "wheels" / pin.replace("==", "-") / "complete").exists()


def main():
    for pin in RELEASES:
        if "--fetch" in sys.argv[1:]:
            nccl_wheel(pin)
        print(f"{pin}: {'there' if is_there(pin) else 'not fetched'}")


if __name__ == "__main__":
    main()
