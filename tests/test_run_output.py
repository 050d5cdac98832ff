"""The output and the input of the ranks of `devicemesh run`: logs, prefixes, times, long lines,
standard input. tool/tests/run/main.rs has the cases of readers that have ended and of full
disks."""

import os
import re
import shlex
import subprocess

import pytest

from support.paths import TOOL
from support.processes import environment, run
from support.rsh import rsh, start
from support.tool import HERE, PATIENCE, ends, without_waits

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


def job(options, script, **how):
    """Runs a script of the shell in each rank."""
    return run(TOOL, "run", *options.split(), "--", "/bin/sh", "-c", script, timeout=PATIENCE, **how)


@pytest.mark.parametrize("options, said", [
    ("-n 1 --log-dir x --prefix", "add --tee"), ("-n 1 --log-max-size 1M", "--log-dir <DIR>"),
    ("-n 1 --log-dir x --log-keep 3", "--log-max-size <SIZE>"), ("-n 1 --log-dir x --log-max-size 0", "size of 1B to 64GiB"),
    ("-n 1 --log-dir x --log-max-size 100", "100 B is too small: the smallest size is 4K; write it like 100M"),
    ("-n 2 --stdin 2", "the ranks are 0 to 1"), ("-n 1 --stdin all", "a rank, as 0, or none"),
    ("-np 2", "argument '-np' found"), ("-n all", "1 to 65536, cpu, gpu or auto"),
    ("--prefx -n 1", "similar argument exists: '--prefix'"), ("--logdir x -n 1", "similar argument exists: '--log-dir'")])
def test_wrong_command_lines_say_what_to_do(options, said, tmp_path):
    assert said in job(options, "exit 9", code=2, cwd=tmp_path).stderr


VERSION = "`devicemesh --version` prints"


@pytest.mark.parametrize("words, tip", [
    ("version", VERSION), ("-v", VERSION), ("run --version", VERSION), ("run -V", VERSION), ("check --device gpu", "a similar value exists: 'cuda'")])
def test_words_of_other_tools_get_a_tip(words, tip):
    said = run(TOOL, *words.split(), code=2).stderr
    assert f"tip: {tip}" in said and said.count("tip:") == 1, said


@pytest.mark.parametrize("wrong, meant", [("rnu", "run"), ("chekc", "check"), ("inf", "info"), ("xyz", None)])
def test_a_mistyped_subcommand_is_guessed(wrong, meant):
    said = run(TOOL, wrong, code=2).stderr
    assert (f"similar subcommand exists: '{meant}'" in said) if meant else "similar" not in said, said


@pytest.mark.parametrize("options, lines", [("", 0), ("--tee --prefix", 2)], ids=["alone", "tee"])
def test_each_rank_has_logs(tmp_path, options, lines):
    script = "echo out $RANK; echo err $RANK >&2; if [ $RANK = 1 ]; then exit 9; fi; sleep 0.2"
    logs = tmp_path / "logs/deep"
    done = job(f"-n 2 --log-dir {logs} {options}", script, code=9)
    for rank in range(2):
        for stream in ("out", "err"):
            assert (logs / f"latest/rank-{rank}.{stream}").read_text() == f"{stream} {rank}\n"
    folder = logs / os.readlink(logs / "latest")
    assert f"devicemesh run: logs in {folder}\n" in done.stderr
    said = f"rank 1 failed first: exit code 9; its last line: err 1 (log in {folder}/rank-1.err)"
    assert done.stderr.splitlines()[-1] == f"devicemesh run: {said}", done.stderr
    assert (done.stdout.count("[rank"), done.stderr.count("[rank")) == (lines, lines), done


def test_logs_of_an_earlier_run_stay(tmp_path):
    for text in ("one", "two", "three"):
        job(f"-n 1 --log-dir {tmp_path}", f"echo {text}")
        assert (tmp_path / "latest/rank-0.out").read_text() == f"{text}\n"
    kept = [(folder / "rank-0.out").read_text() for folder in sorted(tmp_path.iterdir()) if not folder.is_symlink()]
    assert sorted(kept) == ["one\n", "three\n", "two\n"]


