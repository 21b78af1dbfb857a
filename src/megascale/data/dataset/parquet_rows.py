"""Rows of parquet files, by row groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from megascale.data.dataset.metered_files import Meter, open_metered, time_unpacking
from megascale.errors import DataError, describe_install

_PARQUET_BATCH_ROWS = 256
_PARQUET_BATCH_BYTES = 64 << 20


class ParquetRow(NamedTuple):
    """A row of a text column.

    Attributes:
        text: value of the column, of any type.
        location: the row's position, for messages.
        size: bytes of input that the row took.
    """

    text: Any
    location: str
    size: int


def split_row_groups(path: Path, size: int) -> Iterator[tuple[int, int, int]]:
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


def read_rows(
    path: Path, key: str, start: int, stop: int, size: int, meter: Meter | None = None
) -> Iterator[ParquetRow]:
    """Yield the rows of column `key` in the row groups start:stop, which take `size` bytes of input together.

    Raises DataError for a damaged file, and without a single column `key`.
    """
    arrow = _import_arrow()
    try:
        source = path if meter is None else open_metered(path, meter)
        # A file with many row groups has a long footer. The loader, which passes a meter, reads the footer only once.
        footer = None if meter is None else _read_footer(path)
        with arrow.parquet.ParquetFile(source, metadata=footer) as file:
            _check_column(path, key, file.schema_arrow.names)
            groups = [file.metadata.row_group(group) for group in range(start, stop)]
            rows = max(1, sum(group.num_rows for group in groups))
            row = 0
            batches = file.iter_batches(
                batch_size=_count_batch_rows(groups, key, rows), row_groups=range(start, stop), columns=[key]
            )
            while True:
                with time_unpacking(meter):
                    batch = next(batches, None)
                if batch is None:
                    break
                for text in _list_values(arrow, batch.column(key)):
                    # The rows of a piece share its bytes evenly.
                    row_bytes = (row + 1) * size // rows - row * size // rows
                    row += 1
                    yield ParquetRow(text, f"{path}, row {row} after the start of row group {start}", row_bytes)
    except (arrow.ArrowException, OSError) as error:
        # Arrow raises OSError for damaged pages. An error of the operating system has a number.
        if getattr(error, "errno", None):
            raise
        raise DataError(f"input {path} is damaged ({error}); copy it again or leave it out") from None


def _list_values(arrow: Any, column: Any) -> list[Any]:
    """Return the values of a column. Strings are returned as bytes if one of them is not UTF-8."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        # Writers in other languages store any bytes as strings. The reader of records skips the invalid ones.
        if arrow.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        return column.cast(arrow.large_binary()).to_pylist()


def _check_column(path: Path, key: str, names: Sequence[str]) -> None:
    """Raise DataError unless exactly one column has the name `key`."""
    if key not in names:
        raise DataError(
            f"{path} has no column {key!r} (it has {', '.join(map(repr, names))}); name the column with --text-key"
        )
    if names.count(key) > 1:
        raise DataError(f"{path} has several columns {key!r}; rename or remove all but one of them")


def _count_batch_rows(groups: Sequence[Any], key: str, rows: int) -> int:
    """Return the number of rows per batch: about _PARQUET_BATCH_BYTES of the column, at most _PARQUET_BATCH_ROWS."""
    columns = [group.column(i) for group in groups for i in range(group.num_columns)]
    size = sum(column.total_uncompressed_size for column in columns if column.path_in_schema == key)
    return max(1, min(_PARQUET_BATCH_ROWS, _PARQUET_BATCH_BYTES * rows // max(size, 1)))


@lru_cache(maxsize=64)
def _read_footer(path: Path) -> Any:
    return _import_arrow().parquet.read_metadata(path)


def _import_arrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"parquet files need the package pyarrow; {describe_install('formats')}") from None
    return pyarrow
