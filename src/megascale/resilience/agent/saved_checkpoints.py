"""The newest complete checkpoint of another trainer, by the names of its files."""

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
SEARCH_INTERVAL = 5.0  # seconds
# A search rests for so many times its own duration, so that it does not load a slow file system.
REST = 20
MAX_ENTRIES = 100_000  # names that one search reads
_MAX_STEP = 1 << 53

log = logging.getLogger("megascale.agent")


class TooManyEntriesError(Exception):
    """The folders of a pattern have more than MAX_ENTRIES names."""


def find_saved_step(pattern: str, max_entries: int = MAX_ENTRIES) -> int:
    """Return the largest step for which a path exists, 0 if there is none.

    Each folder is listed once. The names with a step are tried from the largest step to the smallest, and the first
    complete one counts, so older checkpoints are not opened.

    Args:
        pattern: absolute path with `{step}` where the digits of the step stand; `*` matches any text within a name.
        max_entries: names to read.

    Raises:
        TooManyEntriesError: the folders have more names. The newest step is unknown then, since names have no order.
    """
    return _Search(max_entries).find_step("/", pattern.strip("/").split("/"))


class _Search:
    """A search that counts the names that it reads."""

    def __init__(self, max_entries: int) -> None:
        self._remaining = max_entries

    def find_step(self, folder: str, parts: list[str]) -> int:
        """Return the largest step of a path that matches the parts of a pattern below a folder."""
        part, *rest = parts
        if STEP_FIELD in part:
            expression = re.compile(_to_expression(part).replace(re.escape(STEP_FIELD), "([0-9]{1,16})"))
            matches = [expression.fullmatch(name) for name in self._list_names(folder)]
            steps = [(int(match[1]), match[0]) for match in matches if match is not None and int(match[1]) < _MAX_STEP]
            for step, name in sorted(steps, reverse=True):
                if self.has_path(os.path.join(folder, name), rest):
                    return step
            return 0
        return max((self.find_step(path, rest) for path in self._match(folder, part)), default=0)

    def has_path(self, path: str, parts: list[str]) -> bool:
        """Return whether a path below another one matches the parts of a pattern."""
        if not parts:
            return os.path.exists(path)
        return any(self.has_path(match, parts[1:]) for match in self._match(path, parts[0]))

    def _match(self, folder: str, part: str) -> Iterator[str]:
        """List the paths in a folder whose names match a part of a pattern."""
        if "*" not in part:
            yield os.path.join(folder, part)
            return
        expression = re.compile(_to_expression(part))
        for name in self._list_names(folder):
            if expression.fullmatch(name):
                yield os.path.join(folder, name)

    def _list_names(self, folder: str) -> list[str]:
        names = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError), os.scandir(folder) as entries:
            for entry in entries:
                names.append(entry.name)
                self._remaining -= 1
                if self._remaining < 0:
                    raise TooManyEntriesError(folder)
        return names


def _to_expression(part: str) -> str:
    """Return the regular expression of a part. As in a shell, a leading * matches no name that begins with a point."""
    hidden = r"(?!\.)" if part.startswith("*") else ""
    return hidden + re.escape(part).replace(r"\*", ".*")


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
        """The step of the newest complete checkpoint, 0 if there is none or if it is unknown."""
        return self._step

    def stop(self) -> None:
        """End the search."""
        self._stopped.set()

    def _search(self) -> None:
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
                pass  # the file system does not answer at the moment
            self._stopped.wait(max(SEARCH_INTERVAL, REST * (time.monotonic() - start)))
