"""Recognition of the folder of a Hugging Face model. No torch."""

from __future__ import annotations

from pathlib import Path


def is_model_folder(path: str | Path) -> bool:
    """Return whether a path is the folder of a Hugging Face model, not a folder of checkpoints or a URL."""
    return "://" not in str(path) and (Path(path) / "config.json").is_file()
