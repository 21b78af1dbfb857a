"""Pictures of a schedule: coloured cells for a terminal, and a PNG file. Matplotlib is imported only to draw."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megascale.core import palette
from megascale.core.replay import ActionGraph, Timeline, replay_schedule
from megascale.core.schedule import ActionKind, Schedule
from megascale.simulate.planner.layout_cost import LayoutCost
from megascale.simulate.planner.layout_figures import GIB, RESERVE_GIB

if TYPE_CHECKING:
    from rich.text import Text

# Colours of the chunks of a stage, from dark to light. Forwards are blue, backwards green.
_FORWARD = palette.list_chunk_shades(palette.FORWARD)
_BACKWARD = palette.list_chunk_shades(palette.BACKWARD)
# Maximum number of computes that are drawn per stage. More cannot be distinguished, and drawing them takes minutes.
_MAX_DRAWN = 2000


def choose_colour(is_backward: bool, chunk: int, virtual: int) -> str:
    """Return the colour of a chunk's forward or backward as #rrggbb. `virtual`: chunks per stage."""
    shades = _BACKWARD if is_backward else _FORWARD
    if virtual == 1:
        return shades[1]
    return shades[round(chunk * (len(shades) - 1) / (virtual - 1))]


def replay_unit_timeline(schedule: Schedule) -> Timeline:
    """Return the timeline of the schedule with equal chunks: a forward takes 1, a backward 2, and transfers 0."""
    graph = ActionGraph.compile(schedule)
    return replay_schedule(graph, graph.durations(1.0, 2.0))


def make_terminal_rows(schedule: Schedule, width: int) -> list[Text] | None:
    """Return one row per stage with time from left to right, or None if `width` columns do not suffice.

    The cell of a forward has the index of its micro-batch, that of a backward the index followed by "<".
    """
    from rich.text import Text

    # A rough bound, which saves the replay of schedules that are much too long.
    columns = 3 * schedule.virtual_stages * (schedule.microbatches + schedule.stages)
    if columns > 4 * width:
        return None
    timeline = replay_unit_timeline(schedule)
    columns = round(float(timeline.makespan))
    if columns > width:
        return None
    scale = 2 if 2 * columns <= width else 1  # columns per unit of time
    graph = timeline.graph
    rows = []
    for stage in range(schedule.stages):
        row = Text()
        row_end = 0
        for action in np.flatnonzero((graph.stage == stage) & graph.is_compute):
            start = round(timeline.start[action])
            end = round(timeline.end[action])
            is_backward = bool(graph.kind[action] != ActionKind.FORWARD)
            row.append(" " * ((start - row_end) * scale))
            cell_width = (end - start) * scale
            # An index that is too long loses its first digits.
            microbatch = str(graph.microbatch[action])
            if is_backward:
                label = microbatch[-cell_width:].ljust(cell_width, "<")
            else:
                label = microbatch[-scale:].rjust(cell_width)
            shade = choose_colour(is_backward, int(graph.chunk[action]), schedule.virtual_stages)
            row.append(label, style=f"{_choose_text_colour(shade)} on {shade}")
            row_end = end
        row.append(" " * ((columns - row_end) * scale))
        rows.append(row)
    return rows


def _choose_text_colour(shade: str) -> str:
    return "black" if _is_light(shade) else "white"


def _is_light(shade: str) -> bool:
    red, green, blue = (int(shade[i : i + 2], 16) for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue > 140


def save_png(plan: LayoutCost, path: Path) -> None:
    """Draw the plan's replayed schedule, and below it the memory of each stage. The suffix selects the file format."""
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
    limit = 100.0  # end of the time axis in percent of the step
    if len(compute) > _MAX_DRAWN * plan.schedule.stages:
        limit = 100 * _MAX_DRAWN * plan.schedule.stages / len(compute)
        compute = compute[timeline.start[compute] < makespan * limit / 100]
    starts = timeline.start[compute] / makespan * 100
    ends = timeline.end[compute] / makespan * 100
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
    shades = [
        choose_colour(bool(is_backward), int(chunk), v)
        for is_backward, chunk in zip(backward, graph.chunk[compute], strict=True)
    ]
    is_crowded = len(compute) / plan.schedule.stages > 400
    axes.add_collection(
        PolyCollection(list(corners), facecolors=shades, edgecolors="none" if is_crowded else "white", lw=0.3)
    )
    # Forwards (or backwards) have labels if the narrowest is wide enough. A digit takes about 0.55% of the axis.
    label_width = (0.3 + 0.55 * len(str(plan.schedule.microbatches - 1))) * limit / 100
    for is_backward in (False, True):
        cells = np.flatnonzero(backward == is_backward)
        if (ends - starts)[cells].min() < label_width:
            continue
        for cell in cells:
            axes.text(
                (starts[cell] + ends[cell]) / 2,
                low[cell] + 0.42,
                str(graph.microbatch[compute[cell]]),
                ha="center",
                va="center",
                fontsize=7,
                color=_choose_text_colour(shades[cell]),
            )
    axes.set_xlim(0, limit)
    axes.set_ylim(plan.schedule.stages - 0.4, -0.6)
    note = "" if limit == 100 else f"; the first {limit:.2g}% are shown"
    axes.set_xlabel(f"share of the step, % (compute by FLOPs, transfers free{note})")
    axes.set_ylabel("pipeline stage")
    axes.yaxis.get_major_locator().set_params(integer=True)
    handles = []
    for is_backward in (False, True):
        for chunk in sorted({0, v - 1}):
            label = "backward" if is_backward else "forward"
            if v > 1:
                label += f", chunk {chunk}"
            handles.append(Patch(color=choose_colour(is_backward, chunk, v), label=label))
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
    schedule = plan.schedule
    axes.set_title(
        f"{schedule.name}: {schedule.stages} stages x {v} chunks, {schedule.microbatches} micro-batches, "
        f"bubble {plan.bubble:.2%} (idle over busy, busiest stage)"
    )


def _draw_memory(axes, plan: LayoutCost) -> None:  # type: ignore[no-untyped-def]
    stages = np.arange(len(plan.memory))
    base = np.zeros(len(stages))
    for kind, shade in palette.MEMORY.items():
        if kind == "reserve":
            height = np.full(len(stages), RESERVE_GIB)
        elif kind == "buffers":
            buffers = [m.tensor_buffers + m.pipeline_buffers + m.graph_buffers + m.prepared_groups for m in plan.memory]
            height = np.array(buffers) / GIB
        elif kind == "weights":
            height = np.array([(m.weights + m.weight_copies) / GIB for m in plan.memory])
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
    axes.set_ylabel("GiB per rank")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
    axes.set_title("memory of one rank at its peak")
