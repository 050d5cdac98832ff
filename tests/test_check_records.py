"""Records of `devicemesh check`: --save, --compare and --tolerance. A comparison in which something
is slower takes over 5 s, because rows that look slower are measured again over several seconds."""

import json
import re
import shutil
import signal

import pytest

from support.checks import QUICK, before_engine, jobs, report, run

# Measuring takes as long as the processors are busy with other work; each wait has a deadline of
# its own.
pytestmark = pytest.mark.timeout(400)
# Times so long that turns of the scheduler do not count.
SMALL = ("2,1", "dp,tp", "--op", "all_reduce,broadcast", "--quiet", *QUICK[2:], "--sizes", "16MiB,32MiB",
         "--slow-factor", "1e6")


@pytest.fixture
def job(free_port):
    yield from jobs(free_port)


@pytest.fixture(scope="session")
def saved(programs, tmp_path_factory):
    """The text of a record. All workers of pytest-xdist share it, because a record takes some
    seconds."""
    def make(path):
        folder = tmp_path_factory.mktemp("record")
        file = folder / "record.json"
        run(2, *SMALL, "--save", file)
        assert [path.name for path in folder.iterdir()] == [file.name]
        shutil.move(file, path)

    return programs.once("record.json", make).read_text()


@pytest.fixture
def record(saved, tmp_path):
    """A record and its content."""
    file = tmp_path / "record.json"
    file.write_text(saved)
    return file, json.loads(saved)


def scaled(file, factor):
    """Writes a record of a check in which everything took `factor` times as long."""
    told = json.loads(file.read_text())
    rows = [row for dimension in told["dimensions"] for row in dimension["measurements"]] + told["pairs"]
    for row in rows:
        row["seconds"] *= factor
        row["batch_seconds"] = [seconds * factor for seconds in row["batch_seconds"]]
    other = file.with_name(f"scaled-{factor}.json")
    other.write_text(json.dumps(told))
    return other


def test_a_record_is_the_report(record):
    _, told = record
    assert told["schema"] == "devicemesh.check/1" and told["version"] and told["hosts"][0]["ranks"] == [0, 1], told
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", told["date"]), told
    rows = told["dimensions"][0]["measurements"] + told["pairs"]
    assert len(rows) == 6 and all(len(row["batch_seconds"]) >= 2 + 10 for row in rows), rows


@pytest.mark.long
def test_what_takes_longer_is_slow(job, record):
    """The record's times are a small part of what was measured, so no noise hides the
    difference."""
    file = scaled(record[0], 1e-5)
    ranks = job(2, *SMALL, "--compare", file, "--fail-slow")
    assert ranks.codes() == [4, 4], ranks
    said = ranks.outputs[0]
    assert f"compared with {file} of {record[1]['date']}: 6 rows, 6 slower by more than 10%, 0 faster; 6 rows that looked slower were measured again\n" in said, said
    assert re.search(r"^slower: dp \(1 x 2 ranks\) all_reduce of 16 MiB: [\d.]+ \w+, was [\d.]+ \w+ \(ratio \d{2,}\.\d\d\)$", said, re.M), said
    assert re.search(r"^  all_reduce +16 MiB +[\d.]+ \w+ +[\d.]+ +[\d.]+ +\d{2,}\.\d\d$", said, re.M) and "verdict: slow" in said, said
    assert "next: run the comparison again; if the figures vary from run to run, allow more with --tolerance 30%" in " ".join(said.split()), said


def test_what_takes_less_is_faster(job, record):
    ranks = job(2, *SMALL, "--compare", scaled(record[0], 1e5), "--fail-slow", "--json")
    told = report(ranks.outputs[0]) if ranks.codes() == [0, 0] else pytest.fail(str(ranks))
    compared = told["comparison"]
    assert (told["verdict"], compared["compared"], len(compared["faster"]), compared["slower"]) == ("good", 6, 6, []), told
    assert compared["differences"] == [] and compared["tolerance"] == 0.1, compared


SLOW = """
#include <dlfcn.h>
#include <signal.h>
#include <stddef.h>
#include <time.h>
/* Until SIGUSR1 a large all_reduce takes 0.15 s longer, however busy the machine is. */
static volatile sig_atomic_t is_quick;
static void end(int signal) { (void)signal, is_quick = 1; }
int ncclAllReduce(const void *send, void *recv, size_t count, int type, int op, void *comm, void *stream)
{
  typedef int (*function)(const void *, void *, size_t, int, int, void *, void *);
  const struct timespec pause = {.tv_nsec = 150000000};
  if (!is_quick && count >= 1 << 20) nanosleep(&pause, NULL);
  return ((function)dlsym(RTLD_NEXT, "ncclAllReduce"))(send, recv, count, type, op, comm, stream);
}
__attribute__((constructor)) static void prepare(void)
{
  struct sigaction action = {.sa_handler = end, .sa_flags = SA_RESTART};
  sigaction(SIGUSR1, &action, NULL);
}
"""


