#!/usr/bin/env python3
"""Write docs/appendix-tests.md: the tests of each case that the documents list.

    scripts/case_tests.py            write the appendix
    scripts/case_tests.py --check    exit with 1 if the appendix or dev/case_tests.toml is out of date

dev/case_tests.toml has an entry per row of the tables of cases, with these keys:
    id      a unique name
    page    the page's path from the root of the repository
    case    the first cell of the row
    tests   `file::name` of each test, or a command

A table of cases is a table whose first column is called "case" or "guarantee". The pages give the order and the
sections of the appendix.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "dev" / "case_tests.toml"
APPENDIX = ROOT / "docs" / "appendix-tests.md"
CASE_COLUMNS = ("case", "guarantee")
HEADER = """# Tests of the cases

<!-- Written by scripts/case_tests.py from dev/case_tests.toml. Do not edit. -->

This appendix lists the tests of each case in [failures](failures.md) and [security](security.md). Run a test by
its name:

    python -m pytest tests/train/test_resuming.py::test_another_model_is_refused

To change the list, edit `dev/case_tests.toml` of the repository and run `scripts/case_tests.py`.
"""


@dataclass(frozen=True)
class Row:
    """A row of a table of cases: the page's path, the heading above the table and the first cell."""

    page: str
    section: str
    case: str


def split_row(line: str) -> list[str]:
    """Return the cells of a line of a Markdown table. A backslash escapes a bar."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def list_rows(page: str) -> list[Row]:
    """Return the rows of a page's tables of cases, in the order of the page."""
    rows: list[Row] = []
    section = ""
    header: list[str] = []
    for line in (ROOT / page).read_text().splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        if not line.startswith("|"):
            header = []
            continue
        cells = split_row(line)
        if not header:
            header = cells
        elif header[0] in CASE_COLUMNS and not set(cells[0]) <= set("-:"):
            rows.append(Row(page, section, case=cells[0]))
    return rows


def list_errors(entries: list[dict[str, Any]], rows: list[Row]) -> list[str]:
    """Return a sentence per repeated or missing entry of the table."""
    ids = Counter(entry["id"] for entry in entries)
    errors = [f"The id {name} occurs {count} times." for name, count in ids.items() if count > 1]
    errors += [f"{entry['id']} names no test." for entry in entries if not entry["tests"]]
    listed = Counter((entry["page"], entry["case"]) for entry in entries)
    present = Counter((row.page, row.case) for row in rows)
    errors += [f"{page} has a row that has no entry: {case}" for page, case in present - listed]
    errors += [f"{page} lacks the row of an entry: {case}" for page, case in listed - present]
    return errors


def format_appendix(entries: list[dict[str, Any]], rows: list[Row]) -> str:
    """Return the text of the appendix: a heading per page, and a table per section."""
    tests = {(entry["page"], entry["case"]): entry["tests"] for entry in entries}
    lines = [HEADER]
    page = section = ""
    for row in rows:
        if row.page != page:
            title = (ROOT / row.page).read_text().splitlines()[0].removeprefix("# ")
            lines.append(f"## {title}\n")
            page, section = row.page, ""
        if row.section != section:
            anchor = re.sub(r"[^\w -]", "", row.section.lower()).replace(" ", "-")
            link = f"{Path(page).name}#{anchor}"
            lines += ["", f"### [{row.section}]({link})\n", "| case | tests |", "|---|---|"]
            section = row.section
        names = ", ".join(f"`{test}`" for test in tests[row.page, row.case])
        lines.append(f"| {row.case} | {names} |")
    text = "\n".join(lines) + "\n"
    return re.sub(r"\n{3,}", "\n\n", text)


def main() -> int:
    """Write or check the appendix, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if out of date")
    arguments = parser.parse_args()
    entries = tomllib.loads(TABLE.read_text())["case"]
    pages = dict.fromkeys(entry["page"] for entry in entries)
    rows = [row for page in pages for row in list_rows(page)]
    errors = list_errors(entries, rows)
    if not errors:
        text = format_appendix(entries, rows)
        if not arguments.check:
            APPENDIX.write_text(text)
        elif not APPENDIX.exists() or APPENDIX.read_text() != text:
            errors = [f"{APPENDIX.relative_to(ROOT)} is out of date. Run scripts/case_tests.py."]
    for error in errors:
        print(error, file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
