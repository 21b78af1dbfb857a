"""`python -m benchmarks shapes`: measure many model shapes one after another in the same processes.

Imports, CUDA contexts and compiled kernels are made once, so a call of a few minutes measures as many shapes as fit.
Each shape has process groups, a model and an optimizer of its own, and its memory is freed before the next one. A shape
that fails has its reason in its row, and the next one follows.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from benchmarks.training.shape_file import PeerRun, Shape, load_shapes
from benchmarks.training.shape_rows import OURS, TRAINERS, RowFile, describe_row, name_row, print_rows
from megascale.bench.step_monitor import StepMonitor
from megascale.core.process_orders import ORDERS_VARIABLE
from megascale.errors import ConfigError, FitError, MegascaleError, TrainingError

if TYPE_CHECKING:
    from benchmarks.harness.rank_series import Item, RankSeries
    from megascale.config import Config

DEADLINE_VARIABLE = "MEGASCALE_BENCH_DEADLINE"  # Unix time in seconds at which the running shape ends


@dataclass(frozen=True)
class Task:
    """One row: a shape that a trainer trains.

    Attributes:
        shape: what to train.
        peer: how a peer trains it; None for our own trainer.
    """

    shape: Shape
    peer: PeerRun | None = None

    @property
    def key(self) -> dict[str, str]:
        """Return what identifies the row."""
        if self.peer is None:
            return {"shape": self.shape.name, "trainer": OURS, "label": ""}
        return {"shape": self.shape.name, "trainer": self.peer.trainer, "label": self.peer.label}

    @property
    def name(self) -> str:
        """Return shape and label."""
        return " ".join(part for part in (self.key["shape"], self.key["label"]) if part)

    @property
    def seconds(self) -> float:
        """Return the time limit."""
        if self.peer is not None and self.peer.seconds is not None:
            return self.peer.seconds
        return self.shape.seconds


def register(app: typer.Typer) -> None:
    """Add the benchmark."""
    app.command("shapes")(shapes)


def shapes(
    file: Path = typer.Argument(..., help="A TOML file of shapes; its format is in benchmarks/training/shape_file.py."),
    nproc: int | None = typer.Option(None, "--nproc", min=1, help="Processes. \\[default: one per GPU, or 1]"),
    trainer: str = typer.Option(
        OURS, help=f"One of {', '.join(TRAINERS)}. Peers train each table shape.peer of theirs."
    ),
    only: list[str] = typer.Option([], help="Name of a shape; may be repeated. \\[default: all]"),
    device: str | None = typer.Option(None, help="Override of train.device, such as cpu."),
    minutes: float | None = typer.Option(
        None,
        min=0.1,
        help="Time after which the running shape ends. A shape begins only if half of its own limit remains.",
    ),
    fresh: bool = typer.Option(
        False, "--fresh", help="Start new processes for each shape, so that no shape is affected by earlier ones."
    ),
    gemm_seconds: float = typer.Option(2.0, min=0.1, help="Duration of the sustained GEMMs before and after a shape."),
    profile: Path | None = typer.Option(
        None,
        help="Folder: trace a further step of each shape of ours, with a table of its kernels in a .txt "
        "file. File names have the letters and digits of the shape's name, and dashes.",
    ),
    check: bool = typer.Option(False, "--check", help="Print layout and planned memory of each shape, and stop."),
    out: Path = typer.Option(Path("bench-shapes.json"), help="JSON file, written after each shape."),
) -> None:
    """Measure step time, tokens/s, MFU and memory of several shapes in one set of processes.

    A shape that fails, runs out of memory or takes longer than its limit has its reason in its row. If the limit ends
    the timed steps, the row has the figures of the steps before it. The rest is measured: in the same processes, or in
    new ones if these cannot go on. The first rank prints the progress about every ten seconds.

    A shape that the host bounds can be slower after many others in the same processes: repeat it with --fresh.

    Examples:

      python -m benchmarks shapes shapes.toml --nproc 4 --out shapes.json

      python -m benchmarks shapes shapes.toml --nproc 4 --trainer megatron-core

      python -m benchmarks shapes shapes.toml --nproc 4 --check
    """
    from megascale.train import launcher

    tasks = list_tasks(load_shapes(file), trainer, only)
    if launcher.is_launched_rank():
        raise typer.Exit(
            run_tasks(tasks, out, device=device, gemm_seconds=gemm_seconds, fresh=fresh, profile_folder=profile)
        )
    import torch

    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    world = nproc or gpus or 1
    if check:
        check_tasks(tasks, world, device)
        return
    configs = load_configs(tasks, world, device)
    rows = RowFile(out, make_head(file, trainer, world))
    if minutes is not None:
        os.environ[DEADLINE_VARIABLE] = str(time.time() + 60 * minutes)
    launch_tasks(tasks, configs, rows, world=world)
    print_rows(rows.rows)
    typer.echo(f"metrics: {out}")
    if all("failed" in row for row in rows.rows):
        raise TrainingError("all shapes failed; the reasons are in the table")


def list_tasks(all_shapes: Sequence[Shape], trainer: str, only: Sequence[str]) -> list[Task]:
    """Return the rows to measure. Raises ConfigError for unknown names."""
    if trainer not in TRAINERS:
        raise ConfigError(f"--trainer={trainer} is unknown; use one of {', '.join(TRAINERS)}")
    unknown = set(only) - {shape.name for shape in all_shapes}
    if unknown:
        names = ", ".join(shape.name for shape in all_shapes)
        raise ConfigError(f"--only={sorted(unknown)[0]}: the file has no shape of this name; it has {names}")
    chosen = [shape for shape in all_shapes if not only or shape.name in only]
    if trainer == OURS:
        return [Task(shape) for shape in chosen]
    tasks = [Task(shape, run) for shape in chosen for run in shape.list_peer_runs(trainer)]
    if not tasks:
        raise ConfigError(f"--trainer={trainer}: no shape has a [[shape.peer]] with this trainer; add one")
    return tasks


def load_configs(tasks: Sequence[Task], world: int, device: str | None) -> list[Config]:
    """Return the tasks' configurations. Raises ConfigError or FitError that names the shape, before anything starts."""
    return [load_checked_config(task, world, device) for task in tasks]


