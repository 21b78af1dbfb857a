"""Which folder of spans it is, for places that keep those of many: a random number, made when it is first asked for."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from megascale.core.untrusted_files import read_small_text

_FILE = "identity"


def folder_identity(folder: Path) -> str:
    """16 hexadecimal digits, the same as long as the folder is; OSError if they cannot be kept."""
    file = folder / _FILE
    with contextlib.suppress(OSError, ValueError):
        if re.fullmatch(r"[0-9a-f]{16}", text := read_small_text(file, 64)):
            return text
    text = os.urandom(8).hex()
    temporary = file.with_suffix(".tmp")
    temporary.write_text(text)
    os.replace(temporary, file)
    return text
