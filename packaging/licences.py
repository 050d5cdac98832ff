"""The licences of other projects' code in the files of a release. `make dist` puts this text into the
archives and packages, because the licences MIT, BSD and ISC ask that copies of a program have their
notices.

The texts are those in the sources of the crates, which cargo has unpacked. Equal crates give equal
bytes."""

import re

import sbom

NAME = "THIRD-PARTY-LICENSES"
HEAD = """\
The files of libdevicemesh contain code of the projects below. LICENSE-APACHE and LICENSE-MIT are the
licences of libdevicemesh itself.

The standard library of Rust is under Apache-2.0 or MIT. Its notices are in the file COPYRIGHT of
https://github.com/rust-lang/rust.

The static tool also contains musl, which is under MIT: Copyright (c) 2005-2020 Rich Felker, et al.

The handlers for JAX are compiled with headers of XLA, which are under Apache-2.0: Copyright The OpenXLA
Authors.

A crate that may be used under Apache-2.0 or another licence is listed with the text of the other licence only.
"""
FILES = re.compile(r"(un)?licen[cs]e|copying|notice|copyright", re.I)
APACHE = re.compile(r"Apache License\s+Version 2\.0, January 2004")


def texts(package):
    """The texts of a crate's licence files. The text of Apache-2.0 is left out if the crate has another licence."""
    folder = sbom.folder(package)
    found = [path.read_text(encoding="utf-8").strip() for path in sorted(folder.iterdir()) if FILES.match(path.name) and path.is_file()]
    if not found:
        raise SystemExit(f"licences: {folder} has no file with the licence of {package['name']}")
    return [text for text in found if not APACHE.search(text)] or found


def document():
    """The whole text: each licence once, below the crates that have it."""
    crates = {}
    for _, package in sorted(sbom.linked()[0].items()):
        # The crates of this workspace have no source.
        for text in texts(package) if package["source"] else []:
            crates.setdefault(text, []).append(f"{package['name']} {package['version']} ({package['license'].replace('/', ' OR ')})")
    parts = [f"{', '.join(names)}\n\n{text}\n" for text, names in sorted(crates.items(), key=lambda item: item[1])]
    return f"\n{'-' * 80}\n\n".join([HEAD, *parts])