def load_checked_config(task: Task, world: int, device: str | None) -> Config:
    """Return a task's configuration. Raises ConfigError or FitError that names the shape."""
    from benchmarks.training.peer_choice import find_obstacle
    from megascale.core.layout import lay_out

    config = task.shape.load_config(device)
    try:
        lay_out(config, world)
    except MegascaleError as error:
        raise type(error)(f"shape {task.shape.name} on {world} processes: {error}") from None
    if task.peer is not None:
        obstacle = find_obstacle(task.peer.trainer, config)
        if obstacle:
            raise ConfigError(f"shape {task.shape.name}: {task.peer.trainer} cannot train it: {obstacle}")
    return config


def make_head(file: Path, trainer: str, world: int) -> dict[str, Any]:
    """Return the facts of the call."""
    return {"date": date.today().isoformat(), "file": file.name, "trainer": trainer, "processes": world}


def launch_tasks(tasks: Sequence[Task], configs: Sequence[Config], rows: RowFile, *, world: int) -> None:
    """Start ranks, and start them again if they end early, until each task has a row."""
    from benchmarks.harness.rank_series import SeriesServer
    from megascale.core.layout import lay_out
    from megascale.errors import EXIT_INTERRUPTED
    from megascale.train import launcher

    server = SeriesServer()
    # The processes outlive failed groups, and torch's watchdog must not end them (rendezvous/start_job.py).
    os.environ.setdefault(ORDERS_VARIABLE, "-")
    while len(rows.rows) < len(tasks):
        first = len(rows.rows)
        server.begin_launch(range(first, len(tasks)))
        code = launcher.launch(sys.argv[1:], lay_out(configs[first], world), holds_model=False, program="benchmarks")
        if code == EXIT_INTERRUPTED:
            raise typer.Exit(code)
        rows.read()
        following = len(rows.rows)
        if following < len(tasks) and server.has_begun(following):
            reason = server.read_failure(following) or f"the processes ended with exit code {code}"
            row: dict[str, Any] = dict(tasks[following].key)
            figures = server.read_partial(following)
            if figures is None:
                row["failed"] = reason
            else:
                row |= figures | {"cut": reason}
            rows.add(row)
        if len(rows.rows) == first:
            raise TrainingError(f"the processes ended with exit code {code} before a shape began; see the lines above")


def run_tasks(
    tasks: Sequence[Task],
    out: Path,
    *,
    device: str | None,
    gemm_seconds: float,
    fresh: bool,
    profile_folder: Path | None = None,
) -> int:
    """Measure the tasks of this launch in one rank, and return the exit code of the process.

    Args:
        fresh: whether the processes end after one task.
        profile_folder: folder for tables of kernels, or None.
    """
    from benchmarks.harness.rank_series import EXIT_LOST, RankSeries

    rank = int(os.environ["RANK"])
    series = RankSeries(rank, int(os.environ["WORLD_SIZE"]))
    rows = RowFile(out)
    for number in series.items:
        task = tasks[number]
        if series.decide(number, read_remaining_seconds() > task.seconds / 2):
            row = measure_task(
                series, number, task, device=device, gemm_seconds=gemm_seconds, profile_folder=profile_folder
            )
            row["earlier_shapes"] = number - series.items[0]
            row["threads"] = count_threads()
        else:
            row = task.key | {"failed": f"not begun: less than {task.seconds / 2:.0f} s of --minutes remained"}
        if rank == 0:
            rows.add(row)
            print(describe_row(row), flush=True)
        if series.is_lost:
            return EXIT_LOST
        if fresh:
            return 0
    return 0


def count_threads() -> int:
    """Return the number of threads of this process, which tells whether shapes leave some behind."""
    return len(os.listdir("/proc/self/task"))


def read_remaining_seconds() -> float:
    """Return the seconds until the time of --minutes is over; infinity without it."""
    return float(os.environ.get(DEADLINE_VARIABLE, "inf")) - time.time()


