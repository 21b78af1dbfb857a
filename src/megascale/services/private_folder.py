"""Folders that only this user may enter, for sockets: whoever gets in is trusted, so no token is asked for there."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from megascale.errors import TrainingError


def private_base_folder() -> Path:
    """This user's folder under the machine's temporary one, private as `make_private` has it."""
    return make_private_folder(Path(tempfile.gettempdir()) / f"megascale-{os.getuid()}")


def make_private_folder(place: Path) -> Path:
    """A folder of this user that nobody else may enter, made if need be.

    Raises TrainingError if the path is another user's, no folder, or one that others could put things into.
    """
    info = _made(place)
    if info.st_uid != os.getuid() or not stat.S_ISDIR(info.st_mode):
        raise TrainingError(f"{place} is not a folder of this user; remove it or set TMPDIR to a folder of your own")
    if stat.S_IMODE(info.st_mode) & 0o022:
        raise TrainingError(f"{place} can be written by others; remove it or set TMPDIR to a folder of your own")
    if stat.S_IMODE(info.st_mode) & 0o077:
        place.chmod(0o700)
    return place


def _made(place: Path) -> os.stat_result:
    """A folder that is there now, made if need be: a service that ends removes its own at any moment."""
    while True:
        with contextlib.suppress(FileExistsError):
            os.mkdir(place, 0o700)
        with contextlib.suppress(FileNotFoundError):
            return place.lstat()
