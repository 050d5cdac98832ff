"""docs/errors.md has a section for every status of the header, and quotes the library's own
messages. tests/c/programs/provoke.c provokes them. Messages that this machine cannot provoke are
looked for in the library's bytes."""

import re

import pytest

from support.paths import LIBRARY, ROOT, STRICT
from support.processes import environment, launch, run

BLOCK = re.compile(r"^<!-- (provoke|in the library)([^\n]*) -->\n```text\n(.*?)```", re.M | re.S)
SECTIONS = re.split(r"^## ", (ROOT / "docs/errors.md").read_text(), flags=re.M)[1:]


def quoted(kind):
    """(status, the words behind `kind`, the text) of each message that is checked in this way."""
    return [(section.splitlines()[0], words, text) for section in SECTIONS for how, words, text in BLOCK.findall(section) if how == kind]


def alike(message):
    """A message without what differs from run to run: handles, ports, processes, and what the
    recordings of the ranks that are still there say (tests/recording.rs tests that)."""
    message = re.sub(r"; (the first call of \S+ in which these ranks differ|rank \d+ (is at|has made|has begun)) .*", "", message)
    return re.sub(r"\(pid \d+\)|(?<=process )\d+|0x[0-9a-f]{8,}|(?<=127\.0\.0\.1:)\d{4,}", "#", message)


def test_each_status_has_a_section():
    statuses = re.findall(r"^#define (DM_STATUS_\w+) \d+$", (ROOT / "include/devicemesh.h").read_text(), re.M)
    titles = [section.splitlines()[0] for section in SECTIONS]
    assert len(statuses) > 10 and titles == statuses
    for status, section in zip(statuses, SECTIONS):
        blocks = BLOCK.findall(section)
        assert len(blocks) == section.count("```text"), f"{status}: a message that nothing checks"
        assert blocks or status == "DM_STATUS_OK", f"{status} has no message"


# `make test` provokes one of the messages at a deadline. These take three seconds each, in which
# nothing else runs.
AT_DEADLINES = {"never_came", "came_too_late"}


def provoked():
    """A case of the test below for each message that can be provoked. At a deadline, the ranks have
    200 ms to find out who is missing. So such a case runs alone."""
    for status, words, text in quoted("provoke"):
        marks = [pytest.mark.alone] * (status == "DM_STATUS_TIMEOUT") + [pytest.mark.long] * (words.split()[0] in AT_DEADLINES)
        yield pytest.param(status, words, text, id=words.strip(), marks=marks)


@pytest.mark.parametrize("status, words, text", provoked())
def test_message_made_anew(programs, status, words, text):
    program = programs.c("tests/c/programs/provoke.c", *STRICT)
    case, *ranks = words.split()
    how = {"env": environment(without=["DM_"])}
    done = launch(ranks[0], program, case, **how) if ranks else run(program, case, **how)
    assert alike(done.stdout.rstrip("\n")) == alike(f"{status}: {text.rstrip()}")


def test_messages_in_the_library():
    library, blocks = (LIBRARY / "libdevicemesh.so").read_bytes(), quoted("in the library")
    assert blocks
    for status, _, text in blocks:
        for part in re.split(r"\.\.\.|\n", text):
            assert part.strip().encode() in library, f"{status}: the library has no {part!r}"
