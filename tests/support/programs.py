"""C and C++ programs of the tests, each compiled once in a session, also when several workers
want it."""

import fcntl
import os
import shutil

from .paths import CC, CXX, LINK, ROOT
from .processes import run


class Programs:
    """Compiled programs in one folder."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def once(self, name, make):
        """The path of `name` in the folder. `make(path)` writes it unless it is there."""
        path = self.folder / name
        with open(self.folder / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                unfinished = self.folder / f"{name}.unfinished"
                # Where a test that wanted it before has failed, part of it may be there.
                if unfinished.is_dir():
                    shutil.rmtree(unfinished)
                make(unfinished)
                os.rename(unfinished, path)
        return path

    def c(self, source, *flags, name=None, link=LINK):
        """A program from a C file of this tree, compiled as C11 with these flags."""
        source = ROOT / source
        command = [CC, "-std=c11", "-D_GNU_SOURCE", "-Og", "-g", f"-I{ROOT}/include", f"-I{ROOT}/tests/c", *flags, source]
        return self.once(name or source.stem, lambda path: run(*command, *link, "-o", path))

    def cpp(self, source, *flags, name=None, link=LINK):
        """A program from a C++ file of this tree, compiled as C++17 with these flags."""
        source = ROOT / source
        command = [CXX, "-std=c++17", "-Og", f"-I{ROOT}/include", f"-I{ROOT}/tests/c", *flags, source]
        return self.once(name or source.stem, lambda path: run(*command, *link, "-o", path))
