#!/usr/bin/env python3
"""The C reference: doxygen has nothing to complain about in the public headers, and every function and constant of devicemesh.h is in a group's page."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(os.environ.get("DM_ROOT", Path(__file__).resolve().parent.parent))
SCRATCH = Path(os.environ.get("DM_TMP", ROOT / "target/tests"))


def main():
    output = SCRATCH / "reference"
    done = subprocess.run([sys.executable, ROOT / "docs/reference/build.py", output], timeout=900)
    if done.returncode != 0:
        return done.returncode
    pages = "".join(page.read_text() for page in output.glob("group__c__*.html"))
    documented = set(re.findall(r'<td class="memItemRight"[^>]*>(?:<a [^>]*>|<b>)+(\w+)', pages))
    header = re.sub(r"/\*.*?\*/", "", (ROOT / "include/devicemesh.h").read_text(), flags=re.S)
    declared = set(re.findall(r"\b(dm_\w+)\(", header)) | set(re.findall(r"^#define (DM_\w+) ", header, re.M))
    assert len(declared) > 50, f"only {len(declared)} names in devicemesh.h"
    assert declared <= documented, f"in no group of the reference: {sorted(declared - documented)}"
    print(f"{len(declared)} functions and constants of devicemesh.h, no warnings")
    return 0


if __name__ == "__main__":
    sys.exit(main())
