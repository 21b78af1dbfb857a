"""Names in the documents: the files, modules, functions and tests of the tree exist."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from megascale.config.registry import PLUGIN_GROUP
from tests.observe.dashboard.conftest import BROWSERS

ROOT = Path(__file__).parents[1]
BASES = (ROOT, ROOT / "src" / "megascale", ROOT / "docs")
# The log says what was true on its dates, in the names of its time.
PAGES = sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("docs/*.md")) + sorted(ROOT.glob("docs/models/*.md"))
FILE = re.compile(r"`((?:src|benchmarks|tests|docs|examples|scripts)/[\w./*-]*|[\w./-]+\.py)(?:::([\w.]+))?")
MODULE = re.compile(r"(?<![\w/.-])megascale(?!\.dev/)((?:\.[a-z_]\w*)+)")
LINK = re.compile(r"\]\(([\w./-]+\.(?:md|py|toml))(?:#[\w-]*)?\)")


def files(path: str) -> list[Path]:
    """Return the files that a page may mean: a path from the root, the package or docs/, or the end of a path."""
    result = [file for base in BASES for file in base.glob(path.rstrip("/"))]
    return result or [file for base in (BASES[1], ROOT / "tests") for file in base.rglob(path)]


def defines(file: Path, name: str) -> bool:
    """Return whether a file defines the function, class or method, and the classes around it."""
    text = file.read_text()
    return all(re.search(rf"^\s*(?:async )?(?:def|class) {part}\b", text, re.M) for part in name.split("."))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_is_there(page):
    text = page.read_text()
    missing = [m[0] for m in FILE.finditer(text) if not any(not m[2] or defines(f, m[2]) for f in files(m[1]))]
    for dotted in MODULE.findall(text):
        if f"megascale{dotted}" == PLUGIN_GROUP:  # a group of entry points, not a module
            continue
        *parents, last = dotted[1:].split(".")
        module = "/".join(parents + [last])
        present = (
            files(f"{module}.py")
            or files(module)
            or any(defines(f, last) for end in (".py", "/__init__.py") for f in files("/".join(parents) + end))
        )
        missing += [] if present else [f"megascale{dotted}"]
    missing += [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    assert not missing


def test_the_reference_of_settings_is_that_of_the_models(megascale):
    page = (ROOT / "docs/configuration.md").read_text()
    # In a process of its own: tests of extensions register parts in this one.
    assert page == megascale("config", "--markdown").stdout, "megascale config --markdown > docs/configuration.md"


def test_the_appendix_of_tests_is_up_to_date():
    command = [sys.executable, ROOT / "scripts/case_tests.py", "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return the built site. A broken link, or a page without a table of contents, fails the build."""
    pytest.importorskip("myst_parser", reason="the extra docs is not installed")
    folder = tmp_path_factory.mktemp("documents")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", ROOT / "docs", folder / "site"]
    done = subprocess.run(command + ["-d", folder / "trees"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "site"


def test_the_site_is_built_without_a_warning(site):
    assert "lr.warmup_steps" in (site / "configuration.html").read_text()


def test_every_page_but_the_last_leads_to_a_next_one(site):
    pages = {file.stem: file.read_text() for file in site.glob("*.html")}
    for name in ("search", "genindex", "py-modindex"):
        pages.pop(name, None)
    assert len(pages) > 60
    assert [name for name, text in pages.items() if 'class="next-page"' not in text] == ["appendix-tests"]


def test_the_search_knows_synonyms_and_leaves_out_lists_of_tests(site):
    index = json.loads((site / "searchindex.js").read_text().removeprefix("Search.setIndex(").removesuffix(")"))
    synonyms = tomllib.loads((ROOT / "docs" / "site" / "synonyms.toml").read_text())
    search_terms = [term for terms in synonyms.values() for term in terms]
    assert len(search_terms) == len(set(search_terms))
    for target, terms in synonyms.items():
        page, _, heading = target.partition("#")
        for term in terms:
            entries = [(index["docnames"][number], anchor) for number, anchor, _ in index["indexentries"][term]]
            assert [name for name, _ in entries] == [page], term
            assert not heading or entries[0][1] == heading
    unsearched = index["docnames"].index("appendix-tests")
    listed = index["terms"].get("test", [])
    assert unsearched not in (listed if isinstance(listed, list) else [listed])


@pytest.mark.xdist_group("browser")
def test_pages_fit_their_windows_and_the_search_answers(site):
    playwright = pytest.importorskip("playwright.sync_api")
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip("no chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page()
        for width in (375, 1280, 1440):
            page.set_viewport_size({"width": width, "height": 800})
            for name in ("performance", "architecture", "configuration", "continued-pretraining"):
                page.goto(f"file://{site}/{name}.html")
                assert page.evaluate("document.documentElement.scrollWidth") <= width, (name, width)
        for query, title in (
            ("fsdp", "sharding"),
            ("gradient accumulation", "planning-layouts"),
            ("fine-tune", "finetune"),
            ("hugging face architectures rope scaling", "model-families"),
            ("continued pretraining learning rate", "continued-pretraining"),
            ("sft lora chat template", "finetune"),
        ):
            page.goto(f"file://{site}/search.html?q={query.replace(' ', '+')}")
            page.wait_for_selector("ul.search li a")
            results = page.locator("ul.search li a").evaluate_all("links => links.map((link) => link.href)")
            assert any(f"/{title}.html" in link for link in results[:3]), (query, results[:5])
        browser.close()
