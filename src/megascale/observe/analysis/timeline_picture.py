"""A step's timeline as a picture: a band a rank, what happened above, the plan below it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from megascale.errors import ConfigError
from megascale.observe.analysis.step_timeline import StepTimeline, Track

# Chunk 0 to the last, dark to light.
_FORWARD = ("#1b3a6b", "#2f6db3", "#5b9bd5", "#86b9e6", "#add2f0")
_BACKWARD = ("#1e5631", "#2f7d4a", "#4ca66b", "#7fc295", "#a9d8b8")
_COLOURS = {"bubble": "#e4e4e4", "exposed": "#d9534f", "samples": "#f0ad4e", "optimizer": "#7a5ea8", "other": "#9a8c7c"}
_LABELS = {
    "bubble": "bubble: the peer is not ready",
    "exposed": "exposed communication",
    "samples": "waits for samples",
    "optimizer": "optimizer",
    "other": "sends, receives, gathers, reductions",
}
_MOST_TRACKS = 64
_ARROWS = 12  # the longest waits whose message is drawn
_REAL, _PLAN = 0.52, 0.24  # heights, of a band of 1


def draw_timeline(timeline: StepTimeline, path: Path) -> None:
    """Draw a PNG, SVG or PDF. ConfigError if too many ranks are shown to be told apart."""
    if len(timeline.tracks) > _MOST_TRACKS:
        raise ConfigError(
            f"--ranks names {len(timeline.tracks)} ranks; a picture shows {_MOST_TRACKS} at most: name fewer, or write "
            "a .json file for Perfetto"
        )
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    count = len(timeline.tracks)
    figure = Figure(figsize=(17, 2.1 + 0.95 * count), layout="constrained")
    axes = figure.subplots()
    scale = 1e-6  # ms
    length = timeline.length * scale
    for position, track in enumerate(timeline.tracks):
        _band(axes, timeline, track, count - 1 - position, length, scale)
    _messages(axes, timeline, count, scale)
    axes.set(xlim=(-0.002 * length, length * 1.002), ylim=(-0.08, count), xlabel="ms from the step's first operation")
    axes.set_yticks(
        [count - 1 - n + 0.5 for n in range(count)], [_label(timeline, track) for track in timeline.tracks], fontsize=8
    )
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#00000018")
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    right = axes.secondary_yaxis("right")
    right.set_yticks(
        [count - 1 - n + 0.5 for n in range(count)], [_shares(track) for track in timeline.tracks], fontsize=7.5
    )
    right.tick_params(length=0)
    right.spines["right"].set_visible(False)
    patches = [
        Patch(color=_FORWARD[1], label="forward (lighter: later chunk)"),
        Patch(color=_BACKWARD[1], label="backward"),
    ]
    used = {wait.kind for track in timeline.tracks for wait in track.waits} | {"optimizer", "other"}
    patches += [
        Patch(facecolor=_COLOURS[name], edgecolor="#999999", linewidth=0.4, label=label)
        for name, label in _LABELS.items()
        if name in used
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8, frameon=False)
    figure.suptitle(_title(timeline), fontsize=10, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _title(timeline: StepTimeline) -> str:
    text = f"step {timeline.step}, {timeline.length / 1e6:.1f} ms, ranks by {timeline.view}"
    if not math.isnan(timeline.planned_seconds):
        text += (
            f". Pipeline: {timeline.pipeline_seconds * 1e3:.1f} ms, planned {timeline.planned_seconds * 1e3:.1f} ms "
            "(lower bars: the same actions at their median own time)"
        )
    if timeline.clock_error > 0:
        text += f". Clocks to {timeline.clock_error / 1e6:.2f} ms"
    return text


def _label(timeline: StepTimeline, track: Track) -> str:
    tensor, stage, data = track.coordinates
    return f"rank {track.rank}\nstage {stage}\ntensor {tensor}, data {data}"


def _shares(track: Track) -> str:
    whole = sum(track.seconds.values())
    exposed = sum(seconds for name, seconds in track.seconds.items() if name.startswith("exposed"))
    return "\n".join(
        f"{name} {seconds / whole:.0%}"
        for name, seconds in (
            ("compute", track.seconds["compute"]), ("bubble", track.seconds["bubble"]), ("exposed", exposed),
            ("samples", track.seconds["samples"]),
        )
        if name != "samples" or seconds > 0.005 * whole
    )  # fmt: skip


def _shade(backward: bool, chunk: int, virtual: int) -> str:
    shades = _BACKWARD if backward else _FORWARD
    return shades[1 if virtual == 1 else round(chunk * (len(shades) - 1) / (virtual - 1))]


def _band(axes: Any, timeline: StepTimeline, track: Track, floor: int, length: float, scale: float) -> None:
    bottom = floor + _PLAN + 0.06
    coloured: dict[str, list[tuple[float, float]]] = {}
    texts: list[tuple[float, float, float, str, str, int]] = []
    axes.axhspan(floor - 0.04, floor - 0.03, color="#00000010")
    for act in track.acts:
        begin, end = (act.begin - timeline.origin) * scale, (act.end - timeline.origin) * scale
        if act.action in ("forward", "backward"):
            colour = _shade(act.action == "backward", act.chunk, timeline.virtual)
            # Its number stands in the longest stretch of work.
            idle = sorted((w.begin, w.end) for w in act.inner if w.action != "transfer")
            at, best = act.begin, (0, act.begin)
            for w_begin, w_end in [*idle, (act.end, act.end)]:
                best = max(best, (w_begin - at, at))
                at = max(at, w_end)
            texts.append(
                ((best[1] - timeline.origin + best[0] / 2) * scale, best[0] * scale, bottom + _REAL / 2,
                 str(act.microbatch), colour, 8)
            )  # fmt: skip
        else:
            colour = _COLOURS["optimizer" if act.action == "optimizer" else "other"]
        coloured.setdefault(colour, []).append((begin, end - begin))
    for wait in track.waits:
        coloured.setdefault(_COLOURS[wait.kind], []).append((wait.begin * scale, (wait.end - wait.begin) * scale))
    # Waits lie in actions and are drawn over them.
    waits = [_COLOURS[name] for name in ("bubble", "exposed", "samples")]
    for colour, bars in sorted(coloured.items(), key=lambda one: one[0] in waits):
        axes.broken_barh(bars, (bottom, _REAL), facecolors=colour, edgecolor="none")
    plan: dict[str, list[tuple[float, float]]] = {}
    for one in track.planned:
        colour = _shade(one.backward, one.chunk, timeline.virtual)
        plan.setdefault(colour, []).append((one.begin * scale, (one.end - one.begin) * scale))
        middle = (one.begin + one.end) / 2 * scale
        texts.append((middle, (one.end - one.begin) * scale, floor + _PLAN / 2, str(one.microbatch), colour, 6))
    for colour, bars in plan.items():
        axes.broken_barh(bars, (floor, _PLAN), facecolors=colour, alpha=0.55, edgecolor="white", linewidth=0.3)
    for x, width, y, text, colour, size in texts:
        if width > length * 0.0009 * size * len(text):
            dark = colour in (*_FORWARD[:2], *_BACKWARD[:2]) and size > 6
            axes.text(x, y, text, ha="center", va="center", fontsize=size, color="white" if dark else "black")


def _messages(axes: Any, timeline: StepTimeline, count: int, scale: float) -> None:
    """Arrows for the messages that ended the longest bubbles: from the send to the end of the wait."""
    row = {track.rank: count - 1 - n for n, track in enumerate(timeline.tracks)}
    waits = [w for track in timeline.tracks for w in track.waits if w.kind == "bubble" and w.waited_on in row]
    for wait in sorted(waits, key=lambda w: w.begin - w.end)[:_ARROWS]:
        source, target = row[wait.waited_on], row[wait.rank]
        up = target > source
        axes.annotate(
            "",
            xy=(wait.end * scale, target + (_PLAN + 0.06 if up else _PLAN + 0.06 + _REAL)),
            xytext=(wait.end * scale, source + (_PLAN + 0.06 + _REAL if up else _PLAN + 0.06)),
            arrowprops={"arrowstyle": "->", "color": "#333333", "linewidth": 0.9, "linestyle": (0, (2, 1.5))},
        )
