"""The C reference: doxygen has nothing to complain about in the public headers, and every
function and constant of devicemesh.h is in a group's page."""

import re
import sys

import pytest

from support.paths import ROOT
from support.processes import run


@pytest.mark.long
@pytest.mark.timeout(900)  # fetches doxygen once
def test_everything_is_documented(tmp_path):
    done = run(sys.executable, "docs/reference/build.py", tmp_path, code=None, timeout=900, merged=True)
    if done.returncode == 77:
        pytest.skip(done.stdout.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout
    pages = "".join(page.read_text() for page in tmp_path.glob("group__c__*.html"))
    documented = set(re.findall(r'<td class="memItemRight"[^>]*>(?:<a [^>]*>|<b>)+(\w+)', pages))
    header = re.sub(r"/\*.*?\*/", "", (ROOT / "include/devicemesh.h").read_text(), flags=re.S)
    declared = set(re.findall(r"\b(dm_\w+)\(", header)) | set(re.findall(r"^#define (DM_\w+) ", header, re.M))
    assert len(declared) > 50, f"only {len(declared)} names in devicemesh.h"
    assert declared <= documented, f"in no group of the reference: {sorted(declared - documented)}"
