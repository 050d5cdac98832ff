"""The site of `make site`: every page of docs/ is in its contents, its links lead to pages and
headings that are there, and the references name everything that the bindings export.

The whole build, which fetches Sphinx once, takes a minute: it makes every page, rustdoc's and doxygen's
too, with warnings as errors. `make test` does without it, because the other tests find a page that is
missing and a link that leads nowhere."""

import ast
import json
import re
import sys
from html import unescape
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest

from support.browser import chromium, measured
from support.paths import ROOT
from support.processes import run
from test_links import anchors

sys.path.insert(0, str(ROOT / "docs/site"))
import sequence  # noqa: E402
import stage  # noqa: E402

REFERENCES = {name for name in stage.INSTEAD.values() if name.startswith("reference/")}
C_NAMES = re.compile(r"\b(dm_\w+)\(|^#define (DM_\w+) ", re.M)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The staged pages, with empty references of C, C++ and Rust, which need doxygen and rustdoc."""
    made = stage.packages()
    made.update({name: "# Reference\n" for name in REFERENCES - set(made)})
    one = stage.Site(tmp_path_factory.mktemp("site"), made)
    one.placed = one.stage()
    return one


def test_every_page_of_docs_is_in_the_contents(site):
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    pages -= {"docs/README.md", "docs/site/index.md", "docs/reference/mainpage.md"}
    assert not pages - site.placed, "docs/README.md has no table row for these pages"
    for entry in re.findall(r"^/(.+\.md)$", "".join(path.read_text() for path in site.folder.rglob("*.md")), re.M):
        assert (site.folder / entry).exists(), f"the contents have {entry}, which is not there"


def test_links_lead_to_pages_and_headings(site):
    problems = []
    for path in sorted(site.folder.rglob("*.md")):
        text = path.read_text()
        for found in stage.PARTS.finditer(text):
            target, _, anchor = (found["target"] or "").partition("#")
            if not found["target"] or re.match(r"[a-z][a-z0-9+.-]*:", found["target"]):
                continue
            place = (path.parent / target).resolve() if target else path
            if place.suffix not in (".md", ".svg", ".png") or not place.exists():
                problems.append(f"{path.relative_to(site.folder)}: {found['target']}: no such page")
            elif anchor and anchor not in anchors(place.read_text()):
                problems.append(f"{path.relative_to(site.folder)}: {found['target']}: no such heading")
    assert not problems, "\n".join(problems)


def test_pictures_are_there_for_light_and_dark(site):
    text = (site.folder / "docs/mesh.md").read_text()
    assert "](pictures/init-light.svg){.only-light}![" in text and "](pictures/init-dark.svg){.only-dark}" in text
    dark = (site.folder / "docs/pictures/init-dark.svg").read_text()
    assert "prefers-color-scheme" not in dark + (site.folder / "docs/pictures/init-light.svg").read_text()
    for path in site.folder.rglob("*.svg"):
        ElementTree.parse(path)


def test_landing_page_has_the_two_lines_of_the_readme(site):
    """README's commands and code are executed by tests/test_readme.py."""
    lines = re.search(r"^```c\n(.*?)^```", (ROOT / "docs/site/index.md").read_text(), re.M | re.S)[1].splitlines()
    readme = [re.sub(r" +/\*.*\*/$", "", line) for line in (ROOT / "README.md").read_text().splitlines()]
    assert len(lines) == 2 and set(lines) <= set(readme)
    landing = (site.folder / "index.md").read_text()
    assert "<!-- README" not in landing and "| libdevicemesh |" in landing


