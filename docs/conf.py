"""Sphinx: the site that `make docs` builds of these pages."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.errors import ExtensionError

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
html_js_files = ["search.js"]


def keep_settings_whole(app, page, template, context, doctree):
    """A setting in running text (`--train.steps=200`) is not broken after its hyphens."""
    if "body" in context:
        context["body"] = context["body"].replace('<span class="pre">--', '<span class="pre setting">--')


# Pages that the search leaves out: lists of tests would come before the pages that explain a matter.
UNSEARCHED = {"appendix-tests"}
SYNONYMS = tomllib.loads((ROOT / "docs" / "site" / "synonyms.toml").read_text())


def add_synonyms(app, doctree):
    """Add words that readers search for as index entries, which the site's search reads."""
    page = app.env.docname
    if page in UNSEARCHED:
        app.env.metadata[page]["nosearch"] = True
    for target, words in SYNONYMS.items():
        name, _, heading = target.partition("#")
        if name != page:
            continue
        sections = [section for section in doctree.findall(nodes.section) if not heading or heading in section["ids"]]
        if not sections:
            raise ExtensionError(f"docs/site/synonyms.toml: {page} has no heading {heading!r}")
        section = sections[0]
        entries = [("single", word, section["ids"][0], "main", None) for word in words]
        section.insert(1, addnodes.index(entries=entries))


def check_synonyms(app, env):
    """Check that each page of the synonyms exists."""
    missing = {target.partition("#")[0] for target in SYNONYMS} - env.all_docs.keys()
    if missing:
        raise ExtensionError(f"docs/site/synonyms.toml names pages that do not exist: {', '.join(sorted(missing))}")


def setup(app):
    """Connect the handlers, which Sphinx calls."""
    app.connect("html-page-context", keep_settings_whole)
    app.connect("doctree-read", add_synonyms)
    app.connect("env-updated", check_synonyms)
