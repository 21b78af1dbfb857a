"""`megascale timeline`: a step of some ranks on one time axis, over the schedule as it was planned."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from megascale.observe.analysis.step_timeline import StepTimeline, Track

_PICTURES = (".png", ".svg", ".pdf")
_EVENTS = (".json", ".json.gz")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("timeline")(timeline)


def timeline(
    run: Path = typer.Argument(..., help="Run folder, such as runs/stdlib, alive or not."),
    step: int | None = typer.Option(None, "--step", help="Step; by default the last of which all spans were kept."),
    ranks: str = typer.Option("", "--ranks", help="0,1 or 0-3,8 or all; by default rank 0's group along the view."),
    view: str = typer.Option("pipeline", help="Axis that orders the ranks: pipeline, tensor or data."),
    out: list[Path] = typer.Option(
        [], "--out", help="File: .png, .svg, .pdf, or .json, .json.gz for Perfetto and Chrome. May be repeated."
    ),
    waits: int = typer.Option(8, min=0, help="Longest waits to explain."),
    as_json: bool = typer.Option(False, "--json", help="Print the figures as JSON."),
) -> None:
    """Where a step's time went, rank by rank: computing, bubbles, exposed communication, and what waited for whom.

    A wait is a bubble as long as the other side was not ready (its message not sent, the collective not joined), and
    exposed communication from then on. The plan is the same actions in the same order, each stage's chunks at their
    median own time and nothing else in the way: what the picture shows below each rank.

    Look down the view's axis: a late stage pushes its neighbours along pipeline; along tensor and data the one
    rank that never waits is the slow one. Spans are kept of each observe.spans-th step, and of those that megascale
    spans --steps asks for.

    Examples:

      megascale timeline runs/stdlib --out step.png

      megascale timeline runs/stdlib --step 300 --view data --ranks all --out step.json.gz

    Open .json and .json.gz with https://ui.perfetto.dev or chrome://tracing.
    """
    from megascale.errors import ConfigError
    from megascale.observe.analysis.step_timeline import step_timeline
    from megascale.observe.store.tables import SpanTables

    for path in out:
        if not path.name.endswith((*_PICTURES, *_EVENTS)):
            raise ConfigError(f"--out={path} ends in none of {', '.join((*_PICTURES, *_EVENTS))}")
    with SpanTables(run) as tables:
        found = step_timeline(tables, step, ranks, view)
    for path in out:
        if path.suffix in _PICTURES:
            from megascale.observe.analysis.timeline_picture import draw_timeline

            draw_timeline(found, path)
        else:
            from megascale.observe.analysis.timeline_events import write_trace_events

            write_trace_events(found, path)
    if as_json:
        from megascale.core import strict_json

        typer.echo(strict_json.dumps(as_tree(found, waits)))
    else:
        show(found, waits)
        for path in out:
            typer.echo(f"written: {path}")


def show(found: StepTimeline, waits: int) -> None:
    """The tables."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    text = f"step {found.step}: {found.length / 1e6:.2f} ms"
    if not math.isnan(found.planned_seconds):
        text += f"; pipeline {1e3 * found.pipeline_seconds:.2f} ms, planned {1e3 * found.planned_seconds:.2f} ms"
    console.print(text)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    heads = ["rank", "s/t/d", "step, ms", "compute", "bubble", "exposed", "samples", "update", "other"]
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number > 1 else "left", no_wrap=True)
    for track in found.tracks:
        tensor, stage, data = track.coordinates
        cells = [(track.end - track.begin) / 1e9, track.seconds["compute"], track.seconds["bubble"], exposed(track)]
        cells += [track.seconds[name] for name in ("samples", "optimizer", "other")]
        table.add_row(str(track.rank), f"{stage}/{tensor}/{data}", *(f"{1e3 * seconds:.2f}" for seconds in cells))
    console.print(table)
    axes = sorted({name for track in found.tracks for name in track.seconds if name.startswith("exposed ")})
    if axes:
        means = {name: sum(track.seconds.get(name, 0.0) for track in found.tracks) / len(found.tracks) for name in axes}
        told = ", ".join(f"{name.removeprefix('exposed ')} {1e3 * mean:.2f}" for name, mean in means.items())
        console.print(f"exposed communication by axis, mean of a rank, ms: {told}")
    if found.bubbles:
        whole = sum(found.bubbles.values())
        told = ", ".join(f"rank {rank} {part / whole:.0%}" for rank, part in list(found.bubbles.items())[:4])
        console.print(f"bubbles, by the rank that they began with: {told}")
    for wait in longest(found, waits):
        console.print(
            f"{(wait.end - wait.begin) / 1e6:9.2f} ms  rank {wait.rank} in {wait.act}, from {wait.begin / 1e6:.2f} ms: "
            f"{wait.kind}: {wait.why}"
            + (f"; it began with rank {wait.root}" if wait.root not in (-1, wait.on) else ""),
            markup=False,
            soft_wrap=True,
        )


def exposed(track: Track) -> float:
    """Seconds of exposed communication, all axes."""
    return sum(seconds for name, seconds in track.seconds.items() if name.startswith("exposed "))


def longest(found: StepTimeline, count: int) -> list[Any]:
    """The longest waits of the ranks shown."""
    waits = [wait for track in found.tracks for wait in track.waits]
    return sorted(waits, key=lambda wait: wait.begin - wait.end)[:count]


def as_tree(found: StepTimeline, waits: int) -> dict[str, Any]:
    """What --json prints; seconds."""
    planned = not math.isnan(found.planned_seconds)
    return {
        "step": found.step,
        "view": found.view,
        "seconds": found.length / 1e9,
        "planned_seconds": found.planned_seconds if planned else None,
        "pipeline_seconds": found.pipeline_seconds if planned else None,
        "clock_error_seconds": found.clock_error / 1e9 if found.clock_error >= 0 else None,
        "ranks": [
            {"rank": t.rank, "tensor": t.coordinates[0], "pipeline": t.coordinates[1], "data": t.coordinates[2], "seconds": t.seconds}
            for t in found.tracks
        ],
        "bubbles": {str(rank): seconds for rank, seconds in found.bubbles.items()},
        "waits": [
            {"rank": w.rank, "in": w.act, "kind": w.kind, "axis": w.axis, "begin": w.begin / 1e9,
             "seconds": (w.end - w.begin) / 1e9, "on": w.on, "root": w.root, "why": w.why}
            for w in longest(found, waits)
        ],
    }  # fmt: skip
