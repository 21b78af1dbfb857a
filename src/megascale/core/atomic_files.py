"""Files that appear complete: written under another name, then renamed. No torch."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def name_temporary(path: Path) -> Path:
    """Return a name next to `path` that no other thread, process or host chooses.

    Hosts that share the folder write at the same time, and processes of two containers may have the same number.
    """
    return path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")


def write_atomically(path: Path, text: str) -> None:
    """Write a text file in UTF-8 and make its folder; readers find the old contents or the new. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = name_temporary(path)
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