def test_nodes_share_the_folder_of_a_run(tmp_path, free_port):
    """Two nodes share a file system. Their lines have the name of the host."""
    command = [str(TOOL), "run", "--nnodes", "2", "-n", "1", "--rdzv-endpoint", f"localhost:{free_port()}",
               "--log-dir", str(tmp_path), "--tee", "--prefix", "--", "/bin/sh", "-c", "echo hello"]
    nodes = [subprocess.Popen(command, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = sorted(node.communicate(timeout=PATIENCE)[0] for node in nodes)
    assert said == [f"[rank {rank} on {HERE}] hello\n" for rank in range(2)]
    assert sorted(path.name for path in (tmp_path / "latest").iterdir()) == ["rank-0.err", "rank-0.out", "rank-1.err", "rank-1.out"]
    assert len([path for path in tmp_path.iterdir() if not path.is_symlink()]) == 1


def test_a_log_of_several_nodes_is_named_with_its_host(start, tmp_path):
    _, err = ends(start("al,be", "if [ $RANK = 1 ]; then exit 9; fi; exec sleep 1000", "--log-dir", "logs", "--failure-grace", "0"), 9)
    folder = f"logs/{os.readlink(tmp_path / 'logs/latest')}"
    assert without_waits(err)[0] == f"devicemesh run: logs in {folder} on each host", err
    assert err.splitlines()[-1] == f"devicemesh run: rank 1 on {HERE} failed first: exit code 9 (log in {folder}/rank-1.err on {HERE})", err


def test_each_line_has_its_time(tmp_path):
    done = job(f"-n 2 --log-dir {tmp_path} --tee --prefix --timestamps", "echo one; echo two; printf three >&2")
    assert len(re.findall(rf"^{TIME} \[rank [01]\] (?:one|two)$", done.stdout, re.M)) == 4, done.stdout
    assert len(re.findall(rf"^{TIME} \[rank [01]\] three$", done.stderr, re.M)) == 2, done.stderr
    assert re.fullmatch(rf"{TIME} one\n{TIME} two\n", (tmp_path / "latest/rank-1.out").read_text())
    alone = job(f"-n 1 --log-dir {tmp_path} --timestamps", "echo one")
    assert not alone.stdout and re.fullmatch(rf"{TIME} one\n", (tmp_path / "latest/rank-0.out").read_text())


@pytest.mark.parametrize("options", ["", "--timestamps"], ids=["bare", "timestamps"])
def test_logs_are_cut_by_size_between_lines(tmp_path, options):
    script = "seq 10000 19999; head -c 9000 /dev/zero | tr '\\0' x; echo; echo last"
    job(f"-n 1 --log-dir {tmp_path} --log-max-size 4K --log-keep 2 {options}", script)
    files = [tmp_path / f"latest/rank-0.out{suffix}" for suffix in (".2", ".1", "")]
    assert sorted(path.name for path in (tmp_path / "latest").iterdir()) == ["rank-0.err", *sorted(path.name for path in files)]
    *before, long, last = [re.sub(rf"(?m)^{TIME} ", "", path.read_text()) for path in files]
    # A line that is longer than a file has a file of its own.
    assert (long, last) == ("x" * 9000 + "\n", "last\n")
    numbers = before[0].split()
    assert before[0].endswith("19999\n") and len(before[0]) <= 4096
    assert numbers == [str(10000 + i) for i in range(10000 - len(numbers), 10000)]


def test_nothing_is_lost_between_logs(tmp_path):
    job(f"-n 1 --log-dir {tmp_path} --log-max-size 4K --log-keep 1000", "seq 20000")
    files = {int(path.suffix[1:]) if path.suffix != ".out" else 0: path for path in (tmp_path / "latest").glob("rank-0.out*")}
    whole = "".join(files[number].read_text() for number in sorted(files, reverse=True))
    assert whole == "".join(f"{number}\n" for number in range(1, 20001)) and all(path.stat().st_size <= 4096 for path in files.values())


def test_a_line_over_a_mebibyte_has_one_log(tmp_path):
    job(f"-n 1 --log-dir {tmp_path} --log-max-size 64K", "echo first; head -c 3000000 /dev/zero | tr '\\0' x; echo; echo last")
    texts = [(tmp_path / f"latest/rank-0.out{suffix}").read_text() for suffix in (".2", ".1", "")]
    assert texts == ["first\n", "x" * 3000000 + "\n", "last\n"], [len(text) for text in texts]


def test_a_file_with_the_name_of_the_link_stays(tmp_path):
    (tmp_path / "latest").write_text("mine")
    assert "latest is no symbolic link" in job(f"-n 1 --log-dir {tmp_path}", "true").stderr
    assert (tmp_path / "latest").read_text() == "mine"
    said = job(f"-n 1 --log-dir {tmp_path}/latest", "true", code=1).stderr
    assert f"cannot make --log-dir {tmp_path}/latest: it is a file, not a folder\n" in said


def test_a_log_that_cannot_be_written_ends_the_job(tmp_path):
    """The limit on the size of files stands for a full disk."""
    script = f"trap '' XFSZ; ulimit -f 1; exec {TOOL} run -n 2 --log-dir {tmp_path} --tee -- sh -c 'seq 1000; exec sleep 1000'"
    done = run("/bin/sh", "-c", script, code=1, timeout=PATIENCE)
    lost = r"cannot write \S+/rank-[01]\.out: File too large .*; some of the ranks' output is lost; 2 ranks get SIGTERM now"
    assert re.search(lost, done.stderr), done.stderr


def test_a_full_disk_under_logs_that_the_ranks_write_is_an_error(tmp_path):
    """The ranks see the error and end well all the same."""
    (logs := tmp_path / "logs").mkdir()
    fills = "head -c 100000 /dev/zero || exit 0"
    script = f"mount -t tmpfs -o size=64k none {logs} && exec {TOOL} run -n 1 --log-dir {logs} -- sh -c {shlex.quote(fills)}"
    isolated = ("unshare", "--user", "--map-root-user", "--mount")
    if run(*isolated, "mount", "-t", "tmpfs", "none", logs, code=None).returncode != 0:
        pytest.skip("no file system can be mounted here (unshare)")
    done = run(*isolated, "/bin/sh", "-c", script, code=1, timeout=PATIENCE)
    lost = rf"no room is left in {logs}/[^/ ]+ \(No space left on device .*\); some of the ranks' output may be lost"
    assert re.search(lost, done.stderr), done.stderr


def test_long_lines_are_whole_and_longer_ones_are_marked():
    done = job("-n 2 --prefix", "head -c 1000000 /dev/zero | tr '\\0' $RANK; echo; head -c 1500000 /dev/zero | tr '\\0' $RANK; echo")
    lines = done.stdout.splitlines()
    assert len(lines) == 6
    for rank in "01":
        whole, begin, end = [line.removeprefix(f"[rank {rank}] ") for line in lines if line.startswith(f"[rank {rank}] ")]
        assert whole == rank * 1000000
        assert begin.endswith(" [line cut at 1 MiB]") and end.startswith("[line goes on] ")
        assert begin.removesuffix(" [line cut at 1 MiB]") + end.removeprefix("[line goes on] ") == rank * 1500000


def test_lines_of_ranks_that_write_at_once_stay_whole():
    """The ranks write each line in pieces. Both outputs go to one pipe."""
    pieces = "printf 'a line ' >&N; printf 'of ' >&N; printf 'text\\n' >&N"
    repeated = "for i in 1 2 3 4 5 6 7 8 9 10; do WORK; done"
    bare = job("-n 4", repeated.replace("WORK", pieces.replace("N", "2")), merged=True).stdout
    assert bare.splitlines() == ["a line of text"] * 40
    both = repeated.replace("WORK", "; ".join(pieces.replace("N", stream) for stream in "12"))
    said = job("-n 4 --prefix", both, merged=True).stdout
    assert sorted(said.splitlines()) == sorted(f"[rank {rank}] a line of text" for rank in range(4) for _ in range(20))


@pytest.mark.parametrize("options", ["-n 1", "-n 1 --prefix", "-n 1 --log-dir logs --tee"], ids=["bare", "prefix", "tee"])
@pytest.mark.parametrize("text", ["half", "bar 1\\rbar 2", "bar 3\\r"], ids=["half", "bar", "return"])
def test_a_message_begins_a_line_after_a_line_without_an_end(tmp_path, options, text):
    done = job(options, f"printf '{text}' >&2; exit 3", code=3, cwd=tmp_path)
    # Python shows a carriage return as a line break.
    shown = (("[rank 0] " if "prefix" in options else "") + text.replace("\\r", "\n")).split()
    lines = [line for line in done.stderr.split("\n") if not line.startswith("devicemesh run: logs in")]
    assert " ".join(lines[:text.count("bar") or 1]).split() == shown, done.stderr
    assert lines[text.count("bar") or 1].startswith("devicemesh run: rank 0 (pid "), done.stderr


def test_a_message_begins_a_line_where_hosts_are_started(tmp_path):
    """The rank writes a line without its end, and fails after this test has read the line."""
    os.mkfifo(tmp_path / "go")
    tool = subprocess.Popen([TOOL, "run", "--hosts", HERE, "-n", "1", "--", "/bin/sh", "-c", f"printf half; read x < {tmp_path}/go; exit 3"],
                            env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0)
    while (begin := tool.stdout.read(4)) != b"half":
        begin += tool.stdout.readline()
        assert begin.startswith(b"devicemesh run: waiting for "), begin
    (tmp_path / "go").write_text("go\n")
    with tool.stdout as said:
        assert re.match(rb"\ndevicemesh run: rank 0 \(pid \d+\).* exited with code 3\n", said.read())
    assert tool.wait(PATIENCE) == 3


def test_one_rank_reads_the_input():
    script = "echo $RANK $(cat)"
    assert sorted(job("-n 3 --stdin 1", script, input="a\nb\n").stdout.splitlines()) == ["0", "1 a b", "2"]
    assert sorted(job("-n 2", script, input="a\n").stdout.splitlines()) == ["0", "1"]


def test_one_rank_reads_the_terminal():
    """The rank is in the background of the terminal, where a read would stop it."""
    ours, theirs = os.openpty()
    script = "test $RANK = 1 || { read one; echo got $one; read two; echo then $two; cat; echo end; }"
    # A shell of its own session has the terminal as its controlling one.
    process = subprocess.Popen(["setsid", "--ctty", TOOL, "run", "-n", "2", "--stdin", "0", "--", "/bin/sh", "-c", script],
                               stdin=theirs, stdout=subprocess.PIPE, env=environment(), text=True)
    os.close(theirs)
    os.write(ours, b"first\n")
    assert process.stdout.readline() == "got first\n"
    os.write(ours, b"second\n")
    assert process.stdout.readline() == "then second\n"
    os.write(ours, b"\x04")  # Ctrl-D
    assert process.stdout.read() == "end\n" and process.wait(PATIENCE) == 0
    os.close(ours)


def test_a_prompt_is_shown_before_its_line_ends(tmp_path):
    """Rank 0 asks and gets its answer only when the prompt has been seen, and rank 1 writes in
    between. Rank 1, which reads no input, is shown by whole lines."""
    os.mkfifo(tmp_path / "go")
    script = """if [ $RANK = 1 ]; then printf 'half '; read x < go; echo whole; exit; fi
printf 'name? '; read name; echo hello $name; printf 'more? '; read x; echo end"""
    tool = subprocess.Popen([TOOL, "run", "-n", "2", "--stdin", "0", "--prefix", "--", "/bin/sh", "-c", script], cwd=tmp_path,
                            env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    read = tool.stdout.read
    assert read(15) == b"[rank 0] name? "
    tool.stdin.write(b"ada\n")
    assert tool.stdout.readline() == b"hello ada\n"
    assert read(15) == b"[rank 0] more? "
    (tmp_path / "go").write_text("go\n")
    assert (tool.stdout.readline(), tool.stdout.readline()) == (b"\n", b"[rank 1] half whole\n")
    tool.stdin.write(b"\n")
    assert read(100) == b"[rank 0] end\n" and tool.wait(PATIENCE) == 0


def test_info_says_who_started_it():
    said = run(TOOL, "run", "-n", 1, "--", TOOL, "info").stdout
    assert re.search(r"^launcher +devicemesh run: rank 0 of 1, local rank 0", said, re.M), said
