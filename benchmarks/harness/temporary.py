"""Folders for runs: a temporary one, in which services of an ended run may still write, or one of the user."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megascale.errors import ConfigError

GRACE_SECONDS = 10.0  # seconds in which who still writes is waited for


@contextmanager
def temporary_folder(prefix: str = "megascale-bench-") -> Iterator[str]:
    """The path of a new folder, which is removed at the end with all that is in it; OSError if it cannot be."""
    name = tempfile.mkdtemp(prefix=prefix)
    try:
        yield name
    finally:
        _remove(name)


def require_folder(folder: Path) -> Path:
    """Return the folder of --folder, made if it is missing. Raises ConfigError if its parent is not a folder.

    A mistyped path would otherwise create folders, and test another disk than the one meant.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--folder={folder} is a file; choose a folder")
    if not folder.absolute().parent.is_dir():
        raise ConfigError(
            f"--folder={folder}: {folder.absolute().parent} is not a folder; create it, or choose another folder"
        )
    folder.mkdir(exist_ok=True)
    return folder


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
