"""The Python tests share this package: paths, running commands, ranks, ports, compiled programs and
pinned downloads.

tests/conftest.py offers the parts that must be cleaned up as fixtures."""
