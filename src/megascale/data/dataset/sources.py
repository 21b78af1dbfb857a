"""Where documents come from: text files, jsonl (plain, .gz, .zst) and parquet, cut into pieces for workers.

A text file is one document. In jsonl and parquet each line or row is one, under a key. Kinds are told by suffix
(.jsonl, .ndjson, .parquet; .gz and .zst on top of .jsonl and .txt); every other file that is UTF-8 without zero
bytes is text. The pieces of a plain jsonl file are byte ranges, those of parquet row groups, so one large file
keeps all workers busy; a compressed file is one piece.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from megascale.data.dataset.meter import Meter, MeteredFile, open_metered
from megascale.errors import DataError, remedy

_CHUNK = 1 << 20
_LINES = (".jsonl", ".ndjson")
_INSTALL = remedy("formats")


@dataclass(frozen=True)
class SourceFile:
    """A file that was found: its name within what was asked for, its path, size in bytes and kind."""

    name: str
    path: Path
    size: int
    kind: str  # text, lines or parquet


@dataclass(frozen=True)
class InputPiece:
    """What one worker encodes at a time.

    Attributes:
        number: place in the order of all pieces; documents keep this order.
        kind: text, lines or parquet.
        paths: the files; one but for text.
        start, stop: byte range of a plain jsonl file (lines that begin in it), or row groups of parquet.
        size: bytes of input, for progress.
        sides: for text files of a known split, `train` or `valid` a file.
    """

    number: int
    kind: str
    paths: list[str]
    start: int = 0
    stop: int = 0
    size: int = 0
    sides: list[str] = field(default_factory=list)


class TextRecord(NamedTuple):
    """A document read, or the reason why something was left out; `size` bytes of input were used up."""

    text: str
    size: int
    side: str = ""
    skipped: str = ""


def find_files(inputs: Sequence[Path], without: Path | None = None) -> list[SourceFile]:
    """All files below `inputs` in a stable order; DataError if there are none.

    Hidden files, links to folders and what lies below `without` (the folder to be built) are left out.
    """
    without = without.resolve() if without else None
    found: list[SourceFile] = []
    for given in inputs:
        if given.is_file():
            found.append(_source(given.name, given))
        elif given.is_dir():
            paths = [p for p in given.rglob("*") if p.is_file() and without not in p.resolve().parents]
            names = sorted((p.relative_to(given).as_posix(), p) for p in paths)
            shown = [(name, p) for name, p in names if not any(part.startswith(".") for part in name.split("/"))]
            found += [_source(f"{given.name}/{name}", path) for name, path in shown]
        else:
            raise DataError(f"input {given} does not exist; give files or folders of text")
    if not found:
        raise DataError(f"no files in {', '.join(map(str, inputs))}; give a folder that holds text")
    return found


def _source(name: str, path: Path) -> SourceFile:
    inner = path.name.removesuffix(".gz").removesuffix(".zst")
    kind = "lines" if inner.endswith(_LINES) else "parquet" if path.suffix == ".parquet" else "text"
    return SourceFile(name, path, path.stat().st_size, kind)


def cut(files: Iterable[SourceFile], size: int) -> list[InputPiece]:
    """Pieces of about `size` bytes of input each, in the order of the files."""
    pieces: list[InputPiece] = []
    group: list[str] = []
    weight = 0

    def close_group() -> None:
        nonlocal weight
        if group:
            pieces.append(InputPiece(len(pieces), "text", group.copy(), size=weight))
            group.clear()
            weight = 0

    for file in files:
        if file.kind == "text":
            group.append(str(file.path))
            weight += file.size
            if weight >= size:
                close_group()
            continue
        close_group()
        path = str(file.path)
        if file.kind == "parquet":
            for start, stop, held in _row_groups(file.path, size):
                pieces.append(InputPiece(len(pieces), "parquet", [path], start, stop, held))
        elif file.path.suffix in (".gz", ".zst"):
            pieces.append(InputPiece(len(pieces), "lines", [path], size=file.size))
        else:
            for start in range(0, file.size, size):
                stop = min(start + size, file.size)
                pieces.append(InputPiece(len(pieces), "lines", [path], start, stop, stop - start))
    close_group()
    return pieces


def read(piece: InputPiece, key: str, meter: Meter | None = None) -> Iterator[TextRecord]:
    """The documents of a piece in order; `meter` counts bytes and the time of reading and decompression.

    DataError naming file and place for what cannot be read.
    """
    try:
        if piece.kind == "text":
            for i, name in enumerate(piece.paths):
                yield _text(Path(name), piece.sides[i] if piece.sides else "", meter)
        elif piece.kind == "parquet":
            yield from _parquet(Path(piece.paths[0]), piece, key, meter)
        else:
            yield from _lines(Path(piece.paths[0]), piece, key, meter)
    except OSError as error:
        raise DataError(
            f"input {', '.join(piece.paths[:3])} cannot be read: {error}; check its permissions or leave it out"
        ) from None


def _text(path: Path, side: str, meter: Meter | None) -> TextRecord:
    size = path.stat().st_size
    if path.suffix in (".gz", ".zst"):
        data = b"".join(chunk for chunk, _ in _chunks(path, meter))
    else:
        with open_metered(path, meter) as file:
            data = file.read()
    if b"\x00" in data:
        return TextRecord("", size, skipped="not UTF-8 text")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return TextRecord("", size, skipped="not UTF-8 text")
    return TextRecord(text, size, side) if text.strip() else TextRecord("", size, skipped="empty")


def _lines(path: Path, piece: InputPiece, key: str, meter: Meter | None) -> Iterator[TextRecord]:
    compressed = path.suffix in (".gz", ".zst")
    lines = _split(_chunks(path, meter)) if compressed else _range(path, piece.start, piece.stop, meter)
    for number, (line, at, used) in enumerate(lines, 1):
        # Within a byte range the line's number is unknown; its place in the file is as good.
        where = f"{path}, line {number}" if compressed or not piece.start else f"{path}, byte {at}"
        if line.strip():
            yield _document(_json(line, where), key, where, used)
        else:
            yield TextRecord("", used, skipped="empty")


def _json(line: bytes, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{where} is not JSON ({error}); the file may be cut off: mend it, remove the line, or leave the file out"
        ) from None


def _document(record: Any, key: str, where: str, size: int) -> TextRecord:
    text = record.get(key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        keys = ", ".join(map(repr, record)) if isinstance(record, dict) else type(record).__name__
        raise DataError(f"{where} has no text under {key!r} (it has {keys or 'nothing'}); name the key with --text-key")
    return TextRecord(clean(text), size) if text.strip() else TextRecord("", size, skipped="empty")


def clean(text: str) -> str:
    """The text with lone surrogates, which JSON may hold and UTF-8 may not, replaced."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _range(path: Path, start: int, stop: int, meter: Meter | None) -> Iterator[tuple[bytes, int, int]]:
    """Lines that begin in bytes `start:stop` of a file, where each begins, and its bytes of input."""
    with open_metered(path, meter) as file:
        if start:
            file.seek(start - 1)
            file.readline()  # the line that the piece before began
        at = file.tell()
        while at < stop and (line := file.readline()):
            yield line, at, len(line)
            at += len(line)


