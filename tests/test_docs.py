"""Names in the documents: the files, modules, functions and tests of the tree exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megascale.config.registry import PLUGIN_GROUP

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


def test_the_site_is_built_without_a_warning(tmp_path):
    """`make docs`: a link or an anchor that leads nowhere, a page that no table of contents has."""
    pytest.importorskip("myst_parser", reason="the extra docs is not installed")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "--keep-going",
        "-b",
        "html",
        ROOT / "docs",
        tmp_path / "site",
    ]
    done = subprocess.run(command + ["-d", tmp_path / "trees"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "lr.warmup_steps" in (tmp_path / "site" / "configuration.html").read_text()
