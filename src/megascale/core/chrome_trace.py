"""Files of trace events that ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

import gzip
from pathlib import Path

from megascale.core import strict_json

Record = dict[str, object]


def write_events(records: list[Record], path: Path) -> int:
    """Write events (times in microseconds) as JSON; a name that ends in .gz compresses. Events written."""
    text = strict_json.dumps({"traceEvents": records, "displayTimeUnit": "ms"})
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gz":
        with gzip.open(path, "wt") as out:
            out.write(text)
    else:
        path.write_text(text)
    return len(records)


def name_tracks(pid: int, name: str, tracks: dict[int, str], order: int | None = None) -> list[Record]:
    """The events that name a process and its tracks, and say where it stands."""
    records: list[Record] = [{"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}]
    if order is not None:
        records.append({"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": order}})
    records += [
        {"ph": "M", "pid": pid, "tid": number, "name": "thread_name", "args": {"name": track}}
        for number, track in tracks.items()
    ]
    return records
