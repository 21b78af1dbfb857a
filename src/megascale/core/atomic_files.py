"""Atomic writes of files: a file is written under another name, then renamed. No torch."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def name_temporary(path: Path) -> Path:
    """Return a unique path next to `path`.

    The name has a random number instead of a process id, because several hosts may share the folder, and processes of
    two containers may have the same id.
    """
    return path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")


def write_atomically(path: Path, text: str) -> None:
    """Write a text file in UTF-8 so that readers see either the old or the new content.

    The folder is created if it does not exist. Raises OSError if the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = name_temporary(path)
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
