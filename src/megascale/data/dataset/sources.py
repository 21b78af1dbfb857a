"""Where documents come from: text files, JSON records and parquet, plain or compressed, cut into pieces for workers.

A text file is one document. In JSON and parquet each record or row is one, under a key. Kinds follow from the suffix,
in either case: .jsonl, .ndjson, .jsonlines, .json and .parquet, with .gz or .zst on top of all but parquet. A .json
file may hold a record per line, a list of records, or one record. Every other file that is UTF-8 without zero bytes is
text. The pieces of plain JSON lines are byte ranges, those of parquet row groups, so one large file keeps all workers
busy; a compressed file and a list of records are one piece.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from megascale.data.dataset.compressed_files import CHUNK, compression_of, read_chunks
from megascale.data.dataset.json_values import TooLongError, read_values
from megascale.data.dataset.meter import Meter, MeteredFile, open_metered
from megascale.errors import DataError, describe_install

_LINES = (".jsonl", ".ndjson", ".jsonlines")
# Limits of what is held in memory as a whole. A small compressed file may hold gigabytes without a line's end.
RECORD_LIMIT = 256 << 20  # bytes of a JSON record, and of a text in parquet
UNPACKED_TEXT_LIMIT = 1 << 30  # bytes of a compressed text file, decompressed
TEXT_LIMIT = 4 << 30  # bytes of a text file
_PARQUET_ROWS = 256
_PARQUET_BYTES = 64 << 20  # of rows read at a time
# Reasons why something was left out, as reports name them.
NOT_UTF8 = "files (not UTF-8 text)"
EMPTY_FILE = "files (empty)"
NOT_JSON = "files (named .json, not JSON)"
NOT_RECORDS = "files (JSON without records of text)"
NULL_TEXT = "records (text is null)"
EMPTY_TEXT = "records (text is empty)"
RECORD_NOT_UTF8 = "records (text is not UTF-8)"


@dataclass(frozen=True)
class SourceFile:
    """A file that was found: its name within what was asked for, its path, size in bytes and kind."""

    name: str
    path: Path
    size: int
    kind: str  # text, lines, json or parquet


@dataclass(frozen=True)
class InputPiece:
    """What one worker encodes at a time.

    Attributes:
        number: place in the order of all pieces; documents keep this order.
        kind: text, lines (a JSON record per line), json (other JSON) or parquet.
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
    """A document, or the reason why a file or record was left out; both used up `size` bytes of input."""

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
    inner = path.name.lower()
    if compression_of(path):
        inner = inner.rpartition(".")[0]
    kind = "text"
    if inner.endswith(_LINES):
        kind = "lines"
    elif inner.endswith(".json"):
        with _named_failures(path):
            kind = _json_kind(path)
    elif path.suffix.lower() == ".parquet":
        kind = "parquet"
    return SourceFile(name, path, path.stat().st_size, kind)


def _json_kind(path: Path) -> str:
    """Return `lines` for a .json file of one record per line, `json` for any other."""
    with closing(read_chunks(path)) as chunks, closing(_split(chunks, RECORD_LIMIT)) as lines:
        try:
            first = next(line for line, _, _ in lines if line.strip())
            if first.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] != b"{" or not isinstance(json.loads(first), dict):
                return "json"
            return "lines" if any(line.strip() for line, _, _ in lines) else "json"
        except (StopIteration, TooLongError, ValueError, RecursionError):
            return "json"


def cut_pieces(files: Iterable[SourceFile], size: int) -> list[InputPiece]:
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
        elif file.kind == "json" or compression_of(file.path):
            pieces.append(InputPiece(len(pieces), file.kind, [path], size=file.size))
        else:
            for start in range(0, file.size, size):
                stop = min(start + size, file.size)
                pieces.append(InputPiece(len(pieces), "lines", [path], start, stop, stop - start))
    close_group()
    return pieces


@contextmanager
def _named_failures(*paths: str | Path) -> Iterator[None]:
    """Turn a failure to read into a DataError that names the files."""
    try:
        yield
    except OSError as error:
        names = ", ".join(map(str, paths[:3]))
        raise DataError(f"input {names} cannot be read: {error}; check its permissions or leave it out") from None


