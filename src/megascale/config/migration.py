"""Keys that were called otherwise once: older configuration files, run folders and checkpoints are still read."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from megascale.errors import ConfigError

# Old name -> new name, both as section.key; a renamed key keeps its section.
RENAMED: dict[str, str] = {
    "parallel.round_size": "parallel.micro_batch_group_size",
    "overlap.products": "overlap.gemms",
    "resilience.patience": "resilience.grace_period",
    "resilience.fruitless": "resilience.no_progress_limit",
}
_noted: set[str] = set()


def migrate(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A tree of settings with today's keys; each old one is noted in one line, once a process.

    Raises ConfigError if a key is given under both names.
    """
    found = {name: dict(table) if isinstance(table, Mapping) else table for name, table in tree.items()}
    for old, new in RENAMED.items():
        section, _, key = old.partition(".")
        table = found.get(section)
        if not isinstance(table, dict) or key not in table:
            continue
        name = new.partition(".")[2]
        if name in table:
            raise ConfigError(f"{old} is the old name of {new}, and both are given; leave {old} out")
        table[name] = table.pop(key)
        if old not in _noted:
            _noted.add(old)
            print(f"note: {old} is called {new} now; the old name is still read", file=sys.stderr)
    return found
