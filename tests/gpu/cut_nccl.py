#!/usr/bin/env python3
"""Cuts a libnccl.so.2 to one GPU architecture, so that it can be carried in a small archive.

    cut_nccl.py LIBRARY OUTPUT ARCHITECTURE      (90 for H100 and H200)

The library keeps its size and its addresses. The machine code of every other architecture is
overwritten by zeros, which compress to nothing: the payloads in the section .nv_fatbin, whose
headers stay, because the driver chooses by them; and the whole section __nv_relfatbin, which only
nvcc's device linker reads. The code of the wanted architecture is not touched. PTX goes as well:
a driver that cannot use the kept code must say so and not compile something else in its place.

The container's format is not documented by NVIDIA. What is relied on is checked as it is read,
and a library that looks different is refused."""

import collections
import struct
import sys

MAGIC = 0xBA55ED50
CONTAINER = struct.Struct("<IHHQ")  # magic, version, size of this header, bytes after it
# kind (1: PTX, 2: machine code), version, size of this header, bytes of the payload, compressed
# size, offset of options, minor and major version, architecture.
ENTRY = struct.Struct("<HHIQIIHHI")
PTX, MACHINE_CODE = 1, 2


def sections(image):
    """Name -> (offset, size) of the sections of a 64-bit ELF file."""
    if image[:5] != b"\x7fELF\x02":
        raise SystemExit("cut_nccl: not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", image, 0x28)
    size, count, names = struct.unpack_from("<HHH", image, 0x3A)
    heads = [struct.unpack_from("<IIQQQQ", image, table + at * size) for at in range(count)]
    text = heads[names][4]
    found = {}
    for name, _, _, _, offset, length in heads:
        end = image.index(b"\0", text + name)
        found[bytes(image[text + name:end]).decode()] = (offset, length)
    return found


def cut(image, architecture):
    """Zeroes the other architectures in place; returns what was kept and what went, in bytes."""
    found = sections(image)
    if ".nv_fatbin" not in found:
        raise SystemExit("cut_nccl: no section .nv_fatbin: this library holds no device code")
    kept, gone = collections.Counter(), collections.Counter()
    if "__nv_relfatbin" in found:
        offset, length = found["__nv_relfatbin"]
        image[offset:offset + length] = bytes(length)
        gone["relocatable"] = length
    offset, length = found[".nv_fatbin"]
    at, end = offset, offset + length
    while at < end:
        if image[at:at + 4] == b"\0\0\0\0":  # padding between containers
            at += 4
            continue
        magic, version, header, size = CONTAINER.unpack_from(image, at)
        if magic != MAGIC or version != 1 or header != CONTAINER.size or at + header + size > end:
            raise SystemExit(f"cut_nccl: no container of device code at {at:#x}: magic {magic:#x}, version {version}, {size} bytes")
        entry, stop = at + header, at + header + size
        while entry < stop:
            kind, _, own, payload, _, _, _, _, arch = ENTRY.unpack_from(image, entry)
            if kind not in (PTX, MACHINE_CODE) or own < ENTRY.size or entry + own + payload > stop or not 30 <= arch < 1000:
                raise SystemExit(
                    f"cut_nccl: no entry of device code at {entry:#x}: kind {kind}, header {own}, {payload} bytes, architecture {arch}"
                )
            if kind == MACHINE_CODE and arch == architecture:
                kept[f"sm_{arch}"] += payload
            else:
                gone[f"{'sm' if kind == MACHINE_CODE else 'ptx'}_{arch}"] += payload
                image[entry + own:entry + own + payload] = bytes(payload)
            entry += own + payload
        at = stop
    if not kept:
        raise SystemExit(f"cut_nccl: no machine code of sm_{architecture}; there is {', '.join(sorted(gone))}")
    return kept, gone


def main():
    if len(sys.argv) != 4:
        raise SystemExit(__doc__)
    with open(sys.argv[1], "rb") as source:
        image = bytearray(source.read())
    kept, gone = cut(image, int(sys.argv[3]))
    with open(sys.argv[2], "wb") as target:
        target.write(image)
    text = [", ".join(f"{name} {size >> 10} KiB" for name, size in sorted(counter.items())) for counter in (kept, gone)]
    print(f"kept: {text[0]}; zeroed: {text[1]}")


if __name__ == "__main__":
    main()
