"""Documents of text files, JSON records and parquet, plain or compressed, cut into pieces for workers.

A text file is one document. A JSON record or a parquet row holds one document under a key. The suffix decides the kind
of a file, in upper or lower case:

- .jsonl, .ndjson and .jsonlines: one record per line.
- .json: one record per line, a list of records, or one record.
- .parquet: one row per document.
- .csv and .tsv whose first line names the key: refused, since each row would be a document.
- Any other file that is UTF-8 without zero bytes is text.

Pointers of Git LFS, and links whose target is missing, are refused: they stand for text that is elsewhere.

All but parquet files may be compressed, with .gz or .zst after the suffix. Plain JSON lines are cut into byte ranges
and parquet into row groups, so that one large file occupies all workers. A compressed file or a list of records is one
piece.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from megascale.core.untrusted_files import is_lfs_pointer
from megascale.data.dataset.json_values import (
    RepeatedKeyError,
    TooLongError,
    has_repeated_key,
    quote_key,
    read_values,
)
from megascale.data.dataset.metered_files import (
    CHUNK_BYTES,
    Meter,
    find_compression,
    open_metered,
    read_chunks,
    time_unpacking,
)
from megascale.errors import DataError, describe_install

_JSON_LINES_SUFFIXES = (".jsonl", ".ndjson", ".jsonlines")
# Limits of objects that must be in memory as a whole. A small compressed file may hold gigabytes in one line.
RECORD_LIMIT = 256 << 20  # bytes of a JSON record, and of a text in parquet
UNPACKED_TEXT_LIMIT = 1 << 30  # bytes of a compressed text file, decompressed
TEXT_LIMIT = 4 << 30  # bytes of a text file
_PARQUET_BATCH_ROWS = 256
_PARQUET_BATCH_BYTES = 64 << 20
_TABLE_DELIMITERS = {".csv": ",", ".tsv": "\t"}
# Suffixes of binary formats that may hold text and are not read, with the remedy.
_UNREAD_FORMATS = {
    **dict.fromkeys((".bz2", ".xz", ".lzma", ".lz4", ".br", ".z", ".snappy"), "compress it with gzip or zstd instead"),
    **dict.fromkeys((".zip", ".7z", ".rar", ".tar", ".tgz", ".tar.gz", ".tar.zst"), "unpack it"),
    **dict.fromkeys((".arrow", ".feather", ".orc", ".avro"), "convert it to parquet"),
    **dict.fromkeys((".pkl", ".pickle", ".pt", ".npy", ".npz", ".h5"), "convert it to parquet or JSON lines"),
    **dict.fromkeys((".xlsx", ".xls", ".docx", ".pdf", ".epub"), "convert it to text"),
}
_PROBE_BYTES = 1 << 12  # beginning of a file that shows whether it is binary
# Reasons for skipping a file or record, as reports name them.
NOT_UTF8 = "files (not UTF-8 text)"
EMPTY_FILE = "files (empty)"
NOT_JSON = "files (named .json, not JSON)"
NOT_RECORDS = "files (JSON without records of text)"
NULL_TEXT = "records (text is null)"
EMPTY_TEXT = "records (text is empty)"
RECORD_NOT_UTF8 = "records (text is not UTF-8)"
NAMED_TWICE = "files (named twice)"
FOLDER_LINK = "links to folders"


@dataclass(frozen=True)
class SourceFile:
    """A file of the input.

    Attributes:
        name: path relative to the parent of the input folder.
        path: the file.
        size: bytes.
        kind: text, lines (a JSON record per line), json (other JSON) or parquet.
    """

    name: str
    path: Path
    size: int
    kind: str


@dataclass(frozen=True)
class InputPiece:
    """Part of the input that one worker encodes at a time.

    Attributes:
        number: position in the order of all pieces; documents keep this order.
        kind: text, lines (a JSON record per line), json (other JSON) or parquet.
        paths: the files; only text has more than one.
        start, stop: byte range of a plain jsonl file (lines that begin in it), or row groups of parquet.
        size: bytes of input, for progress.
        sides: split of each file, `train` or `valid`, for text files whose split is known beforehand.
    """

    number: int
    kind: str
    paths: list[str]
    start: int = 0
    stop: int = 0
    size: int = 0
    sides: list[str] = field(default_factory=list)


class TextRecord(NamedTuple):
    """A document, or a file or record that was skipped.

    Attributes:
        text: the document; "" for a skipped one.
        size: bytes of input that the document took.
        split: `train` or `valid` if the split is known beforehand, else "".
        skipped: reason for skipping; "" for a document, and for a blank line.
    """

    text: str
    size: int
    split: str = ""
    skipped: str = ""


def find_files(inputs: Sequence[Path], excluded_folder: Path | None = None) -> list[SourceFile]:
    """Return the files of `inputs` and below, in a stable order. Raises DataError if there are none.

    Hidden files and links to folders are left out, and so are files below `excluded_folder`, which a build writes. A
    file that is reached twice, through a link or through two inputs, is returned once. Raises DataError for a link
    whose target is missing, and for a pointer of Git LFS.
    """
    files, _ = find_files_and_skipped(inputs, excluded_folder)
    return files


def find_files_and_skipped(
    inputs: Sequence[Path], excluded_folder: Path | None = None
) -> tuple[list[SourceFile], dict[str, int]]:
    """Return the result of `find_files`, and the numbers of files and links that were left out, by reason."""
    excluded = None if excluded_folder is None else excluded_folder.resolve()
    files: list[SourceFile] = []
    skipped: dict[str, int] = {}
    for entry in inputs:
        if entry.is_file():
            files.append(_describe_file(entry.name, entry))
        elif entry.is_dir():
            for name, path in _list_visible(entry):
                if path.is_file():
                    if excluded not in path.resolve().parents:
                        files.append(_describe_file(f"{entry.name}/{name}", path))
                elif path.is_symlink() and path.is_dir():
                    skipped[FOLDER_LINK] = skipped.get(FOLDER_LINK, 0) + 1
                elif path.is_symlink() and not path.exists():
                    raise DataError(
                        f"input {path} is a link to {path.readlink()}, which does not exist; restore the "
                        "file, or remove the link"
                    )
        elif entry.exists():
            raise DataError(f"input {entry} is a pipe or a device; save its text to a file, and give the file")
        else:
            raise DataError(f"input {entry} does not exist; give files or folders of text")
    if not files:
        raise DataError(f"no files in {', '.join(map(str, inputs))}; give a folder that holds text")
    # An empty file of records has no pieces, so no worker counts it.
    if empty_count := sum(1 for file in files if file.kind == "lines" and not file.size):
        skipped[EMPTY_FILE] = empty_count
    files_by_target: dict[Path, SourceFile] = {}
    for file in files:
        files_by_target.setdefault(file.path.resolve(), file)
    if len(files_by_target) < len(files):
        skipped[NAMED_TWICE] = len(files) - len(files_by_target)
    return list(files_by_target.values()), skipped


def _list_visible(folder: Path) -> list[tuple[str, Path]]:
    """Return the entries below a folder that are not hidden, each with its name relative to the folder, in order."""
    entries = [(path.relative_to(folder).as_posix(), path) for path in folder.rglob("*")]
    return sorted(
        (name, path) for name, path in entries if not any(component.startswith(".") for component in name.split("/"))
    )


def _describe_file(name: str, path: Path) -> SourceFile:
    plain_name = path.name.lower()
    if find_compression(path):
        plain_name = plain_name.rpartition(".")[0]
    kind = "text"
    if is_lfs_pointer(path):
        raise DataError(f"input {path} is a pointer of Git LFS, not the file itself; get the file with `git lfs pull`")
    if plain_name.endswith(_JSON_LINES_SUFFIXES):
        kind = "lines"
    elif plain_name.endswith(".json"):
        with _raise_data_errors(path):
            kind = _find_json_kind(path)
    elif path.suffix.lower() == ".parquet":
        kind = "parquet"
    return SourceFile(name, path, path.stat().st_size, kind)


def _explain_binary(path: Path) -> str:
    """Return the reason for skipping a file that is not UTF-8 text, with the remedy if its suffix shows one."""
    for suffix, remedy in _UNREAD_FORMATS.items():
        if path.name.lower().endswith(suffix):
            return f"files ({suffix} is not read: {remedy})"
    return NOT_UTF8


def find_binary_reason(file: SourceFile) -> str:
    """Return the reason for which a plain text file will be skipped, judged by its beginning, or an empty string."""
    if file.kind != "text" or find_compression(file.path):
        return ""
    with _raise_data_errors(file.path), open(file.path, "rb") as opened:
        return _explain_binary(file.path) if b"\x00" in opened.read(_PROBE_BYTES) else ""


def _find_json_kind(path: Path) -> str:
    """Return `lines` for a .json file with one record per line, `json` for any other .json file."""
    with closing(read_chunks(path)) as chunks, closing(_split_lines(chunks, RECORD_LIMIT)) as lines:
        try:
            first = next(line for line, _, _ in lines if line.strip())
            begins_with_brace = first.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"{"
            if not begins_with_brace or not isinstance(json.loads(first), dict):
                return "json"
            has_second_line = any(line.strip() for line, _, _ in lines)
            return "lines" if has_second_line else "json"
        except (StopIteration, TooLongError, ValueError, RecursionError):
            return "json"


def cut_pieces(files: Iterable[SourceFile], size: int) -> list[InputPiece]:
    """Return pieces of about `size` bytes of input each, in the order of the files.

    Consecutive text files share a piece.
    """
    pieces: list[InputPiece] = []
    text_paths: list[str] = []  # of the next piece of text files
    text_bytes = 0

    def add_text_piece() -> None:
        nonlocal text_bytes
        if text_paths:
            pieces.append(InputPiece(len(pieces), "text", text_paths.copy(), size=text_bytes))
            text_paths.clear()
            text_bytes = 0

    for file in files:
        if file.kind == "text":
            text_paths.append(str(file.path))
            text_bytes += file.size
            if text_bytes >= size:
                add_text_piece()
            continue
        add_text_piece()
        path = str(file.path)
        if file.kind == "parquet":
            for start, stop, range_bytes in _split_row_groups(file.path, size):
                pieces.append(InputPiece(len(pieces), "parquet", [path], start, stop, range_bytes))
        elif file.kind == "json" or find_compression(file.path):
            pieces.append(InputPiece(len(pieces), file.kind, [path], size=file.size))
        else:
            for start in range(0, file.size, size):
                stop = min(start + size, file.size)
                pieces.append(InputPiece(len(pieces), "lines", [path], start, stop, stop - start))
    add_text_piece()
    return pieces


@contextmanager
def _raise_data_errors(*paths: str | Path) -> Iterator[None]:
    """Turn an OSError inside the context into a DataError that names the files."""
    try:
        yield
    except OSError as error:
        names = ", ".join(map(str, paths[:3]))
        raise DataError(f"input {names} cannot be read: {error}; check its permissions or leave it out") from None


def read_documents(piece: InputPiece, key: str, meter: Meter | None = None) -> Generator[TextRecord, None, None]:
    """Yield the documents of a piece in order.

    Args:
        piece: the piece.
        key: key of the text in JSON records, or column of parquet.
        meter: counts bytes, and seconds of reading and decompression; None: nothing is counted.

    Raises DataError naming file and position for contents that cannot be read or exceed a limit.
    """
    with _raise_data_errors(*piece.paths):
        if piece.kind == "text":
            splits = piece.sides or [""] * len(piece.paths)
            for name, split in zip(piece.paths, splits, strict=True):
                yield _read_text(Path(name), split, meter, key)
        elif piece.kind == "parquet":
            yield from _read_parquet(Path(piece.paths[0]), piece, key, meter)
        elif piece.kind == "json":
            yield from _read_json(Path(piece.paths[0]), key, meter)
        else:
            yield from _read_lines(Path(piece.paths[0]), piece, key, meter)


def _read_text(path: Path, split: str, meter: Meter | None, key: str) -> TextRecord:
    size = path.stat().st_size
    limit = UNPACKED_TEXT_LIMIT if find_compression(path) else TEXT_LIMIT
    contents: list[bytes] = []
    length = 0
    with closing(read_chunks(path, meter)) as chunks:
        for chunk, _ in chunks:
            if b"\x00" in chunk:
                return TextRecord("", size, skipped=_explain_binary(path))
            contents.append(chunk)
            length += len(chunk)
            if length > limit:
                raise DataError(
                    f"input {path} holds more than {limit:,} bytes of text, the limit for one document; cut it into "
                    "smaller files, or give it as JSON lines (.jsonl) with one document per line"
                )
    try:
        text = b"".join(contents).decode("utf-8-sig")
    except UnicodeDecodeError:
        return TextRecord("", size, skipped=_explain_binary(path))
    if not text.strip():
        return TextRecord("", size, skipped=EMPTY_FILE)
    _refuse_table(path, text, key)
    return TextRecord(text, size, split)


def _refuse_table(path: Path, text: str, key: str) -> None:
    """Raise DataError for a .csv or .tsv file with a column `key`, whose rows are meant to be documents."""
    plain_path = path.with_suffix("") if find_compression(path) else path
    delimiter = _TABLE_DELIMITERS.get(plain_path.suffix.lower())
    if delimiter is None:
        return
    first_line = text.lstrip().partition("\n")[0]
    try:
        columns = next(csv.reader([first_line], delimiter=delimiter), [])
    except csv.Error:  # no heading, such as a line with a huge cell or with a carriage return within it
        return
    if key in (column.strip() for column in columns):
        options = f"c.ParseOptions(delimiter={delimiter!r}, newlines_in_values=True)"
        raise DataError(
            f"input {path} is a table with the column {key!r}, and tables are not read; convert it with `python -c "
            f"\"import pyarrow.csv as c, pyarrow.parquet as q; q.write_table(c.read_csv('{path}', "
            f"parse_options={options}), '{plain_path.with_suffix('.parquet')}')\"` and move it away, or rename it to "
            ".txt to train on the table as one text"
        )


def _read_lines(path: Path, piece: InputPiece, key: str, meter: Meter | None) -> Iterator[TextRecord]:
    lines: Iterator[tuple[bytes, int, int]]
    if find_compression(path):
        lines = _split_lines(read_chunks(path, meter), RECORD_LIMIT)
    else:
        lines = _read_range(path, piece.start, piece.stop, meter)
    line_number = 0
    quoted_forms = [quoted.encode() for quoted in quote_key(key)]
    try:
        for line, offset, input_bytes in lines:
            line_number += 1
            # The line's number is unknown in a byte range that does not begin the file.
            location = f"{path}, byte {offset}" if piece.start else f"{path}, line {line_number}"
            if line.strip():
                record = _parse_json(line, location)
                if sum(line.count(quoted) for quoted in quoted_forms) > 1 and has_repeated_key(line, key):
                    raise _repeated_key_error(location, key)
                yield _read_record(record, key, location, input_bytes)
            else:
                yield TextRecord("", input_bytes)  # a blank line, or nothing after the last line's end
    except TooLongError:
        raise _too_long_error(str(path) if piece.start else f"{path}, line {line_number + 1}") from None


def _too_long_error(location: str) -> DataError:
    return DataError(
        f"{location} is longer than {RECORD_LIMIT:,} bytes, the limit for one record; cut its text into several "
        "records, or leave the file out"
    )


def _read_json(path: Path, key: str, meter: Meter | None) -> Iterator[TextRecord]:
    """Yield the records of a .json file that does not hold one record per line."""
    size = path.stat().st_size
    yielded_bytes = record_number = 0
    skipped = EMPTY_FILE
    first_chunk = b""
    # First object if it lacks the key. It is a settings file if it is the only value, which is skipped, and else a
    # record without a text, which is an error.
    object_without_key: dict[str, Any] | None = None

    def read_and_keep_first_chunk() -> Iterator[tuple[bytes, int]]:
        nonlocal first_chunk
        for chunk, input_bytes in read_chunks(path, meter):
            first_chunk = first_chunk or chunk
            yield chunk, input_bytes

    try:
        for value, is_element, input_bytes in read_values(read_and_keep_first_chunk(), RECORD_LIMIT, key):
            record_number += 1
            if object_without_key is not None:
                _read_record(object_without_key, key, f"{path}, record 1", 0)  # raises the error for a missing key
            if record_number == 1:
                skipped = NOT_RECORDS
                if not isinstance(value, dict):
                    break
                if not is_element and key not in value:
                    object_without_key = value
                    continue
            yield _read_record(value, key, f"{path}, record {record_number}", input_bytes)
            yielded_bytes += input_bytes
            skipped = ""
    except TooLongError:
        raise _too_long_error(f"{path}, record {record_number + 1}") from None
    except RepeatedKeyError:
        raise _repeated_key_error(f"{path}, record {record_number + 1}", key) from None
    except ValueError as error:
        # A settings file with comments is skipped. A file that contains the key is meant to hold records.
        if record_number or any(quoted.encode() in first_chunk for quoted in quote_key(key)):
            raise _not_json_error(f"{path}, record {record_number + 1}", error) from None
        skipped = NOT_JSON
    yield TextRecord("", size - yielded_bytes, skipped=skipped)


def _parse_json(line: bytes, location: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _not_json_error(location, error) from None


def _repeated_key_error(location: str, key: str) -> DataError:
    """Return the error for a record that has the key twice, since only the last text would be read."""
    return DataError(f"{location} has the key {key!r} twice; keep one text per record")


def _not_json_error(location: str, error: Exception) -> DataError:
    return DataError(
        f"{location} is not JSON ({error}); the file may be cut off: repair it, remove the record, or leave it out"
    )


_JSON_NAMES = {list: "a list", dict: "an object", bool: "true or false", int: "a number", float: "a number"}


def _read_record(record: Any, key: str, location: str, size: int) -> TextRecord:
    """Return the document of a JSON record. Raises DataError if it is not an object with the key."""
    if not isinstance(record, dict):
        name = "a string" if isinstance(record, str) else _JSON_NAMES.get(type(record), "null")
        raise DataError(
            f"{location} is {name} where an object with a text under {key!r} is expected; leave the file out, or turn "
            "its texts into records"
        )
    if key not in record:
        keys = ", ".join(map(repr, record))
        raise DataError(
            f"{location} has no text under {key!r} (it has {keys or 'nothing'}); name the key with --text-key"
        )
    return _make_text_record(record[key], key, location, size)


def _make_text_record(text: Any, key: str, location: str, size: int) -> TextRecord:
    """Return the document of a value under the key. A null, empty or badly encoded text is skipped with the reason.

    Raises DataError for a value of another type.
    """
    if text is None:
        return TextRecord("", size, skipped=NULL_TEXT)
    if isinstance(text, bytes):
        try:
            text = text.decode()
        except UnicodeDecodeError:
            return TextRecord("", size, skipped=RECORD_NOT_UTF8)
    if not isinstance(text, str):
        type_name = _JSON_NAMES.get(type(text), type(text).__name__)
        raise DataError(f"{location} has {type_name} under {key!r}, not text; name the key of the text with --text-key")
    if not text.strip():
        return TextRecord("", size, skipped=EMPTY_TEXT)
    return TextRecord(replace_surrogates(text), size)


def replace_surrogates(text: str) -> str:
    """Return the text with lone surrogates replaced, which JSON can express and UTF-8 cannot."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _read_range(path: Path, start: int, stop: int, meter: Meter | None) -> Iterator[tuple[bytes, int, int]]:
    """Yield (line, offset, bytes of input) for each line that begins in bytes `start:stop` of a file.

    Raises TooLongError for a line beyond RECORD_LIMIT.
    """
    with open_metered(path, meter) as file:
        if start:
            file.seek(start - 1)
            # The line that begins before `start` belongs to the previous piece.
            skipped = file.readline(CHUNK_BYTES)
            while skipped and not skipped.endswith(b"\n"):
                skipped = file.readline(CHUNK_BYTES)
        offset = file.tell()
        while offset < stop:
            line = file.readline(RECORD_LIMIT + 1)
            if not line:
                break
            if len(line) > RECORD_LIMIT:
                raise TooLongError
            yield line, offset, len(line)
            offset += len(line)


