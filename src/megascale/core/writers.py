"""Who else may write into a folder: its writer is trusted, so whoever may write there is let into the run."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def describe_other_writers(folder: Path) -> str:
    """A sentence on who else may change what lies in a folder; "" for nobody but this user and root.

    Looks at the folder and at those that it lies in (who may write there may put another in its place), but for
    directories such as /tmp, where only the owner of an entry may move it. Access lists are not looked at.
    """
    real = Path(os.path.realpath(folder))
    for place in (real, *real.parents):
        try:
            about = place.stat()
        except OSError:
            continue  # not there yet, or not to be looked at: who made it is asked on the next one
        sticky = place != real and about.st_mode & stat.S_ISVTX
        if about.st_uid not in (0, os.geteuid()):
            return f"{place} belongs to user {about.st_uid}, who may change what lies there"
        if about.st_mode & stat.S_IWOTH and not sticky:
            return f"{place} can be written by every user of this machine; run `chmod o-w {place}`"
        if place == real and about.st_mode & stat.S_IWGRP and about.st_gid != os.getegid():
            return f"{place} can be written by group {about.st_gid}; run `chmod g-w {place}`"
    return ""
