"""Writer of a host's spans: frames go from the ranks' rings to the spool's current segment and then into tables.

A frame is a block of spans, roll-ups, clock offsets or counters (frames.py). The spool is a sequence of files,
*segments*, to which frames are appended. A ring releases frames only after they are stored in the segment. A segment
ends by size or age. A *sink* (span_sinks.py) then writes it as tables, by default Parquet files. If the folder exceeds
its limit, the oldest files are removed, roll-ups last. If nothing can be written, the rings fill, the ranks drop and
count spans, and training continues.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megascale.core import strict_json
from megascale.core.spans import SPAN_SCHEMA
from megascale.observe.store.columns import TABLES
from megascale.observe.store.frames import (
    CLOCK,
    CLOCKS,
    COUNTERS,
    RECORDS,
    FrameHead,
    TornFrame,
    pack_frame,
    scan_frames,
)
from megascale.observe.store.span_ring import SpanRing
from megascale.observe.store.span_sinks import SegmentSink
from megascale.observe.store.spool import (
    ORPHAN_PREFIX,
    RINGS_FILE,
    Spool,
    adopt_orphan,
    get_segment_file,
    list_segments,
    read_last_numbers,
    read_segment,
    replace_file,
)

log = logging.getLogger("megascale.observe.spans")

SEGMENT_BYTES = 16 << 20
SEGMENT_SECONDS = 300.0
_RETRY_SECONDS = 10.0  # pause after a failed conversion of a segment


class _StoredFile(NamedTuple):
    """A file of the folder. Files sort by age.

    Attributes:
        numbers: numbers of its segments as text with leading zeros.
        size: bytes.
    """

    numbers: str
    path: Path
    size: int


class Ingest:
    """Writer of a host's span folder. Only one process writes the folder, in one thread.

    Args:
        folder: `runs/NAME/spans/host=H`, created if missing.
        job, host, hostname: origin of the frames.
        sink: makes the sink; called at the end of the first segment, so that DuckDB is not loaded before.
        limit: bytes that the folder may occupy.
        clock_ns: offset of the common clock from the monotonic clock until a clock frame is added; None: the offset
            of this host's clock.

    Attributes:
        rows: rows of each table written so far.
        removed_files: number of files that were removed to keep the limit.
        failures: number of failed writes.
        damaged: number of readings of rings that were damaged.
        dropped_segments: number of segments that were deleted before all configured sinks had received them.
        error: newest failure as text.
    """

    def __init__(
        self,
        folder: Path,
        *,
        job: str,
        host: int,
        hostname: str,
        sink: Callable[[Path], SegmentSink],
        limit: int = 512 << 20,
        clock_ns: int | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        segment_seconds: float = SEGMENT_SECONDS,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.limit = limit
        self.segment_bytes = segment_bytes
        self.segment_seconds = segment_seconds
        if clock_ns is None:
            self.clock_ns = time.time_ns() - time.monotonic_ns()
        else:
            self.clock_ns = clock_ns
        self.rows: dict[str, int] = {}
        self.removed_files = 0
        self.failures = 0
        self.damaged = 0
        self.dropped_segments = 0
        self.error = ""
        self._make_sink = sink
        self._sink: SegmentSink | None = None
        for temporary in folder.glob("*.tmp"):
            temporary.unlink(missing_ok=True)
        last_frames = read_last_numbers(folder)  # number of the last stored frame of each ring
        self._unconverted_segments = deque(list_segments(folder))  # numbers of segments that are not tables yet
        # The name of a table's file ends with the number of its newest segment.
        table_numbers = [path.stem.rpartition("-")[2] for path in folder.glob("*-*.parquet")]
        used_numbers = list(self._unconverted_segments) + [int(text) for text in table_numbers if text.isdigit()]
        last_number = max(used_numbers, default=-1)
        # Files of frames that ranks wrote themselves because no service took them.
        for orphan in sorted(folder.glob(f"{ORPHAN_PREFIX}*.bin")):
            last_number += 1
            adopt_orphan(orphan, get_segment_file(folder, last_number), last_frames)
            self._unconverted_segments.append(last_number)
        self._first_segment = last_number + 1  # first segment of this process
        header = {"job": job, "host": host, "hostname": hostname, "schema": SPAN_SCHEMA, "clock_ns": self.clock_ns}
        self._spool = Spool(folder, header, self._first_segment, last_frames)
        # Frames of the host itself (clocks, counters) have a random ring identity, as if they came from a ring.
        self._host_ring = int.from_bytes(os.urandom(8), "little")
        self._host_frame_count = 0
        self._segment_begin = time.monotonic()
        self._retry_time = 0.0

    # Frames --------------------------------------------------------------------------------------------------------

    def take_frames(self, ring: SpanRing) -> int:
        """Store the frames of a ring and release them; return the number of released bytes.

        Frames that cannot be stored stay in the ring. Damaged bytes are dropped.
        """
        try:
            data = memoryview(ring.read())
        except ValueError as error:
            self._report_damage(ring, 0, str(error))
            return 0
        heads = []
        frames = []
        offset = 0
        damage = None
        try:
            for head, _, end in scan_frames(data):
                # Skip a frame that is in the ring again because the service was killed after it had stored the frame.
                if head.number > self._spool.last.get(head.ring, 0):
                    heads.append(head)
                    frames.append(data[offset:end])
                offset = end
        except TornFrame as error:
            damage = error
        if frames and not self._append(heads, b"".join(frames)):
            return 0
        if damage is not None:
            self._report_damage(ring, len(data), str(damage))
        ring.release(len(data))
        return len(data)

    def _append(self, heads: list[FrameHead], frames: bytes) -> bool:
        """Append frames to the spool, and return whether this succeeded."""
        try:
            self._spool.append(frames)
        except OSError as error:
            self._report_failure(f"the spool cannot be written: {error}")
            return False
        for head in heads:
            self._spool.last[head.ring] = head.number
        return True

    def _report_damage(self, ring: SpanRing, size: int, reason: str) -> None:
        self.damaged += 1
        log.warning("the ring of rank %d is damaged; %d bytes are dropped: %s", ring.rank, size, reason)

    def add_records(self, kind: int, records: np.ndarray[Any, Any]) -> None:
        """Store records of the host; `kind` is CLOCKS or COUNTERS."""
        if kind not in (CLOCKS, COUNTERS):
            raise ValueError(f"records of a host are of kind {CLOCKS} or {COUNTERS}, not {kind}")
        self._host_frame_count += 1
        head = FrameHead(kind, self._host_ring, self._host_frame_count, rank=0, attempt=0, step=0)
        self._append([head], pack_frame(head, records.astype(RECORDS[kind])))

    def add_clock(self, now_ns: int, offset_ns: int, error_ns: int) -> None:
        """Store the offset of the common clock from the monotonic clock at the monotonic time `now_ns`."""
        self.add_records(CLOCKS, np.array([(now_ns, offset_ns, error_ns)], CLOCK))

    # Segments ------------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write the stored frames to the disk, so that they survive a machine failure."""
        try:
            self._spool.flush()
        except OSError as error:
            self._report_failure(f"the spool cannot be flushed to the disk: {error}")

    def maintain(self, current_time: float | None = None, end: bool = False) -> None:
        """End a large or old segment, convert ended segments, and enforce the limit.

        Args:
            current_time: by time.monotonic; None reads the clock.
            end: end the current segment in any case.
        """
        if current_time is None:
            current_time = time.monotonic()
        is_old = current_time - self._segment_begin >= self.segment_seconds
        if end or is_old or self._spool.size >= self.segment_bytes:
            self._segment_begin = current_time
            ended_segment = self._spool.rotate()  # None if the segment is empty
            if ended_segment is not None:
                self._unconverted_segments.append(ended_segment)
        if self._unconverted_segments and (end or current_time >= self._retry_time):
            self._convert_segments(current_time)
        if end or is_old:
            self.enforce_limit()

    def _convert_segments(self, current_time: float) -> None:
        """Convert ended segments to tables. If one cannot be converted yet, set the time of the next attempt."""
        while self._unconverted_segments:
            number = self._unconverted_segments[0]
            file = get_segment_file(self.folder, number)
            try:
                self._write_tables(number, file)
                file.unlink(missing_ok=True)
            except FileNotFoundError:
                pass  # nothing to convert
            except ValueError as error:  # the segment is damaged
                self._report_failure(str(error))
                with contextlib.suppress(OSError):
                    os.replace(file, file.with_suffix(".damaged"))  # a file with this suffix is not read again
            except OSError as error:
                self._report_failure(f"segment {number} cannot be converted yet: {error}")
                self.enforce_limit()
                if not self._drop_segment(number):
                    self._retry_time = current_time + _RETRY_SECONDS
                    return
            self._unconverted_segments.popleft()

    def _write_tables(self, number: int, file: Path) -> None:
        """Give a segment to the sink. Raises ValueError for a damaged segment, OSError if it cannot be written yet."""
        # Check the segments of an earlier process, which a power cut may have damaged.
        segment = read_segment(file, check=number < self._first_segment)
        if segment.damage:
            log.warning("%s: %s; the frames before the damage are kept", file.name, segment.damage)
        if not segment.frames:
            return
        if self._sink is None:
            self._sink = self._make_sink(self.folder)
        for table, rows in self._sink.write_segment(number, segment).items():
            self.rows[table] = self.rows.get(table, 0) + rows
        # If the next service starts when no segment exists, it reads the last frame number of each ring from this file.
        numbers = {str(ring): last for ring, last in segment.last.items()}
        replace_file(self.folder / RINGS_FILE, strict_json.dumps(numbers).encode())

    def _drop_segment(self, number: int) -> bool:
        """Drop a segment that the first sink has stored, if unconverted segments exceed a quarter of the limit.

        Another sink that is down for long then misses segments, but the first sink, which commands read, continues.

        Returns:
            Whether the segment was dropped.
        """
        # Only the combination of several sinks has this method.
        has_first_sink_stored = getattr(self._sink, "has_first_sink_stored", lambda number: False)
        if self._count_ended_bytes() <= self.limit // 4 or not has_first_sink_stored(number):
            return False
        get_segment_file(self.folder, number).unlink(missing_ok=True)
        self.dropped_segments += 1
        return True

    def enforce_limit(self) -> None:
        """Remove files until the folder is within its limit.

        Damaged files are removed first. Then the oldest roll-ups are removed if they occupy more than half of the
        limit, otherwise the oldest other files.
        """
        folder_bytes = 0
        damaged: list[_StoredFile] = []
        rollups: list[_StoredFile] = []
        tables: list[_StoredFile] = []
        for path in self.folder.iterdir():
            size = _read_size(path)
            folder_bytes += size
            table, _, numbers = path.stem.partition("-")
            file = _StoredFile(numbers, path, size)
            if path.suffix == ".damaged":
                damaged.append(file)
            elif path.suffix == ".parquet" and table == "rollups":
                rollups.append(file)
            elif path.suffix == ".parquet" and table in TABLES:
                tables.append(file)
        for files in (damaged, rollups, tables):
            files.sort()
        rollup_bytes = sum(file.size for file in rollups)
        while folder_bytes > self.limit and (damaged or rollups or tables):
            if damaged:
                files = damaged
            elif rollups and (rollup_bytes > self.limit // 2 or not tables):
                files = rollups
            else:
                files = tables
            oldest = files.pop(0)
            oldest.path.unlink(missing_ok=True)
            folder_bytes -= oldest.size
            if files is rollups:
                rollup_bytes -= oldest.size
            self.removed_files += 1

    def is_full(self) -> bool:
        """Return whether unconverted segments reach the limit of the folder. Frames then stay in the rings."""
        return self._count_ended_bytes() + self._spool.size > self.limit

    def _count_ended_bytes(self) -> int:
        """Return the bytes of ended segments that are not tables yet."""
        return sum(_read_size(get_segment_file(self.folder, number)) for number in self._unconverted_segments)

    def _report_failure(self, text: str) -> None:
        self.failures += 1
        if text != self.error:
            log.warning("%s", text)
        self.error = text

    def close(self) -> None:
        """Convert all frames and close the sink."""
        self.maintain(end=True)
        if self._sink is not None:
            self._sink.close()


def _read_size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
