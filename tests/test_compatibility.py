#!/usr/bin/env python3
"""The C ABI beside what was recorded of it (tests/compatibility/records, by `make abi-record`): layouts, exported names, abidiff; that each of these refuses headers
that break programs and takes those that add to it; and programs compiled against an earlier header, and against one of the future, on this library."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.dont_write_bytecode = True
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/compatibility"))
import c_abi
import record

RELEASE = ROOT / "target/release"
SCRATCH = ROOT / "target/tests/abi"
SONAME = f"libdevicemesh.so.{record.series()}"
HEADER = (ROOT / "include/devicemesh.h").read_text()
NO_ABIDIFF = "no abidiff here, so functions' types were not compared (Debian: apt-get install abigail-tools)"


class Failure(Exception):
    pass


def check(holds, message):
    if not holds:
        raise Failure(message)


class Baseline:
    """What a header is held to: a record, or today's header for the cases that show what would be refused."""

    def __init__(self, name, header, layout, abi):
        self.name, self.header, self.layout, self.abi = name, header, layout, abi

    def hold(self, header, how):
        """Refuses a header that breaks what was compiled against this one; None when nothing does."""
        folder = SCRATCH / f"{self.name}-{how}"
        try:
            if how == "layout":
                c_abi.compare_layouts(self.layout, c_abi.layout(header, folder), c_abi.sized(header))
            else:
                c_abi.abidiff(self.abi, c_abi.stub(header, folder, SONAME), c_abi.sized(header))
        except c_abi.Refused as refused:
            return str(refused)
        return None


def methods():
    return ["layout", "abidiff"] if shutil.which("abidiff") else ["layout"]


def released():
    """Today's header holds what the last release of this SONAME promised, and the library exports it."""
    folder = record.RECORDS / record.series()
    if not folder.exists():
        return f"{SONAME} has not been released: nothing to hold it to"
    baseline = Baseline("released", (folder / "devicemesh.h").read_text(), (folder / "layout.txt").read_text(), folder / "devicemesh.abi")
    for how in methods():
        refused = baseline.hold(HEADER, how)
        check(refused is None, f"include/devicemesh.h breaks programs compiled against {folder.name} ({how}): {refused}\nbelow 1.0 that needs a new minor version")
    exported = {line.split()[-1] for line in c_abi.run("nm", "-D", "--defined-only", RELEASE / "libdevicemesh.so").splitlines()}
    gone = set(c_abi.functions(baseline.header)) - exported
    check(not gone, f"{SONAME} exported {sorted(gone)}")
    return f"{len(c_abi.functions(baseline.header))} functions, {len(baseline.layout.splitlines())} lines of layout"


# What is done to today's header, and which comparisons refuse it.
MUTATIONS = [
    ("nothing", "", "", ()),
    ("a new function", "dm_status dm_lookup(", "dm_status dm_later(int32_t more);\ndm_status dm_lookup(", ()),
    ("a new constant", "#define DM_STATUS_OK 0", "#define DM_STATUS_LATER 1000\n#define DM_STATUS_OK 0", ()),
    ("a struct that grows at its end", "} dm_init_options;", "  int64_t later;\n} dm_init_options;", ()),
    ("a function that is gone", "dm_status dm_lookup(", "dm_status dm_looked_up(", ("abidiff",)),
    ("one more parameter", "dm_status dm_group_ranks(const struct dm_mesh *mesh,", "dm_status dm_group_ranks(const struct dm_mesh *mesh, int32_t more,", ("abidiff",)),
    ("a parameter of another size", "dm_reduce_scatter(const struct dm_mesh *mesh,", "dm_reduce_scatter(int32_t mesh,", ("abidiff",)),
    ("a field in the middle", "  const char *comm_name;", "  int64_t early;\n  const char *comm_name;", ("layout", "abidiff")),
    ("a field in what was padding", "  const void *nccl_config;", "  uint32_t early;\n  const void *nccl_config;", ("layout", "abidiff")),
    ("a field of another type", "  int64_t timeout_ms;\n} dm_init_options;", "  uint64_t timeout_ms;\n} dm_init_options;", ("layout",)),
    ("a struct without a size that grows", "} dm_placement;", "  int32_t more;\n} dm_placement;", ("layout", "abidiff")),
    ("another number", "#define DM_STATUS_TIMEOUT 7", "#define DM_STATUS_TIMEOUT 17", ("layout",)),
]


