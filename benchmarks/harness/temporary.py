"""A temporary folder for runs: services of a run that has ended may still write there for a moment."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

GRACE_SECONDS = 10.0  # seconds in which who still writes is waited for


@contextmanager
def temporary_folder(prefix: str = "megascale-bench-") -> Iterator[str]:
    """The path of a new folder, which is removed at the end with all that is in it; OSError if it cannot be."""
    name = tempfile.mkdtemp(prefix=prefix)
    try:
        yield name
    finally:
        _remove(name)


def _remove(name: str) -> None:
    deadline = time.monotonic() + GRACE_SECONDS
    while True:
        try:
            shutil.rmtree(name)
            return
        except OSError:  # something came, or what was listed has gone meanwhile
            if not os.path.exists(name):
                return
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)