def _split_lines(chunks: Iterable[tuple[bytes, int]], limit: int) -> Generator[tuple[bytes, int, int], None, None]:
    """Yield (line, offset, bytes of input since the previous line) for each line of a stream.

    The text after the last line end is yielded as a line, even if it is empty. Raises TooLongError for a line of more
    than `limit` bytes.
    """
    line_parts: list[bytes] = []
    length = offset = input_bytes = 0
    for chunk, chunk_input_bytes in chunks:
        input_bytes += chunk_input_bytes
        line_end, *next_lines = chunk.split(b"\n")
        line_parts.append(line_end)
        length += len(line_end)
        for line_begin in next_lines:
            if length > limit:
                raise TooLongError
            yield b"".join(line_parts), offset, input_bytes
            offset += length + 1
            input_bytes = 0
            line_parts = [line_begin]
            length = len(line_begin)
        if length > limit:
            raise TooLongError
    yield b"".join(line_parts), offset, input_bytes


def _import_arrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"parquet files need the package pyarrow; {describe_install('formats')}") from None
    return pyarrow


def _split_row_groups(path: Path, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first, past-last, bytes) of consecutive row groups that have about `size` bytes together."""
    arrow = _import_arrow()
    try:
        metadata = arrow.parquet.read_metadata(path)
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"input {path} is not a parquet file that can be read: {error}; leave it out") from None
    start = range_bytes = 0
    for group in range(metadata.num_row_groups):
        range_bytes += metadata.row_group(group).total_byte_size
        if range_bytes >= size or group == metadata.num_row_groups - 1:
            yield start, group + 1, range_bytes
            start = group + 1
            range_bytes = 0


@lru_cache(maxsize=64)
def _read_footer(path: Path) -> Any:
    return _import_arrow().parquet.read_metadata(path)


def _read_parquet(path: Path, piece: InputPiece, key: str, meter: Meter | None) -> Iterator[TextRecord]:
    arrow = _import_arrow()
    try:
        source = path if meter is None else open_metered(path, meter)
        # A file with many row groups has a long footer. The loader, which passes a meter, reads the footer only once.
        footer = None if meter is None else _read_footer(path)
        with arrow.parquet.ParquetFile(source, metadata=footer) as file:
            if key not in file.schema_arrow.names:
                raise DataError(
                    f"{path} has no column {key!r} (it has {', '.join(map(repr, file.schema_arrow.names))}); name the "
                    "column with --text-key"
                )
            if file.schema_arrow.names.count(key) > 1:
                raise DataError(f"{path} has several columns {key!r}; rename or remove all but one of them")
            groups = [file.metadata.row_group(g) for g in range(piece.start, piece.stop)]
            rows = max(1, sum(group.num_rows for group in groups))
            row = 0
            batches = file.iter_batches(
                batch_size=_count_batch_rows(groups, key, rows),
                row_groups=range(piece.start, piece.stop),
                columns=[key],
            )
            while True:
                with time_unpacking(meter):
                    batch = next(batches, None)
                if batch is None:
                    break
                for text in batch.column(0).to_pylist():
                    # The rows of a piece share its bytes evenly.
                    size = (row + 1) * piece.size // rows - row * piece.size // rows
                    row += 1
                    location = f"{path}, row {row} after the start of row group {piece.start}"
                    if isinstance(text, str | bytes) and len(text) > RECORD_LIMIT:
                        raise _too_long_error(location)
                    yield _make_text_record(text, key, location, size)
    except (arrow.ArrowException, OSError) as error:
        # Arrow raises OSError for damaged pages. An error of the operating system has a number.
        if getattr(error, "errno", None):
            raise
        raise DataError(f"input {path} is damaged ({error}); copy it again or leave it out") from None


def _count_batch_rows(groups: Sequence[Any], key: str, rows: int) -> int:
    """Return the number of rows per batch: about _PARQUET_BATCH_BYTES of the column, at most _PARQUET_BATCH_ROWS."""
    columns = [group.column(i) for group in groups for i in range(group.num_columns)]
    size = sum(column.total_uncompressed_size for column in columns if column.path_in_schema == key)
    return max(1, min(_PARQUET_BATCH_ROWS, _PARQUET_BATCH_BYTES * rows // max(size, 1)))
