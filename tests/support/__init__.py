"""What the Python tests share: paths, running commands, ranks, ports, compiled programs and pinned downloads.

tests/conftest.py offers the parts that must be cleaned up as fixtures."""
