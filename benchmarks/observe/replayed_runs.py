"""Replayed jobs (replayed_job.py) as runs on the disk: through ring, spool and Parquet, as spans of a real run come."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.observe.synthetic_spans import Job
from megascale.core import strict_json
from megascale.core.grid import Grid
from megascale.observe.store.frames import COUNTER, COUNTERS, ROLLUPS
from megascale.observe.store.ingest import Ingest
from megascale.observe.store.parquet import ParquetWriter
from megascale.observe.store.span_ring import SpanRing
from megascale.observe.store.tables import RANKS_FILE

Array = np.ndarray[Any, Any]
_RING_BYTES = 32 << 20
HOST_RANKS = 8


def keep(
    folder: Path, job: Job, steps: Iterable[tuple[int, Array]], counters: Callable[[int, int], Array] | None = None
) -> Path:
    """Write a run; its folder, which is made anew.

    Args:
        steps: (step, ROLLUP records [ranks, kinds]).
        counters: COUNTER records of a step that begins at so many nanoseconds, put before its roll-ups.
    """
    shutil.rmtree(folder, ignore_errors=True)
    out = folder / "spans" / "host=0"
    ring = SpanRing(capacity=_RING_BYTES, attempt=1)

    def sink(folder: Path) -> ParquetWriter:
        return ParquetWriter(folder, threads=2)

    ingest = Ingest(
        out, job="bench", host=0, hostname="bench", sink=sink, limit=1 << 40, clock_ns=10**18, segment_bytes=32 << 20
    )
    _write_ranks(out / RANKS_FILE, job)
    most = 0
    for step, records in steps:
        if counters is not None:
            result = counters(step, int(records["first_ns"][records["first_ns"] > 0].min()))
            ring.rank = 0
            ring.write(COUNTERS, step, result.astype(COUNTER), 0)
        most = most or 2 * (records[0].nbytes + 4096)
        for rank in range(job.world):
            if ring.free_bytes() < most:
                _take(ingest, ring)
            ring.rank = rank
            ring.write(ROLLUPS, step, records[rank], 1000)
        _take(ingest, ring)
    ingest.maintain(end=True)
    ingest.close()
    lost = ring.lost_rollups
    ring.close()
    if lost or ingest.failures:
        raise OSError(ingest.error or f"{lost} roll-ups were lost")
    return folder


def _take(ingest: Ingest, ring: SpanRing) -> None:
    ingest.take_frames(ring)
    ingest.maintain()
    if ingest.failures:
        raise OSError(ingest.error)


def _write_ranks(file: Path, job: Job) -> None:
    """Write the table of ranks into the folder of one host, which stands for all hosts."""
    grid = Grid(tensor=job.tensor, data=job.data, pipeline=job.stages, ranks_per_host=HOST_RANKS)
    with open(file, "w") as out:
        for rank in range(job.world):
            at = grid.coordinate(rank)
            single = {"attempt": 1, "rank": rank, "tensor": at.tensor, "pipeline": at.pipeline, "data": at.data}
            out.write(strict_json.dumps(single | {"hostname": "bench", "device": "GPU"}) + "\n")
