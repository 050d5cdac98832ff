"""docs/tool.md is right: every command in it gives the output and the exit code that are
quoted (tests/tool_page.py writes them anew). The options of other launchers are refused in the
words of its table. The completions complete, and the manual pages are clean."""

import re
import shutil

import pytest

from support.paths import ROOT, TOOL
from support.processes import environment, run
from support.terminals import on_terminals
from tool_page import PAGE, blocks, commands, options_with_advice, printed, refused_options, shell

BLOCKS = blocks(PAGE.read_text())
# The outputs of these commands depend on seconds: on a busy machine a rank may fail later than
# another one ends, or a node may say for whom it waits.
DEPENDS_ON_SECONDS = re.compile(r"\bsleep [\d.]+|timeout [\d.]+s\b")


@pytest.mark.parametrize("block", [pytest.param(block, id=commands(block)[0][0][2:50], marks=[pytest.mark.alone] * bool(DEPENDS_ON_SECONDS.search(block)))
                                   for block in BLOCKS])
def test_quoted_outputs(block, tmp_path, free_port):
    for command, output in commands(block):
        # Ranks write in any order.
        assert sorted(printed(command, tmp_path, free_port).split("\n")) == sorted(output.split("\n")), (
            f"{command}: tests/tool_page.py writes the outputs anew"
        )


def test_options_of_other_launchers_are_refused_in_the_words_of_the_page():
    rows = refused_options()
    assert [option.lstrip("-") for options, _ in rows for option in options] == options_with_advice(), (
        f"the table of {PAGE.name} has the options of tool/src/other_launchers.rs"
    )
    for options, advice in rows:
        for option in options:
            said = run(TOOL, "run", option, "2", "--", "true", code=2).stderr
            assert advice in " ".join(said.split()), f"{option}: {said}"


@pytest.mark.parametrize("option", ["-host", "-hosts", "-hostfile"])
def test_the_hosts_of_mpirun_with_one_dash_are_no_question_for_help(option):
    done = run(TOOL, "run", option, "alpha", "--", "true", code=2)
    assert f"-{option}" in done.stderr and not done.stdout


@pytest.mark.parametrize("words, expected", [
    (("devicemesh", "ru"), ["run"]),
    (("devicemesh", "run", "--rdzv-e"), ["--rdzv-endpoint"]),
    (("devicemesh", "show", "--color", "a"), ["always", "auto"]),
])
def test_completions_of_bash(words, expected):
    asked = f'source <(devicemesh completions bash); COMP_WORDS=({" ".join(words)}); COMP_CWORD={len(words) - 1}; '
    asked += f'_devicemesh devicemesh {words[-1]!r} {words[-2]!r}; printf "%s\\n" "${{COMPREPLY[@]}}"'
    assert sorted(shell(asked, ROOT)[0].split()) == expected


@pytest.mark.parametrize("name", ["zsh", "fish", "elvish", "powershell"])
def test_completions_of_other_shells(name):
    script, code = shell(f"devicemesh completions {name}", ROOT)
    assert code == 0 and "rdzv-endpoint" in script
    if shutil.which(name) and name in ("zsh", "fish"):
        assert shell(f"{name} -n <(devicemesh completions {name})", ROOT) == ("", 0)


@pytest.mark.parametrize("width", [60, 200])
@pytest.mark.parametrize("words", ["help", "run --help", "store --help", "ps --help", "why --help", "check --help", "show --help", "info --help", "man --help"])
def test_help_fits_the_terminal(words, width):
    """No line is wider than the terminal. A long text is continued below its beginning, and a long
    command after a backslash."""
    shown = on_terminals(width, TOOL, *words.split(), env=environment(TERM="xterm", NO_COLOR="1"))[0].replace("\r\n", "\n")
    lines = shown.split("\n")
    assert not [line for line in lines if len(line) > width], shown
    # The first paragraphs are as wide as they can be.
    first = lines[:next(at for at, line in enumerate(lines) if line.startswith("Usage:"))]
    for line, below in zip(first, first[1:]):
        assert not below or not line or len(line) + 1 + len(below.split()[0]) > width, first
    # The rest has the same words at every width, except for the backslashes in commands.
    end = shown.partition("Print help (see a summary with '-h')\n\n")[2]
    whole = run(TOOL, *words.split(), env=environment(NO_COLOR="1")).stdout.partition("Print help (see a summary with '-h')\n\n")[2]
    plain = lambda text: " ".join(text.replace("\\\n", " ").split())
    assert end and plain(end) == plain(whole)
    # Each line of a section begins with a label, or in the column of the texts.
    for section in end.split("\n\n"):
        columns = {len(match[0]) for match in re.finditer(r"^  \S+(?: [-+] \S+)?  +(?=\S)", section, re.M)}
        rest = [len(line) - len(line.lstrip()) for line in section.split("\n") if line.startswith("    ")]
        if "Examples" not in section and columns:
            assert len(columns) == 1 and set(rest) <= columns, section


@pytest.fixture
def manual(tmp_path):
    """The folder of the manual pages."""
    assert shell("devicemesh man --dir man1", tmp_path) == ("", 0)
    return tmp_path / "man1"


def test_manual_has_a_page_for_each_command(manual):
    pages = {path.name for path in manual.iterdir()}
    assert {"devicemesh.1", "devicemesh-run.1", "devicemesh-info.1", "devicemesh-show.1"} <= pages
    listed = run(TOOL, "--help").stdout
    names = re.findall(r"^  ([a-z]+) ", listed[listed.index("Commands:"):listed.index("Options:")], flags=re.M)
    assert {f"devicemesh-{name}.1" for name in names} | {"devicemesh.1"} == pages
    listed = re.findall(r"^(devicemesh\S+)\(1\)", (manual / "devicemesh.1").read_text().replace("\\-", "-"), flags=re.M)
    assert {f"{name}.1" for name in listed} | {"devicemesh.1"} == pages
    version = run(TOOL, "--version").stdout.strip()
    assert all(f'"{version}" "libdevicemesh"' in (manual / page).read_text() for page in pages)
    page = (manual / "devicemesh-run.1").read_text()
    assert "EXIT CODES" in page and "rdzv" in page and "124" in page


@pytest.mark.parametrize("checker",
                         [["groff", "-man", "-ww", "-Tutf8", "-z"], ["mandoc", "-T", "lint", "-W", "warning"]],
                         ids=lambda words: words[0])
def test_manual_is_clean(manual, checker):
    if not shutil.which(checker[0]):
        pytest.skip(f"no {checker[0]} here")
    for page in sorted(manual.iterdir()):
        done = run(*checker, page)
        assert not done.stdout + done.stderr, page
