"""Which runs there are in a folder, by name: nothing else can be asked for."""

from __future__ import annotations

import os
from pathlib import Path

from megascale.core.untrusted_files import is_plain_name
from megascale.errors import DataError

# What makes a folder a run folder.
_MARKS = ("metrics.jsonl", "events.jsonl", "journal.sqlite", "config.toml", "spans")
_MOST = 2000


class RunList:
    """Args:
        place: a run folder, or a folder of run folders.

    DataError if it is neither; an empty folder called runs may get some later.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        if not place.is_dir():
            raise DataError(f"{place} is no folder; name a run folder, such as runs/stdlib, or a folder of them")
        self.single = _is_run(place)
        if not self.single and not self.list_names():
            raise DataError(
                f"{place} holds no run: no folder in it has {', '.join(_MARKS)}; name a run folder or a folder of them"
            )

    def list_names(self) -> list[str]:
        """Names of runs, the one last written to first."""
        if self.single:
            return [self.place.absolute().name or "run"]
        found = []
        try:
            with os.scandir(self.place) as entries:
                for entry in entries:
                    path = Path(entry.path)
                    if is_plain_name(entry.name) and entry.is_dir() and _is_run(path):
                        found.append((_touched(path), entry.name))
        except OSError:
            return []
        return [name for _, name in sorted(found, reverse=True)[:_MOST]]

    def find_folder(self, name: str) -> Path:
        """The folder of a run. DataError if there is none of that name."""
        if self.single and name == self.list_names()[0]:
            return self.place
        if not self.single and is_plain_name(name) and _is_run(self.place / name):
            return self.place / name
        raise DataError(f"there is no run {name[:100]!r} in {self.place}")


def _is_run(path: Path) -> bool:
    return any((path / mark).exists() for mark in _MARKS)


def _touched(path: Path) -> float:
    times = []
    for mark in _MARKS[:3]:
        try:
            times.append((path / mark).stat().st_mtime)
        except OSError:
            continue
    return max(times, default=0.0)