def mutations():
    """Each comparison sees what it is there for, and lets additions pass."""
    folder = SCRATCH / "today"
    layout, abi = c_abi.layout(HEADER, folder), folder / "devicemesh.abi"
    if "abidiff" in methods():
        abi.write_text(c_abi.abidw(c_abi.stub(HEADER, folder, SONAME)))
    today = Baseline("today", HEADER, layout, abi)
    for name, old, new, refusing in MUTATIONS:
        # Comments stand between the last field and the end of a struct in the header as it is.
        text = c_abi.bare(HEADER)
        text = re.sub(r"\n\s*\n", "\n", text)
        check(old in text, f"{name}: no {old!r} in the header")
        text = text.replace(old, new, 1)
        for how in methods():
            refused = today.hold(text, how)
            check((refused is not None) == (how in refusing), f"{name}: {how} {f'refuses it: {refused}' if refused else 'lets it pass'}")
    return f"{len(MUTATIONS)} headers"


def compile_and_run(source, program, header, *flags, ranks=0):
    folder = SCRATCH / program
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "devicemesh.h").write_text(header)
    c_abi.run(c_abi.CC, "-std=c11", "-Wall", *flags, "-I", folder, ROOT / "tests/compatibility" / source, "-L", RELEASE, "-ldevicemesh", f"-Wl,-rpath,{RELEASE}",
              "-o", folder / program)
    return c_abi.run(*([RELEASE / "devicemesh", "run", "-n", ranks, "--"] if ranks else []), folder / program)


def least_sizes():
    """The least struct sizes that were recorded are the library's."""
    recorded = record.RECORDS / record.series() / "least_sizes.txt"
    if not recorded.exists():
        return f"{SONAME} has not been released"
    sizes = {what.split()[1]: size[0] for what, size in c_abi.parse(recorded.read_text()).items()}
    text = (ROOT / "tests/compatibility/least_sizes.c").read_text()
    missing = [name for name in sizes if f"LEAST_{name}" not in text]
    check(not missing, f"tests/compatibility/least_sizes.c does not try {missing}")
    compile_and_run("least_sizes.c", "least_sizes", HEADER, *(f"-DLEAST_{name}=((size_t){size})" for name, size in sizes.items()))
    return f"{len(sizes)} structs"


def other_headers():
    """A program of two ranks against each earlier header, today's, and one whose structs have grown."""
    earlier = sorted((ROOT / "tests/compatibility/headers").glob("*/devicemesh.h")) + sorted(record.RECORDS.glob("*/devicemesh.h"))
    check(earlier, "there is no earlier header")
    future = re.sub(r"\} (\w+);", lambda end: f"  int64_t later;\n{end.group(0)}" if end.group(1) in c_abi.sized(HEADER) else end.group(0), HEADER)
    check(future.count("int64_t later;") == len(c_abi.sized(HEADER)), "the header of the future is not one")
    for name, header, flags in [*((path.parent.name, path.read_text(), []) for path in earlier), ("today", HEADER, []), ("future", future, ["-DFUTURE"])]:
        output = compile_and_run("earlier.c", f"program-{name}", header, *flags, ranks=2)
        check(output.count("sum 1") == 2, f"compiled against {name}:\n{output}")
    return ", ".join([*(path.parent.name for path in earlier), "today, future"])


def main():
    shutil.rmtree(SCRATCH, ignore_errors=True)
    for case in (released, mutations, least_sizes, other_headers):
        began = time.monotonic()
        try:
            said = case()
        except (Failure, RuntimeError, subprocess.TimeoutExpired) as failure:
            print(f"{case.__name__}: {failure}")
            return 1
        print(f"{case.__name__}: {said} ({time.monotonic() - began:.1f} s)")
    if "abidiff" not in methods():
        print(NO_ABIDIFF)
        return 77
    return 0


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
