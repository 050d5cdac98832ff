#!/usr/bin/env python3
"""README's commands are executed as they stand there, and its pieces of C, C++ and Python run on the eight ranks of its mesh. What is not in this script's
list of how to run a command is a failure: a command that is added to README needs a way to be run here. `make test`, which is README's too, is who runs this."""

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRATCH = Path(os.environ.get("DM_TMP", ROOT / "target/tests")).resolve() / "readme"
README = (ROOT / "README.md").read_text()
TOOL = ROOT / "target/release/devicemesh"


def run(command, cwd, **environment):
    """A line of a shell, as a reader types it."""
    # The jobserver of a make above would only bring warnings.
    inherited = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "PYTHONPATH")}
    done = subprocess.run(["bash", "-c", command], cwd=cwd, env={**inherited, **environment}, timeout=600, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, f"$ {command}\n{done.stdout}\nexit code {done.returncode}"
    print(f"$ {command}", flush=True)
    return done.stdout


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.M | re.S)


def program(block, ending, before=""):
    """A whole program of README's lines: includes first, the rest in main."""
    lines = block.splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    return "\n".join([*lines[:first], "#include <stdio.h>", before, "int main(void) {", *lines[first:], ending, "}", ""])


def workplace():
    """A folder where `include` and `target/release` are what they are in the repository, so that its commands' outputs stay out of it."""
    shutil.rmtree(SCRATCH, ignore_errors=True)
    (SCRATCH / "target").mkdir(parents=True)
    (SCRATCH / "include").symlink_to(ROOT / "include")
    (SCRATCH / "target/release").symlink_to(ROOT / "target/release")
    (SCRATCH / "packaging").symlink_to(ROOT / "packaging")
    (c,), (cpp,) = blocks("c"), blocks("cpp")
    shown = 'if (shard == NULL) return 1; printf("%s has shard\\n", {}); return 0;'
    hello = program(c, "char text[99]; size_t length; dm_describe(mesh, text, sizeof text, &length);" + shown.format("text"))
    (SCRATCH / "hello.c").write_text(hello)
    (SCRATCH / "train.c").write_text(hello)
    (SCRATCH / "train.cpp").write_text(program(cpp, shown.format("mesh.describe().c_str()")))


def commands():
    """What README has in its sh blocks, without comments."""
    lines = [line.split("#")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    return [line for line in lines if line]


def quoted(pattern):
    """A command in a sentence."""
    found = re.findall(rf"`({pattern})`", README)
    assert found, f"README has no `{pattern}` any more"
    return found[0]


def on_eight(command):
    """Eight ranks each say that they have the communicator."""
    output = run(f"{command}", SCRATCH, PATH=f"{TOOL.parent}:{os.environ['PATH']}")
    assert output.count("DeviceMesh((replicate=2, shard=4), 'cpu'") == 8 and output.count("has shard") == 8, output


def python_lines():
    """The package as README installs it, in an environment of its own, and README's lines with it."""
    place = SCRATCH / "venv"
    venv.create(place, with_pip=True)
    run(quoted(r"pip install \./bindings/python"), ROOT, PATH=f"{place}/bin:{os.environ['PATH']}", PIP_DISABLE_PIP_VERSION_CHECK="1")
    ours = [block for block in blocks("python") if "devicemesh_jax" not in block]
    assert len(ours) == 1, "README has other Python than one block, and one of the JAX package (which bindings/jax/tests runs)"
    (SCRATCH / "train.py").write_text(
        "import array, devicemesh\ngradients = array.array('f', [1, 2])\n" + ours[0] + "print(str(mesh), 'has shard' if list(gradients) == [4, 8] else gradients)\n")
    on_eight(f"devicemesh run -n 8 -- {place}/bin/python train.py")


def disagreement():
    """The message that README quotes, from a rank that calls with the two sizes exchanged."""
    (message,) = re.findall(r"^```\n(rank 3 called .*)\n```$", README, re.M)
    source = (SCRATCH / "hello.c").read_text().replace("(size_t[]){2, 4}", "dm_rank_is_3() ? (size_t[]){4, 2} : (size_t[]){2, 4}")
    source = source.replace('{"replicate", "shard"}', '{"dp", "tp"}').replace("int main(void) {", '#include <stdlib.h>\n#include <string.h>\n'
                            'static int dm_rank_is_3(void) { return strcmp(getenv("RANK"), "3") == 0; }\nint main(void) {')
    (SCRATCH / "differ.c").write_text(source.replace("dm_get_comm(mesh", "puts(dm_last_error()); return 0; dm_get_comm(mesh"))
    run("cc differ.c -Iinclude -Ltarget/release -ldevicemesh -Wl,-rpath,$PWD/target/release -o differ", SCRATCH)
    said = run("devicemesh run -n 8 -- ./differ", SCRATCH, PATH=f"{TOOL.parent}:{os.environ['PATH']}").splitlines()
    assert len(said) == 8 and all(message in line for line in said), f"README quotes\n{message}\nwhat was said is\n" + "\n".join(said)


def main():
    workplace()
    ways = {"make demo": ROOT, "cc": SCRATCH, "c++": SCRATCH}
    assert "make test" in commands()
    missing = None if shutil.which("pkg-config") else "no pkg-config here (Debian: apt-get install pkg-config): README's line that needs it was left out"
    # As an installed tree is found: README says no prefix.
    installed = SCRATCH / "prefix"
    assert quoted(r"make install PREFIX=\.\.\.")
    run(f"make install PREFIX={installed}", ROOT)
    for command in (quoted("cargo build --release"), *commands()):
        if command != "make test" and not (missing and "pkg-config" in command):
            where = ROOT if command.startswith("cargo") else next((place for start, place in ways.items() if command.startswith(start)), None)
            assert where, f"README has `{command}`, and tests/test_readme.py no way to run it"
            run(command, where, PKG_CONFIG_PATH=f"{installed}/lib/pkgconfig")
    on_eight(quoted(r"devicemesh run -n 8 -- \./train"))
    on_eight("devicemesh run -n 8 -- ./hello")
    assert "replicate" in run(quoted("devicemesh show .*?"), SCRATCH, PATH=f"{TOOL.parent}:{os.environ['PATH']}")
    disagreement()
    python_lines()
    if missing:
        print(missing)
        return 77
    return 0


if __name__ == "__main__":
    sys.exit(main())
