"""Sphinx: Markdown pages (myst) and the API from the docstrings. Built by scripts/docs, warnings as errors."""

import re
from pathlib import Path
from typing import Any

import nf4_patch

project = "nf4_patch"
version = release = nf4_patch.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"nf4_patch {release}"
html_static_path, html_css_files = ["style"], ["fit.css"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "description"


def home_page(app: Any, name: str, source: list[str]) -> None:
    """The home page is the README, its links as seen from docs/; index.md adds the table of contents."""
    if name == "index":
        readme = Path(app.srcdir).with_name("README.md")
        app.env.note_dependency(str(readme))  # a change of the README builds the page again
        text = readme.read_text(encoding="utf-8")
        seen_from_docs = re.sub(r"\]\((?!\w+:|#)(docs/)?", lambda link: "](" if link[1] else "](../", text)
        # CONTRIBUTING.md and CHANGELOG.md are pages of their own
        pages = re.sub(r"\]\(\.\./(\w+\.md)\)", lambda link: f"]({link[1].lower()})", seen_from_docs)
        source[0] = f"{pages}\n{source[0]}"
    source[0] = source[0].replace("](../README.md", "](index.md")


def setup(app: Any) -> None:
    app.connect("source-read", home_page)