def measure_task(
    series: RankSeries,
    number: int,
    task: Task,
    *,
    device: str | None,
    gemm_seconds: float,
    profile_folder: Path | None = None,
) -> dict[str, Any]:
    """Measure a task on all ranks and return its row. Collective."""
    start = time.monotonic()
    config = task.shape.load_config(device)

    def measure(item: Item) -> dict[str, Any] | None:
        monitor = StepMonitor(
            name_row(task.key),
            warmup=task.shape.warmup,
            steps=task.shape.steps,
            prints=item.rank == 0,
            check=item.check,
        )
        item.watch_steps(monitor)
        if task.peer is None:
            return measure_ours(
                task.shape,
                config,
                item,
                monitor=monitor,
                suffix=series.name_suffix(number),
                gemm_seconds=gemm_seconds,
                profile_folder=profile_folder,
            )
        from benchmarks.training.peer_shape import measure_peer

        return measure_peer(task.shape, task.peer, config=config, item=item, monitor=monitor, gemm_seconds=gemm_seconds)

    outcome = series.run(number, min(task.seconds, max(1.0, read_remaining_seconds())), measure)
    row: dict[str, Any] = dict(task.key)
    figures = outcome.result
    if outcome.error:
        figures = outcome.partial
        if figures is not None:
            row["cut"] = outcome.error
    if figures is not None:
        row |= figures
        if outcome.end_error:
            row["end_error"] = outcome.end_error
        row |= summarise_peaks(outcome.peak_gib)
    else:
        row["failed"] = outcome.error or "no rank returned a result"
    row["leftover_gib"] = outcome.leftover_gib
    row["seconds_in_all"] = time.monotonic() - start
    return row


def summarise_peaks(peaks: Sequence[float | None]) -> dict[str, Any]:
    """Return the fields of a row that have the peak memory of all ranks; none on CPUs.

    Args:
        peaks: per rank, its peak in GiB with the memory of its exchanges, or None.
    """
    known_peaks = [peak for peak in peaks if peak is not None]
    if not known_peaks:
        return {}
    return {"peak_memory_gib": max(known_peaks), "peak_memory_gib_by_rank": known_peaks}


def measure_ours(
    shape: Shape,
    config: Config,
    item: Item,
    *,
    monitor: StepMonitor,
    suffix: str,
    gemm_seconds: float,
    profile_folder: Path | None = None,
) -> dict[str, Any] | None:
    """Measure a shape with our trainer; return the figures on rank 0, None on other ranks."""
    from megascale.bench.measured_steps import join_groups, measure_steps
    from megascale.rendezvous.groups import abort, shutdown

    profile: Path | None = None
    if profile_folder is not None:
        profile = profile_folder / f"{shape.file_name}.json"
    item.set_address()
    rank_info, groups = join_groups(config, name_suffix=suffix)
    if groups is not None:
        item.on_end(abort=partial(abort, groups), leave=partial(shutdown, groups))
    return measure_steps(
        config,
        rank_info,
        groups=groups,
        steps=shape.steps,
        warmup=shape.warmup,
        mean_document=shape.mean_document,
        even_experts=shape.even_experts,
        gemm_seconds=gemm_seconds,
        host_steps=0,
        profile=profile,
        monitor=monitor,
    )


def check_tasks(tasks: Sequence[Task], world: int, device: str | None) -> None:
    """Print the plan of each task, and why others cannot run.

    Raises the error of a single such task after all tasks. For several, raises FitError, or ConfigError if the settings
    of one are wrong.
    """
    errors: list[MegascaleError] = []
    for task in tasks:
        try:
            config = load_checked_config(task, world, device)
        except MegascaleError as error:
            errors.append(error)
            typer.echo(f"{task.name}: cannot run: {error}")
        else:
            print_plan(task, config, world)
    if len(errors) == 1:
        raise errors[0]
    if not errors:
        return
    summary = f"{len(errors)} of {len(tasks)} rows cannot run on {world} processes; the reasons are above"
    if any(not isinstance(error, FitError) for error in errors):
        raise ConfigError(f"{summary}. Correct their settings, or choose others with --only")
    raise FitError(f"{summary}. Choose others with --only, or set --nproc to the number that a row needs")


def print_plan(task: Task, config: Config, world: int) -> None:
    """Print the layout, the micro-batches and the planned memory of the largest stage of a task."""
    from megascale.core.layout import lay_out

    layout = lay_out(config, world)
    estimates = [layout.stage_memory(stage) for stage in range(config.parallel.pipeline)]
    memory = max(estimate.total for estimate, _ in estimates)
    reasons = {reason for _, reason in estimates if reason}
    typer.echo(
        f"{task.name}: {layout.grid.describe()}, {layout.microbatches} micro-batches of "
        f"{config.train.micro_batch} x {config.model.sequence_length} tokens per rank and step, "
        f"{memory / 2**30:.1f} GiB planned, {task.shape.warmup} + {task.shape.steps} steps, limit {task.seconds:.0f} s"
    )
    for reason in sorted(reasons):
        typer.echo(f"  no CUDA graphs expected: {reason}")
