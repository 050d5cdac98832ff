#!/usr/bin/env python3
"""`make site`: the pages of the repository and the references of all languages as one searchable site,
in target/site/html. A warning of doxygen, rustdoc or Sphinx is an error, and so is a link that leads
nowhere.

    build.py [--out FOLDER] [--without-rust]

The tools are fetched once: Sphinx, its theme and MyST into target/site-venv (requirements.txt, with
hashes), doxygen as a wheel (docs/reference/build.py). With the tools, the build needs no network, and
the site needs none either: it has no script, style, font or picture of another host. Where the tools
cannot be had, this ends with 77."""

import argparse
import fcntl
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "docs/site"
TARGET = ROOT / "target"
# The crates whose documentation programs need. The others are inner parts of these.
CRATES = ["devicemesh", "hostccl", "devicemesh-recording"]
# What loads something: an attribute in HTML, an import or a url in CSS. A link loads nothing.
LOADS = re.compile(r"<(?:script|img|iframe|source|link)\b[^>]*?\b(?:src|href)=\"(?:https?:)?//[^\"]*\"|"
                   r"@import\s+[^;]*https?:|url\(\s*['\"]?(?:https?:)?//[^)]*\)")
UNAVAILABLE = 77


def run(*command, **options):
    done = subprocess.run([str(word) for word in command], cwd=ROOT, **options)
    if done.returncode != 0:
        sys.exit(done.returncode)


def site_python():
    """The interpreter of target/site-venv, where what requirements.txt pins is installed once."""
    folder, wanted = TARGET / "site-venv", (HERE / "requirements.txt").read_text()
    complete = folder / "requirements.txt"
    TARGET.mkdir(exist_ok=True)
    with open(TARGET / "site-venv.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists() or complete.read_text() != wanted:
            shutil.rmtree(folder, ignore_errors=True)
            pip = [folder / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            pins = ["--require-hashes", "--only-binary=:all:", "-r", HERE / "requirements.txt"]
            for command in ([sys.executable, "-m", "venv", folder], [*pip, *pins]):
                done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
                if done.returncode != 0:
                    print(f"no Sphinx: docs/site/requirements.txt cannot be installed ({(done.stderr or done.stdout).strip()[-300:]})")
                    sys.exit(UNAVAILABLE)
            complete.write_text(wanted)
    return folder / "bin/python"


def doxygen(folder):
    """The public headers as doxygen reads them, as XML."""
    command = [sys.executable, str(ROOT / "docs/reference/build.py"), str(folder), "--xml"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        print(done.stdout, end="")
        sys.exit(done.returncode)
    return folder


def rustdoc():
    """The documentation of the crates as HTML, in a target folder of cargo's."""
    packages = [word for crate in CRATES for word in ("--package", crate)]
    run("cargo", "doc", "--no-deps", "--features", "cudarc", "--quiet", *packages, env={**os.environ, "RUSTDOCFLAGS": "-D warnings"})
    return Path(os.environ.get("CARGO_TARGET_DIR", TARGET)) / "doc"


def foreign(html):
    """What pages of the site would load from other hosts."""
    found = []
    for path in html.rglob("*"):
        if path.suffix in (".html", ".css"):
            found += [f"{path.relative_to(html)}: {load[0][:120]}" for load in LOADS.finditer(path.read_text(errors="replace"))]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=TARGET / "site")
    parser.add_argument("--without-rust", action="store_true", help="leave out rustdoc, which compiles the crates' dependencies")
    options = parser.parse_args()
    began, out = time.monotonic(), options.out.resolve()
    python = site_python()
    for name in ("source", "html", "doxygen"):
        shutil.rmtree(out / name, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    words = ["--xml", doxygen(out / "doxygen")]
    if not options.without_rust:
        words += ["--rustdoc", rustdoc()]
    version = re.search(r'^version = "(.+)"', (ROOT / "Cargo.toml").read_text(), re.M)[1]
    environment = {**os.environ, "DM_SITE": str(HERE), "DM_VERSION": version, "PYTHONPATH": str(HERE), "PYTHONDONTWRITEBYTECODE": "1"}
    run(python, HERE / "sources.py", out / "source", *words, env=environment)
    run(python, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-c", HERE, "-d", out / "doctrees", out / "source", out / "html",
        env=environment)
    if not options.without_rust:
        shutil.copytree(words[-1], out / "html/rust", ignore=shutil.ignore_patterns("c", ".lock"))
    if loads := foreign(out / "html"):
        sys.exit("these would be loaded from other hosts:\n" + "\n".join(loads))
    files = [path for path in (out / "html").rglob("*") if path.is_file()]
    count, size = sum(path.suffix == ".html" for path in files), sum(path.stat().st_size for path in files)
    print(f"{out / 'html/index.html'}: {count} pages, {size / 1e6:.1f} MB, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