@pytest.mark.parametrize("lasts", [pytest.param(False, marks=pytest.mark.long), True], ids=["for a moment", "always"])
def test_what_looks_slower_is_measured_again(job, tmp_path, lasts):
    """A slowness of 0.15 s a call, which ends with the first measurement or does not end. It is
    many times the record's time, however busy the machine is. Takes up to 20 s, because it is
    measured again over many seconds."""
    slow = before_engine(tmp_path, SLOW)
    words = ("2", "dp", "--op", "all_reduce", *QUICK[2:], "--sizes", "4MiB", "--warmup", "1", "--slow-factor", "1e6")
    file = tmp_path / "record.json"
    saved = job(2, *words, "--save", file)
    assert saved.codes() == [0, 0], saved
    # A quick call takes a small part of the time in this record, and a slow one many times as long.
    told = json.loads(file.read_text())
    told["dimensions"][0]["measurements"][0].update(seconds=0.06, batch_seconds=[0.06, 0.06])
    # The pairs of ranks are never slower than in this record, so only the other row can be slow.
    for pair in told["pairs"]:
        pair.update(seconds=60.0, batch_seconds=[60.0, 60.0])
    file.write_text(json.dumps(told))
    ranks = job(2, *words, "--compare", file, "--fail-slow", "--json", "--tolerance", "50", DM_CCL_LIBRARY=slow)
    ranks.until(0, "] measuring again what looks slower")
    for rank in ranks.ranks if not lasts else []:
        rank.send_signal(signal.SIGUSR1)
    assert ranks.codes() == ([4, 4] if lasts else [0, 0]), ranks
    told = report(ranks.outputs[0])
    rows = [change["row"] for change in told["comparison"]["slower"]]
    batches = told["dimensions"][0]["measurements"][0]["batch_seconds"]
    assert rows == (["dp (1 x 2 ranks) all_reduce of 4 MiB"] if lasts else []), told
    assert told["comparison"]["measured_again"] >= 1 and len(batches) >= 2 + 5 and min(batches[:2]) > 0.15, told
    assert (min(batches) > 0.15) == lasts, told


def test_a_ratio_that_is_no_change_is_explained(job, record):
    """Each row of the record took long except in one batch, so the rows are not faster now."""
    told = json.loads(scaled(record[0], 1e5).read_text())
    for row in told["dimensions"][0]["measurements"]:
        row["batch_seconds"][0] = 1e-9
    record[0].write_text(json.dumps(told))
    ranks = job(2, *SMALL, "--compare", record[0])
    assert ranks.codes() == [0, 0], ranks
    said = ranks.outputs[0]
    assert len(re.findall(r"^  (?:all_reduce|broadcast) .* 0\.00\*$", said, re.M)) == 4, said
    assert "\n* more than 10% apart, but neither slower nor faster: 4 rows had a batch as quick as in the other check\n" in said, said


def test_a_tolerance_is_kept(job, record):
    ranks = job(2, *SMALL, "--compare", scaled(record[0], 0.5), "--tolerance", "1000000%", "--fail-slow")
    assert ranks.codes() == [0, 0] and "0 slower by more than 1000000%" in ranks.outputs[0], ranks


def test_rows_that_cannot_be_compared_are_told(job, record):
    """Other collectives and sizes, another dimension, and another library."""
    told = json.loads(record[0].read_text())
    told["library_version"] = "2.99.0"
    record[0].write_text(json.dumps(told))
    ranks = job(2, "2,1", "dp,tp", "--op", "all_reduce,reduce", "--quiet", *QUICK[2:], "--sizes", "16MiB,8KiB", "--slow-factor", "1e6", "--compare", record[0])
    assert ranks.codes() == [0, 0], ranks
    said = ranks.outputs[0]
    assert ": 2 rows, " in said and re.search(r"^  differs: NCCL [\d.]+, then 2\.99\.0$", said, re.M), said
    assert re.search(r"^  not compared: 4 rows, not in the record: dp \(1 x 2 ranks\) all_reduce of 8 KiB, ", said, re.M), said
    assert re.search(r"^  not compared: 4 rows, only in the record: dp \(1 x 2 ranks\) all_reduce of 32 MiB, ", said, re.M), said
    assert re.search(r"^  reduce .* -$", said, re.M), said


@pytest.mark.parametrize("change, said", [
    (lambda text: "", "EOF while parsing a value at line 1 column 0"),
    (lambda text: text[:200], "at line 1 column 200"),
    (lambda text: "\0" * 50, "at line 1 column 1"),
    (lambda text: '{"schema": "other/1"}', 'its schema is "other/1", and this version reads "devicemesh.check/1"'),
    (lambda text: text.replace('"dimensions":', '"dims":'), "missing field `dimensions`"),
    (lambda text: text.replace('"seconds":', '"seconds":-'), "it has a time of -"),
    (lambda text: '{"schema": "devicemesh.check/1", "verdict": "error"}', "a check that could not be made"),
    (lambda text: text.replace('"cpu"', '"cuda"', 1), "nothing in it can be compared: it is about device type cuda"),
    (lambda text: text.replace('"dp"', '"pp"'), "it has other dimensions, collectives or sizes"),
], ids=["empty", "cut", "zeros", "schema", "field", "time", "error", "device", "mesh"])
def test_a_file_that_is_no_record_is_refused_before_anything_is_measured(job, record, change, said):
    file, _ = record
    file.write_text(change(file.read_text()))
    ranks = job(2, *SMALL, "--compare", file, "--json")
    assert ranks.codes() == [2, 2], ranks
    lines = ranks.errors[0].splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"devicemesh check: --compare {file}: ") and said in lines[0], ranks
    assert ranks.errors[1] == "" and ranks.outputs == ["", ""], ranks


def test_files_that_cannot_be_read_or_written(job, record, tmp_path):
    for option, file, said in [("--compare", tmp_path / "none", "No such file"), ("--compare", tmp_path, "it is not a file"),
                               ("--save", record[0], "the file exists"), ("--save", tmp_path / "none/record", "No such file")]:
        ranks = job(2, *SMALL, option, file)
        assert ranks.codes() == [2, 2], ranks
        assert ranks.errors[0].startswith(f"devicemesh check: {option} {file}: ") and said in ranks.errors[0], ranks
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def test_ranks_that_disagree_about_records(job, record):
    ranks = job(2, *SMALL, of_each=lambda rank: ["--compare", record[0]] if rank == 1 else [])
    assert ranks.codes() == [3, 3] and " has --compare, and rank 0 has no --compare" in ranks.errors[0], ranks
