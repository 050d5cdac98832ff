"""Sphinx's configuration of the site. build.py stages the sources and calls Sphinx."""

import os

project = "libdevicemesh"
author = "the libdevicemesh authors"
version = release = os.environ["DM_VERSION"]
html_title = f"libdevicemesh {version}"
html_copy_source = False
# The search takes the place of an index, which would be one page of 3,000 names.
html_use_index = False
html_domain_indices = False
html_show_sphinx = False
html_show_copyright = False

extensions = ["myst_parser", "sitemaker.names"]
myst_enable_extensions = ["attrs_inline", "attrs_block", "colon_fence", "fieldlist"]
# The anchors of headings are GitHub's, so links to them work there and here.
myst_heading_anchors = 6
smartquotes = False
highlight_language = "text"

maximum_signature_line_length = 90
add_module_names = False
python_display_short_literal_types = True
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_static_path = ["../static"]
html_css_files = ["site.css"]
html_theme_options = {"top_of_page_buttons": []}
pygments_style = "friendly"
pygments_dark_style = "github-dark"
