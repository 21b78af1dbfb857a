"""Checkpoints: logical tensors with global offsets, committed whole or not at all, loadable by any layout."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megascale.checkpoint.background.staging import SaveOutcome
    from megascale.checkpoint.checkpointer import Checkpointer
    from megascale.checkpoint.format.chunks import TensorShard
    from megascale.checkpoint.format.step_folders import Summary, inspect, latest, steps
    from megascale.checkpoint.loader import LoadReport, load
    from megascale.checkpoint.saver import save

__all__ = [
    "Checkpointer",
    "LoadReport",
    "SaveOutcome",
    "Summary",
    "TensorShard",
    "inspect",
    "latest",
    "load",
    "save",
    "steps",
]

_HOMES = {
    "Checkpointer": "checkpointer",
    "LoadReport": "loader",
    "SaveOutcome": "background.staging",
    "TensorShard": "format.chunks",
    "Summary": "format.step_folders",
    "inspect": "format.step_folders",
    "latest": "format.step_folders",
    "load": "loader",
    "save": "saver",
    "steps": "format.step_folders",
}


def __getattr__(name: str) -> Any:
    """Public names are fetched when first used, so that importing the package loads no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
