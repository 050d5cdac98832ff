#!/usr/bin/env python3
"""docs/tool.md says what is so: every command in it gives the output and the exit code that are quoted (process numbers, ports, folders, times and this host's name
aside); the completions complete, and the manual pages are clean. `--update` writes the quoted outputs anew."""

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(os.environ.get("DM_ROOT", Path(__file__).resolve().parent.parent))
LIBRARY = Path(os.environ.get("DM_LIB_DIR", ROOT / "target/release"))
PAGE = ROOT / "docs/tool.md"
# What differs from run to run, and what the page has in its place.
CHANGES = [(r"pid \d+", "pid 4711"), (r"reached in \d+ ms", "reached in 1 ms"), (r"127\.0\.0\.1:\d{3,5}", "127.0.0.1:29400"),
           (r"\b%s\b" % re.escape(socket.gethostname()), "alpha")]
CLEAN = {name: value for name, value in os.environ.items()
         if not re.match(r"(RANK|WORLD_SIZE|LOCAL_|MASTER_|SLURM_|PMI|OMPI_|DM_STORE|DM_CCL|NO_COLOR|CUDA_VIS)", name)}


def shell(script, folder):
    environment = {**CLEAN, "PATH": f"{LIBRARY}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    return done.stdout, done.returncode


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def quoted(text, update):
    """Every console block, with what its commands print now, and their exit code where it is not 0."""
    wrong, count = [], 0

    def block(match):
        nonlocal count
        out = ""
        with tempfile.TemporaryDirectory() as folder:
            for part in re.split(r"^(?=\$ )", match.group(1), flags=re.M):
                command, _, expected = part.partition("\n")
                if not command:
                    continue
                ports = {port: free_port() for port in re.findall(r"localhost:(\d+)", command)}
                ours = re.sub(r"localhost:(\d+)", lambda match: f"localhost:{ports[match.group(1)]}", command)
                printed, code = shell(ours.removeprefix("$ "), folder)
                for theirs, port in ports.items():
                    printed = printed.replace(f"localhost:{port}", f"localhost:{theirs}")
                for pattern, instead in CHANGES:
                    printed = re.sub(pattern, instead, printed)
                printed = printed.rstrip() + (f"\n(exit code {code})" if code else "")
                count += 1
                # Ranks write in any order, but the tool's own lines have one.
                if sorted(printed.split("\n")) != sorted(expected.rstrip().split("\n")):
                    wrong.append(f"$ {command}\nexpected:\n{expected}\nprinted:\n{printed}")
                out += f"{command}\n{printed}\n"
        return f"```console\n{out}```"

    text = re.sub(r"^```console\n(.*?)^```", block, text, flags=re.M | re.S)
    assert update or not wrong, f"{len(wrong)} outputs differ (tests/test_tool_page.py --update writes them anew)\n" + "\n".join(wrong)
    return text, count


def completions():
    def complete(*words):
        asked = f'source <(devicemesh completions bash); COMP_WORDS=({" ".join(words)}); COMP_CWORD={len(words) - 1}; '
        asked += f'_devicemesh devicemesh {words[-1]!r} {words[-2]!r}; printf "%s\\n" "${{COMPREPLY[@]}}"'
        return shell(asked, ROOT)[0].split()
    assert complete("devicemesh", "ru") == ["run"]
    assert complete("devicemesh", "run", "--rdzv-e") == ["--rdzv-endpoint"]
    assert sorted(complete("devicemesh", "show", "--color", "a")) == ["always", "auto"]
    for name in ("zsh", "fish", "elvish", "powershell"):
        script, code = shell(f"devicemesh completions {name}", ROOT)
        assert code == 0 and "rdzv-endpoint" in script, name
        if shutil.which(name) and name in ("zsh", "fish"):
            assert shell(f"{name} -n <(devicemesh completions {name})", ROOT) == ("", 0), name


def manual():
    with tempfile.TemporaryDirectory() as folder:
        assert shell("devicemesh man --dir man1", folder) == ("", 0)
        pages = sorted(path.name for path in Path(folder, "man1").iterdir())
        assert {"devicemesh.1", "devicemesh-run.1", "devicemesh-info.1", "devicemesh-show.1"} <= set(pages), pages
        listed = subprocess.run([LIBRARY / "devicemesh", "--help"], capture_output=True, text=True, check=True).stdout
        for name in re.findall(r"^  ([a-z]+) ", listed[listed.index("Commands:"):listed.index("Options:")], flags=re.M):
            assert name == "help" or f"devicemesh-{name}.1" in pages, f"no page for {name}"
        run = Path(folder, "man1/devicemesh-run.1").read_text()
        assert "EXIT CODES" in run and "rdzv" in run and "124" in run
        checks = [command for command in (["groff", "-man", "-ww", "-Tutf8", "-z"], ["mandoc", "-T", "lint", "-W", "warning"]) if shutil.which(command[0])]
        for command in checks:
            for page in pages:
                done = subprocess.run([*command, Path(folder, "man1", page)], capture_output=True, text=True, timeout=60)
                assert done.returncode == 0 and not done.stdout + done.stderr, f"{command} {page}\n{done.stdout}{done.stderr}"
        return len(pages), len(checks)


def main():
    update = sys.argv[1:] == ["--update"]
    text, count = quoted(PAGE.read_text(), update)
    if update:
        PAGE.write_text(text)
    completions()
    pages, checks = manual()
    print(f"{count} outputs, completions, {pages} manual pages by {checks} checkers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
