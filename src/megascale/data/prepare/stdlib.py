"""The source of Python's standard library as a data set, which every machine with Python has.

Installed packages, test suites, IDLE and generated tables are left out. Near-duplicate files are in the same split, so
that the held-out loss does not measure memorised text.
"""

from __future__ import annotations

import sysconfig
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from megascale.data.prepare.split import hash_text
from megascale.errors import DataError

MAX_BYTES = 12_000_000  # of the text
HELD_OUT_SHARE = 0.06
# A larger group of near-duplicates is trained on, since it would make the held-out share too large.
_MAX_GROUP_SHARE = 0.02
# A run of lines that is in more files than this is ignored: it is a licence text, and the files are not duplicates.
_MAX_FILES_PER_RUN = 8

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


def read_stdlib(root: Path | None = None, max_bytes: int = MAX_BYTES) -> dict[str, str]:
    """Return the texts of the library's source files by relative path, in path order, of at most `max_bytes` in all.

    Args:
        root: folder of the library; None: the running Python's.
        max_bytes: of a larger library, files are chosen by the hash of their path.

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
        if size > max_bytes:
            break
        selected.append(name)
    return {name: texts[name] for name in sorted(selected)}


def _is_source(path: PurePosixPath) -> bool:
    return not (
        _EXCLUDED_FOLDERS.intersection(path.parts)
        or path.name.startswith(("test_", "_sysconfigdata"))
        or path.parts[0].startswith("config-")
    )


def choose_held_out(texts: Mapping[str, str], share: float = HELD_OUT_SHARE) -> set[str]:
    """Return the held-out files: groups of near-duplicates in the order of a stable hash, `share` of the bytes."""
    groups = defaultdict(list)
    for name, group in group_near_duplicates(texts).items():
        groups[group].append(name)
    sizes = {name: len(text.encode()) for name, text in texts.items()}
    total = sum(sizes.values())
    chosen: set[str] = set()
    chosen_bytes = 0
    for group in sorted(groups, key=hash_text):
        group_bytes = sum(sizes[name] for name in groups[group])
        if group_bytes > _MAX_GROUP_SHARE * total:
            continue
        if chosen_bytes >= share * total:
            break
        chosen.update(groups[group])
        chosen_bytes += group_bytes
    return chosen


def group_near_duplicates(texts: Mapping[str, str], share: float = 0.1, window: int = 4) -> dict[str, str]:
    """Return the group of each file, named by its first file. Files of a group have much text in common.

    Two files are near-duplicates if at least `share` of the runs of `window` lines in the smaller file also occur in
    the larger file. Blank lines and indentation are ignored. Near-duplicates of near-duplicates are in the same group.
    """
    runs: dict[str, set[int]] = {}  # hashes of runs of lines, by file
    files_by_run: dict[int, list[str]] = defaultdict(list)
    for name, text in texts.items():
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        runs[name] = {hash(tuple(lines[i : i + window])) for i in range(len(lines) - window + 1)}
        for run in runs[name]:
            files_by_run[run].append(name)
    common_runs: dict[tuple[str, str], int] = defaultdict(int)  # by pair of files
    for names in files_by_run.values():
        if 2 <= len(names) <= _MAX_FILES_PER_RUN:
            for i, first in enumerate(names):
                for second in names[i + 1 :]:
                    common_runs[first, second] += 1
    sets = _DisjointSets(texts)
    for (first, second), count in common_runs.items():
        if count >= share * min(len(runs[first]), len(runs[second])):
            sets.join(first, second)
    for folder in _GROUPED_FOLDERS:
        members = sorted(name for name in texts if name.startswith(folder + "/"))
        for name in members[1:]:
            sets.join(members[0], name)
    return {name: sets.find_root(name) for name in texts}


class _DisjointSets:
    """Disjoint sets of names (union-find). The root of a set is its least name."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._parents = {name: name for name in names}

    def find_root(self, name: str) -> str:
        parents = self._parents
        while parents[name] != name:
            parents[name] = parents[parents[name]]  # shorten the path for later calls
            name = parents[name]
        return name

    def join(self, first: str, second: str) -> None:
        low, high = sorted((self.find_root(first), self.find_root(second)))
        self._parents[high] = low
