#!/usr/bin/env python3
"""`make site`: the pages of the repository and the references of all languages as one searchable site,
in target/site/html. A warning of doxygen, rustdoc or Sphinx is an error, and so is a link that leads
nowhere.

    build.py [--out FOLDER] [--tools]

The tools are fetched once: Sphinx, its theme and MyST into target/site-venv (requirements.txt, with
hashes), doxygen as a wheel (docs/reference/build.py). With the tools, the build needs no network, and
the site needs none either: it has no script, style, font or picture of another host. `--tools`
fetches the tools, and makes no site.

Exits with 77 if the tools cannot be installed, because venv or the network is missing."""

import argparse
import fcntl
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from support import pinned  # noqa: E402  (pip and virtual environments under target/)
from support.paths import ROOT, TARGET  # noqa: E402
from support.processes import Failed  # noqa: E402

HERE = ROOT / "docs/site"
# The crates whose documentation programs need. The others are inner parts of these.
CRATES = ["devicemesh", "hostccl", "devicemesh-recording"]
# Matches the places where a page loads a file. An `<a>` loads nothing. In scripts and pictures most
# addresses are links for readers and names of XML's namespaces, so their other uses are named here.
ELSEWHERE = r"(?:https?:|wss?:)?//"
STYLES = rf"@import\s[^;]*https?:|url\(\s*['\"]?{ELSEWHERE}[^)]*\)"
LOADS = {
    ".html": re.compile(rf"<(?:script|img|iframe|source|link)\b[^>]*?\b(?:src|href)=[\"']{ELSEWHERE}[^\"']*|{STYLES}"),
    ".svg": re.compile(rf"<(?:image|use|script|feImage)\b[^>]*?\bhref=[\"']{ELSEWHERE}[^\"']*|{STYLES}"),
    ".css": re.compile(STYLES),
    ".js": re.compile(r"(?:\bimport\b|\bfetch\(|importScripts|new (?:Worker|WebSocket|EventSource)|\.open\(|\.src ?=|sendBeacon)"
                      rf"[^;\n]{{0,80}}?['\"`]{ELSEWHERE}[^'\"`]*"),
}
UNAVAILABLE = 77


def run(*command, **options):
    done = subprocess.run([str(word) for word in command], cwd=ROOT, **options)
    if done.returncode != 0:
        sys.exit(done.returncode)


def site_python():
    """Returns the interpreter of target/site-venv, and first installs the packages of requirements.txt
    if they are missing."""
    try:
        return pinned.virtual_environment("site-venv", HERE / "requirements.txt", "--require-hashes", "--only-binary=:all:")
    except pinned.Unavailable as why:
        print(f"no Sphinx: {why}")
        sys.exit(UNAVAILABLE)
    except Failed as why:
        told = str(why)
        print(told.strip()[-2000:])
        is_offline = pinned.is_offline(told)
        print(f"no Sphinx: pip {'reaches no index for' if is_offline else 'cannot install'} docs/site/requirements.txt")
        sys.exit(UNAVAILABLE if is_offline else 1)


def doxygen(folder):
    """The public headers as doxygen reads them, as XML."""
    command = [sys.executable, str(ROOT / "docs/reference/build.py"), str(folder), "--xml"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        print(done.stdout, end="")
        sys.exit(done.returncode)
    return folder


def rustdoc(folder):
    """Makes the crates' HTML documentation, and returns the folder."""
    # target/doc has the other crates too, and pages of items that are gone. The compiled
    # dependencies stay in a folder that all builds of the site share.
    cargo = TARGET / "site-cargo"
    packages = [word for crate in CRATES for word in ("--package", crate)]
    environment = {name: value for name, value in os.environ.items() if name != "CARGO_BUILD_TARGET"}
    with open(TARGET / "site-cargo.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shutil.rmtree(cargo / "doc", ignore_errors=True)
        run("cargo", "doc", "--target-dir", cargo, "--no-deps", "--features", "cudarc", "--quiet", *packages,
            env={**environment, "RUSTDOCFLAGS": "-D warnings"})
        shutil.copytree(cargo / "doc", folder, ignore=shutil.ignore_patterns(".lock"))
    return folder


def foreign(html):
    """Lists the files that pages would load from other hosts."""
    found = []
    for path in sorted(html.rglob("*")):
        if path.suffix in LOADS:
            loads = LOADS[path.suffix].finditer(path.read_text(errors="replace"))
            found += [f"{path.relative_to(html)}: {load[0][:120]}" for load in loads]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=TARGET / "site")
    parser.add_argument("--tools", action="store_true", help="fetch the tools, try doxygen, and make no site")
    options = parser.parse_args()
    began, out = time.monotonic(), options.out.resolve()
    python = site_python()
    out.mkdir(parents=True, exist_ok=True)
    xml = doxygen(out / "doxygen")
    if options.tools:
        return
    for name in ("source", "html", "rustdoc", "doctrees"):
        shutil.rmtree(out / name, ignore_errors=True)
    crates = rustdoc(out / "rustdoc")
    version = re.search(r'^version = "(.+)"', (ROOT / "Cargo.toml").read_text(), re.M)[1]
    environment = {**os.environ, "DM_VERSION": version, "PYTHONPATH": str(HERE), "PYTHONDONTWRITEBYTECODE": "1"}
    run(python, "-m", "sitemaker.sources", out / "source", "--xml", xml, "--rustdoc", crates, env=environment)
    # Without -d the site would have Sphinx's own files in html/.doctrees.
    sphinx = [python, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-c", HERE / "sitemaker", "-d", out / "doctrees"]
    run(*sphinx, out / "source", out / "html", env=environment)
    shutil.move(crates, out / "html/rust")
    if loads := foreign(out / "html"):
        sys.exit("these would be loaded from other hosts:\n" + "\n".join(loads))
    files = [path for path in (out / "html").rglob("*") if path.is_file()]
    count, size = sum(path.suffix == ".html" for path in files), sum(path.stat().st_size for path in files)
    print(f"{out / 'html/index.html'}: {count} pages, {size / 1e6:.1f} MB, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
