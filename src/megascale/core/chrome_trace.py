"""Trace files for ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

import gzip
from pathlib import Path

from megascale.core import strict_json

Record = dict[str, object]


def write_trace(records: list[Record], path: Path) -> int:
    """Write trace events as JSON, compressed if the name ends in .gz, and return their number.

    Times in `records` are microseconds.
    """
    text = strict_json.dumps({"traceEvents": records, "displayTimeUnit": "ms"})
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gz":
        with gzip.open(path, "wt") as file:
            file.write(text)
    else:
        path.write_text(text)
    return len(records)


def name_tracks(pid: int, name: str, tracks: dict[int, str], order: int | None = None) -> list[Record]:
    """Return the events that name a process and its tracks.

    Args:
        tracks: names of the tracks by thread id.
        order: position of the process among all processes; None: the viewer's order.
    """
    records: list[Record] = [{"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}]
    if order is not None:
        records.append({"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": order}})
    for tid, track in tracks.items():
        records.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": track}})
    return records
