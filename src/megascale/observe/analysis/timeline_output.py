"""Output of a step's timeline as a picture, or as trace events for ui.perfetto.dev and chrome://tracing.

In the picture each rank is a band: the recorded step above, the plan below. In the trace each rank is a process. The
ranks have the order of the timeline's view.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from megascale.core import palette
from megascale.core.chrome_trace import Record, name_tracks, write_trace
from megascale.core.spans import BACKWARD_LABELS, COMPUTE_LABELS
from megascale.errors import ConfigError
from megascale.observe.analysis.run_steps import ActionSpan
from megascale.observe.analysis.step_timeline import StepTimeline, Track

# Colours of the chunks, from dark (first chunk) to light (last chunk).
_FORWARD = palette.list_chunk_shades(palette.FORWARD)
_BACKWARD = palette.list_chunk_shades(palette.BACKWARD)
_DARK = _FORWARD[:2] + _BACKWARD[:2]  # colours on which text is white
_COLOURS = {
    "bubble": palette.BUBBLE,
    "exposed": palette.EXPOSED,
    "samples": palette.SAMPLES,
    "optimizer": palette.OPTIMIZER,
    "other": palette.OTHER,
}
_WAIT_COLOURS = [_COLOURS[name] for name in ("bubble", "exposed", "samples")]
_LABELS = {
    "bubble": "bubble: the peer is not ready",
    "exposed": "exposed communication",
    "samples": "waits for samples",
    "optimizer": "optimizer",
    "other": "sends, receives, gathers, reductions",
}
_MAX_TRACKS = 64
_MAX_ARROWS = 12  # arrows for the messages that ended the longest bubbles
# Heights within a band of height 1: the plan at the bottom, a gap, the recorded step.
_RECORDED_HEIGHT = 0.52
_PLAN_HEIGHT = 0.24
_RECORDED_BOTTOM = _PLAN_HEIGHT + 0.06
_MIN_SHOWN_SHARE = 0.005  # share of the step from which on waits for samples are written next to a band
_MS = 1e-6  # milliseconds per nanosecond
_US = 1e-3  # microseconds per nanosecond
_ACTIONS, _WAITS, _PLAN, _TRANSFERS = range(4)  # numbers of the threads of a rank's process in the trace


def draw_timeline(timeline: StepTimeline, path: Path) -> None:
    """Draw a PNG, SVG or PDF file. Raises ConfigError for more ranks than a picture can show."""
    track_count = len(timeline.tracks)
    if track_count > _MAX_TRACKS:
        raise ConfigError(
            f"--ranks names {track_count} ranks, and a picture shows at most {_MAX_TRACKS}: name fewer ranks, or write "
            "a .json file for Perfetto"
        )
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(17, 2.1 + 0.95 * track_count), layout="constrained")
    axes = figure.subplots()
    length_ms = timeline.length * _MS
    # The first track is at the top.
    for index, track in enumerate(timeline.tracks):
        _Band(axes, timeline, floor=track_count - 1 - index).draw(track)
    _draw_messages(axes, timeline)
    axes.set(
        xlim=(-0.002 * length_ms, length_ms * 1.002),
        ylim=(-0.08, track_count),
        xlabel="ms from the step's first operation",
    )
    ticks = [track_count - index - 0.5 for index in range(track_count)]
    axes.set_yticks(ticks, [_format_label(track) for track in timeline.tracks], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#00000018")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    right = axes.secondary_yaxis("right")
    right.set_yticks(ticks, [_format_shares(track) for track in timeline.tracks], fontsize=7.5)
    right.tick_params(length=0)
    right.spines["right"].set_visible(False)
    patches = [
        Patch(color=_FORWARD[1], label="forward (lighter: later chunk)"),
        Patch(color=_BACKWARD[1], label="backward"),
    ]
    drawn_categories = {wait.kind for track in timeline.tracks for wait in track.waits} | {"optimizer", "other"}
    for name, label in _LABELS.items():
        if name in drawn_categories:
            patches.append(Patch(facecolor=_COLOURS[name], edgecolor="#999999", linewidth=0.4, label=label))
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8, frameon=False)
    figure.suptitle(_format_title(timeline), fontsize=10, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _format_title(timeline: StepTimeline) -> str:
    text = f"step {timeline.step}, {timeline.length * _MS:.1f} ms, ranks by {timeline.view}"
    if not math.isnan(timeline.planned_seconds):
        text += (
            f". Pipeline: {timeline.pipeline_seconds * 1e3:.1f} ms, planned {timeline.planned_seconds * 1e3:.1f} ms "
            "(lower bars: the same actions with median durations, without waits)"
        )
    if timeline.clock_error > 0:
        text += f". Clock error up to {timeline.clock_error * _MS:.2f} ms"
    return text


def _format_label(track: Track) -> str:
    tensor, stage, data = track.coordinates
    return f"rank {track.rank}\nstage {stage}\ntensor {tensor}, data {data}"


def _format_shares(track: Track) -> str:
    """Return the shares of compute, bubble, exposed communication and, if they matter, waits for samples."""
    total = sum(track.seconds.values())
    exposed = sum(seconds for name, seconds in track.seconds.items() if name.startswith("exposed"))
    shares = {"compute": track.seconds["compute"], "bubble": track.seconds["bubble"], "exposed": exposed}
    if track.seconds["samples"] > _MIN_SHOWN_SHARE * total:
        shares["samples"] = track.seconds["samples"]
    return "\n".join(f"{name} {seconds / total:.0%}" for name, seconds in shares.items())


class _Band:
    """Drawer of one rank's band, which occupies the heights from `floor` to `floor` + 1."""

    def __init__(self, axes: Any, timeline: StepTimeline, floor: int) -> None:
        self.axes = axes
        self.timeline = timeline
        self.floor = floor

    def draw(self, track: Track) -> None:
        """Draw actions, waits and the plan."""
        self.axes.axhspan(self.floor - 0.04, self.floor - 0.03, color="#00000010")  # line between two bands
        bars: dict[str, list[tuple[float, float]]] = {}  # begin and length in milliseconds, by colour
        for act in track.actions:
            begin = (act.begin - self.timeline.origin) * _MS
            bars.setdefault(self._choose_action_colour(act), []).append((begin, (act.end - act.begin) * _MS))
        for wait in track.waits:
            bars.setdefault(_COLOURS[wait.kind], []).append((wait.begin * _MS, (wait.end - wait.begin) * _MS))
        # Waits lie within actions and are drawn over them.
        for colour, spans in sorted(bars.items(), key=lambda item: item[0] in _WAIT_COLOURS):
            bottom = self.floor + _RECORDED_BOTTOM
            self.axes.broken_barh(spans, (bottom, _RECORDED_HEIGHT), facecolors=colour, edgecolor="none")
        for act in track.actions:
            if act.action in COMPUTE_LABELS:
                self._write_microbatch(act)
        self._draw_plan(track)

    def _draw_plan(self, track: Track) -> None:
        bars: dict[str, list[tuple[float, float]]] = {}  # as in `draw`
        for compute in track.planned_computes:
            colour = self._choose_chunk_colour(compute.is_backward, compute.chunk)
            begin = compute.begin * _MS
            width = (compute.end - compute.begin) * _MS
            bars.setdefault(colour, []).append((begin, width))
            middle = self.floor + _PLAN_HEIGHT / 2
            self._write_text(begin + width / 2, middle, width, text=str(compute.microbatch), colour=colour, size=6)
        for colour, spans in bars.items():
            self.axes.broken_barh(
                spans, (self.floor, _PLAN_HEIGHT), facecolors=colour, alpha=0.55, edgecolor="white", linewidth=0.3
            )

    def _write_microbatch(self, act: ActionSpan) -> None:
        """Write the number of a compute's micro-batch into the longest time without a wait."""
        waits = sorted((span.begin, span.end) for span in act.inner_spans if span.action != "transfer")
        begin = act.begin  # end of the previous wait
        longest = 0
        longest_begin = act.begin
        for wait_begin, wait_end in waits + [(act.end, act.end)]:
            if wait_begin - begin >= longest:
                longest = wait_begin - begin
                longest_begin = begin
            begin = max(begin, wait_end)
        x = (longest_begin - self.timeline.origin + longest / 2) * _MS
        y = self.floor + _RECORDED_BOTTOM + _RECORDED_HEIGHT / 2
        colour = self._choose_action_colour(act)
        self._write_text(x, y, longest * _MS, text=str(act.microbatch), colour=colour, size=8)

    def _write_text(self, x: float, y: float, width: float, text: str, colour: str, size: int) -> None:
        """Write a text over a bar of `width` milliseconds if the bar is wide enough for the text."""
        # The figure is about 1,100 points wide, so a point is 0.0009 of the timeline. A digit is about as wide as its
        # font size in points.
        if width > self.timeline.length * _MS * 0.0009 * size * len(text):
            is_dark = colour in _DARK and size > 6
            self.axes.text(x, y, text, ha="center", va="center", fontsize=size, color="white" if is_dark else "black")

    def _choose_action_colour(self, act: ActionSpan) -> str:
        if act.action in COMPUTE_LABELS:
            return self._choose_chunk_colour(act.action in BACKWARD_LABELS, act.chunk)
        return _COLOURS["optimizer" if act.action == "optimizer" else "other"]

    def _choose_chunk_colour(self, is_backward: bool, chunk: int) -> str:
        shades = _BACKWARD if is_backward else _FORWARD
        if self.timeline.virtual == 1:
            return shades[1]
        return shades[round(chunk * (len(shades) - 1) / (self.timeline.virtual - 1))]


