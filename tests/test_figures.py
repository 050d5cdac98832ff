"""The tables of measured times agree with the sentences about them. docs/hosts.md marks the cells
in which Open MPI is ahead, and README.md says how many these are. README.md and
docs/performance.md say in how many rows of docs/bench.txt a peer is ahead, and in how many cells
of the tables of an EPYC and a Xeon in docs/performance.md, which marks these cells."""

import re

import pytest

from support.paths import ROOT

README = (ROOT / "README.md").read_text()


def test_open_mpi_is_bold_where_it_is_ahead():
    page = (ROOT / "docs/hosts.md").read_text()
    cells = []
    for line in re.findall(r"^\| [a-z/, -]*\| (?:4 B|64 KiB|1 MiB|64 MiB) \|(.*)\|$", page, re.M):
        for cell in line.split("|"):
            ours, bold, theirs = re.fullmatch(r"\s*([\d.,]+), (\**)([\d.,]+)\**\s*", cell).groups()
            is_ahead = float(theirs.replace(",", "")) < float(ours.replace(",", ""))
            assert bool(bold) == is_ahead, f"docs/hosts.md: {cell.strip()}: bold where Open MPI takes less time"
            cells.append(is_ahead)
    assert f"{sum(cells)} of {len(cells)}." in page, f"docs/hosts.md: Open MPI is ahead in {sum(cells)} of {len(cells)}"
    assert f"faster in {sum(cells)} of {len(cells)} figures" in README, f"README.md: {sum(cells)} of {len(cells)} figures"


def test_rows_in_which_a_peer_is_ahead_are_counted():
    # "2.05 ms (...) ... 2.34 Open MPI": the last ratio of a row is the best peer's time in ours.
    pattern = r"^\d+ (?:B|KiB|MiB) .*\s([\d.]+) (?:Gloo|MPICH|Open MPI|PyTorch gloo)\b(?: +\S+ \S+)?\s*$"
    ratios = [float(ratio) for ratio in re.findall(pattern, (ROOT / "docs/bench.txt").read_text(), re.M)]
    ahead = sum(ratio < 1 for ratio in ratios)
    assert f"In {ahead} of {len(ratios)} measured rows" in README, f"README.md: {ahead} of {len(ratios)} rows"
    assert f"In {ahead} of the {len(ratios)} rows of bench.txt" in (ROOT / "docs/performance.md").read_text()


@pytest.mark.parametrize("machine, name", [
    ("On a faster AMD EPYC", None),
    ("On another AMD EPYC", "an EPYC"),
    ("On an Intel Xeon", "a Xeon"),
])
def test_rows_of_one_machine_are_bold_where_a_peer_is_ahead(machine, name):
    """README has the newest figures of each kind of machine, by that name."""
    page = (ROOT / "docs/performance.md").read_text()
    section = page[page.index(f"### {machine}"):]
    section = section[:section.index("\n### ", 4)]
    cells = re.findall(r", (\**)([\d.]+)\** (?:Open MPI|MPICH|Gloo|PyTorch) \|", section)
    ahead = sum(float(ratio) < 1 for _, ratio in cells)
    wrong = [(bold, ratio) for bold, ratio in cells if bool(bold) != (float(ratio) < 1)]
    assert len(cells) == 72 and not wrong, f"docs/performance.md: bold where a peer takes less time: {wrong}"
    assert f"In {ahead} of the {len(cells)} rows" in section
    assert name is None or f"in {ahead} of {len(cells)} rows on {name}" in README
