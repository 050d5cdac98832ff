#!/usr/bin/env python3
"""The gates look at the library in other ways than the tests. `make gates` runs all of them; with
ARGS="asan fuzz" it runs these two. ARGS="asan aarch64 --quick" is the part of these gates that
.ci/run has: the library, and some programs.

A gate first plants a defect, which it must report. A gate that cannot run on this machine says what
is missing and counts as skipped. The last line is "gates: N passed, N failed, N skipped"."""

import argparse
import os
import sys
import time

import coverage
import emulated
import fuzz
import loom
import memcheck
import sanitized
from harness import ROOT, Failure, Skip
from support.machine import forget_machine
from support.processes import GATE

GATES = {
    "asan": (sanitized.address,
             "the library, the tool, tests/c and tests/cpp under AddressSanitizer, LeakSanitizer and UndefinedBehaviorSanitizer"),
    "valgrind": (memcheck.gate, "tests/c under valgrind's memcheck, with leaks as errors"),
    "tsan": (sanitized.thread, "the library, tests/c, tests/cpp and the store's tests under ThreadSanitizer, with an instrumented std"),
    "aarch64": (emulated.gate, "tests/c, tests/cpp and the tests of the reductions as programs of 64-bit ARM, under qemu-user"),
    "coverage": (coverage.gate, "lines that tests/c, tests/cpp and the Rust tests run, as one figure"),
    "loom": (loom.gate, "the lock-free protocols under loom, with weak memory, and with each memory order weakened once"),
    "fuzz": (fuzz.gate, "every fuzz target for --seconds (60) from its corpus"),
}
# The gates that have a quick form.
QUICK = {
    "asan": (sanitized.quick, "the library and some of tests/c under AddressSanitizer and the other two"),
    "aarch64": (emulated.quick, "the library, some of tests/c and tests/cpp and the tests of the reductions, under qemu-user"),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gate", nargs="*", help="; ".join(f"{name}: {what}" for name, (_, what) in GATES.items()))
    parser.add_argument("--seconds", type=int, default=60, help="how long each fuzz target runs")
    parser.add_argument("--quick", action="store_true", help=f"a part of these gates, for .ci/run: {', '.join(QUICK)}")
    options = parser.parse_args()
    gates = QUICK if options.quick else GATES
    unknown = set(options.gate) - set(gates)
    if unknown:
        parser.error(f"no gate {', '.join(sorted(unknown))}{' with --quick' * options.quick}; there are {', '.join(gates)}")
    os.chdir(ROOT)
    forget_machine()
    os.environ["SECONDS_EACH"] = str(options.seconds)
    os.environ[GATE] = "1"
    counts = {"ok  ": 0, "FAIL": 0, "skip": 0}
    for name in options.gate or gates:
        print(f"---- {name}: {gates[name][1]}", flush=True)
        began = time.monotonic()
        try:
            verdict, text = "ok  ", f": {gates[name][0]()}"
        except Skip as why:
            verdict, text = "skip", f": {why}"
        except Failure as failure:
            verdict, text = "FAIL", f"\n{failure}"
        counts[verdict] += 1
        print(f"{verdict} {name} ({time.monotonic() - began:.0f} s){text}", flush=True)
    print(f"gates: {counts['ok  ']} passed, {counts['FAIL']} failed, {counts['skip']} skipped")
    return 1 if counts["FAIL"] else 0


if __name__ == "__main__":
    sys.exit(main())
