"""Checkpoints: logical tensors with global offsets, committed whole or not at all, loadable by any layout."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megascale.checkpoint.checkpointer import Checkpointer
    from megascale.checkpoint.folder import Summary, inspect, latest, steps
    from megascale.checkpoint.layout import Shard
    from megascale.checkpoint.loader import LoadReport, load
    from megascale.checkpoint.saver import save
    from megascale.checkpoint.staging import Outcome

__all__ = ["Checkpointer", "LoadReport", "Outcome", "Shard", "Summary", "inspect", "latest", "load", "save", "steps"]

_HOMES = {
    "Checkpointer": "checkpointer",
    "LoadReport": "loader",
    "Outcome": "staging",
    "Shard": "layout",
    "Summary": "folder",
    "inspect": "folder",
    "latest": "folder",
    "load": "loader",
    "save": "saver",
    "steps": "folder",
}


def __getattr__(name: str) -> Any:
    """Public names are fetched when first used, so that importing the package loads no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
