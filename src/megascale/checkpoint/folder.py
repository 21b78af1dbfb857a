"""A folder of checkpoints: `step-N/` each, complete only with its COMMIT file. Listing, reading, pruning. No torch.

Files of one save carry its generation in their names; COMMIT, put in place last and in one piece, names them with
their sizes and checksums. So a step saved again never harms the one that is there, and everything that COMMIT does
not name is a leftover. Commits are numbered: the newest is the one with the highest number, whatever the clock or
the step says (a run that went back to an earlier step goes on from there).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megascale.checkpoint.index import Index
from megascale.errors import DataError

COMMIT = "COMMIT"
FORMAT = 1
METADATA = ".metadata"
_STEP = re.compile(r"step-(\d+)")


class Damaged(Exception):
    """A committed checkpoint that is not what was written: the message says which file and how."""


@dataclass(frozen=True)
class Commit:
    """What COMMIT says.

    Attributes:
        step: optimizer steps done.
        sequence: number of this commit in its folder, counted up.
        generation: part of the names of this save's files.
        files: name to (bytes, zlib.crc32) of every file that belongs to it.
        state: what the trainer gave besides tensors.
    """

    step: int
    sequence: int
    generation: str
    files: dict[str, tuple[int, int]]
    state: dict[str, Any]

    def to_bytes(self) -> bytes:
        """COMMIT's text: one JSON object, then its checksum."""
        body = json.dumps({"format": FORMAT, **self.__dict__}, sort_keys=True).encode()
        return body + b"\n" + f"{zlib.crc32(body):08x}\n".encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Commit:
        """The inverse; Damaged if the text was altered or cut."""
        body, _, checksum = data.partition(b"\n")
        if checksum.strip() != f"{zlib.crc32(body):08x}".encode():
            raise Damaged("COMMIT does not match its own checksum")
        record = json.loads(body)
        if record.pop("format") != FORMAT:
            raise Damaged("COMMIT is of a format that this version does not know")
        record["files"] = {name: (size, crc) for name, (size, crc) in record["files"].items()}
        return cls(**record)

    @property
    def index_file(self) -> str:
        """Name of the index."""
        return f"index-{self.generation}.npz"


def step_folder(folder: Path, step: int) -> Path:
    """Where a step's checkpoint lies."""
    return folder / f"step-{step}"


def read_commit(place: Path) -> Commit | None:
    """The commit of a step's folder, None without one; Damaged if it cannot be read."""
    try:
        data = (place / COMMIT).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise Damaged(f"COMMIT cannot be read: {error.strerror}") from None
    return Commit.from_bytes(data)


def read_index(place: Path, commit: Commit) -> Index:
    """The commit's index, its checksum checked; Damaged if it is not what was written."""
    name = commit.index_file
    try:
        data = (place / name).read_bytes()
    except OSError as error:
        raise Damaged(f"{name} cannot be read: {error.strerror}") from None
    if (len(data), zlib.crc32(data)) != commit.files.get(name):
        raise Damaged(f"{name} is not what was written ({len(data)} bytes)")
    return Index.from_bytes(data)


