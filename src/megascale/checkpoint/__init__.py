"""Checkpoints of logical tensors. Each is committed completely or not at all, and any layout can load it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megascale.checkpoint.background.early_slots import EarlySlots, prepare_slots
    from megascale.checkpoint.background.staging import SaveOutcome
    from megascale.checkpoint.checkpointer import (
        Checkpointer,
        StoredState,
        end_unused_service,
        find_stored_state,
        has_saved_state,
        start_service,
    )
    from megascale.checkpoint.chunk_source import LoadReport
    from megascale.checkpoint.format.chunks import TensorShard
    from megascale.checkpoint.format.step_folders import latest, steps
    from megascale.checkpoint.format.verify import Summary, inspect
    from megascale.checkpoint.loader import load
    from megascale.checkpoint.saver import save

__all__ = [
    "Checkpointer",
    "EarlySlots",
    "LoadReport",
    "SaveOutcome",
    "StoredState",
    "Summary",
    "TensorShard",
    "end_unused_service",
    "find_stored_state",
    "has_saved_state",
    "inspect",
    "latest",
    "load",
    "prepare_slots",
    "save",
    "start_service",
    "steps",
]

_MODULES = {
    "Checkpointer": "checkpointer",
    "EarlySlots": "background.early_slots",
    "LoadReport": "chunk_source",
    "SaveOutcome": "background.staging",
    "TensorShard": "format.chunks",
    "Summary": "format.verify",
    "StoredState": "checkpointer",
    "end_unused_service": "checkpointer",
    "find_stored_state": "checkpointer",
    "has_saved_state": "checkpointer",
    "inspect": "format.verify",
    "latest": "format.step_folders",
    "load": "loader",
    "prepare_slots": "background.early_slots",
    "save": "saver",
    "start_service": "checkpointer",
    "steps": "format.step_folders",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that importing the package does not import torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
