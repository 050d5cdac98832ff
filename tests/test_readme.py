"""README's commands are executed as they stand there, and its pieces of C, C++ and Python run on
the eight ranks of its mesh. A command that this file has no way to run is a failure, so a command
that is added to README needs one here. README's command `make test` runs this test. Takes half a
minute, because `make demo` trains a network and pip installs the package."""

import os
import re
import shutil
import venv

import pytest

from support import processes
from support.paths import ROOT, TARGET

README = (ROOT / "README.md").read_text()
TOOL = TARGET / "release/devicemesh"
pytestmark = pytest.mark.timeout(900)  # cargo may have to wait for another cargo


def run(command, cwd, **variables):
    """Runs a line of a shell as a reader types it, and gives its output."""
    # The jobserver of a make above would only bring warnings.
    env = processes.environment(without=["MAKEFLAGS", "MFLAGS", "MAKELEVEL", "PYTHONPATH"], **variables)
    return processes.run("bash", "-c", command, cwd=cwd, env=env, timeout=800, merged=True).stdout


def on_cpu(block):
    """README's lines with the device type that is here."""
    assert block.count('"cuda"') == 1, f"README's lines are for device type cuda:\n{block}"
    return block.replace('"cuda"', '"cpu"')


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.M | re.S)


def program(block, ending, before=""):
    """A whole program of README's lines: includes first, the rest in main."""
    lines = block.splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    return "\n".join([*lines[:first], "#include <stdio.h>", before, "int main(void) {", *lines[first:], ending, "}", ""])


def commands():
    """The commands of README's sh blocks, without comments."""
    lines = [line.split("#")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    return [line for line in lines if line]


def quoted(pattern):
    """A command in a sentence."""
    found = re.findall(rf"`({pattern})`", README)
    assert found, f"README has no `{pattern}` any more"
    return found[0]


@pytest.fixture
def workplace(tmp_path):
    """A folder where `include` and `target/release` are what they are in the repository, so that
    the commands' outputs stay out of it."""
    (tmp_path / "target").mkdir()
    for name in ("include", "target/release", "packaging"):
        (tmp_path / name).symlink_to(ROOT / name)
    (c,), (cpp,) = blocks("c"), blocks("cpp")
    shown = 'if (shard == NULL) return 1; printf("%s has shard\\n", {}); return 0;'
    hello = program(on_cpu(c), "char text[99]; size_t length; dm_describe(mesh, text, sizeof text, &length);" + shown.format("text"))
    (tmp_path / "hello.c").write_text(hello)
    (tmp_path / "train.c").write_text(hello)
    (tmp_path / "train.cpp").write_text(program(on_cpu(cpp), shown.format("mesh.describe().c_str()")))
    return tmp_path


def with_tool(command, cwd):
    return run(command, cwd, PATH=f"{TOOL.parent}:{os.environ['PATH']}")


def on_eight(command, cwd):
    """Eight ranks each say that they have the communicator."""
    output = with_tool(command, cwd)
    assert output.count("DeviceMesh((replicate=2, shard=4), 'cpu'") == 8 and output.count("has shard") == 8, output


def test_commands_in_their_order(workplace):
    # README's pkg-config line names no prefix, so PKG_CONFIG_PATH leads to this one.
    installed = workplace / "prefix"
    assert quoted(r"make install PREFIX=\.\.\.")
    assert "make test" in commands()
    run(f"make install PREFIX={installed}", ROOT)
    places = {"cargo": ROOT, "make demo": ROOT, "cc": workplace, "c++": workplace}
    left_out = []
    for command in (quoted("cargo build --release"), *commands()):
        if command == "make test":
            continue
        if "pkg-config" in command and not shutil.which("pkg-config"):
            left_out.append(command)
            continue
        where = next((place for start, place in places.items() if command.startswith(start)), None)
        assert where, f"README has `{command}`, and tests/test_readme.py no way to run it"
        run(command, where, PKG_CONFIG_PATH=f"{installed}/lib/pkgconfig")
    on_eight(quoted(r"devicemesh run -n 8 -- \./train"), workplace)
    on_eight("devicemesh run -n 8 -- ./hello", workplace)
    if left_out:
        pytest.skip(f"no pkg-config here (Debian: apt-get install pkg-config), so this was left out: {', '.join(left_out)}")


def test_show(workplace):
    assert "replicate" in with_tool(quoted("devicemesh show .*?"), workplace)


def test_message_of_a_disagreement(workplace):
    """The message that README quotes, from a rank that calls with the two sizes exchanged."""
    (message,) = re.findall(r"^```\n(rank 3 called .*)\n```$", README, re.M)
    source = (workplace / "hello.c").read_text().replace("(int[]){2, 4}", "dm_rank_is_3() ? (int[]){4, 2} : (int[]){2, 4}")
    source = source.replace('{"replicate", "shard"}', '{"dp", "tp"}').replace(
        "int main(void) {", '#include <stdlib.h>\n#include <string.h>\n'
        'static int dm_rank_is_3(void) { return strcmp(getenv("RANK"), "3") == 0; }\nint main(void) {')
    (workplace / "differ.c").write_text(source.replace("dm_get_comm(mesh", "puts(dm_last_error()); return 0; dm_get_comm(mesh"))
    run("cc differ.c -Iinclude -Ltarget/release -ldevicemesh -Wl,-rpath,$PWD/target/release -o differ", workplace)
    said = with_tool("devicemesh run -n 8 -- ./differ", workplace).splitlines()
    assert len(said) == 8 and all(message in line for line in said), f"README quotes\n{message}\nwhat was said is\n" + "\n".join(said)


@pytest.mark.long
def test_python_lines(workplace):
    """The package as README installs it, in an environment of its own, and README's lines with
    it."""
    place = workplace / "venv"
    venv.create(place, with_pip=True)
    run(quoted(r"pip install \./bindings/python"), ROOT, PATH=f"{place}/bin:{os.environ['PATH']}", PIP_DISABLE_PIP_VERSION_CHECK="1")
    ours = [block for block in blocks("python") if "devicemesh_jax" not in block]
    assert len(ours) == 1, "README has other Python than one block, and one of the JAX package (which bindings/jax/tests runs)"
    (workplace / "train.py").write_text("import array, devicemesh\ngradients = array.array('f', [1, 2])\n" + ours[0] +
                                        "print(str(mesh), 'has shard' if list(gradients) == [4, 8] else gradients)\n")
    on_eight(f"devicemesh run -n 8 -- {place}/bin/python train.py", workplace)
