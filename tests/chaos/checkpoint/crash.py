"""Disks that fail: one that remembers every change, to build what a power cut may leave; one that errs on demand.

The power cut is the adversary that file systems allow: contents not synced since may be lost, torn or there in part;
entries of a folder not synced since may be missing, though never out of order; everything synced is there.
"""

from __future__ import annotations

import errno
import os
import random
from dataclasses import dataclass, field
from pathlib import Path

from megascale.checkpoint.storage.local_disk import Disk

_SECTOR = 512


@dataclass
class _File:
    """Contents that last, and writes since the last sync."""

    lasting: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes]] = field(default_factory=list)

    def finish(self) -> None:
        for at, data in self.pending:
            _put(self.lasting, at, data)
        self.pending.clear()


def _put(contents: bytearray, at: int, data: bytes) -> None:
    if len(contents) < at:
        contents.extend(bytes(at - len(contents)))
    contents[at : at + len(data)] = data


@dataclass
class _Folder:
    """Entries that last, and changes since the last sync: (name, what it means now or None), several at once."""

    lasting: dict[str, int] = field(default_factory=dict)
    pending: list[dict[str, int | None]] = field(default_factory=list)


def _apply(entries: dict[str, int], change: dict[str, int | None]) -> None:
    for name, node in change.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


class JournalDisk(Disk):
    """Does every change for real under `root` and writes it down."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.journal: list[tuple] = []
        self._nodes: dict[int, int] = {}
        self._next = 1

    def create(self, path: Path, direct: bool) -> tuple[int, bool]:
        handle, direct = super().create(path, direct)
        self._nodes[handle] = self._next
        self.journal.append(("create", path, self._next))
        self._next += 1
        return handle, direct

    def write(self, handle: int, data: memoryview, at: int) -> int:
        count = super().write(handle, data, at)
        self.journal.append(("write", self._nodes[handle], at, bytes(data[:count])))
        return count

    def sync(self, handle: int) -> None:
        self.journal.append(("sync", self._nodes[handle]))

    def sync_folder(self, path: Path) -> None:
        self.journal.append(("sync_folder", path))

    def replace(self, old: Path, new: Path) -> None:
        super().replace(old, new)
        self.journal.append(("replace", old, new))

    def make_folder(self, path: Path) -> None:
        super().make_folder(path)
        self.journal.append(("make_folder", path))

    def remove(self, path: Path) -> None:
        super().remove(path)
        self.journal.append(("remove", path))

    def remove_folder(self, path: Path) -> None:
        for name in sorted(os.listdir(path)):
            self.remove(path / name)
        self.remove_empty_folder(path)

    def remove_empty_folder(self, path: Path) -> None:
        super().remove_empty_folder(path)
        if not path.exists():
            self.journal.append(("remove", path))


def after_power_cut(journal: list[tuple], root: Path, target: Path, rng: random.Random) -> None:
    """Build in `target` what a power cut after the changes in `journal` may leave of `root`."""
    files: dict[int, _File] = {}
    folders: dict[int, _Folder] = {0: _Folder()}
    number = {root: 0}
    counter = -1

    def node(path: Path) -> int | None:
        folder = folders[number[path.parent]]
        entries = dict(folder.lasting)
        for change in folder.pending:
            _apply(entries, change)
        return entries.get(path.name)

    for record in journal:
        kind = record[0]
        if kind == "create":
            files[record[2]] = _File()
            folders[number[record[1].parent]].pending.append({record[1].name: record[2]})
        elif kind == "write":
            files[record[1]].pending.append(record[2:])
        elif kind == "sync":
            files[record[1]].finish()
        elif kind == "sync_folder":
            folder = folders[number[record[1]]]
            for change in folder.pending:
                _apply(folder.lasting, change)
            folder.pending.clear()
        elif kind == "replace":
            old, new = record[1:]
            folders[number[old.parent]].pending.append({old.name: None, new.name: node(old)})
        elif kind == "make_folder":
            folders[counter] = _Folder()
            number[record[1]] = counter
            folders[number[record[1].parent]].pending.append({record[1].name: counter})
            counter -= 1
        elif kind == "remove" and record[1].parent in number:
            folders[number[record[1].parent]].pending.append({record[1].name: None})
    _build(0, target, files, folders, rng)


def _build(number: int, target: Path, files: dict[int, _File], folders: dict[int, _Folder], rng: random.Random) -> None:
    folder = folders[number]
    entries = dict(folder.lasting)
    for change in folder.pending[: rng.randint(0, len(folder.pending))]:
        _apply(entries, change)
    target.mkdir(parents=True)
    for name, node in entries.items():
        if node <= 0:
            _build(node, target / name, files, folders, rng)
            continue
        contents = bytearray(files[node].lasting)
        for at, data in files[node].pending:
            fate = rng.random()
            if fate < 0.4:
                _put(contents, at, data)
            elif fate < 0.7:
                _put(contents, at, data[: rng.randint(0, len(data) // _SECTOR) * _SECTOR])
        (target / name).write_bytes(contents)


class FaultyDisk(Disk):
    """Fails from the n-th change on, in the way asked for.

    Args:
        kind: "full" (no room from there on), "error" (one change fails), "short" (writes take a part of the data).
        when: number of the change at which it begins.
    """

    def __init__(self, kind: str, when: int) -> None:
        self.kind = kind
        self.when = when
        self.count = 0

    def _step(self, writes: bool) -> None:
        self.count += 1
        if self.kind == "full" and writes and self.count > self.when:
            raise OSError(errno.ENOSPC, "No space left on device")
        if self.kind == "error" and self.count == self.when:
            raise OSError(errno.EIO, "Input/output error")

    def create(self, path: Path, direct: bool) -> tuple[int, bool]:
        self._step(True)
        return super().create(path, direct)

    def write(self, handle: int, data: memoryview, at: int) -> int:
        self._step(True)
        count = super().write(handle, data, at)
        if self.kind == "short" and self.count >= self.when and count > 1:
            # Past the page cache only whole blocks can be written, so all is, and a part of it reported.
            count = max(1, count // 3)
        return count

    def sync(self, handle: int) -> None:
        self._step(True)

    def sync_folder(self, path: Path) -> None:
        self._step(False)

    def replace(self, old: Path, new: Path) -> None:
        self._step(False)
        super().replace(old, new)

    def make_folder(self, path: Path) -> None:
        self._step(True)
        super().make_folder(path)
