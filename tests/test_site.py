"""The site of `make site`: every page of docs/ is in its contents, its links lead to pages and
headings that are there, and the references name everything that the bindings export.

The whole build, which fetches Sphinx once, takes a minute: it makes every page, rustdoc's and
doxygen's too, with warnings as errors. `make test` does without it, because the other tests find a
page that is missing and a link that leads nowhere."""

import ast
import importlib.util
import json
import re
import sys
import zlib
from html import unescape
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest

from support import pinned
from support.browser import chromium, measured
from support.paths import ROOT
from support.processes import run
from test_links import anchors

sys.path.append(str(ROOT / "docs/site"))
from sitemaker import rust_reference, sequence, stage  # noqa: E402

REFERENCES = {name for name in stage.INSTEAD.values() if name.startswith("reference/")}
C_NAMES = re.compile(r"\b(dm_\w+)\(|^#define (DM_\w+) ", re.M)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The staged pages, with empty references of C, C++ and Rust, which need doxygen and
    rustdoc."""
    made = stage.packages()
    made.update({name: "# Reference\n" for name in REFERENCES - set(made)})
    one = stage.Site(tmp_path_factory.mktemp("site"), made)
    one.placed = one.stage()
    return one


def test_every_page_of_docs_is_in_the_contents(site):
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    pages -= {"docs/README.md", "docs/site/index.md", "docs/reference/mainpage.md"}
    assert not pages - site.placed, "docs/README.md has no table row for these pages"
    # An entry is /PAGE or NAME </PAGE>.
    staged = "".join(path.read_text() for path in site.folder.rglob("*.md"))
    contents = "".join(re.findall(r"^```\{toctree\}\n:hidden:\n\n(.*?)^```", staged, re.M | re.S))
    entries = [re.fullmatch(r"(?:.+ </(?P<named>.+)>|/(?P<page>.+))", line) for line in contents.splitlines()]
    assert all(entries) and {"named", "page"} == {entry.lastgroup for entry in entries}, contents
    missing = [entry[0] for entry in entries if not (site.folder / entry[entry.lastgroup]).is_file()]
    assert not missing, f"the contents have pages that are not there: {missing}"


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


def exported(package, module):
    """The names in a module's __all__, also those of `__all__ += errors.__all__`."""
    names = set()
    for node in ast.parse((package / f"{module}.py").read_text()).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target if isinstance(node, ast.AugAssign) else None
        if target is None or ast.unparse(target) != "__all__":
            continue
        if isinstance(node.value, ast.List):
            names |= set(ast.literal_eval(node.value))
        else:
            names |= exported(package, ast.unparse(node.value).removesuffix(".__all__"))
    return names


@pytest.mark.parametrize("package", ["bindings/python/devicemesh", "bindings/jax/devicemesh_jax"])
def test_python_references_have_every_exported_name(site, package):
    page = (site.folder / stage.INSTEAD[f"{package}/__init__.py"]).read_text()
    documented = set(re.findall(r"^:::::\{py:\w+\} (\w+)", page, re.M))
    listed = exported(ROOT / package, "__init__")
    assert len(listed) > 3 and listed <= documented, sorted(listed - documented)
    assert "errors.py" not in {path.name for path in (ROOT / package).iterdir()} or exported(ROOT / package, "errors") <= listed


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


