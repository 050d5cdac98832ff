#!/usr/bin/env python3
"""The corpora of the fuzz targets. fuzz/corpus/TARGET.hex holds one input a line, in hexadecimal.

    corpus.py unpack TARGET FOLDER    writes each input to a file of its own, which libFuzzer reads
    corpus.py add TARGET FILE...      adds what libFuzzer found; the tests replay it from then on

tests/corpus/mod.rs reads the same files for the tests that replay them.
"""

import hashlib
import sys
from pathlib import Path

CORPUS = Path(__file__).resolve().parent / "corpus"


def packed(target):
    path = CORPUS / f"{target}.hex"
    if not path.exists():
        sys.exit(f"there is no {path}; the targets are {', '.join(sorted(found.stem for found in CORPUS.glob('*.hex')))}")
    return path


def read(path):
    return [bytes.fromhex(line) for line in path.read_text().splitlines()]


def unpack(target, folder):
    """libFuzzer names a file by the SHA-1 of its bytes, so a second unpacking changes nothing."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for data in read(packed(target)):
        (Path(folder) / hashlib.sha1(data).hexdigest()).write_bytes(data)


def add(target, *files):
    path = packed(target)
    inputs = {*read(path), *(Path(file).read_bytes() for file in files)} - {b""}
    path.write_text("".join(f"{data.hex()}\n" for data in sorted(inputs)))
    print(f"{path.name} holds {len(inputs)} inputs")


if __name__ == "__main__":
    commands = {"unpack": unpack, "add": add}
    if len(sys.argv) < 4 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    commands[sys.argv[1]](*sys.argv[2:])
