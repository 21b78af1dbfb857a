"""Trace file of a simulated step, for ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megascale.core.chrome_trace import Record, name_tracks, write_trace
from megascale.core.replay import STREAMS
from megascale.core.schedule import RECEIVES, ActionKind, make_kind_mask
from megascale.simulate.step import StepEstimate

_MICRO = 1e6


def write_step_trace(result: StepEstimate, path: Path) -> int:
    """Write the timeline of the event level, with one process per stage and one track per stream.

    A path that ends in .gz is compressed. Returns the number of written trace events.
    """
    assert result.event is not None, "only the event level has a timeline"
    event = result.event
    timeline = event.timeline
    graph = timeline.graph
    records: list[Record] = []
    for stage in range(graph.schedule.stages):
        records += name_tracks(stage, f"stage {stage}", dict(enumerate(STREAMS)))
    receives = make_kind_mask(graph.kind, *RECEIVES)
    lengths = timeline.end - timeline.transfer_start
    for n in np.flatnonzero(~receives & (lengths > 0)).tolist():
        kind = ActionKind(int(graph.kind[n]))
        records.append(
            {
                "ph": "X",
                "pid": int(graph.stage[n]),
                "tid": int(graph.stream[n]),
                "name": kind.label,
                "ts": float(timeline.transfer_start[n]) * _MICRO,
                "dur": float(lengths[n]) * _MICRO,
                "args": {"chunk": int(graph.chunk[n]), "microbatch": int(graph.microbatch[n])},
            }
        )
    # Reductions without overlap, and waits for other replicas, come after the timeline of this replica's pipeline.
    for stage, reduced in enumerate(event.reduced):
        is_stage_compute = (graph.stage == stage) & graph.is_compute
        last = float(timeline.end[is_stage_compute].max())
        if reduced > last:
            records.append(
                {
                    "ph": "X",
                    "pid": stage,
                    "tid": STREAMS.index("reduce"),
                    "name": "gradients of all replicas",
                    "ts": last * _MICRO,
                    "dur": (float(reduced) - last) * _MICRO,
                    "args": {},
                }
            )
    return write_trace(records, path)
