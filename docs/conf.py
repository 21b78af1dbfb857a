"""Sphinx: the site that `make docs` builds of these pages."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

import megascale  # noqa: E402

project = "MegaScale"
author = copyright = "the MegaScale authors"
release = version = megascale.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]

myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 4
autodoc_typehints = "description"
autodoc_member_order = "bysource"
html_theme = "furo"
html_title = "MegaScale"
html_static_path = ["site"]
html_css_files = ["site.css"]


def keep_settings_whole(app, page, template, context, doctree):
    """A setting in running text (`--train.steps=200`) is not broken after its hyphens."""
    if "body" in context:
        context["body"] = context["body"].replace('<span class="pre">--', '<span class="pre setting">--')


def setup(app):
    """What Sphinx calls."""
    app.connect("html-page-context", keep_settings_whole)
