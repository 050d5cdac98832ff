"""Writes the sources of the site: the staged pages and the references. build.py calls this with the
interpreter that has Sphinx, whose parser of C++ the reference uses.

    sources.py FOLDER --xml DOXYGEN'S [--rustdoc RUSTDOC'S]"""

import argparse
from pathlib import Path

import c_reference
import rust_reference
import stage


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--xml", type=Path, required=True)
    parser.add_argument("--rustdoc", type=Path)
    options = parser.parse_args()
    generated = {**stage.packages(), **c_reference.pages(options.xml), **rust_reference.pages(options.rustdoc)}
    site = stage.Site(options.folder, generated)
    site.stage()


if __name__ == "__main__":
    main()