@pytest.fixture(scope="module")
def build():
    """docs/site/build.py as a module."""
    spec = importlib.util.spec_from_file_location("build_of_the_site", ROOT / "docs/site/build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name, text", [
    ("a.html", '<p><script async src="https://cdn.example/x.js"></script>'),
    ("a.html", "<link rel='stylesheet' href='//fonts.example/x.css'>"),
    ("a.css", "body { background: url(http://example.org/x.png) }"),
    ("a.svg", '<svg xmlns:xlink="http://www.w3.org/1999/xlink"><image xlink:href="https://example.org/x.png"/></svg>'),
    ("a.js", 'const more = await import("https://cdn.example/x.js")'),
    ("a.js", 'script.src = "//cdn.example/x.js"'),
])
def test_files_of_other_hosts_are_found(build, tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert len(build.foreign(tmp_path)) == 1


def test_links_and_names_are_no_files_of_other_hosts(build, tmp_path):
    (tmp_path / "a.html").write_text('<a href="https://example.org/"><img src="x.png"></a>')
    (tmp_path / "a.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"><a href="https://example.org/"/></svg>')
    (tmp_path / "a.js").write_text('element.setAttribute("href", "https://example.org/")')
    assert build.foreign(tmp_path) == []


def test_only_a_missing_network_lets_the_tests_skip():
    """pip's words for a missing network are told from those for a package that has another hash."""
    retry = "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError('HTTPSConnectionPool(...'\n"
    none = "ERROR: Could not find a version that satisfies the requirement babel==2.19.0 (from versions: none)\n"
    disk = "ERROR: Could not install packages due to an OSError: "
    assert pinned.is_offline(retry + none)
    assert pinned.is_offline(disk + "HTTPSConnectionPool(host='files.pythonhosted.org', port=443): Max retries exceeded with url: /x\n")
    assert not pinned.is_offline(none)
    for told in ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.\n", disk + "[Errno 28] No space left\n"):
        assert not pinned.is_offline(told) and not pinned.is_offline(retry + told), told


RUSTDOC = '''<nav class="sidebar"><ul><li><a href="#method.size">size</a></li></ul></nav>
<section id="method.size" class="method"><h4 class="code-header">pub fn size()</h4></section></summary>\
<div class="docblock"><p>A size.</p></div>'''


def rustdoc_page(folder, text):
    (folder / "crate").mkdir()
    (folder / "crate/all.html").write_text('<li><a href="struct.View.html">View</a></li>')
    (folder / "crate/struct.View.html").write_text(text)
    return rust_reference.pages(folder)["reference/rust.md"]


def test_rust_reference_has_methods(tmp_path):
    assert 'crate/struct.View.html#method.size">size</a>: A size.' in rustdoc_page(tmp_path, RUSTDOC)


@pytest.mark.parametrize("old, new", [('class="method"', 'class="fn"'), ("<nav ", "<div "), ("code-header", "code")])
def test_html_that_rustdoc_did_not_write_before_is_refused(tmp_path, old, new):
    with pytest.raises(LookupError, match="methods that were not found"):
        rustdoc_page(tmp_path, RUSTDOC.replace(old, new))


def dead_links(html):
    """The links of the site's own pages whose file or anchor does not exist."""
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


def cpp_names():
    """The public names that devicemesh.hpp declares in namespace dm, such as BasicMesh::size,
    nothrow::init and Op::sum, without deleted functions."""
    text = re.sub(r"//[^\n]*", "", (ROOT / "include/devicemesh.hpp").read_text().replace("}  // namespace detail", "}@detail"))
    text = re.sub(r"^namespace detail \{$.*?^\}@detail$", "", text, flags=re.M | re.S)
    text = text[text.index("\nnamespace dm {"):text.index("template <> struct std::hash")]
    found, inner, owner, is_public = set(), "", None, True
    for line in text.splitlines():
        kind = re.match(r"(?:template <.*> )?(class|struct|enum class) (?:\[\[nodiscard\]\] )?(\w+)", line)
        function = re.search(r"(?:^|[ *&])(operator ?(?:\(\)|[^\s(]+)|~?(?!sizeof|decltype)\w+)\(", line)
        name = re.match(r" *using (\w+) =", line) or re.match(r"  [\w:<>,*& ]+ \*?(\w+)(?: = .+|\{.*\})?;$", line) or function
        if line == "namespace nothrow {":
            inner = "nothrow::"
        elif kind:
            owner, is_public = None if line.endswith((";", "{};")) else kind[2], kind[1] != "class"
            found.add(kind[2])
            if kind[1] == "enum class" and line.endswith("};"):
                found |= {f"{kind[2]}::{value}" for value in re.findall(r"(\w+) = ", line)}
        elif line.startswith(("};", "public:", "private:")):
            owner, is_public = None if line == "};" else owner, line == "public:"
        elif re.match(r" {2}\w+ = DM_\w+,?$", line) and owner:
            found.add(f"{owner}::{line.split()[0]}")
        elif "= delete" in line or not re.match(r"\S" if owner is None else r" {2}[\w\[~]", line) or not is_public and owner:
            continue
        elif name:
            found.add(inner + (f"{owner}::" if owner else "") + name[1])
    return found


def declared_names(html, domain):
    """The names of the entries of one of Sphinx's domains, from the list that Sphinx makes for
    other sites."""
    inventory = zlib.decompress((html / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    return set(re.findall(rf"^(.+?) {domain}:\w+ -?\d+ ", inventory, re.M))


# One worker of pytest-xdist makes the site for both tests.
@pytest.mark.release
@pytest.mark.lengthy
@pytest.mark.timeout(1200)
@pytest.mark.xdist_group("site")
def test_whole_site(html):
    header = re.sub(r"/\*.*?\*/", "", (ROOT / "include/devicemesh.h").read_text(), flags=re.S)
    declared = {name for names in C_NAMES.findall(header) for name in names if name}
    there = set(re.findall(r' id="c\.(\w+)"', "".join(path.read_text() for path in (html / "reference/c").glob("*.html"))))
    assert len(declared) > 50 and declared <= there, f"not in the reference: {sorted(declared - there)}"
    entries = {re.sub(r"<[^:]*>", "", name.removeprefix("dm::")) for name in declared_names(html, "cpp")}
    missing = cpp_names() - entries
    assert len(cpp_names()) > 300 and not missing, f"not in the reference of C++: {sorted(missing)}"
    # A name in a sentence leads to its entry.
    assert 'href="../reference/c/making-meshes.html#c.dm_init"' in (html / "docs/errors.html").read_text()
    # The search knows the stems of words on pages, in the references, and of rustdoc's items.
    index = (html / "searchindex.js").read_text()
    terms = json.loads(index[index.index("{"):index.rindex("}") + 1])["terms"]
    for word in ("torchrun", "dm_get_comm", "local_shard", "goroutin", "from_rank_arrai"):
        assert word in terms, f"the search does not find {word}"
    assert (html / "rust/devicemesh/comm/struct.View.html").exists()
    # rust/c is the folder of another reference in target/doc, and ccl and ffi are modules.
    assert {path.parent.name for path in (html / "rust").glob("*/all.html")} == {"devicemesh", "hostccl", "recording"}
    assert not (html / "rust/c").exists() and (html / "rust/devicemesh/ccl/index.html").exists()
    assert not (html / "_downloads").exists(), "a page leads to a file that has no page"
    assert dead_links(html) == []


@pytest.mark.release
@pytest.mark.lengthy
@pytest.mark.timeout(1200)
@pytest.mark.xdist_group("site")
def test_in_a_browser(html):
    """The first screen has the two lines and the picture, on a desktop and on a phone screen. On a
    phone's width no page is wider than the screen, apart from code and tables, which scroll by
    themselves."""
    if not chromium():
        pytest.skip("no Chromium here, so no page was measured (Debian: apt-get install chromium; .ci/run does not install it)")
    pages = [path.relative_to(html).as_posix() for path in sorted(html.rglob("*.html")) if "rust" not in path.relative_to(html).parts]
    wanted = [("index.html", 1280, 800), *((page, 390, 844) for page in pages)]
    told = measured(html, wanted)
    for width, height in ((1280, 800), (390, 844)):
        edges = told["index.html", width]
        assert edges["code"] and edges["picture"] and max(edges["code"], edges["picture"]) < height, edges
    wide = {page: edges["right"] for (page, width), edges in told.items() if width == 390 and edges["right"] > 391}
    assert len(told) == len(wanted) and not wide, f"wider than 390 pixels: {wide}"
