"""Lines of JSON files, as byte ranges of a plain file or as a stream of chunks."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from pathlib import Path

from megascale.data.dataset.json_values import TooLongError
from megascale.data.dataset.metered_files import CHUNK_BYTES, Meter, open_metered

# A record must be in memory as a whole. A small compressed file may hold gigabytes in one line.
RECORD_LIMIT = 256 << 20  # bytes of a JSON record, and of a text in parquet


def read_range(path: Path, start: int, stop: int, limit: int, meter: Meter | None) -> Iterator[tuple[bytes, int, int]]:
    """Yield (line, offset, bytes of input) for each line that begins in bytes `start:stop` of a file.

    Raises TooLongError for a line of more than `limit` bytes.
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
            line = file.readline(limit + 1)
            if not line:
                break
            if len(line) > limit:
                raise TooLongError
            yield line, offset, len(line)
            offset += len(line)


def split_lines(chunks: Iterable[tuple[bytes, int]], limit: int) -> Generator[tuple[bytes, int, int], None, None]:
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
