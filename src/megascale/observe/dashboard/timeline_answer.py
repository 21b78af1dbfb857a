"""A step's timeline as the page draws it: tracks, waits with their chain of causes, and the planned schedule."""

from __future__ import annotations

import math
from typing import Any

from megascale.errors import ConfigError
from megascale.observe.analysis.run_steps import kept_steps
from megascale.observe.analysis.step_timeline import StepTimeline, step_timeline
from megascale.observe.store.tables import SpanTables

_MOST_TRACKS = 512
_WHOLE = 32  # ranks: of so small a job all are shown where none was asked for


def timeline(tables: SpanTables, step: int | None, ranks: str, view: str) -> dict[str, Any]:
    """The step as columns a track; ConfigError and DataError as `step_timeline`.

    Acts are [action, chunk, micro-batch, begin, end], waits [kind, axis, begin, end, on, root, in, why], planned
    [backward, chunk, micro-batch, begin, end]; times are microseconds from the timeline's begin.
    """
    steps = kept_steps(tables)
    if not ranks and int(tables.query("SELECT count(DISTINCT rank) AS n FROM ranks")["n"][0]) <= _WHOLE:
        ranks = "all"
    found = step_timeline(tables, step, ranks, view)
    if len(found.tracks) > _MOST_TRACKS:
        raise ConfigError(f"ranks={ranks[:60]}: {len(found.tracks):,} ranks; at most {_MOST_TRACKS} are shown at once")
    return _as_plain(found, steps)


def _as_plain(found: StepTimeline, steps: list[int]) -> dict[str, Any]:
    def us(ns: int) -> float:
        return round(ns / 1e3, 1)

    origin = found.origin
    planned = not math.isnan(found.planned_seconds)
    return {
        "step": found.step,
        "steps": steps[-500:],
        "view": found.view,
        "length": us(found.length),
        "virtual": found.virtual,
        "planned_seconds": found.planned_seconds if planned else None,
        "pipeline_seconds": found.pipeline_seconds if planned else None,
        "clock_error": us(found.clock_error) if found.clock_error >= 0 else None,
        "bubbles": list(found.bubbles.items())[:20],
        "messages": [[sender, us(begin), receiver, us(end)] for sender, begin, receiver, end in found.messages],
        "tracks": [
            {
                "rank": track.rank,
                "place": track.coordinates,
                "begin": us(track.begin),
                "end": us(track.end),
                "seconds": track.seconds,
                "acts": [
                    [act.action, act.chunk, act.microbatch, us(act.begin - origin), us(act.end - origin)]
                    for act in track.acts
                ],
                "waits": [
                    [w.kind, w.axis, us(w.begin), us(w.end), w.waited_on, w.root, w.act, w.reason] for w in track.waits
                ],
                "planned": [[int(p.backward), p.chunk, p.microbatch, us(p.begin), us(p.end)] for p in track.planned],
            }
            for track in found.tracks
        ],
    }
