"""The front page: its length, commands, address, and figures, which the documents must have too."""

from __future__ import annotations

import re
import tomllib

import pytest

from tests.test_commands import INLINE, ROOT, commands, parse

README = ROOT / "README.md"
TEXT = README.read_text()
WORD_LIMIT = 1200
# Figures of the speed table and of the quickstart -> the page that has them, with date, card and command.
FIGURES = {
    "67.4%": "docs/comparison.md",
    "57.4%": "docs/comparison.md",
    "60.0%": "docs/comparison.md",
    "84.3%": "docs/comparison.md",
    "590,000": "docs/performance.md",
    "0.574": "docs/open-run.md",
    "2e-16": "docs/exactness.md",
}


def test_it_is_short():
    counted_words = [word for word in TEXT.split() if re.search(r"\w", word)]
    assert len(counted_words) <= WORD_LIMIT


def test_its_commands_parse():
    inline = [command for command in INLINE.findall(TEXT) if not re.search(r"\b[A-Z]{2,}\b", command)]
    assert len(inline) >= 8
    for command in commands(README) + inline:
        try:
            parse(command)
        except Exception as error:
            if type(error).__name__ not in ("MissingParameter", "BadOptionUsage", "Exit"):
                pytest.fail(f"{command}: {type(error).__name__}: {error}")


def test_its_address_has_one_source():
    """`scripts/package_metadata.py` replaces PROJECT_URL; the page names no other address of the project."""
    assert "git clone PROJECT_URL" in TEXT
    assert "PROJECT_URL/actions/workflows/tests.yml/badge.svg" in TEXT
    assert (ROOT / ".github/workflows/tests.yml").exists()
    assert not re.search(r"github\.com/[^/]+/megascale", TEXT, re.IGNORECASE)


@pytest.mark.parametrize(("figure", "page"), FIGURES.items())
def test_its_figures_stand_in_the_documents(figure, page):
    assert figure in (ROOT / page).read_text()
    assert figure in TEXT


@pytest.mark.parametrize("name", ["questions.md", "questions-operators.md"])
def test_the_pages_that_answer_questions_exist(name):
    page = ROOT / "dev" / name
    links = re.findall(r"\]\(([^)#]+)", page.read_text())
    assert len(links) > 20
    assert not [link for link in links if not (page.parent / link).exists()]


def test_the_search_words_of_operators_lead_to_their_pages():
    """Check that the site's search returns the page of a row for the word in its fourth column."""
    synonyms = tomllib.loads((ROOT / "docs/site/synonyms.toml").read_text())
    text = (ROOT / "dev/questions-operators.md").read_text()
    rows = re.findall(r"^(\| \d+\. .*) \| ([^|]+) \| [^|]+ \| [^|]+ \|$", text, re.M)
    rows = [(row, word) for row, word in rows if word != "-"]
    assert len(rows) >= 8
    for row, word in rows:
        # As in docs/site/search.js, a synonym may be a part of a longer query.
        pages = {
            target.partition("#")[0]
            for target, words in synonyms.items()
            if any(f" {synonym} " in f" {word} " for synonym in words)
        }
        assert any(f"(../docs/{page}.md" in row for page in pages), word


def test_the_commands_that_answer_questions_parse():
    text = (ROOT / "dev/questions.md").read_text()
    questions = [command for command in INLINE.findall(text) if not re.search(r"\b[A-Z]+\b|--help", command)]
    assert len(questions) >= 6
    for command in questions:
        parse(command)
