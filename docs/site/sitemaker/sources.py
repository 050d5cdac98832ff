"""Writes the sources of the site: the staged pages and the references.

    python -m sitemaker.sources FOLDER --xml XML_FOLDER --rustdoc RUSTDOC_FOLDER"""

import argparse
from pathlib import Path

from . import c_reference, rust_reference, stage


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--xml", type=Path, required=True)
    parser.add_argument("--rustdoc", type=Path, required=True)
    options = parser.parse_args()
    generated = {**stage.packages(), **c_reference.pages(options.xml), **rust_reference.pages(options.rustdoc)}
    site = stage.Site(options.folder, generated)
    site.stage()


if __name__ == "__main__":
    main()
