"""The Python standard library's own source as a data set: real text on every machine with Python.

Installed packages, test suites, IDLE and generated tables are left out. Near-duplicate files are in the same
split, so that held-out loss measures learning and not memory.
"""

from __future__ import annotations

import sysconfig
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from megascale.data.prepare.split import hash_text
from megascale.errors import DataError

LARGEST = 12_000_000
HELD_OUT = 0.06
# A group larger than this share of the text would unbalance the held-out split, so it is trained on.
_LARGEST_GROUP = 0.02
# Runs of lines found in more files than this are licence texts, which do not make files near-duplicates.
_MAX_FILES = 8

_EXCLUDED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "idlelib",
    "idle_test",
    "pydoc_data",  # generated from the manual
    "lib-dynload",
}
# Families of files written on one pattern: 120 code tables, 50 syntax fixers.
_GROUPED_FOLDERS = ("encodings", "lib2to3/fixes")


def read_stdlib(root: Path | None = None, largest: int = LARGEST) -> dict[str, str]:
    """Return the library's source files as {path with /: text} in path order, at most `largest` bytes.

    Raises DataError if the folder holds no source.
    """
    root = Path(root or sysconfig.get_path("stdlib"))
    texts: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if _is_source(PurePosixPath(name)):
            try:
                text = path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue
            if text.strip():
                texts[name] = text
    if not texts:
        raise DataError(
            f"{root} holds no Python source files, so there is no standard library to learn from; install Python with "
            "its library (Debian: libpython3-stdlib) or give your own text with --input"
        )
    size = 0
    selected = []
    for name in sorted(texts, key=hash_text):
        size += len(texts[name].encode())
        if size > largest:
            break
        selected.append(name)
    return {name: texts[name] for name in sorted(selected)}


def _is_source(path: PurePosixPath) -> bool:
    return not (
        _EXCLUDED_FOLDERS.intersection(path.parts)
        or path.name.startswith(("test_", "_sysconfigdata"))
        or path.parts[0].startswith("config-")
    )


def choose_held_out(texts: Mapping[str, str], share: float = HELD_OUT) -> set[str]:
    """Return the held-out files: groups in the order of a stable hash, up to `share` of the bytes."""
    groups = defaultdict(list)
    for name, group in group_near_duplicates(texts).items():
        groups[group].append(name)
    sizes = {name: len(text.encode()) for name, text in texts.items()}
    total = sum(sizes.values())
    chosen: set[str] = set()
    chosen_bytes = 0
    for group in sorted(groups, key=hash_text):
        group_bytes = sum(sizes[name] for name in groups[group])
        if group_bytes > _LARGEST_GROUP * total:
            continue
        if chosen_bytes >= share * total:
            break
        chosen.update(groups[group])
        chosen_bytes += group_bytes
    return chosen


def group_near_duplicates(texts: Mapping[str, str], share: float = 0.1, window: int = 4) -> dict[str, str]:
    """Return the group of each file: files that have much text in common, directly or through other files.

    Two files belong together if at least `share` of the smaller one's runs of `window` lines (blank lines and
    indentation aside) also occur in the other.
    """
    runs: dict[str, set[int]] = {}
    files: dict[int, list[str]] = defaultdict(list)
    for name, text in texts.items():
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        runs[name] = {hash(tuple(lines[i : i + window])) for i in range(len(lines) - window + 1)}
        for run in runs[name]:
            files[run].append(name)
    common: dict[tuple[str, str], int] = defaultdict(int)
    for names in files.values():
        if 2 <= len(names) <= _MAX_FILES:
            for i, first in enumerate(names):
                for second in names[i + 1 :]:
                    common[first, second] += 1
    sets = _DisjointSets(texts)
    for (first, second), count in common.items():
        if count >= share * min(len(runs[first]), len(runs[second])):
            sets.join(first, second)
    for folder in _GROUPED_FOLDERS:
        members = sorted(name for name in texts if name.startswith(folder + "/"))
        for name in members[1:]:
            sets.join(members[0], name)
    return {name: sets.root(name) for name in texts}


class _DisjointSets:
    """Sets of names that can be joined; the least name of a set is its root."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._parents = {name: name for name in names}

    def root(self, name: str) -> str:
        parents = self._parents
        while parents[name] != name:
            parents[name] = parents[parents[name]]
            name = parents[name]
        return name

    def join(self, first: str, second: str) -> None:
        low, high = sorted((self.root(first), self.root(second)))
        self._parents[high] = low
