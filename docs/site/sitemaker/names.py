"""Sphinx's extension that links names in the text, such as `dm_init` and `dm::Mesh`, to the
reference. Parameters are left out of the search index."""

import re

from docutils import nodes
from sphinx.domains.c import CDomain
from sphinx.domains.cpp import CPPDomain
from sphinx.util.nodes import make_refnode

NAME = re.compile(r"((?:dm|DM|DEVICEMESH|hostccl|HOSTCCL|nccl)_?\w+|dm(?:::\w+)+)(?:\(\))?")
# The kinds of names that a name in the text may link to. Parameters are not among them.
KINDS = {"function", "macro", "struct", "type", "member", "class", "enum", "var"}


class C(CDomain):
    def get_objects(self):
        return (found for found in super().get_objects() if found[2] != "functionParam")


class Cpp(CPPDomain):
    def get_objects(self):
        return (found for found in super().get_objects() if found[2] not in ("functionParam", "templateParam"))


def places(app):
    """name -> (page, anchor) of the declarations in the references of C and C++."""
    found = {}
    for domain in ("cpp", "c"):  # a name that both have links to C's entry
        for name, _, kind, page, anchor, _ in app.env.get_domain(domain).get_objects():
            if kind in KINDS:
                found[name] = (page, anchor)
    return found


def link_names(app, tree, page):
    if not hasattr(app.env, "places_of_names"):
        app.env.places_of_names = places(app)
    for literal in list(tree.findall(nodes.literal)):
        match = NAME.fullmatch(literal.astext())
        place = match and app.env.places_of_names.get(match[1])
        above = literal.parent
        while place and above is not None and not isinstance(above, (nodes.reference, nodes.title)):
            above = above.parent
        if place and above is None:
            literal.replace_self(make_refnode(app.builder, page, place[0], place[1], literal.deepcopy(), match[1]))


def setup(app):
    app.add_domain(C, override=True)
    app.add_domain(Cpp, override=True)
    app.connect("doctree-resolved", link_names)
    return {"parallel_read_safe": True, "parallel_write_safe": False}
