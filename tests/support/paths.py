"""The places of the project and of what was built, and the compilers that the tests use."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "target"
# DM_LIB_DIR names another build of the library, for example one that counts coverage.
LIBRARY = Path(os.environ.get("DM_LIB_DIR", TARGET / "release"))
TOOL = LIBRARY / "devicemesh"
# Everything that the tests write is below this folder.
SCRATCH = TARGET / "tests"
CC = os.environ.get("CC", "cc")
CXX = os.environ.get("CXX", "c++")
STRICT = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]
LINK = [f"-L{LIBRARY}", "-ldevicemesh", f"-Wl,-rpath,{LIBRARY}", "-pthread"]