def read_documents(piece: InputPiece, key: str, meter: Meter | None = None) -> Generator[TextRecord, None, None]:
    """Yield the documents of a piece in order; `meter` counts bytes and the time of reading and decompression.

    Raises DataError naming file and place for what cannot be read or is longer than a limit.
    """
    with _named_failures(*piece.paths):
        if piece.kind == "text":
            for i, name in enumerate(piece.paths):
                yield _text(Path(name), piece.sides[i] if piece.sides else "", meter)
        elif piece.kind == "parquet":
            yield from _parquet(Path(piece.paths[0]), piece, key, meter)
        elif piece.kind == "json":
            yield from _json_values(Path(piece.paths[0]), key, meter)
        else:
            yield from _lines(Path(piece.paths[0]), piece, key, meter)


def _text(path: Path, side: str, meter: Meter | None) -> TextRecord:
    size = path.stat().st_size
    limit = UNPACKED_TEXT_LIMIT if compression_of(path) else TEXT_LIMIT
    parts: list[bytes] = []
    held = 0
    with closing(read_chunks(path, meter)) as chunks:
        for chunk, _ in chunks:
            if b"\x00" in chunk:
                return TextRecord("", size, skipped=NOT_UTF8)
            parts.append(chunk)
            held += len(chunk)
            if held > limit:
                raise DataError(
                    f"input {path} holds more than {limit:,} bytes of text, the limit for one document; cut it into "
                    "smaller files, or give it as JSON lines (.jsonl) with one document per line"
                )
    try:
        text = b"".join(parts).decode("utf-8-sig")
    except UnicodeDecodeError:
        return TextRecord("", size, skipped=NOT_UTF8)
    return TextRecord(text, size, side) if text.strip() else TextRecord("", size, skipped=EMPTY_FILE)


def _lines(path: Path, piece: InputPiece, key: str, meter: Meter | None) -> Iterator[TextRecord]:
    compressed = bool(compression_of(path))
    lines: Iterator[tuple[bytes, int, int]]
    if compressed:
        lines = _split(read_chunks(path, meter), RECORD_LIMIT)
    else:
        lines = _range(path, piece.start, piece.stop, meter)
    number = 0
    try:
        for line, at, used in lines:
            number += 1
            # Within a byte range the line's number is unknown, so its place in the file is named.
            where = f"{path}, line {number}" if compressed or not piece.start else f"{path}, byte {at}"
            # A line without characters is no record; the part after a file's last line's end is not even a line.
            yield _document(_json(line, where), key, where, used) if line.strip() else TextRecord("", used)
    except TooLongError:
        raise _record_too_long(f"{path}, line {number + 1}" if compressed or not piece.start else str(path)) from None


def _record_too_long(where: str) -> DataError:
    return DataError(
        f"{where} is longer than {RECORD_LIMIT:,} bytes, the limit for one record; cut its text into several records, "
        "or leave the file out"
    )


def _json_values(path: Path, key: str, meter: Meter | None) -> Iterator[TextRecord]:
    """Yield the records of a .json file that does not hold one record per line."""
    size = path.stat().st_size
    reported = number = 0
    skipped = EMPTY_FILE
    head = b""
    first: dict[str, Any] | None = None  # an object without a text, which is no record if nothing follows it

    def chunks() -> Iterator[tuple[bytes, int]]:
        nonlocal head
        for chunk, used in read_chunks(path, meter):
            head = head or chunk
            yield chunk, used

    try:
        for value, is_element, used in read_values(chunks(), RECORD_LIMIT):
            number += 1
            if first is not None:
                _document(first, key, f"{path}, record 1", 0)  # raises: a record without a text
            if number == 1:
                skipped = NOT_RECORDS
                if not isinstance(value, dict):
                    break
                if not is_element and key not in value:
                    first = value
                    continue
            yield _document(value, key, f"{path}, record {number}", used)
            reported += used
            skipped = ""
    except TooLongError:
        raise _record_too_long(f"{path}, record {number + 1}") from None
    except ValueError as error:
        # Files of settings may have comments; a file with the key was meant to hold records.
        if number or json.dumps(key).encode() in head:
            raise _not_json(f"{path}, record {number + 1}", error) from None
        skipped = NOT_JSON
    yield TextRecord("", size - reported, skipped=skipped)