def _split(chunks: Iterable[tuple[bytes, int]]) -> Iterator[tuple[bytes, int, int]]:
    """Lines of a decompressed stream, where each begins in it, and the input read since the line before."""
    rest, at, used = b"", 0, 0
    for chunk, size in chunks:
        used += size
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line, at, used
            at += len(line) + 1
            used = 0
    yield rest, at, used


def _chunks(path: Path, meter: Meter | None = None) -> Iterator[tuple[bytes, int]]:
    """Decompressed contents of a .gz or .zst file of one or more members, and the input read for each chunk.

    DataError if the file is cut off or damaged.
    """
    make: Any
    damage: tuple[type[Exception], ...]
    if path.suffix == ".gz":
        make, damage = (lambda: zlib.decompressobj(31)), (zlib.error,)
    else:
        try:
            import zstandard
        except ImportError:
            raise DataError(f"input {path} needs the package zstandard; {_INSTALL}") from None
        make, damage = (lambda: zstandard.ZstdDecompressor().decompressobj()), (zstandard.ZstdError,)
    member: Any = None
    unpacking = nullcontext if meter is None else meter.unpacking
    with open_metered(path, meter) as file:
        try:
            while data := file.read(_CHUNK):
                used = len(data)
                while data:
                    member = member or make()
                    with unpacking():
                        chunk = member.decompress(data)
                    yield chunk, used
                    used = 0
                    data = member.unused_data if member.eof else b""
                    member = None if member.eof else member
        except damage as error:
            raise DataError(f"input {path} is damaged ({error}); copy it again or leave it out") from None
    if member is not None:
        raise DataError(f"input {path} is cut off in the middle; copy it again or leave it out")


def _arrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"parquet files need the package pyarrow; {_INSTALL}") from None
    return pyarrow


def _row_groups(path: Path, size: int) -> Iterator[tuple[int, int, int]]:
    """(first, past-last, bytes) runs of row groups of about `size` bytes."""
    arrow = _arrow()
    try:
        meta = arrow.parquet.read_metadata(path)
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"input {path} is not a parquet file that can be read: {error}; leave it out") from None
    start = weight = 0
    for group in range(meta.num_row_groups):
        weight += meta.row_group(group).total_byte_size
        if weight >= size or group == meta.num_row_groups - 1:
            yield start, group + 1, weight
            start, weight = group + 1, 0


@lru_cache(maxsize=64)
def _footer(path: Path) -> Any:
    return _arrow().parquet.read_metadata(path)


def _parquet(path: Path, piece: InputPiece, key: str, meter: Meter | None) -> Iterator[TextRecord]:
    arrow = _arrow()
    unpacking = nullcontext if meter is None else meter.unpacking
    try:
        source = path if meter is None else MeteredFile(path, meter)
        # The footer of a file of many row groups is long: it is read once, not with each.
        footer = None if meter is None else _footer(path)
        with arrow.parquet.ParquetFile(source, metadata=footer) as file:
            if key not in file.schema_arrow.names:
                raise DataError(
                    f"{path} has no column {key!r} (it has {', '.join(map(repr, file.schema_arrow.names))}); name the "
                    "column with --text-key"
                )
            groups = list(range(piece.start, piece.stop))
            rows = max(1, sum(file.metadata.row_group(g).num_rows for g in groups))
            row = 0
            batches = file.iter_batches(batch_size=256, row_groups=groups, columns=[key])
            while True:
                with unpacking():
                    batch = next(batches, None)
                if batch is None:
                    break
                for text in batch.column(0).to_pylist():
                    size = (row + 1) * piece.size // rows - row * piece.size // rows
                    row += 1
                    if text is None:
                        yield TextRecord("", size, skipped="empty")
                    else:
                        yield _document({key: text}, key, f"{path}, row {row} of groups {piece.start} on", size)
    except arrow.ArrowException as error:
        raise DataError(f"input {path} is damaged ({error}); copy it again or leave it out") from None
