"""Runs every fuzz target for some time from its corpus. The target `abi` runs under
AddressSanitizer (see the Makefile)."""

import os
import re

from harness import Failure, run

TARGETS = {
    "frame": ["fuzz", "FUZZ=frame"], "records": ["fuzz", "FUZZ=records"], "mesh_text": ["fuzz", "FUZZ=mesh_text"],
    "decision": ["fuzz", "FUZZ=decision"], "wire": ["fuzz", "FUZZ=wire"],
    "abi": ["fuzz-abi"]
}


def gate():
    seconds = int(os.environ.get("SECONDS_EACH", "60"))
    told = []
    for name, words in TARGETS.items():
        output = run(["make", *words, f"SECONDS={seconds}"], timeout=seconds + 1800)
        done = re.search(r"Done (\d+) runs in (\d+) second", output)
        if not done:
            raise Failure(f"{output[-4000:]}\n{name}: libFuzzer did not say that it is done")
        told.append(f"{name} {int(done.group(1)):,} runs in {done.group(2)} s")
        print(f"     ok   {told[-1]}", flush=True)
    return ", ".join(told)
