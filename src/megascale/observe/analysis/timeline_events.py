"""A step's timeline as trace events for ui.perfetto.dev and chrome://tracing: a process a rank, in the view's order."""

from __future__ import annotations

from pathlib import Path

from megascale.core.chrome_trace import Record, name_tracks, write_events
from megascale.observe.analysis.step_timeline import StepTimeline

_ACTIONS, _WAITS, _PLAN, _TRANSFERS = range(4)
_MICRO = 1e-3  # nanoseconds to microseconds


def write_trace_events(timeline: StepTimeline, path: Path) -> int:
    """Write the file (.json, or .json.gz); events written.

    Waits carry whom they were for and why; arrows lead from a send to the compute that needed it.
    """
    records: list[Record] = []
    tracks = {_ACTIONS: "actions", _WAITS: "waits", _PLAN: "planned", _TRANSFERS: "transfers"}
    for order, track in enumerate(timeline.tracks):
        tensor, stage, data = track.coordinates
        name = f"rank {track.rank} (stage {stage}, tensor {tensor}, data {data})"
        records += name_tracks(track.rank, name, tracks, order)

        for number, act in enumerate(track.acts):
            begin, end = act.begin - timeline.origin, act.end - timeline.origin
            records.append(
                _bar(track.rank, _ACTIONS, act.action, begin, end, {"chunk": act.chunk, "microbatch": act.microbatch})
            )
            for position, moved in enumerate(act.inner):
                if moved.action != "transfer":
                    continue
                # They overlap each other: pairs of events with a number of their own.
                shared = {
                    "cat": "transfer", "id": f"{track.rank}.{number}.{position}", "pid": track.rank, "tid": _TRANSFERS,
                    "name": moved.axis,
                }  # fmt: skip
                args = {"bytes": moved.bytes, "waited_on": moved.waited_on}
                records.append({"ph": "b", "ts": (moved.begin - timeline.origin) * _MICRO, "args": args, **shared})
                records.append({"ph": "e", "ts": (moved.end - timeline.origin) * _MICRO, **shared})
        for wait in track.waits:
            name = f"{wait.kind} {wait.axis}".strip()
            cause: Record = {"in": wait.act, "rank": wait.waited_on, "began_with": wait.root, "why": wait.reason}
            records.append(_bar(track.rank, _WAITS, name, wait.begin, wait.end, cause))
        for one in track.planned:
            name = "backward" if one.backward else "forward"
            which: Record = {"chunk": one.chunk, "microbatch": one.microbatch}
            records.append(_bar(track.rank, _PLAN, name, one.begin, one.end, which))
    for number, (sender, sent, receiver, needed) in enumerate(timeline.messages):
        shared = {"cat": "message", "id": number, "name": "message", "tid": _ACTIONS}
        records.append({"ph": "s", "pid": sender, "ts": sent * _MICRO, **shared})
        records.append({"ph": "f", "bp": "e", "pid": receiver, "ts": max(sent, needed) * _MICRO, **shared})
    return write_events(records, path)


def _bar(rank: int, track: int, name: str, begin: int, end: int, args: Record) -> Record:
    return {
        "ph": "X", "pid": rank, "tid": track, "name": name, "ts": begin * _MICRO, "dur": (end - begin) * _MICRO,
        "args": args,
    }  # fmt: skip
