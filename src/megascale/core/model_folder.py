"""The folder of a Hugging Face model, recognised without torch."""

from __future__ import annotations

from pathlib import Path


def is_model_folder(path: str | Path) -> bool:
    """Return whether a path is a Hugging Face folder, which a folder of checkpoints is not."""
    return "://" not in str(path) and (Path(path) / "config.json").is_file()
