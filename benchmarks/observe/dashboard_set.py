"""A run of 12,288 ranks for the dashboard: spans through the normal ingest, and beside them what a run folder has."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.observe import ingest
from benchmarks.observe.synthetic_spans import Job
from megascale.core import strict_json
from megascale.core.events import Event
from megascale.observe.metrics import JsonLines
from megascale.observe.store.tables import RANKS_FILE

_GPUS_PER_HOST = 8


def make(run: Path, job: Job, full_steps: int, rollup_steps: int, metric_steps: int) -> dict[str, Any]:
    """Make the run in `run`, which may hold its spans already; what the ingest measured."""
    report: dict[str, Any] = {}
    if not (run / "spans").is_dir():
        report = ingest.measure(run, full_steps, rollup_steps, job)
    write_ranks(run, job)
    write_metrics(run, metric_steps)
    return report


def write_ranks(run: Path, job: Job) -> None:
    """Write the table of ranks: eight per host."""
    with open(run / "spans" / "host=0" / RANKS_FILE, "w") as out:
        for rank in range(job.world):
            location = {
                "tensor": rank % job.tensor,
                "data": rank // job.tensor % job.data,
                "pipeline": job.stage(rank),
            }
            host, device = f"node-{rank // _GPUS_PER_HOST:04d}", f"cuda:{rank % _GPUS_PER_HOST}"
            name = {"attempt": 0, "rank": rank, "time": 0.0, "hostname": host, "device": device}
            out.write(strict_json.dumps(name | location) + "\n")


def write_metrics(run: Path, steps: int) -> None:
    """Metrics of so many steps until now, a checkpoint each 500, and the events of it."""
    random, current = np.random.default_rng(0), time.time() - 6.34 * steps
    metrics, events = JsonLines(run / "metrics.jsonl"), JsonLines(run / "events.jsonl")
    events.write({"time": current, "event": Event.RUN_STARTED, "attempt": 1, "rank": 0})
    noise = random.standard_normal(steps)
    for step in range(1, steps + 1):
        current += 6.34
        seconds = 6.34 + 0.05 * abs(float(noise[step - 1]))
        metrics.write(
            {
                "step": step, "time": current,
                "loss": 2.2 + 8 * math.exp(-step / (steps / 8)) + 0.02 * float(noise[step - 1]),
                "learning_rate": 6e-5 * min(1.0, step / 200), "grad_norm": 0.4 + 0.1 * abs(float(noise[-step])),
                "tokens": step * 12_582_912, "seconds": seconds, "tokens_per_second": 12_582_912 / seconds,
                "mfu": 0.552 * 6.34 / seconds, "memory_gib": 61.2, "compute_seconds": 5.7,
            }
        )  # fmt: skip
        if step % 500 == 0:
            events.write({"time": current, "event": Event.CHECKPOINT_SAVED, "attempt": 1, "rank": 0, "step": step})
    metrics.close()
    events.close()
