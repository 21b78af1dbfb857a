"""Tests that leave the suite for a campaign, by `tests/campaign.toml`. MEGASCALE_EXACT_CASES=all runs them too."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("campaign.toml")
HAS_ALL_CASES = os.environ.get("MEGASCALE_EXACT_CASES") == "all"


def read_campaign(path: Path = FILE) -> dict[str, frozenset[str]]:
    """Return the names of the campaign's tests by file, relative to the repository."""
    return {file: frozenset(names) for file, names in tomllib.loads(path.read_text()).items()}


def is_of_campaign(node: str, campaign: Mapping[str, Collection[str]]) -> bool:
    """Return whether the campaign has the test with this node ID."""
    file, _, name = node.partition("::")
    return name in campaign.get(file, ())


def find_unknown_names(nodes: Iterable[str], campaign: Mapping[str, Collection[str]]) -> list[str]:
    """Return the campaign's tests that are not collected although other tests of their file are."""
    collected = set(nodes)
    files = {node.partition("::")[0] for node in collected}
    return sorted(
        f"{file}::{name}"
        for file, names in campaign.items()
        if file in files
        for name in names
        if f"{file}::{name}" not in collected
    )


def select_tests(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the campaign's tests, and remove them from `items` unless all cases are requested.

    A test that the command line names runs. A name that no test has would let a renamed test return to the suite, so it
    is an error. Raises pytest.UsageError.
    """
    campaign = read_campaign()
    if not any("::" in argument for argument in config.args):
        unknown = find_unknown_names([item.nodeid for item in items], campaign)
        if unknown:
            raise pytest.UsageError(
                f"tests/campaign.toml names tests that do not exist: {unknown}; correct or remove the names"
            )
    selected, removed = [], []
    for item in items:
        if item.nodeid in config.args or not is_of_campaign(item.nodeid, campaign):
            selected.append(item)
        elif HAS_ALL_CASES:
            item.add_marker("campaign")
            selected.append(item)
        else:
            removed.append(item)
    if removed:
        config.hook.pytest_deselected(items=removed)
        items[:] = selected
