"""The span service killed at random moments: what it acknowledged is there, once, and nothing half-written is read."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

from megascale.core.spans import SpanKind
from megascale.observe.store.frames import ROLLUP, ROLLUPS, SPAN, SPANS
from megascale.observe.store.ingest import Ingest
from megascale.observe.store.parquet import ParquetWriter
from megascale.observe.store.span_ring import SpanRing
from megascale.observe.store.tables import SpanTables

_SPANS = 50  # a step
_MOST_SECONDS = 0.4  # that a service lives


def _serve(ring: str, out: str, report: Any) -> None:
    """Run the service's thread with segments of 50 ms, so that most kills come during a write."""
    end = SpanRing(os.open(ring, os.O_RDWR))
    ingest = Ingest(
        Path(out), job="kills", host=0, hostname="here", sink=ParquetWriter, clock_ns=0, segment_seconds=0.05
    )
    report.send(None)
    while True:
        ingest.take_frames(end)
        ingest.flush()
        ingest.maintain()
        time.sleep(0.002)


def measure(folder: Path, kills: int, seed: int) -> dict[str, Any]:
    """Kill services one after another and look at what each left; AssertionError with the seed if it is wrong."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.observe.kills", "duckdb"])
    dice, ring = random.Random(seed), SpanRing()
    path, out = f"/proc/{os.getpid()}/fd/{ring.handle}", folder / "spans" / "host=0"
    rollups, spans = np.zeros(3, ROLLUP), np.zeros(_SPANS, SPAN)
    rollups["kind"], rollups["count"] = [SpanKind.STEP, SpanKind.FORWARD, SpanKind.BACKWARD], 1
    steps = 0
    in_files = 0
    in_spool = 0
    moments = []
    sent: list[tuple[int, int]] = []  # (head of the ring after it, step)
    for number in range(kills + 1):
        last = number == kills
        local, present = multiprocessing.Pipe(duplex=False)
        service = context.Process(target=_serve, args=(path, str(out), present))
        service.start()
        present.close()
        local.recv()
        lives = dice.uniform(0, _MOST_SECONDS)
        deadline = time.monotonic() + lives
        while time.monotonic() < deadline or (last and ring.read()):
            if not last:
                steps += 1
                ring.write(ROLLUPS, steps, rollups, 0)
                ring.write(SPANS, steps, spans, 0)
                sent.append((ring._written, steps))
            time.sleep(dice.uniform(0, 0.01))
        assert service.pid is not None
        os.kill(service.pid, signal.SIGKILL)
        service.join()
        moments.append(round(lives, 4))
        tail = ring._written - len(ring.read())
        acknowledged = max((step for head, step in sent if head <= tail), default=0)
        in_spool += len(list(out.glob("spool-*.bin")))
        in_files = len(list(out.glob("*.parquet")))
        _check(folder, acknowledged, steps, f"kill {number} (seed {seed})")
    ingest = Ingest(out, job="kills", host=0, hostname="here", sink=ParquetWriter, clock_ns=0)
    ingest.take_frames(ring)
    ingest.close()
    _check(folder, steps, steps, f"the end (seed {seed})")
    return {
        "kills": kills,
        "seed": seed,
        "steps": steps,
        "lost": ring.lost_spans,
        "files": in_files,
        "left_segments": in_spool,
    }


def _check(folder: Path, acknowledged: int, written: int, where: str) -> None:
    with SpanTables(folder) as tables:
        assert not tables.skipped, f"{where}: {tables.skipped}"
        for table, rows in (("spans", _SPANS), ("rollups", 3)):
            if table == "spans":
                subject = "count(*)"
            else:
                subject = "sum(count)"
            result = tables.query(f"SELECT step, {subject}::BIGINT AS n FROM {table} GROUP BY step ORDER BY step")
            steps = result["step"].tolist()
            assert set(result["n"].tolist()) <= {rows}, f"{where}: a step is there in part or twice: {result}"
            assert steps == list(range(1, len(steps) + 1)), f"{where}: steps are missing: {steps}"
            assert acknowledged <= len(steps) <= written, f"{where}: {len(steps)} of {acknowledged} to {written} steps"
