"""Throughput of the span store: 12,288 ranks through the normal ingest, and questions about them."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import resource
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.observe.synthetic_spans import Job, make_records
from megascale.observe.store.frames import HEAD_BYTES, ROLLUPS, SPANS
from megascale.observe.store.ingest import Ingest
from megascale.observe.store.parquet import ParquetWriter
from megascale.observe.store.span_ring import SpanRing
from megascale.observe.store.tables import SpanTables

_RINGS, _RING_BYTES = 4, 32 << 20

QUESTIONS = {
    "own time by rank": "SELECT rank, sum(total_ns - waited_ns) / count(DISTINCT step) / 1e9 AS own FROM rollups "
    "WHERE action = 'step' GROUP BY rank ORDER BY own DESC LIMIT 20",
    "forward and backward by rank": "SELECT rank, sum(total_ns - waited_ns) / 1e9 AS own FROM rollups "
    "WHERE action IN ('forward', 'backward') GROUP BY rank ORDER BY own DESC LIMIT 20",
    "time by step": "SELECT step, max(total_ns) / 1e9 AS slowest, median(total_ns) / 1e9 AS middle FROM rollups "
    "WHERE action = 'step' GROUP BY step ORDER BY step",
    "waits by axis and step": "SELECT step, axis, sum(total_ns) / 1e9 AS waited FROM rollups WHERE action = 'wait' "
    "GROUP BY ALL ORDER BY ALL",
    "all actions of a step": "SELECT action, axis, avg(total_ns) / 1e9 AS mean, max(total_ns) / 1e9 AS most "
    "FROM rollups WHERE step = 50 GROUP BY ALL ORDER BY ALL",
    "history of one rank": "SELECT step, action, axis, total_ns, waited_ns FROM rollups WHERE rank = 7 ORDER BY ALL",
    "totals by action": "SELECT action, axis, sum(count) AS n, sum(total_ns) / 1e9 AS seconds, sum(bytes) AS bytes "
    "FROM rollups GROUP BY ALL ORDER BY ALL",
    "last reduction by step": "SELECT step, max(last_ns) - min(last_ns) AS spread, arg_max(rank, last_ns) AS latest "
    "FROM rollups WHERE action = 'finish_reductions' GROUP BY step ORDER BY step",
}


def _write(job: dict[str, int], rings: list[str], full_steps: int, rollup_steps: int, report: Any) -> None:
    """The ranks, in a process of their own: they write as fast as they are read."""
    shape = Job(**job)
    ends = [SpanRing(os.open(path, os.O_RDWR)) for path in rings]
    began = time.process_time()
    for kind, steps in ((SPANS, full_steps), (ROLLUPS, rollup_steps)):
        for rank, step, records in make_records(shape, steps, kind == SPANS):
            ring = ends[rank % len(ends)]
            ring.rank = rank
            while ring.free_bytes() - (_RING_BYTES // 4) < records.nbytes + HEAD_BYTES:
                time.sleep(0.0005)
            ring.write(kind, step, records, 1000)
        report.send((kind, time.process_time() - began))
        report.recv()  # the next kind begins when this one is in its tables
    report.send(None)


def measure(folder: Path, full_steps: int, rollup_steps: int, job: Job) -> dict[str, Any]:
    """Take all of it in and ask; see `python -m benchmarks observe`."""
    rings = [SpanRing(capacity=_RING_BYTES) for _ in range(_RINGS)]
    paths = [f"/proc/{os.getpid()}/fd/{ring.handle}" for ring in rings]
    local, present = multiprocessing.Pipe()
    arguments = (dataclasses.asdict(job), paths, full_steps, rollup_steps, present)
    ranks = multiprocessing.get_context("spawn").Process(target=_write, args=arguments, daemon=True)
    out = folder / "spans" / "host=0"

    def sink(folder: Path) -> ParquetWriter:
        return ParquetWriter(folder, threads=2)

    ingest = Ingest(
        out, job="bench", host=0, hostname="bench", sink=sink, limit=1 << 40, clock_ns=10**18, segment_bytes=32 << 20
    )
    ranks.start()
    record: dict[str, Any] = {"world": job.world, "full_steps": full_steps, "rollup_steps": rollup_steps}
    began: float | None = None
    cpu = 0.0
    phases = {SPANS: "spans", ROLLUPS: "rollups"}
    while True:
        used = sum(ingest.take_frames(ring) for ring in rings)
        if used and began is None:
            began, cpu = time.perf_counter(), time.process_time()
        ingest.maintain()
        if not used and local.poll():
            output = local.recv()
            if output is None:
                break
            kind, maker_cpu = output
            while sum(ingest.take_frames(ring) for ring in rings):
                ingest.maintain()
            ingest.maintain(end=True)
            name = phases[kind]
            rows = ingest.rows.get(name, 0)
            assert began is not None
            seconds = time.perf_counter() - began
            record[name] = {
                "rows": rows,
                "seconds": seconds,
                "rows_per_second": rows / seconds,
                "cpu_seconds": time.process_time() - cpu,
                "making_cpu_seconds": maker_cpu,
            }
            began = None
            local.send(None)
        elif not used:
            time.sleep(0.0005)
        if ingest.failures:
            raise OSError(ingest.error)
    ranks.join()
    ingest.close()
    record["lost_spans"] = sum(ring.lost_spans for ring in rings)
    record["peak_memory_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    record["bytes_on_disk"] = sum(path.stat().st_size for path in out.iterdir())
    record["questions"] = ask(folder)
    return record


def ask(folder: Path, times: int = 3) -> dict[str, Any]:
    """Seconds of each question: first, and the median of `times` more."""
    began = time.perf_counter()
    result: dict[str, Any] = {}
    with SpanTables(folder, threads=2) as tables:
        result["opening"] = {"first": time.perf_counter() - began, "median": None, "rows": None}
        for name, sql in QUESTIONS.items():
            seconds = []
            for _ in range(times + 1):
                began = time.perf_counter()
                rows = len(next(iter(tables.query(sql).values())))
                seconds.append(time.perf_counter() - began)
            result[name] = {"first": seconds[0], "median": statistics.median(seconds[1:]), "rows": rows}
        slowest = tables.query(QUESTIONS["own time by rank"])["rank"][0]
        if int(slowest) != 7:
            raise AssertionError(f"the slowest rank is 7, and {slowest} was found")
    return result
