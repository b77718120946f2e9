"""Sphinx: Markdown pages (myst) and the API from the docstrings. Built by scripts/docs, warnings as errors."""

import nf4_patch

project = "nf4_patch"
version = release = nf4_patch.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"nf4_patch {release}"
exclude_patterns = ["_build"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "description"
