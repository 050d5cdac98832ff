"""The parts of the suite that tests/run.py runs itself. pytest runs the Python tests
(tests/conftest.py)."""
