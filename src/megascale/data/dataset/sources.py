"""Documents of text files, JSON records and parquet, plain or compressed (source_files.py).

A text file is one document. A JSON record or a parquet row holds one document under a key.
"""

from __future__ import annotations

import csv
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from megascale.data.dataset.json_values import (
    RepeatedKeyError,
    TooLongError,
    has_repeated_key,
    parse_record,
    quote_key,
    read_values,
)
from megascale.data.dataset.line_ranges import RECORD_LIMIT, read_range, split_lines
from megascale.data.dataset.metered_files import Meter, find_compression, read_chunks
from megascale.data.dataset.parquet_rows import read_rows
from megascale.data.dataset.source_files import EMPTY_FILE, NOT_UTF8, InputPiece, explain_binary, raise_data_errors
from megascale.data.text_encoding import NotUtf8Error, describe_invalid_utf8
from megascale.errors import DataError

# A text must be in memory as a whole, and a small compressed file may hold gigabytes.
UNPACKED_TEXT_LIMIT = 1 << 30  # bytes of a compressed text file, decompressed
TEXT_LIMIT = 4 << 30  # bytes of a text file
_TABLE_DELIMITERS = {".csv": ",;\t", ".tsv": "\t"}  # by suffix; some programs write .csv with semicolons or tabs
# Reasons for skipping a file or record, as reports name them. source_files.py has further reasons.
NOT_JSON = "files (named .json, not JSON)"
NOT_RECORDS = "files (JSON without records of text)"
NULL_TEXT = "records (text is null)"
EMPTY_TEXT = "records (text is empty)"
RECORD_NOT_UTF8 = "records (text is not UTF-8)"


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


def read_documents(piece: InputPiece, key: str, meter: Meter | None = None) -> Generator[TextRecord, None, None]:
    """Yield the documents of a piece in order.

    Args:
        piece: the piece.
        key: key of the text in JSON records, or column of parquet.
        meter: counts bytes, and seconds of reading and decompression; None: nothing is counted.

    Raises DataError naming file and position for contents that cannot be read or exceed a limit.
    """
    with raise_data_errors(*piece.paths):
        if piece.kind == "text":
            splits = piece.sides or [""] * len(piece.paths)
            for name, split in zip(piece.paths, splits, strict=True):
                yield _read_text(Path(name), split, meter, key)
        elif piece.kind == "parquet":
            rows = read_rows(Path(piece.paths[0]), key, piece.start, piece.stop, size=piece.size, meter=meter)
            for row in rows:
                if isinstance(row.text, str | bytes) and len(row.text) > RECORD_LIMIT:
                    raise _too_long_error(row.location)
                yield _make_text_record(row.text, key, row.location, row.size)
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
                return TextRecord("", size, skipped=explain_binary(path))
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
        return TextRecord("", size, skipped=explain_binary(path))
    if not text.strip():
        return TextRecord("", size, skipped=EMPTY_FILE)
    _refuse_table(path, text, key)
    return TextRecord(text, size, split)


def _refuse_table(path: Path, text: str, key: str) -> None:
    """Raise DataError for a .csv or .tsv file with a column `key`, whose rows are meant to be documents."""
    plain_path = path.with_suffix("") if find_compression(path) else path
    first_line = text.lstrip().partition("\n")[0]
    for delimiter in _TABLE_DELIMITERS.get(plain_path.suffix.lower(), ""):
        try:
            columns = next(csv.reader([first_line], delimiter=delimiter), [])
        except csv.Error:  # no heading, such as a line with a huge cell or with a carriage return within it
            return
        if key not in (column.strip() for column in columns):
            continue
        options = f"c.ParseOptions(delimiter={delimiter!r}, newlines_in_values=True)"
        raise DataError(
            f"input {path} is a table with the column {key!r}, and tables are not read; convert it with `python -c "
            f"\"import pyarrow.csv as c, pyarrow.parquet as q; q.write_table(c.read_csv('{path}', "
            f"parse_options={options}), '{plain_path.with_suffix('.parquet')}')\"` and move it away, or rename it to "
            ".txt to train on the table as one text"
        )


def _read_lines(path: Path, piece: InputPiece, key: str, meter: Meter | None) -> Iterator[TextRecord]:
    lines: Iterator[tuple[bytes, int, int]]
    is_compressed = bool(find_compression(path))
    if is_compressed:
        lines = split_lines(read_chunks(path, meter), RECORD_LIMIT)
    else:
        lines = read_range(path, piece.start, piece.stop, limit=RECORD_LIMIT, meter=meter)
    line_number = 0
    quoted_forms = [quoted.encode() for quoted in quote_key(key)]
    try:
        for line, offset, input_bytes in lines:
            line_number += 1
            # The line's number is unknown in a byte range that does not begin the file.
            location = f"{path}, byte {offset}" if piece.start else f"{path}, line {line_number}"
            if line.strip():
                record = _parse_json(line, location, offset, is_compressed=is_compressed)
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
    except NotUtf8Error as error:
        if record_number or any(quoted.encode() in first_chunk for quoted in quote_key(key)):
            raise _not_utf8_error(str(path), str(error)) from None  # the byte may be in a later record
        skipped = NOT_UTF8
    except ValueError as error:
        # A settings file with comments is skipped. A file that contains the key is meant to hold records.
        if record_number or any(quoted.encode() in first_chunk for quoted in quote_key(key)):
            raise _not_json_error(f"{path}, record {record_number + 1}", error) from None
        skipped = NOT_JSON
    yield TextRecord("", size - yielded_bytes, skipped=skipped)


def _parse_json(line: bytes, location: str, offset: int, *, is_compressed: bool) -> Any:
    """Return the value in a line. Raises DataError for a line that is not UTF-8 or not JSON.

    Args:
        location: the line's position, for messages.
        offset: offset of the line in the file, after decompression.
    """
    try:
        return parse_record(line)
    except (ValueError, RecursionError) as error:
        problem = describe_invalid_utf8(line, offset, "of the unpacked file" if is_compressed else "of the file")
        if problem:
            raise _not_utf8_error(location, problem) from None
        raise _not_json_error(location, error) from None


def _not_utf8_error(location: str, problem: str) -> DataError:
    return DataError(f"{location} is not UTF-8 text: {problem}, or remove the record")


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