@pytest.mark.parametrize("package", ["bindings/python/devicemesh", "bindings/jax/devicemesh_jax"])
def test_python_references_have_every_exported_name(site, package):
    page = (site.folder / stage.INSTEAD[f"{package}/__init__.py"]).read_text()
    documented = set(re.findall(r"^:::::\{py:\w+\} (\w+)", page, re.M))
    tree = ast.parse((ROOT / package / "__init__.py").read_text())
    (listed,) = [ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"]
    assert set(listed) <= documented


def test_go_reference_has_every_exported_name(site):
    page = (site.folder / "reference/go.md").read_text()
    documented = set(re.findall(r"^#+ (?:func|type) (?:\((\w+)\) )?(\w+)$", page, re.M))
    for path in sorted((ROOT / "bindings/go").glob("*.go")):
        if path.name.endswith("_test.go"):
            continue
        source = path.read_text()
        declared = {("", name) for name in re.findall(r"^type ([A-Z]\w*)|^func ([A-Z]\w*)", source, re.M) for name in name if name}
        declared |= set(re.findall(r"^func \(\w+ \*?([A-Z]\w*)(?:\[\w+\])?\) ([A-Z]\w*)", source, re.M))
        assert declared <= documented, f"{path.name}: {sorted(declared - documented)}"


def test_unknown_lines_of_a_diagram_are_refused():
    with pytest.raises(ValueError, match="does not know how to draw"):
        sequence.svg("sequenceDiagram\nparticipant A as a\nloop every minute", "a loop")


def dead_links(html):
    """The links of the site's own pages that lead to no file or to no place in it."""
    places, dead = {}, []
    for path in sorted(html.rglob("*.html")):
        if path.relative_to(html).parts[0] == "rust":
            continue
        for target, anchor in set(re.findall(r'href="([^"#?:]*)(?:#([^"]*))?"', path.read_text())):
            place = (path.parent / unquote(target)).resolve() if target else path
            if place not in places and place.is_file() and place.suffix == ".html":
                places[place] = set(re.findall(r'\bid="([^"]+)"', place.read_text()))
            if not place.is_file() or anchor and place.suffix == ".html" and unescape(unquote(anchor)) not in map(unescape, places[place]):
                dead.append(f"{path.relative_to(html)}: {target}#{anchor}")
    return dead


@pytest.fixture(scope="module")
def html(tmp_path_factory):
    """The folder with the made site."""
    out = tmp_path_factory.mktemp("whole")
    done = run(sys.executable, "docs/site/build.py", "--out", out, code=None, timeout=1100, merged=True)
    if done.returncode == 77:
        pytest.skip(done.stdout.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout
    return out / "html"


# One worker of pytest-xdist makes the site for both tests.
@pytest.mark.long
@pytest.mark.lengthy
@pytest.mark.timeout(1200)
@pytest.mark.xdist_group("site")
def test_whole_site(html):
    header = re.sub(r"/\*.*?\*/", "", (ROOT / "include/devicemesh.h").read_text(), flags=re.S)
    declared = {name for names in C_NAMES.findall(header) for name in names if name}
    there = set(re.findall(r' id="c\.(\w+)"', "".join(path.read_text() for path in (html / "reference/c").glob("*.html"))))
    assert len(declared) > 50 and declared <= there, f"not in the reference: {sorted(declared - there)}"
    # A name in a sentence leads to its place.
    assert 'href="../reference/c/making-meshes.html#c.dm_init"' in (html / "docs/errors.html").read_text()
    # The search knows the stems of words on pages, in the references, and of rustdoc's items.
    index = (html / "searchindex.js").read_text()
    terms = json.loads(index[index.index("{"):index.rindex("}") + 1])["terms"]
    for word in ("torchrun", "dm_get_comm", "local_shard", "goroutin", "from_rank_arrai"):
        assert word in terms, f"the search does not find {word}"
    assert (html / "rust/devicemesh/comm/struct.View.html").exists()
    assert not (html / "_downloads").exists(), "a page leads to a file that has no page"
    assert dead_links(html) == []


@pytest.mark.long
@pytest.mark.lengthy
@pytest.mark.timeout(1200)
@pytest.mark.xdist_group("site")
def test_in_a_browser(html):
    """The first screen has the two lines and the picture, on a desk and on a phone. On a phone's width
    no page is wider than the screen, apart from code and tables, which scroll by themselves."""
    if not chromium():
        pytest.skip("no Chromium here (Debian: apt-get install chromium)")
    pages = [path.relative_to(html).as_posix() for path in sorted(html.rglob("*.html")) if "rust" not in path.relative_to(html).parts]
    wanted = [("index.html", 1280, 800), *((page, 390, 844) for page in pages)]
    told = measured(html, wanted)
    for width, height in ((1280, 800), (390, 844)):
        edges = told["index.html", width]
        assert edges["code"] and edges["picture"] and max(edges["code"], edges["picture"]) < height, edges
    wide = {page: edges["right"] for (page, width), edges in told.items() if width == 390 and edges["right"] > 391}
    assert len(told) == len(wanted) and not wide, f"wider than 390 pixels: {wide}"