def _draw_messages(axes: Any, timeline: StepTimeline) -> None:
    """Draw arrows for the messages that ended the longest bubbles, from the sender to the end of the wait."""
    floors = {track.rank: len(timeline.tracks) - 1 - index for index, track in enumerate(timeline.tracks)}
    waits = [
        wait for track in timeline.tracks for wait in track.waits if wait.kind == "bubble" and wait.waited_on in floors
    ]
    longest_waits = sorted(waits, key=lambda wait: wait.begin - wait.end)[:_MAX_ARROWS]
    for wait in longest_waits:
        source = floors[wait.waited_on] + _RECORDED_BOTTOM
        target = floors[wait.rank] + _RECORDED_BOTTOM
        # The arrow leads from edge to edge of the two bars that face each other.
        if target > source:
            source += _RECORDED_HEIGHT
        else:
            target += _RECORDED_HEIGHT
        axes.annotate(
            "",
            xy=(wait.end * _MS, target),
            xytext=(wait.end * _MS, source),
            arrowprops={"arrowstyle": "->", "color": "#333333", "linewidth": 0.9, "linestyle": (0, (2, 1.5))},
        )


def write_trace_events(timeline: StepTimeline, path: Path) -> int:
    """Write a .json or .json.gz file; return the number of events.

    Events of waits contain the awaited rank and the reason. Arrows lead from a send to the compute that awaited it.
    """
    records: list[Record] = []
    names = {_ACTIONS: "actions", _WAITS: "waits", _PLAN: "planned", _TRANSFERS: "transfers"}
    for order, track in enumerate(timeline.tracks):
        tensor, stage, data = track.coordinates
        records += name_tracks(
            track.rank, f"rank {track.rank} (stage {stage}, tensor {tensor}, data {data})", names, order
        )
        for number, act in enumerate(track.actions):
            begin, end = act.begin - timeline.origin, act.end - timeline.origin
            details: Record = {"chunk": act.chunk, "microbatch": act.microbatch}
            records.append(_make_bar(track.rank, _ACTIONS, act.action, begin, end, details))
            for index, span in enumerate(act.inner_spans):
                if span.action != "transfer":
                    continue
                # Transfers may overlap, so each is a pair of begin and end events with an id of its own.
                common_fields = {
                    "cat": "transfer", "id": f"{track.rank}.{number}.{index}", "pid": track.rank, "tid": _TRANSFERS,
                    "name": span.axis,
                }  # fmt: skip
                details = {"bytes": span.bytes, "waited_on": span.waited_on}
                records.append(
                    {"ph": "b", "ts": (span.begin - timeline.origin) * _US, "args": details, **common_fields}
                )
                records.append({"ph": "e", "ts": (span.end - timeline.origin) * _US, **common_fields})
        for wait in track.waits:
            name = f"{wait.kind} {wait.axis}".strip()
            details = {"in": wait.action, "rank": wait.waited_on, "began_with": wait.root, "why": wait.reason}
            records.append(_make_bar(track.rank, _WAITS, name, wait.begin, wait.end, details))
        for compute in track.planned_computes:
            name = "backward" if compute.is_backward else "forward"
            details = {"chunk": compute.chunk, "microbatch": compute.microbatch}
            records.append(_make_bar(track.rank, _PLAN, name, compute.begin, compute.end, details))
    records += _list_arrows(timeline)
    return write_trace(records, path)


def _list_arrows(timeline: StepTimeline) -> list[Record]:
    """Return the events of the arrows: a start ("s") at the send, and an end ("f") in the receiver's compute."""
    records: list[Record] = []
    for number, message in enumerate(timeline.messages):
        common_fields = {"cat": "message", "id": number, "name": "message", "tid": _ACTIONS}
        # Errors of clocks must not let an arrow end before it starts.
        end = max(message.send_begin, message.compute_begin)
        records.append({"ph": "s", "pid": message.sender, "ts": message.send_begin * _US, **common_fields})
        records.append({"ph": "f", "bp": "e", "pid": message.receiver, "ts": end * _US, **common_fields})
    return records


def _make_bar(rank: int, track: int, name: str, begin: int, end: int, details: Record) -> Record:
    """Return a complete event; `begin` and `end` are nanoseconds since the timeline's begin."""
    return {
        "ph": "X",
        "pid": rank,
        "tid": track,
        "name": name,
        "ts": begin * _US,
        "dur": (end - begin) * _US,
        "args": details,
    }
