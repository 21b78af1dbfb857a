"""`tests/campaign.toml`: its tests leave the suite, and a name that no test has is an error."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import campaign

FILE = "tests/exact/test_layouts.py"


class FakeItem:
    """A collected test."""

    def __init__(self, nodeid: str) -> None:
        self.nodeid = nodeid

    def add_marker(self, name: str) -> None:
        self.marker = name


def select(monkeypatch: pytest.MonkeyPatch, names: list[str], arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the selected and the deselected tests of a campaign that has `FILE::a` and `FILE::b[x]`."""
    monkeypatch.setattr(campaign, "read_campaign", lambda: {FILE: frozenset({"a", "b[x]"})})
    deselected: list[Any] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items))
    items: list[Any] = [FakeItem(name) for name in names]
    campaign.select_tests(SimpleNamespace(args=arguments, hook=hook), items)  # type: ignore[arg-type]
    return [item.nodeid for item in items], [item.nodeid for item in deselected]


def test_tests_of_the_campaign_leave_the_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{FILE}::a", f"{FILE}::b[x]", f"{FILE}::b[y]", "tests/test_docs.py::a"]
    monkeypatch.setattr(campaign, "HAS_ALL_CASES", False)
    assert select(monkeypatch, names, ["tests"]) == (names[2:], names[:2])
    assert select(monkeypatch, names, [FILE, names[0]]) == ([names[0]] + names[2:], names[1:2])
    monkeypatch.setattr(campaign, "HAS_ALL_CASES", True)
    assert select(monkeypatch, names, ["tests"]) == (names, [])


def test_an_unknown_test_name_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(pytest.UsageError, match=r"'tests/exact/test_layouts.py::b\[x\]'.* correct or remove"):
        select(monkeypatch, [f"{FILE}::a"], ["tests"])
    select(monkeypatch, [f"{FILE}::a"], [f"{FILE}::a"])  # other tests of the file are not collected
    select(monkeypatch, ["tests/test_docs.py::a"], ["tests/test_docs.py"])


def test_files_of_the_campaign_exist() -> None:
    root = Path(campaign.__file__).parents[1]
    assert [file for file in campaign.read_campaign() if not (root / file).is_file()] == []
