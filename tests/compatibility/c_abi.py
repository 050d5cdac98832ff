"""The C ABI as the header has it, for the record of a release (record.py) and for the test that
later headers are held to it (test_compatibility.py).

Two pictures of it, both from the header alone, as include/devicemesh.h is generated from the Rust
source and exported names are compared with it elsewhere:

- layout: a C program made from the header prints structs, fields, offsets, sizes and constants.
- stub: a shared library in C with every function of the header and nothing in it, whose debug information abidw and abidiff read. The library's own speaks
  of Rust's types.
"""

import os
import re
import subprocess
from pathlib import Path

CC = os.environ.get("CC", "cc")
# A struct that begins with its size may grow at its end, and no other way; new functions are
# welcome.
GROWTH = """[suppress_type]
name = {name}
type_kind = struct
has_data_member_inserted_at = end
has_size_change = yes
"""


class Refused(Exception):
    """A header that breaks programs compiled with an earlier one."""


def bare(header):
    return re.sub(r"/\*.*?\*/", "", header, flags=re.S)


def structs(header):
    """{struct: {field: its declaration}} in the header's order."""
    found = {}
    for body, name in re.findall(r"typedef struct \w+ \{(.*?)\} (\w+);", bare(header), re.S):
        fields = [" ".join(field.split()) for field in body.split(";") if field.strip()]
        found[name] = {(re.search(r"\(\*(\w+)\)", field) or re.search(r"(\w+)$", field)).group(1): field for field in fields}
    return found


def sized(header):
    """The structs that begin with their size."""
    return [name for name, fields in structs(header).items() if next(iter(fields)) == "struct_size"]


def functions(header):
    """{function: its declaration without the semicolon}."""
    return {name: " ".join(text.split()) for text, name in re.findall(r"^((?:const )?\w[\w ]* \*?(dm_\w+)\([^;]*\));", bare(header), re.M)}


def constants(header):
    return re.findall(r"^#define (DM_\w+) (?!\{)", header, re.M)


def run(*command, cwd=None):
    done = subprocess.run([str(part) for part in command], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
    if done.returncode != 0:
        raise RuntimeError(f"$ {' '.join(str(part) for part in command)}\n{done.stdout}\nexit code {done.returncode}")
    return done.stdout


def layout(header, folder):
    """The layout of a header's text, as lines: struct <name> <size>, field <struct.name>
    <offset> <size> <declaration>, constant <name> <value>."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "devicemesh.h").write_text(header)
    lines = ["#include <devicemesh.h>", "#include <stdio.h>", "int main(void) {"]
    for name, fields in structs(header).items():
        lines.append(f'  printf("struct {name} %zu\\n", sizeof({name}));')
        lines += [f'  printf("field {name}.{field} %zu %zu {declaration}\\n", offsetof({name}, {field}), sizeof((({name} *)0)->{field}));'
                  for field, declaration in fields.items()]
    lines += [f'  printf("constant {name} %lld\\n", (long long){name});' for name in constants(header)]
    (folder / "layout.c").write_text("\n".join([*lines, "}", ""]))
    run(CC, "-std=c11", "-I", folder, folder / "layout.c", "-o", folder / "layout")
    return run(folder / "layout")


def parse(text):
    """{"struct dm_x": ["48"], "field dm_x.y": ["8", "4", "int32_t y"], ...}"""
    lines = [line.split(" ", 2) for line in text.splitlines()]
    return {f"{kind} {name}": rest.split(" ", 2 if kind == "field" else 0) for kind, name, rest in lines}


def compare_layouts(old, new, may_grow):
    """Refuses a layout in which programs of the old one would read or write elsewhere."""
    old, new = parse(old), parse(new)
    for what, was in old.items():
        if what not in new:
            raise Refused(f"{what} is gone")
        kind, name = what.split()
        if kind == "struct":
            before, now = int(was[0]), int(new[what][0])
            if now < before or (now > before and name not in may_grow):
                raise Refused(f"{what} has {now} bytes, it had {before}")
        elif new[what] != was:
            raise Refused(f"{what} is {' '.join(new[what])}, it was {' '.join(was)}")
    for what, now in new.items():
        kind, name = what.split()
        owner = "struct " + name.split(".")[0]
        # Also in what was padding: old callers leave anything there.
        if kind == "field" and what not in old and owner in old and int(now[0]) < int(old[owner][0]):
            raise Refused(f"{what} begins at byte {now[0]} of the {old[owner][0]} that {owner} had: a struct grows only at its end")


def stub(header, folder, soname):
    """A library with the header's functions, empty."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "devicemesh.h").write_text(header)
    bodies = [f"{declaration} {{ __builtin_trap(); }}" for declaration in functions(header).values()]
    (folder / "stub.c").write_text("\n".join(['#include "devicemesh.h"', *bodies, ""]))
    # Named alike everywhere, so that a record does not say where it was made.
    run(CC, "-std=c11", "-g", "-shared", "-fPIC", "-nostdlib", f"-Wl,-soname,{soname}", "stub.c", "-o", "libdevicemesh.so", cwd=folder)
    return folder / "libdevicemesh.so"


def abidw(library):
    return run("abidw", "--no-corpus-path", "--no-comp-dir-path", "--no-architecture", library.name, cwd=library.parent)


def abidiff(recorded, library, may_grow):
    """Refuses what abidiff calls a change, but for new functions and for structs of may_grow
    that are longer."""
    suppressions = library.parent / "growth.suppr"
    suppressions.write_text("\n".join(GROWTH.format(name=name) for name in may_grow))
    done = subprocess.run(["abidiff", "--no-architecture", "--no-added-syms", "--suppressions", suppressions, recorded, library],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
    # Bits: 1 and 2 are errors of the tool or its use, 4 a change, 8 one that breaks programs.
    if done.returncode & 3:
        raise RuntimeError(f"abidiff: {done.stdout}")
    if done.returncode:
        raise Refused(f"abidiff:\n{done.stdout}")
