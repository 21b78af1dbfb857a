"""`python -m benchmarks fleet`: the dashboard's table of all runs, made from synthetic run folders."""

from __future__ import annotations

import random
import time
from datetime import date
from pathlib import Path

import typer

from benchmarks.harness.temporary import temporary_folder
from benchmarks.observe.dashboard_set import write_metrics
from megascale.core import strict_json
from megascale.core.events import Event

BOUND_SECONDS = 2.0  # for the first look at 1,000 runs on one core
_LENGTHS = (40, 400, 1200)  # steps of the runs
_PLANNED = 1200
_DAYS = 20  # over which runs have ended
_LAST_EVENTS = (Event.RUN_FINISHED, Event.RUN_FINISHED, Event.RUN_FAILED, Event.INTERRUPTED, Event.CHECKPOINT_SAVED)


def register(app: typer.Typer) -> None:
    """Add the bench."""
    app.command("fleet")(fleet)


def fleet(
    runs: int = typer.Option(1000, min=1, help="Number of run folders."),
    folder: Path | None = typer.Option(None, help="Folder of the runs, made if it is missing and kept."),
    out: Path = typer.Option(Path("bench-fleet.json"), help="JSON file for the figures."),
) -> None:
    """The table of all runs: processor time of the first look and of later ones. Exit code 1 if an aim is missed.

    A fifth of the runs is alive, the others have ended or failed. They have 40, 400 or 1,200 steps.

    Example: python -m benchmarks fleet --runs 1000
    """
    from megascale.observe.dashboard.fleet import Fleet
    from megascale.resilience.driver.api.client import describe_job

    with temporary_folder() as temporary:
        location = folder or Path(temporary) / "runs"
        if not location.is_dir():
            write_runs(location, runs)
        table = Fleet(describe_job)
        seconds = []
        unmeasured = []
        for _ in range(3):
            begin = time.process_time()
            answer = table.list_rows(location)
            seconds.append(time.process_time() - begin)
            unmeasured.append(answer["unmeasured"])
    for index, (duration, remaining) in enumerate(zip(seconds, unmeasured, strict=True)):
        typer.echo(f"look {index + 1}: {duration:.2f} s of processor time, {remaining} effective times to follow")
    figures = {"date": date.today().isoformat(), "runs": runs, "seconds": seconds, "unmeasured": unmeasured}
    out.write_text(strict_json.dumps(figures) + "\n")
    if seconds[0] > BOUND_SECONDS:
        typer.echo(f"the first look takes more than {BOUND_SECONDS:g} s", err=True)
        raise typer.Exit(1)


def write_runs(folder: Path, count: int) -> None:
    """Write `count` run folders, copies of a few runs with events of their own."""
    choices = random.Random(0)
    templates = []
    for steps in _LENGTHS:
        template = folder / f"template-{steps}"
        template.mkdir(parents=True)
        write_metrics(template, steps)
        templates.append((steps, [(template / name).read_bytes() for name in ("metrics.jsonl", "events.jsonl")]))
        for file in template.iterdir():
            file.unlink()
        template.rmdir()
    for number in range(count):
        run = folder / f"gpt-{number:04d}"
        run.mkdir()
        steps, (metrics, events) = choices.choice(templates)
        event = _LAST_EVENTS[number % len(_LAST_EVENTS)]
        end = time.time()
        if event != Event.CHECKPOINT_SAVED:
            end -= choices.random() * _DAYS * 86_400
        last = {"time": end, "event": event, "attempt": choices.choice((1, 1, 1, 2, 4)), "rank": 0, "step": steps}
        (run / "metrics.jsonl").write_bytes(metrics)
        (run / "events.jsonl").write_bytes(events + strict_json.dumps(last).encode() + b"\n")
        (run / "config.toml").write_text(f'[train]\nname = "{run.name}"\nsteps = {_PLANNED}\n')
