"""A schedule as a picture: coloured cells for a terminal, a PNG for people. Matplotlib is imported only to draw."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megascale.core import palette
from megascale.core.replay import ActionGraph, Timeline, replay_schedule
from megascale.core.schedule import ActionKind, Schedule
from megascale.simulate.planner.layout_cost import GIB, RESERVE_GIB, LayoutCost

if TYPE_CHECKING:
    from rich.text import Text

# Chunk 0 to the last, dark to light; forwards blue, backwards green.
_FORWARD = palette.list_chunk_shades(palette.FORWARD)
_BACKWARD = palette.list_chunk_shades(palette.BACKWARD)
# A stage's computes drawn at most: more cannot be distinguished and take minutes.
_DRAWN = 2000


def colour(backward: bool, chunk: int, virtual: int) -> str:
    """The colour of a chunk's forward or backward as #rrggbb."""
    shades = _BACKWARD if backward else _FORWARD
    return shades[1 if virtual == 1 else round(chunk * (len(shades) - 1) / (virtual - 1))]


def unit_timeline(schedule: Schedule) -> Timeline:
    """The schedule with equal chunks: a forward takes 1, a backward 2, transfers nothing."""
    graph = ActionGraph.compile(schedule)
    return replay_schedule(graph, graph.durations(1.0, 2.0))


def terminal_rows(schedule: Schedule, width: int) -> list[Text] | None:
    """Return one row per stage, time from left to right, or None if `width` columns do not suffice.

    A forward shows its micro-batch, a backward its micro-batch followed by "<".
    """
    from rich.text import Text

    columns = 3 * schedule.virtual_stages * (schedule.microbatches + schedule.stages)
    if columns > 4 * width:
        return None
    timeline = unit_timeline(schedule)
    columns = round(float(timeline.makespan))
    scale = next((n for n in (2, 1) if columns * n <= width), None)
    if scale is None:
        return None
    graph = timeline.graph
    rows = []
    for stage in range(schedule.stages):
        row, column = Text(), 0
        for n in np.flatnonzero((graph.stage == stage) & graph.is_compute):
            start, end = round(timeline.start[n]), round(timeline.end[n])
            backward = graph.kind[n] != ActionKind.FORWARD
            row.append(" " * ((start - column) * scale))
            cells = (end - start) * scale
            label = str(graph.microbatch[n])[-cells if backward else -scale :]
            if backward:
                label = label.ljust(cells, "<")
            else:
                label = label.rjust(cells)
            shade = colour(bool(backward), int(graph.chunk[n]), schedule.virtual_stages)
            row.append(label, style=f"{'black' if _light(shade) else 'white'} on {shade}")
            column = end
        row.append(" " * ((columns - column) * scale))
        rows.append(row)
    return rows


def _light(shade: str) -> bool:
    red, green, blue = (int(shade[i : i + 2], 16) for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue > 140


def save_png(plan: LayoutCost, path: Path) -> None:
    """Draw the plan's replayed schedule above the memory of each stage. Formats by suffix, as matplotlib's."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    p = plan.layout.grid.pipeline
    shown = min(p, 32)
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(14, 3.2 + 0.28 * shown + 3.2), height_ratios=[1.0 + 0.28 * shown, 3.2], layout="constrained"
    )
    _draw_schedule(top, plan)
    _draw_memory(bottom, plan)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_schedule(axes, plan: LayoutCost) -> None:  # type: ignore[no-untyped-def]
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    timeline = plan.timeline
    graph = plan.timeline.graph
    v = plan.schedule.virtual_stages
    makespan = float(timeline.makespan)
    compute = np.flatnonzero(graph.is_compute)
    limit = 100.0
    if len(compute) > _DRAWN * plan.schedule.stages:
        limit = 100 * _DRAWN * plan.schedule.stages / len(compute)
        compute = compute[timeline.start[compute] < makespan * limit / 100]
    starts, ends = timeline.start[compute] / makespan * 100, timeline.end[compute] / makespan * 100
    low = graph.stage[compute] - 0.42
    corners = np.stack(
        [
            np.stack([starts, low], 1),
            np.stack([ends, low], 1),
            np.stack([ends, low + 0.84], 1),
            np.stack([starts, low + 0.84], 1),
        ],
        axis=1,
    )
    backward = graph.kind[compute] != ActionKind.FORWARD
    shades = [colour(bool(b), int(c), v) for b, c in zip(backward, graph.chunk[compute], strict=True)]
    crowded = len(compute) / plan.schedule.stages > 400
    axes.add_collection(
        PolyCollection(list(corners), facecolors=shades, edgecolors="none" if crowded else "white", lw=0.3)
    )
    # Label forwards, or backwards, if the narrowest has room: a digit is about half a percent of the axis wide.
    room = (0.3 + 0.55 * len(str(plan.schedule.microbatches - 1))) * limit / 100
    for is_backward in (False, True):
        matching = np.flatnonzero(backward == is_backward)
        if (ends - starts)[matching].min() < room:
            continue
        for n in matching:
            ink = "black" if _light(shades[n]) else "white"
            text = str(graph.microbatch[compute[n]])
            axes.text((starts[n] + ends[n]) / 2, low[n] + 0.42, text, ha="center", va="center", fontsize=7, color=ink)
    axes.set_xlim(0, limit)
    axes.set_ylim(plan.schedule.stages - 0.4, -0.6)
    if limit == 100:
        part = ""
    else:
        part = f"; the first {limit:.2g}% are shown"
    axes.set_xlabel(f"share of the step, % (compute by FLOPs, transfers free{part})")
    axes.set_ylabel("pipeline stage")
    axes.yaxis.get_major_locator().set_params(integer=True)
    chunks = sorted({0, v - 1})
    handles = [
        Patch(color=colour(b, c, v), label=f"{'backward' if b else 'forward'}{f', chunk {c}' if v > 1 else ''}")
        for b in (False, True)
        for c in chunks
    ]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
    s = plan.schedule
    axes.set_title(
        f"{s.name}: {s.stages} stages x {v} chunks, {s.microbatches} micro-batches, "
        f"bubble {plan.bubble:.2%} (idle over busy, busiest stage)"
    )


def _draw_memory(axes, plan: LayoutCost) -> None:  # type: ignore[no-untyped-def]
    stages = np.arange(len(plan.memory))
    base = np.zeros(len(stages))
    for kind, shade in palette.MEMORY.items():
        if kind == "reserve":
            height = np.full(len(stages), RESERVE_GIB)
        elif kind == "buffers":
            height = np.array([(m.tensor_buffers + m.pipeline_buffers) / GIB for m in plan.memory])
        else:
            height = np.array([getattr(m, kind) / GIB for m in plan.memory])
        axes.bar(stages, height, bottom=base, color=shade, label=kind, width=0.8)
        base += height
    axes.axhline(plan.device_gib, color="black", ls="--", lw=1)
    axes.text(
        len(stages) - 0.5, plan.device_gib, f"device, {plan.device_gib:g} GiB ", ha="right", va="bottom", fontsize=8
    )
    axes.set_ylim(0, max(base.max(), plan.device_gib) * 1.1)
    axes.set_xlim(-0.5, len(stages) - 0.5)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("pipeline stage")
    axes.set_ylabel("GiB a rank")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
    axes.set_title("memory of one rank at its peak")
