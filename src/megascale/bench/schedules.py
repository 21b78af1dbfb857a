"""Time to make, check, compile and replay pipeline schedules: what the planner and the simulator are built on."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import typer

# (stages, chunks a stage, micro-batches, data-parallel replicas replayed together)
CASES = ((8, 6, 32, 1), (8, 6, 32, 192), (35, 3, 280, 1), (64, 1, 512, 1), (64, 4, 512, 1))


def register(app: typer.Typer) -> None:
    """Add `bench schedules`."""
    app.command("schedules")(schedules)


def schedules(
    repeats: int = typer.Option(3, min=1, help="Runs of each part; the best counts."),
    out: Path = typer.Option(Path("bench-schedules.json"), help="JSON file for the figures."),
) -> None:
    """Time the pipeline schedules: make, check for deadlock, compile for replay, replay. No GPU.

    The second row is a step of the paper's 12,288 GPUs (TP8 PP8, 192 replicas, each with durations of its own).
    Example: megascale bench schedules --repeats 5
    """
    import numpy as np
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from megascale.core.checker import check
    from megascale.core.replay import Graph, replay
    from megascale.core.schedule import ideal_bubble, pipeline_schedule

    def best(work: Callable[[], object]) -> float:
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            work()
            times.append(time.perf_counter() - begin)
        return min(times)

    rows = []
    for p, v, m, replicas in CASES:
        schedule = pipeline_schedule(p, v, m)
        graph = Graph.of(schedule)
        equal = graph.durations(1.0, 2.0)
        durations = equal if replicas == 1 else equal[:, None] * np.random.default_rng(0).uniform(1, 1.1, replicas)
        rows.append(
            {
                "stages": p,
                "chunks": v,
                "microbatches": m,
                "replicas": replicas,
                "actions": graph.actions,
                "bubble": float(replay(graph, equal).bubble),
                "bubble_ideal": ideal_bubble(p, v, m),
                "make_s": best(lambda: pipeline_schedule(p, v, m)),  # noqa: B023 - called at once
                "check_s": best(lambda: check(schedule)),  # noqa: B023
                "compile_s": best(lambda: Graph.of(schedule)),  # noqa: B023
                "replay_s": best(lambda: replay(graph, durations)),  # noqa: B023
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
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.processor() or platform.machine(),
        "rows": rows,
    }
    out.write_text(json.dumps(record, indent=2) + "\n")
