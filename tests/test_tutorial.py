"""docs/tutorial.md: every command is executed in the order of the page, with the programs that the
page has the reader save, and prints what the page quotes (tests/tutorial_page.py writes the outputs
anew). Takes 6 s, because five programs are compiled."""

import pytest

from tool_page import blocks, commands
from tutorial_page import PAGE, printed, programs

# The page's first command is cargo's, which may have to wait for another cargo.
pytestmark = pytest.mark.timeout(900)


def test_commands_and_outputs(tmp_path):
    text = PAGE.read_text()
    quoted = [(command, output) for block in blocks(text) for command, output in commands(block)]
    assert quoted, "no command is found on the page"
    for (command, expected), output in zip(quoted, printed(text, tmp_path)):
        assert output.rstrip() == expected, f"{command}: tests/tutorial_page.py writes the outputs anew"


def test_every_program_is_saved_and_compiled():
    text = PAGE.read_text()
    asked = " ".join(command for block in blocks(text) for command, _ in commands(block))
    assert len(programs(text)) == text.count("```cpp\n"), "a program of the page has no name to save it by"
    for name in programs(text):
        assert name.endswith(".hpp") or name in asked, f"no command compiles {name}"
