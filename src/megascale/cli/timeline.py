"""`megascale timeline`: show a step of some ranks on one time axis, above the planned schedule."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from megascale.cli.common import JSON, add_rows, make_console, make_number_table, number_or_none, print_json

if TYPE_CHECKING:
    from megascale.observe.analysis.step_timeline import StepTimeline, Track

_PICTURES = (".png", ".svg", ".pdf")
_TRACES = (".json", ".json.gz")
_MAX_BUBBLE_CAUSES = 4  # ranks that are named as causes of bubbles


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(timeline)


def timeline(
    run: Path = typer.Argument(..., help="Run folder, such as runs/stdlib, training or ended."),
    step: int | None = typer.Option(None, "--step", help="Step; default: the last one with all spans recorded."),
    ranks: str = typer.Option("", "--ranks", help="0,1 or 0-3,8 or all; default: rank 0's group along the view."),
    view: str = typer.Option("pipeline", help="Axis that orders the ranks: pipeline, tensor or data."),
    out: list[Path] = typer.Option(
        [], "--out", help="File: .png, .svg, .pdf, or .json, .json.gz for Perfetto and Chrome; repeatable."
    ),
    waits: int = typer.Option(8, min=0, help="Number of the longest waits to explain."),
    as_json: bool = JSON,
) -> None:
    """Show a step's time by rank: computing, bubbles, exposed communication, and which rank each wait was for.

    A wait is a bubble while the other side is not ready (its message is not sent, the collective not joined), and
    exposed communication from then on. The plan has the same actions in the same order, each stage's chunks at their
    median own time without any delay; the picture shows it below each rank.

    A late stage delays its neighbours along pipeline. Along tensor and data the one rank that never waits is the slow
    one. Spans are recorded for each observe.spans-th step, and for the steps that megascale spans --steps requests.

    Examples:

      megascale timeline runs/stdlib --out step.png

      megascale timeline runs/stdlib --step 300 --view data --ranks all --out step.json.gz

    Open .json and .json.gz with https://ui.perfetto.dev or chrome://tracing.
    """
    from megascale.errors import ConfigError
    from megascale.observe.analysis.step_timeline import read_step_timeline
    from megascale.observe.store.tables import SpanTables

    suffixes = _PICTURES + _TRACES
    for path in out:
        if not path.name.endswith(suffixes):
            raise ConfigError(f"--out={path} must end in one of {', '.join(suffixes)}")
    with SpanTables(run) as tables:
        report = read_step_timeline(tables, step, ranks, view)
    for path in out:
        if path.suffix in _PICTURES:
            from megascale.observe.analysis.timeline_output import draw_timeline

            draw_timeline(report, path)
        else:
            from megascale.observe.analysis.timeline_output import write_trace_events

            write_trace_events(report, path)
    if as_json:
        print_json(_to_dict(report, waits))
        return
    _print_tables(report, waits)
    for path in out:
        typer.echo(f"written: {path}")


def _print_tables(report: StepTimeline, waits: int) -> None:
    """Print a row per rank, exposed communication by axis, causes of bubbles, and the longest waits."""
    console = make_console()
    line = f"step {report.step}: {report.length / 1e6:.2f} ms"  # report.length is in nanoseconds
    if not math.isnan(report.planned_seconds):  # NaN: not all ranks of a pipeline are shown
        line += f"; pipeline {1e3 * report.pipeline_seconds:.2f} ms, planned {1e3 * report.planned_seconds:.2f} ms"
    console.print(line)
    # s/t/d: coordinates of the rank along pipeline (stage), tensor and data.
    headers = ["rank", "s/t/d", "step, ms", "compute", "bubble", "exposed", "samples", "update", "other"]
    table = make_number_table(headers, left_aligned=["s/t/d"])
    add_rows(table, map(_format_track, report.tracks))
    console.print(table)
    names = sorted({name for track in report.tracks for name in track.seconds if name.startswith("exposed ")})
    if names:
        mean_texts = []
        for name in names:
            mean = sum(track.seconds.get(name, 0.0) for track in report.tracks) / len(report.tracks)
            mean_texts.append(f"{name.removeprefix('exposed ')} {1e3 * mean:.2f}")
        console.print(f"exposed communication by axis, mean per rank, ms: {', '.join(mean_texts)}")
    if report.bubbles:
        total = sum(report.bubbles.values())
        largest = list(report.bubbles.items())[:_MAX_BUBBLE_CAUSES]
        sources = [f"rank {rank} {seconds / total:.0%}" for rank, seconds in largest]
        console.print(f"bubbles, by the rank that caused them: {', '.join(sources)}")
    for wait in _find_longest_waits(report, waits):
        line = f"{(wait.end - wait.begin) / 1e6:9.2f} ms  rank {wait.rank} in {wait.action}, from "
        line += f"{wait.begin / 1e6:.2f} ms: {wait.kind}: {wait.reason}"
        if wait.root not in (-1, wait.waited_on):  # the awaited rank was itself late because of another rank
            line += f"; rank {wait.root} caused it"
        console.print(line, markup=False, soft_wrap=True)


def _format_track(track: Track) -> list[str]:
    """Return the cells of a rank, with times in ms."""
    tensor, stage, data = track.coordinates
    by_category = track.seconds
    times = [(track.end - track.begin) / 1e9, by_category["compute"], by_category["bubble"], _sum_exposed(track)]
    times += [by_category["samples"], by_category["optimizer"], by_category["other"]]
    return [str(track.rank), f"{stage}/{tensor}/{data}"] + [f"{1e3 * seconds:.2f}" for seconds in times]


def _sum_exposed(track: Track) -> float:
    """Return the seconds of exposed communication over all axes."""
    return sum(seconds for name, seconds in track.seconds.items() if name.startswith("exposed "))


def _find_longest_waits(report: StepTimeline, count: int) -> list[Any]:
    """Return the longest waits of all ranks, longest first."""
    waits = [wait for track in report.tracks for wait in track.waits]
    return sorted(waits, key=lambda wait: -(wait.end - wait.begin))[:count]


def _to_dict(report: StepTimeline, waits: int) -> dict[str, Any]:
    """Return the record of --json, in seconds."""
    is_planned = not math.isnan(report.planned_seconds)
    tracks = []
    for track in report.tracks:
        tensor, stage, data = track.coordinates
        tracks.append({"rank": track.rank, "tensor": tensor, "pipeline": stage, "data": data, "seconds": track.seconds})
    return {
        "step": report.step,
        "view": report.view,
        "seconds": report.length / 1e9,
        "planned_seconds": number_or_none(report.planned_seconds),
        "pipeline_seconds": report.pipeline_seconds if is_planned else None,
        "clock_error_seconds": report.clock_error / 1e9 if report.clock_error >= 0 else None,
        "ranks": tracks,
        "bubbles": {str(rank): seconds for rank, seconds in report.bubbles.items()},
        "waits": [
            {"rank": wait.rank, "in": wait.action, "kind": wait.kind, "axis": wait.axis, "begin": wait.begin / 1e9,
             "seconds": (wait.end - wait.begin) / 1e9, "on": wait.waited_on, "root": wait.root, "why": wait.reason}
            for wait in _find_longest_waits(report, waits)
        ],
    }  # fmt: skip
