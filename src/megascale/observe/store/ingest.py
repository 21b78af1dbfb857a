"""The way of frames from the rings of a host's ranks into its spool and its tables: what the span service does.

Frames are taken over from rings into the segment under way, and only then does a ring forget them. Segments end by size
or age and become Parquet files. The folder is bounded: over its limit the oldest files go, and roll-ups stay longest.
Where nothing can be written, rings fill, ranks drop spans and count them, and training goes on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from megascale.core import strict_json
from megascale.core.spans import SPAN_SCHEMA
from megascale.observe.store.columns import TABLES
from megascale.observe.store.frames import CLOCK, CLOCKS, COUNTERS, RECORDS, FrameHead, TornFrame, pack_frame, scan
from megascale.observe.store.span_ring import SpanRing
from megascale.observe.store.span_sinks import SegmentSink
from megascale.observe.store.spool import (
    LEFT,
    RINGS,
    Spool,
    adopt,
    last_numbers,
    read_segment,
    segment_file,
    segments,
)

log = logging.getLogger("megascale.observe.spans")

SEGMENT_BYTES = 16 << 20
SEGMENT_SECONDS = 300.0
STATE = "state.json"


class Ingest:
    """One writer of a folder; not for several threads.

    Args:
        folder: `runs/NAME/spans/host=H`, made if need be.
        job, host, hostname: whose it is.
        sink: makes the sink at the first segment's end; DuckDB is loaded then and not before.
        limit: bytes that the folder may have.
        clock_ns: how far the common clock is ahead of the monotonic one, until a clock frame says more.

    Attributes:
        rows: of each table, made so far.
        removed: files that were given up for want of room.
        failures: times that something could not be written.
        given_up: segments that a sink beside the first never got.
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
        self.folder, self.limit = folder, limit
        self.segment_bytes, self.segment_seconds = segment_bytes, segment_seconds
        if clock_ns is None:
            clock_ns = time.time_ns() - time.monotonic_ns()
        self.clock_ns = clock_ns
        self.about = {"job": job, "host": host, "hostname": hostname, "schema": SPAN_SCHEMA, "clock_ns": clock_ns}
        self.rows: dict[str, int] = {}
        self.removed_files = self.failures = self.damaged = self.given_up = 0
        self.error = ""
        self._make_sink, self._sink = sink, None  # type: Callable[[Path], SegmentSink], SegmentSink | None
        for left in folder.glob("*.tmp"):
            left.unlink(missing_ok=True)
        last = last_numbers(folder)
        self._ended = deque(segments(folder))
        newest = max([*self._ended, *_numbers(folder)], default=-1)
        for left in sorted(folder.glob(f"{LEFT}*.bin")):
            newest += 1
            adopt(left, segment_file(folder, newest), last)
            self._ended.append(newest)
        self._first = newest + 1  # of this process's own
        self._spool = Spool(folder, self.about, newest + 1, last)
        self._own_number, self._own_ring = 0, int.from_bytes(os.urandom(8), "little")
        self._opened = time.monotonic()
        self._asked_again = 0.0

    # frames --------------------------------------------------------------------------------------------------------

    def take_frames(self, ring: SpanRing) -> int:
        """Take over what a ring has; bytes of it. What cannot be written stays there."""
        try:
            data = memoryview(ring.read())
        except ValueError as error:
            self._damage(ring, 0, str(error))
            return 0
        if not len(data):
            return 0
        whole, torn = self._new_frames(data)
        if whole and not self._append(whole):
            return 0
        if torn is not None:
            self._damage(ring, len(data), str(torn))
        ring.release(len(data))
        return len(data)

    def _new_frames(self, data: memoryview) -> tuple[list[tuple[FrameHead, memoryview]], TornFrame | None]:
        """Frames that were not kept before, as (head, the whole frame), and what ends them early."""
        found: list[tuple[FrameHead, memoryview]] = []
        at = 0
        try:
            for head, _, end in scan(data):
                if head.number > self._spool.last.get(head.ring, 0):
                    found.append((head, data[at:end]))
                at = end
        except TornFrame as torn:
            return found, torn
        return found, None

    def _append(self, frames: list[tuple[FrameHead, memoryview]]) -> bool:
        try:
            self._spool.append(b"".join([frame for _, frame in frames]))
        except OSError as error:
            self._failed(f"the spool cannot be written: {error}")
            return False
        for head, _ in frames:
            self._spool.last[head.ring] = head.number
        return True

    def _damage(self, ring: SpanRing, size: int, why: str) -> None:
        self.damaged += 1
        log.warning("the ring of rank %d holds what cannot be read and %d bytes are given up: %s", ring.rank, size, why)

    def add_records(self, kind: int, records: np.ndarray[Any, Any]) -> None:
        """Keep clocks or counters of the host itself."""
        assert kind in (CLOCKS, COUNTERS)
        self._own_number += 1
        head = FrameHead(kind, self._own_ring, self._own_number, 0, 0, 0)
        self._append([(head, memoryview(pack_frame(head, records.astype(RECORDS[kind]))))])

    def note_clock(self, now_ns: int, offset_ns: int, error_ns: int) -> None:
        """From `now_ns` of the monotonic clock on the common clock is so far ahead of it."""
        self.add_records(CLOCKS, np.array([(now_ns, offset_ns, error_ns)], CLOCK))

    # segments ------------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Have all that was taken over outlive the machine."""
        try:
            self._spool.flush()
        except OSError as error:
            self._failed(f"the spool cannot be put on the disk: {error}")

    def tick(self, now: float | None = None, end: bool = False) -> None:
        """End the segment if it is large or old enough, or at the `end`; make tables of ended ones; keep the limit."""
        now = time.monotonic() if now is None else now
        old = now - self._opened >= self.segment_seconds
        if end or old or self._spool.size >= self.segment_bytes:
            self._opened = now
            if (number := self._spool.rotate()) is not None:
                self._ended.append(number)
        if self._ended and (end or now >= self._asked_again):
            self._convert(now)
        if end or old:
            self.bound()

    def _convert(self, now: float) -> None:
        while self._ended:
            number = self._ended[0]
            file = segment_file(self.folder, number)
            try:
                segment = read_segment(file, check=number < self._first)
                if segment.torn:
                    log.warning("%s: %s; what is before it counts", file.name, segment.torn)
                if segment.frames:
                    if self._sink is None:
                        self._sink = self._make_sink(self.folder)
                    for table, rows in self._sink.write_segment(number, segment).items():
                        self.rows[table] = self.rows.get(table, 0) + rows
                    self._keep_rings(segment.last)
                file.unlink()
            except FileNotFoundError:
                pass
            except ValueError as error:  # not of ours: kept under another name, so that it is not read again
                self._failed(str(error))
                with contextlib.suppress(OSError):
                    os.replace(file, file.with_suffix(".damaged"))
            except OSError as error:
                self._failed(f"segment {number} cannot be made into tables yet: {error}")
                self.bound()
                if not self._given_up(number):
                    self._asked_again = now + 10.0
                    return
            self._ended.popleft()

    def _given_up(self, number: int) -> bool:
        """Where what waits for a sink beside the first is a quarter of the folder, it does without the oldest segment:
        what commands read goes on."""
        if self._waiting() <= self.limit // 4 or not getattr(self._sink, "first_has", lambda n: False)(number):
            return False
        segment_file(self.folder, number).unlink(missing_ok=True)
        self.given_up += 1
        return True

    def _keep_rings(self, last: dict[int, int]) -> None:
        """Which frame of each ring was kept last, for a service that starts when no segment tells it."""
        temporary = self.folder / "rings.tmp"
        temporary.write_text(strict_json.dumps({str(ring): number for ring, number in last.items()}))
        os.replace(temporary, self.folder / RINGS)

    def bound(self) -> None:
        """Remove files of the folder until it keeps its limit: first what is damaged, then the oldest roll-ups if they
        have more than half of it, else the oldest of the others."""
        tables: dict[str, list[tuple[str, Path, int]]] = {table: [] for table in TABLES}
        damaged: list[tuple[Path, int]] = []
        total = 0
        for path in self.folder.iterdir():
            size = _size(path)
            total += size
            if path.suffix == ".damaged":
                damaged.append((path, size))
            table, _, numbers = path.stem.partition("-")
            if path.suffix == ".parquet" and table in tables:
                tables[table].append((numbers, path, size))
        for path, size in damaged:
            if total > self.limit:
                path.unlink(missing_ok=True)
                total -= size
                self.removed_files += 1
        rollups = sorted(tables.pop("rollups"))
        others = sorted(one for found in tables.values() for one in found)
        share = sum(size for _, _, size in rollups)
        while total > self.limit and (rollups or others):
            from_rollups = bool(rollups) and (share > self.limit // 2 or not others)
            _, path, size = (rollups if from_rollups else others).pop(0)
            path.unlink(missing_ok=True)
            total -= size
            share -= size if from_rollups else 0
            self.removed_files += 1

    def full(self) -> bool:
        """Whether segments that could not be made into tables fill the folder: nothing more is taken over then."""
        return self._waiting() + self._spool.size > self.limit

    def _waiting(self) -> int:
        """Bytes of segments that have ended and are not tables."""
        return sum(_size(segment_file(self.folder, number)) for number in self._ended)

    def _failed(self, text: str) -> None:
        self.failures += 1
        if text != self.error:
            log.warning("%s", text)
        self.error = text

    def close(self) -> None:
        """Make tables of what is left."""
        self.tick(end=True)
        if self._sink is not None:
            self._sink.close()


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _numbers(folder: Path) -> list[int]:
    """Numbers of segments that have become tables."""
    found = (path.stem.rpartition("-")[2] for path in folder.glob("*-*.parquet"))
    return [int(text) for text in found if text.isdigit()]
