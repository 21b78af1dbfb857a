"""The newest complete checkpoint of another trainer, by the names of its files."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import threading
from pathlib import Path

STEP_FIELD = "{step}"
SEARCH_INTERVAL = 5.0  # seconds
_MAX_STEP = 1 << 53


def find_saved_step(pattern: str) -> int:
    """Return the largest step for which a path exists, 0 if there is none.

    Args:
        pattern: absolute path with `{step}` where the digits of the step stand; `*` matches any text within a name.
    """
    before, _, after = pattern.partition(STEP_FIELD)
    expression = re.compile(_to_expression(before) + "([0-9]{1,16})" + _to_expression(after))
    steps = [0]
    # Brackets and question marks stand for themselves, as in the expression.
    names = glob.escape(pattern.replace(STEP_FIELD, "*")).replace("[*]", "*")
    for path in glob.iglob(names):
        match = expression.fullmatch(path)
        if match is not None and int(match[1]) < _MAX_STEP:
            steps.append(int(match[1]))
    return max(steps)


def _to_expression(part: str) -> str:
    return re.escape(part).replace(r"\*", "[^/]*")


class SavedCheckpoints:
    """Searcher in a thread, because a folder of a shared file system may take long to list.

    Args:
        folder: working directory of the trainer.
        pattern: `foreign.checkpoints`.
    """

    def __init__(self, folder: str, pattern: str) -> None:
        self._pattern = str(Path(folder) / os.path.expanduser(pattern))
        self._step = 0
        self._stopped = threading.Event()
        threading.Thread(target=self._search, name="saved-checkpoints", daemon=True).start()

    @property
    def step(self) -> int:
        """The step of the newest complete checkpoint, 0 if there is none."""
        return self._step

    def stop(self) -> None:
        """End the search."""
        self._stopped.set()

    def _search(self) -> None:
        while not self._stopped.is_set():
            with contextlib.suppress(OSError):  # the file system does not answer at the moment
                self._step = find_saved_step(self._pattern)
            self._stopped.wait(SEARCH_INTERVAL)
