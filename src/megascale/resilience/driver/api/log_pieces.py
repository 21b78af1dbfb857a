"""Pieces of ranks' logs, for those who follow one from another machine."""

from __future__ import annotations

import os
from pathlib import Path

from megascale.core.untrusted_files import open_regular

LOG_PIECE = 64 << 10  # bytes of a log that are read at once


def read_log_piece(file: Path, after: int) -> tuple[int, bytes] | None:
    """(position, at most LOG_PIECE bytes) of a log from byte `after` on, below 0 from its end; None: there is none.

    A position behind the end, of a log that was begun anew, is its begin.
    """
    try:
        with open(file, "rb", opener=open_regular) as log:
            size = log.seek(0, os.SEEK_END)
            start = max(0, size + after) if after < 0 else after if after <= size else 0
            log.seek(start)
            return start, log.read(LOG_PIECE)
    except OSError:  # none, or not a file
        return None