def _json(line: bytes, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _not_json(where, error) from None


def _not_json(where: str, error: Exception) -> DataError:
    return DataError(
        f"{where} is not JSON ({error}); the file may be cut off: mend it, remove the record, or leave the file out"
    )


_JSON_NAMES = {list: "a list", dict: "an object", bool: "true or false", int: "a number", float: "a number"}


def _document(record: Any, key: str, where: str, size: int) -> TextRecord:
    if not isinstance(record, dict):
        name = "a string" if isinstance(record, str) else _JSON_NAMES.get(type(record), "null")
        raise DataError(
            f"{where} is {name} where an object with a text under {key!r} is expected; leave the file out, or turn its "
            "texts into records"
        )
    if key not in record:
        keys = ", ".join(map(repr, record))
        raise DataError(f"{where} has no text under {key!r} (it has {keys or 'nothing'}); name the key with --text-key")
    return _document_of(record[key], key, where, size)


def _document_of(text: Any, key: str, where: str, size: int) -> TextRecord:
    """Return the document of a value; null and empty texts are left out with their reason."""
    if text is None:
        return TextRecord("", size, skipped=NULL_TEXT)
    if isinstance(text, bytes):
        try:
            text = text.decode()
        except UnicodeDecodeError:
            return TextRecord("", size, skipped=RECORD_NOT_UTF8)
    if not isinstance(text, str):
        kind = _JSON_NAMES.get(type(text), type(text).__name__)
        raise DataError(f"{where} has {kind} under {key!r}, not text; name the key of the text with --text-key")
    if not text.strip():
        return TextRecord("", size, skipped=EMPTY_TEXT)
    return TextRecord(clean(text), size)


def clean(text: str) -> str:
    """The text with lone surrogates, which JSON may hold and UTF-8 may not, replaced."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _range(path: Path, start: int, stop: int, meter: Meter | None) -> Iterator[tuple[bytes, int, int]]:
    """Yield the lines that begin in bytes `start:stop` of a file, where each begins, and its bytes of input.

    Raises TooLongError for a line beyond RECORD_LIMIT.
    """
    with open_metered(path, meter) as file:
        if start:
            file.seek(start - 1)
            # Pass over the line that the piece before began.
            while (part := file.readline(CHUNK)) and not part.endswith(b"\n"):
                pass
        at = file.tell()
        while at < stop and (line := file.readline(RECORD_LIMIT + 1)):
            if len(line) > RECORD_LIMIT:
                raise TooLongError
            yield line, at, len(line)
            at += len(line)


def _split(chunks: Iterable[tuple[bytes, int]], limit: int) -> Generator[tuple[bytes, int, int], None, None]:
    """Yield the lines of a stream, where each begins in it, and the input read since the line before.

    What follows the last line's end comes last, even if it is nothing. Raises TooLongError for a line of more than
    `limit` bytes.
    """
    parts: list[bytes] = []
    held = at = used = 0
    for chunk, size in chunks:
        used += size
        first, *others = chunk.split(b"\n")
        parts.append(first)
        held += len(first)
        for following in others:
            if held > limit:
                raise TooLongError
            yield b"".join(parts), at, used
            at += held + 1
            used = 0
            parts = [following]
            held = len(following)
        if held > limit:
            raise TooLongError
    yield b"".join(parts), at, used


def _arrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"parquet files need the package pyarrow; {describe_install('formats')}") from None
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
            groups = [file.metadata.row_group(g) for g in range(piece.start, piece.stop)]
            rows = max(1, sum(group.num_rows for group in groups))
            row = 0
            batches = file.iter_batches(
                batch_size=_batch_rows(groups, key, rows), row_groups=range(piece.start, piece.stop), columns=[key]
            )
            while True:
                with unpacking():
                    batch = next(batches, None)
                if batch is None:
                    break
                for text in batch.column(0).to_pylist():
                    size = (row + 1) * piece.size // rows - row * piece.size // rows
                    row += 1
                    where = f"{path}, row {row} of groups {piece.start} on"
                    if isinstance(text, str | bytes) and len(text) > RECORD_LIMIT:
                        raise _record_too_long(where)
                    yield _document_of(text, key, where, size)
    except arrow.ArrowException as error:
        raise DataError(f"input {path} is damaged ({error}); copy it again or leave it out") from None


def _batch_rows(groups: Sequence[Any], key: str, rows: int) -> int:
    """Return how many rows to read at a time: about _PARQUET_BYTES of the column, at most _PARQUET_ROWS."""
    columns = [group.column(i) for group in groups for i in range(group.num_columns)]
    size = sum(column.total_uncompressed_size for column in columns if column.path_in_schema == key)
    return max(1, min(_PARQUET_ROWS, _PARQUET_BYTES * rows // max(size, 1)))
