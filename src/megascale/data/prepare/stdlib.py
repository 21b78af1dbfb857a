"""The Python standard library's own source as a data set: real text that every machine with Python has.

Left out: installed packages, test suites, IDLE, generated tables. Files that repeat each other stand on one side of
the split, so that held-out loss measures learning and not remembering.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from megascale.errors import DataError

LARGEST = 12_000_000
HELD_OUT = 0.06
# A group larger than this share of the whole would unbalance the held-out part; it stays in training.
_LARGEST_GROUP = 0.02

_LEFT_OUT = {
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
# Families written on one pattern: 120 code tables, 50 syntax fixers.
_GROUPED_FOLDERS = ("encodings", "lib2to3/fixes")


def read_stdlib(root: Path | None = None, largest: int = LARGEST) -> dict[str, str]:
    """Path (relative, with /) to text of the library's source files, in path order, at most `largest` bytes.

    Raises DataError if the folder holds no source.
    """
    root = Path(root or sysconfig.get_path("stdlib"))
    texts: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if _wanted(PurePosixPath(name)):
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
    kept = []
    for name in sorted(texts, key=_place):
        size += len(texts[name].encode())
        if size > largest:
            break
        kept.append(name)
    return {name: texts[name] for name in sorted(kept)}


def _wanted(path: PurePosixPath) -> bool:
    return not (
        _LEFT_OUT.intersection(path.parts)
        or path.name.startswith(("test_", "_sysconfigdata"))
        or path.parts[0].startswith("config-")
    )


def _place(name: str) -> float:
    """A stable number in [0, 1) for a name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") / 2**64


def choose_held_out(texts: Mapping[str, str], share: float = HELD_OUT) -> set[str]:
    """Names of the files kept from training: whole groups in the order of a stable hash, up to `share` of the bytes."""
    groups = defaultdict(list)
    for name, group in group_near_duplicates(texts).items():
        groups[group].append(name)
    size = {name: len(text.encode()) for name, text in texts.items()}
    total = sum(size.values())
    chosen: set[str] = set()
    taken = 0
    for group in sorted(groups, key=_place):
        weight = sum(size[name] for name in groups[group])
        if weight > _LARGEST_GROUP * total:
            continue
        if taken >= share * total:
            break
        chosen.update(groups[group])
        taken += weight
    return chosen


def group_near_duplicates(texts: Mapping[str, str], share: float = 0.1, window: int = 4) -> dict[str, str]:
    """Name of each file to the name of its group: files that have much text in common, directly or through others.

    Two files belong together if at least `share` of the smaller one's runs of `window` lines (blank lines and
    indentation aside) also stand in the other. Runs found in more than 8 files are licence texts and do not count.
    """
    runs: dict[str, set[int]] = {}
    where: dict[int, list[str]] = defaultdict(list)
    for name, text in texts.items():
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        runs[name] = {hash(tuple(lines[i : i + window])) for i in range(len(lines) - window + 1)}
        for run in runs[name]:
            where[run].append(name)
    common: dict[tuple[str, str], int] = defaultdict(int)
    for names in where.values():
        if 2 <= len(names) <= 8:
            for i, a in enumerate(names):
                for b in names[i + 1 :]:
                    common[a, b] += 1
    parent = {name: name for name in texts}

    def root(name: str) -> str:
        while parent[name] != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    for (a, b), count in common.items():
        if count >= share * min(len(runs[a]), len(runs[b])):
            low, high = sorted((root(a), root(b)))
            parent[high] = low
    for folder in _GROUPED_FOLDERS:
        inside = sorted(name for name in texts if name.startswith(folder + "/"))
        for name in inside[1:]:
            low, high = sorted((root(inside[0]), root(name)))
            parent[high] = low
    return {name: root(name) for name in texts}
