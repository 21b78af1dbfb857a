"""Spans and roll-ups of a large job, made from its schedule: what 12,288 ranks would tell of their steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from megascale.core.schedule import ActionKind, Schedule, build_pipeline_schedule
from megascale.core.spans import SpanAxis, SpanKind
from megascale.observe.rank.timers import make_spans, roll_up

Array = np.ndarray[Any, Any]

FORWARD_NS = 8_000_000
BACKWARD_NS = 16_000_000
TRANSFER_NS = 300_000
UPDATE_NS = 60_000_000
_SPREAD = 0.01  # by which ranks differ


@dataclasses.dataclass(frozen=True)
class Job:
    """The paper's 12,288 GPUs: tensor 8, pipeline 8 in 6 chunks, data 192, 32 micro-batches (MegaScale, Table 2)."""

    tensor: int = 8
    stages: int = 8
    virtual: int = 6
    data: int = 192
    microbatches: int = 32

    @property
    def world(self) -> int:
        """Ranks."""
        return self.tensor * self.stages * self.data

    def stage(self, rank: int) -> int:
        """The pipeline stage of a rank: tensor-parallel ranks lie side by side, then data, then stages."""
        return rank // (self.tensor * self.data)

    def schedule(self) -> Schedule:
        """Return the actions of the job's stages."""
        return build_pipeline_schedule(self.stages, self.virtual, self.microbatches)


def rows_of_stage(schedule: Schedule, stage: int) -> Array:
    """A step of one rank of a stage as a recorder keeps it, int64 [spans, 10]: the actions of the schedule one after
    another, each compute with a wait in it, and what comes after them. Times from 0 on."""
    rows: list[tuple[int, ...]] = []
    current = 0
    lasts = {ActionKind.FORWARD: FORWARD_NS, ActionKind.BACKWARD: BACKWARD_NS}
    for kind, chunk, microbatch in schedule[stage]:
        duration = lasts.get(kind, 20_000)
        rows.append((kind, 0, chunk, microbatch, -1, 0, -1, current, current + duration, duration))
        current += duration
    after = ((SpanKind.FINISH_REDUCTIONS, 30_000_000), (SpanKind.OPTIMIZER, UPDATE_NS))
    for last, duration in after:
        rows.append((last, 0, -1, -1, -1, 0, -1, current, current + duration, duration))
        current += duration
    return np.array(rows, np.int64)


def rollups_of_stage(rows: Array) -> Array:
    """Roll-ups of such a step with its waits and transfers."""
    waits: list[tuple[int, ...]] = []
    for axis, parent in ((SpanAxis.PIPELINE, SpanKind.FORWARD), (SpanAxis.TENSOR, SpanKind.BACKWARD)):
        for row in rows[rows[:, 0] == parent].tolist():
            start = row[7]
            waits.append((SpanKind.WAIT, axis, row[2], row[3], -1, 0, parent, start, start + TRANSFER_NS, 0))
            waits.append((SpanKind.TRANSFER, axis, row[2], row[3], -1, 1 << 24, -1, start, start + TRANSFER_NS, 0))
    end = int(rows[-1, 8])
    step = (SpanKind.STEP, 0, -1, -1, -1, 0, -1, 0, end, end)
    return roll_up([*map(tuple, rows.tolist()), *waits, step])  # type: ignore[list-item]


def _with_step(rows: Array) -> list[Any]:
    """The rows and the step that they are of."""
    end = int(rows[-1, 8])
    return [*map(tuple, rows.tolist()), (SpanKind.STEP, 0, -1, -1, -1, 0, -1, 0, end, end)]


def make_records(job: Job, steps: int, full: bool, seed: int = 0) -> Iterator[tuple[int, int, Array]]:
    """(rank, step, records) of `steps` steps of all ranks: SPANS where `full`, else ROLLUPS. Ranks differ a little, and
    rank 7 is a tenth slower."""
    schedule, random = job.schedule(), np.random.default_rng(seed)
    pace = 1 + _SPREAD * random.standard_normal(job.world).clip(-3, 3)
    pace[7] += 0.1
    rows = [rows_of_stage(schedule, stage) for stage in range(job.stages)]
    base = [make_spans(_with_step(item)) if full else rollups_of_stage(item) for item in rows]
    times: tuple[str, ...] = ("start_ns", "end_ns")
    if not full:
        times = ("total_ns", "waited_ns", "longest_ns", "host_ns", "first_ns", "last_ns")
    begin = 10**15
    for step in range(1, steps + 1):
        for rank in range(job.world):
            records = base[job.stage(rank)].copy()
            for name in times:
                records[name] = records[name] * pace[rank]
            for name in ("start_ns", "end_ns", "first_ns", "last_ns"):
                if name in times:
                    records[name] += begin
            yield rank, step, records
        begin += 6_340_000_000
