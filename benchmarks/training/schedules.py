"""Time to make, check, compile and replay pipeline schedules: what the planner and the simulator are built on."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer

from megascale.core import strict_json

# (stages, chunks a stage, micro-batches, data-parallel replicas replayed together)
CASES = ((8, 6, 32, 1), (8, 6, 32, 192), (35, 3, 280, 1), (64, 1, 512, 1), (64, 4, 512, 1))
# Rounds on a slow network: gpt-13b in PP2 DP4, 64 x 2,048 at micro-batch 2, every byte through host memory.
STAGES = 2
MICROBATCHES = 8
LAYERS = 40
COMPUTE_S = 2.4
WIRE_S = 0.87
CHUNKS, ROUNDS = (2, 4, 5, 10), (2, 4, 8)


def register(app: typer.Typer) -> None:
    """Add `python -m benchmarks schedules`."""
    app.command("schedules")(schedules)


def schedules(
    repeats: int = typer.Option(3, min=1, help="Runs of each part; the best counts."),
    out: Path = typer.Option(Path("bench-schedules.json"), help="JSON file for the metrics."),
) -> None:
    """Time the pipeline schedules: make, check for deadlock, compile for replay, replay. No GPU.

    The second row is a step of the paper's 12,288 GPUs (TP8 PP8, 192 replicas, each with durations of its own). Then a
    replay of what longer rounds (parallel.micro_batch_group_size) hide on a slow network.
    Example: python -m benchmarks schedules --repeats 5
    """
    import numpy as np
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from megascale.core.checker import check_schedule
    from megascale.core.replay import ActionGraph, replay_schedule
    from megascale.core.schedule import build_pipeline_schedule, compute_ideal_bubble

    def best(work: Callable[[], object]) -> float:
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            work()
            times.append(time.perf_counter() - begin)
        return min(times)

    rows = []
    for p, v, m, replicas in CASES:
        schedule = build_pipeline_schedule(p, v, m)
        graph = ActionGraph.compile(schedule)
        equal = graph.durations(1.0, 2.0)
        if replicas == 1:
            durations = equal
        else:
            durations = equal[:, None] * np.random.default_rng(0).uniform(1, 1.1, replicas)
        rows.append(
            {
                "stages": p,
                "chunks": v,
                "microbatches": m,
                "replicas": replicas,
                "actions": graph.action_count,
                "bubble": float(replay_schedule(graph, equal).bubble),
                "bubble_ideal": compute_ideal_bubble(p, v, m),
                "make_s": best(lambda: build_pipeline_schedule(p, v, m)),  # noqa: B023 - called at once
                "check_s": best(lambda: check_schedule(schedule)),  # noqa: B023
                "compile_s": best(lambda: ActionGraph.compile(schedule)),  # noqa: B023
                "replay_s": best(lambda: replay_schedule(graph, durations)),  # noqa: B023
            }
        )
    table = Table(title=f"pipeline schedules, best of {repeats}, seconds", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for name in ("p x v, m", "data", "actions", "bubble", "ideal", "make", "check", "compile", "replay"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row['stages']} x {row['chunks']}, {row['microbatches']}",
            str(row["replicas"]),
            f"{row['actions']:,}",
            f"{row['bubble']:.2%}",
            f"{row['bubble_ideal']:.2%}",
            *(f"{row[part]:.3f}" for part in ("make_s", "check_s", "compile_s", "replay_s")),
        )
    Console().print(table)
    record: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.processor() or platform.machine(),
        "rows": rows,
    }
    record["rounds"] = rounds()
    shown = Table(
        title=f"seconds a step: {COMPUTE_S} of compute, {WIRE_S} each of gather and reduction",
        box=box.SIMPLE_HEAD,
    )
    for name in ("chunks a stage", *(f"rounds of {size}" for size in ROUNDS), "free collectives"):
        shown.add_column(name, justify="right")
    for row in record["rounds"]:
        shown.add_row(str(row["chunks"]), *(f"{s:.2f}" for s in row["seconds"]), f"{row['free']:.2f}")
    Console().print(shown)
    out.write_text(strict_json.dumps(record, indent=2) + "\n")


def rounds() -> list[dict[str, Any]]:
    """The replayed step for each number of chunks and length of rounds; the logits count as a layer."""
    import numpy as np

    from megascale.core.replay import ActionGraph, replay_schedule
    from megascale.core.schedule import build_pipeline_schedule

    layer = COMPUTE_S / (3 * MICROBATCHES * (LAYERS + 1) / STAGES)

    def step(chunks: int, size: int, transfer: float) -> float:
        work = np.full((STAGES, chunks), LAYERS / (STAGES * chunks))
        work[-1, -1] += 1
        graph = ActionGraph.compile(build_pipeline_schedule(STAGES, chunks, MICROBATCHES, micro_batch_group_size=size))
        each = transfer / chunks
        return float(
            replay_schedule(graph, graph.durations(work * layer, 2 * work * layer, gather=each, reduce=each)).makespan
        )

    return [
        {"chunks": v, "seconds": [step(v, size, WIRE_S) for size in ROUNDS], "free": step(v, STAGES, 0.0)}
        for v in CHUNKS
    ]
