"""No file imports up a layer, and no files import each other in a circle; tests/imports.py reads
them. The planted trees show that it finds what it should."""

from pathlib import Path

import imports
import pytest

ROOT = Path(__file__).resolve().parent.parent

PLANTED = {
    "two files": (
        {
            "src/lib.rs": "mod wait;\nmod error;", "src/wait.rs": "use crate::error::Failed;\npub struct Wait;",
            "src/error.rs": "use super::wait::Wait;\npub struct Failed;"
        }, "circle of 2 files: src/error.rs src/wait.rs",
    ), "over a re-export": ({
        "src/lib.rs": "mod mesh;", "src/mesh/mod.rs": "mod root;\nmod view;\npub use root::Root;\npub use view::View;",
        "src/mesh/root.rs": "use super::View;\npub struct Root;",
        "src/mesh/view.rs": "use crate::mesh::{self, Root};\npub struct View;",
    }, "circle of 2 files: src/mesh/root.rs src/mesh/view.rs",
                            ), "by a path in the code": ({
                                "src/lib.rs": "mod wait;\nmod error;",
                                "src/wait.rs": "pub fn wait() { crate::error::fail() }",
                                "src/error.rs": "pub fn fail() { crate::wait::wait() }"
                            }, "circle of 2 files: src/error.rs src/wait.rs",
                                                         ),
    "by a method that stands elsewhere": ({
        "src/lib.rs": "mod mesh;", "src/mesh/mod.rs": "mod root;\nmod life;",
        "src/mesh/root.rs": "pub struct Root;\nimpl Root {\n    fn drop_it(&self) { self.end() }\n}\n",
        "src/mesh/life.rs": "use super::root::Root;\nimpl Root {\n    pub fn end(&self) {}\n}\n",
    }, "circle of 2 files: src/mesh/life.rs src/mesh/root.rs",
                                          ),
    "up a layer": ({
        "src/lib.rs": "mod mesh;\nmod comm;", "src/mesh/mod.rs": "use crate::comm::Comm;",
        "src/comm/mod.rs": "pub struct Comm;"
    }, "up a layer: src/mesh/mod.rs:1 imports src/comm/mod.rs (crate::comm::Comm)",
                   ), "a file of no layer": (
                       {"src/lib.rs": "mod novel;",
                        "src/novel.rs": ""}, "no layer: src/novel.rs (name it in LAYERS of tests/imports.py)"),
    "in Python, inside a function": ({
        "src/lib.rs": "", "bindings/python/devicemesh/__init__.py": "from .mesh import Mesh",
        "bindings/python/devicemesh/mesh.py": "def group():\n    from .group import Group\n",
        "bindings/python/devicemesh/group.py": "from .mesh import Mesh\n",
    }, "circle of 2 files: bindings/python/devicemesh/group.py bindings/python/devicemesh/mesh.py",
                                     ),
}

ALLOWED = {
    "src/lib.rs": "mod wait;\nmod comm;\npub use comm::Comm;",
    "src/wait.rs": "//! Not an import: crate::comm::Comm.\npub struct Wait;\n"
                   "#[cfg(test)]\nmod tests {\n    use super::*;\n    use crate::comm::Comm;\n}\n",
    "src/comm/mod.rs": "//! A parent may re-export what its children define, and they may name each other over it.\n"
                       "mod life;\nmod root;\npub use root::Comm;",
    "src/comm/root.rs": "use crate::wait::Wait;\npub struct Comm(Wait);",
    "src/comm/life.rs": "use super::Comm;\nfn end(_: Comm) {}",
}


def grow(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.long
def test_this_tree():
    assert imports.problems(ROOT) == []


def test_every_crate_and_layer_is_there():
    """A crate that is not found, and a name of no file, would take files out of the check."""
    found = {str(path.relative_to(ROOT)) for path in imports.crates(ROOT)}
    assert {"src/lib.rs", "hostccl/src/lib.rs", "tool/src/lib.rs", "benches/store_start.rs"} <= found, found
    named = [name for names in imports.LAYERS for name in names]
    assert [name for name in named if not any((ROOT / "src" / file).exists() for file in (name, f"{name}.rs"))] == []


@pytest.mark.parametrize("name", PLANTED)
def test_planted(name, tmp_path):
    files, expected = PLANTED[name]
    grow(tmp_path, files)
    assert expected in imports.problems(tmp_path)


def test_allowed(tmp_path):
    grow(tmp_path, ALLOWED)
    assert imports.problems(tmp_path) == []
