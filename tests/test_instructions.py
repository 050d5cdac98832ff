"""The instructions of one call of the quick functions are those that were recorded
(tests/instructions.py). Takes half a minute, because valgrind counts them."""

import pytest

import instructions


@pytest.mark.long
@pytest.mark.timeout(600)  # valgrind is slow
def test_no_call_costs_more(tmp_path):
    assert not instructions.compare(tmp_path)
