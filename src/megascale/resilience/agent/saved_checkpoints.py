"""Search for the newest complete checkpoint of a foreign trainer, by the names of its files."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

STEP_FIELD = "{step}"
SEARCH_INTERVAL = 5.0  # seconds between two searches
# The pause after a search is at least this multiple of its duration, so that searches do not load a slow file system.
PAUSE_FACTOR = 20
MAX_ENTRIES = 100_000  # largest number of names that one search reads
_MAX_STEP = 1 << 53  # A greater number in a name is not a step.

log = logging.getLogger("megascale.agent")


class TooManyEntriesError(Exception):
    """Error for a search whose folders have more than MAX_ENTRIES names. Its text is the last folder."""


def find_saved_step(pattern: str, max_entries: int = MAX_ENTRIES) -> int:
    """Return the largest step for which the pattern's path exists, or 0 if there is none.

    The search lists each folder once. It tries names from the largest step to the smallest and returns the first
    complete path, so it does not open older checkpoints.

    Args:
        pattern: absolute path with `{step}` in place of the step's digits. `*` matches any text within a name.
        max_entries: largest number of names to read.

    Raises:
        TooManyEntriesError: the folders have more names. The newest step is then unknown, because names are unordered.
    """
    return _Search(max_entries).find_step("/", pattern.strip("/").split("/"))


class _Search:
    """Search that counts the names that it reads."""

    def __init__(self, max_entries: int) -> None:
        self._remaining_entries = max_entries

    def find_step(self, folder: str, name_patterns: list[str]) -> int:
        """Return the largest step of a path in `folder` that matches the name patterns, one per folder level."""
        name_pattern, *lower_patterns = name_patterns
        if STEP_FIELD in name_pattern:
            expression = re.compile(_to_expression(name_pattern).replace(re.escape(STEP_FIELD), "([0-9]{1,16})"))
            names_by_step = []  # (step, name)
            for name in self._list_names(folder):
                match = expression.fullmatch(name)
                if match is not None and int(match[1]) < _MAX_STEP:
                    names_by_step.append((int(match[1]), name))
            for step, name in sorted(names_by_step, reverse=True):
                if self.has_path(os.path.join(folder, name), lower_patterns):
                    return step
            return 0
        return max(
            (self.find_step(path, lower_patterns) for path in self._list_matches(folder, name_pattern)), default=0
        )

    def has_path(self, path: str, name_patterns: list[str]) -> bool:
        """Return whether a path below `path` matches the name patterns."""
        if not name_patterns:
            return os.path.exists(path)
        return any(self.has_path(match, name_patterns[1:]) for match in self._list_matches(path, name_patterns[0]))

    def _list_matches(self, folder: str, name_pattern: str) -> Iterator[str]:
        """Yield the paths in a folder whose names match a name pattern."""
        if "*" not in name_pattern:
            yield os.path.join(folder, name_pattern)
            return
        expression = re.compile(_to_expression(name_pattern))
        for name in self._list_names(folder):
            if expression.fullmatch(name):
                yield os.path.join(folder, name)

    def _list_names(self, folder: str) -> list[str]:
        """Return the names in a folder, [] if it is missing or this user may not read it."""
        names = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError), os.scandir(folder) as entries:
            for entry in entries:
                names.append(entry.name)
                self._remaining_entries -= 1
                if self._remaining_entries < 0:
                    raise TooManyEntriesError(folder)
        return names


def _to_expression(name_pattern: str) -> str:
    """Return the regular expression of a name pattern. As in a shell, a leading * does not match hidden names."""
    hidden = r"(?!\.)" if name_pattern.startswith("*") else ""
    return hidden + re.escape(name_pattern).replace(r"\*", ".*")


class SavedCheckpoints:
    """Thread that searches for the newest checkpoint. Listing a folder of a shared file system may take long.

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
        """Step of the newest complete checkpoint, or 0 if there is none or it is unknown."""
        return self._step

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()

    def _search(self) -> None:
        """Search at intervals until `stop`. Runs in the thread."""
        is_reported = False
        while not self._stopped.is_set():
            start = time.monotonic()
            try:
                self._step = find_saved_step(self._pattern)
            except TooManyEntriesError as error:
                self._step = 0
                if not is_reported:
                    is_reported = True
                    log.warning(
                        "foreign.checkpoints=%s: the newest checkpoint is unknown, because more than %d names had to "
                        "be read, up to those in %s; name a folder with fewer files, or write fewer *",
                        self._pattern,
                        MAX_ENTRIES,
                        error,
                    )
            except OSError:
                pass  # the file system does not answer; the next search tries again
            self._stopped.wait(max(SEARCH_INTERVAL, PAUSE_FACTOR * (time.monotonic() - start)))