def places(folder: Path) -> dict[int, Path]:
    """All `step-N` folders, committed or not, by step."""
    try:
        found = [(m, p) for p in folder.iterdir() if (m := _STEP.fullmatch(p.name)) and p.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return {int(m.group(1)): p for m, p in sorted(found, key=lambda pair: int(pair[0].group(1)))}


def survey(folder: Path) -> tuple[list[Commit], dict[Path, str]]:
    """Readable commits, newest first, and the folders whose COMMIT cannot be read, with why."""
    good, damaged = [], {}
    for place in places(folder).values():
        try:
            commit = read_commit(place)
            good += [commit] if commit is not None else []
        except Damaged as damage:
            damaged[place] = str(damage)
    return sorted(good, key=lambda commit: -commit.sequence), damaged


def commits(folder: Path) -> list[Commit]:
    """Readable commits, newest first."""
    return survey(folder)[0]


def latest(folder: Path) -> int | None:
    """Step of the newest committed checkpoint, None if there is none."""
    return next((commit.step for commit in commits(Path(folder))), None)


def steps(folder: Path) -> list[int]:
    """Steps of all committed checkpoints, ascending."""
    return sorted(commit.step for commit in commits(Path(folder)))


def sync_folder(path: Path) -> None:
    """Make a folder's entries last through a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_file(path: Path, data: bytes) -> None:
    """Put a small file in place in one piece, lasting."""
    temporary = path.with_name(f"{path.name}.part")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sweep(place: Path, commit: Commit | None) -> None:
    """Remove what the commit of a step's folder does not name; the folder itself if it has no commit."""
    if commit is None:
        shutil.rmtree(place, ignore_errors=True)
        return
    for path in place.iterdir():
        if path.name != COMMIT and path.name not in commit.files:
            path.unlink(missing_ok=True)


def remove(place: Path) -> None:
    """Delete a checkpoint: its COMMIT first, so that what an interruption leaves never counts as whole."""
    with contextlib.suppress(FileNotFoundError):
        (place / COMMIT).unlink()
        sync_folder(place)
    shutil.rmtree(place, ignore_errors=True)


def prune(folder: Path, keep: int) -> list[int]:
    """Remove all but the newest `keep` commits, and leftovers of saves that died; returns the steps removed.

    A commit whose files are cut short or gone does not count among those kept. A COMMIT that cannot be read is left
    for a person to look at. Call it only where no other save into this folder is under way.
    """
    good = [commit for commit in commits(folder) if _sizes_hold(step_folder(folder, commit.step), commit)]
    kept = {commit.step: commit for commit in good[: max(keep, 1)]}
    removed = []
    for step, place in places(folder).items():
        if step in kept:
            sweep(place, kept[step])
        elif good:
            try:
                committed = read_commit(place) is not None
            except Damaged:
                continue
            removed += [step] if committed else []
            remove(place)
    return removed


def _sizes_hold(place: Path, commit: Commit) -> bool:
    try:
        check_sizes(place, commit)
    except Damaged:
        return False
    return True


@dataclass(frozen=True)
class TensorSummary:
    """One line of `inspect`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    chunks: int


@dataclass(frozen=True)
class Summary:
    """What a step's folder holds."""

    path: Path
    step: int
    committed: bool
    problem: str | None
    sequence: int = 0
    bytes: int = 0
    tensors: list[TensorSummary] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)


def find_places(path: Path) -> Sequence[Path]:
    """Steps' folders under a run folder, a checkpoints folder, or a step's own folder; DataError if there are none."""
    path = Path(path)
    if _STEP.fullmatch(path.resolve().name) and path.is_dir():
        return [path]
    for folder in (path / "checkpoints", path):
        if found := places(folder):
            return list(found.values())
    raise DataError(
        f"there is no checkpoint in {str(path)!r}; give a run folder, its checkpoints folder or one step-N folder"
    )


def summarise(place: Path) -> Summary:
    """What one step's folder holds, whole or not."""
    match = _STEP.fullmatch(place.resolve().name)
    step = int(match.group(1)) if match else -1
    try:
        commit = read_commit(place)
        if commit is None:
            return Summary(place, step, False, "no COMMIT: the save did not finish")
        index = read_index(place, commit)
        check_sizes(place, commit)
    except Damaged as damage:
        return Summary(place, step, False, str(damage))
    tensors = [
        TensorSummary(name, info.shape, info.dtype, info.nbytes, len(index.rows(name)))
        for name, info in index.tensors.items()
    ]
    total = sum(size for size, _ in commit.files.values())
    return Summary(place, commit.step, True, None, commit.sequence, total, tensors, commit.state)


def check_sizes(place: Path, commit: Commit) -> None:
    """Damaged if a file of the commit is missing or of another length: quick, reads nothing."""
    for name, (size, _) in commit.files.items():
        try:
            actual = (place / name).stat().st_size
        except OSError as error:
            raise Damaged(f"{name} cannot be read: {error.strerror}") from None
        if actual != size and name != METADATA:
            raise Damaged(f"{name} is {actual} bytes long, {size} were written")


def inspect(folder_or_step: Path) -> Summary:
    """The newest committed checkpoint of a folder (or of the given step-N), or what is there if none is whole."""
    found = [summarise(place) for place in find_places(folder_or_step)]
    return max(found, key=lambda summary: (summary.committed, summary.sequence, summary.step))
