"""Where documents come from: folders and files of text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megascale.errors import DataError


@dataclass(frozen=True)
class SourceFile:
    """A file that was found: its name within what was asked for, its path and size in bytes."""

    name: str
    path: Path
    size: int


def find_files(inputs: Sequence[Path]) -> list[SourceFile]:
    """All regular files below `inputs` in a stable order, hidden ones left out; DataError if there are none."""
    found: list[SourceFile] = []
    for given in inputs:
        if given.is_file():
            found.append(SourceFile(given.name, given, given.stat().st_size))
        elif given.is_dir():
            paths = [p for p in given.rglob("*") if p.is_file() and not p.is_symlink()]
            names = sorted((p.relative_to(given).as_posix(), p) for p in paths)
            found += [
                SourceFile(f"{given.name}/{name}", path, path.stat().st_size)
                for name, path in names
                if not any(part.startswith(".") for part in name.split("/"))
            ]
        else:
            raise DataError(f"input {given} does not exist; give files or folders of text")
    if not found:
        raise DataError(f"no files in {', '.join(map(str, inputs))}; give a folder that holds text")
    return found


def read_text(path: Path) -> str | None:
    """The text of a file, None if it is not UTF-8 text (a zero byte tells binary files too)."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"input {path} cannot be read: {error}; check its permissions or leave it out") from None
    if b"\x00" in data:
        return None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None


def is_held_out(text: str, share: float) -> bool:
    """Whether a document belongs to the held-out part: by its contents, so equal documents stand on one side."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def split_tail(text: str, share: float) -> tuple[str, str]:
    """Cut the last `share` of a text off at a line's end: how few long documents are split."""
    cut = text.rfind("\n", 0, int(len(text) * (1 - share))) + 1 or int(len(text) * (1 - share))
    return text[:cut], text[cut:]


def batches(texts: Iterator[str], characters: int = 1_000_000) -> Iterator[list[str]]:
    """Lists of texts of about `characters` characters each."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
