"""Asking a run that trains for all spans of its next steps, by a file that its hosts' span services look for."""

from __future__ import annotations

import math
import os
from pathlib import Path

from megascale.core import strict_json
from megascale.core.untrusted_files import read_small_text
from megascale.errors import DataError
from megascale.observe.store.ingest import STATE_FILE
from megascale.observe.store.span_service import ASKED
from megascale.observe.store.tables import SpanTables

_ATTEMPT = "(SELECT max(attempt) FROM rollups WHERE action = 'step')"
_NOTICE = 2.0  # seconds within which every host's service has seen the file and told its ranks


def request_spans(run: Path, steps: int) -> tuple[int, int]:
    """Ask for the next `steps` steps that all hosts can still keep: (first, last). DataError if nothing is recorded."""
    newest, seconds = 0, 0.0
    for state in (run / "spans").glob(f"host=*/{STATE_FILE}"):
        try:
            told = strict_json.loads(read_small_text(state))
            newest = max([newest, *(int(step) for step in told["steps"].values())])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
            continue
    if not newest:
        raise DataError(
            f"no span service has written to {run / 'spans'} yet: the run is not training, has just begun, or has "
            "observe.timers=false"
        )
    with SpanTables(run) as tables:
        found = tables.query(
            f"SELECT sum(total_ns)::DOUBLE / 1e9 / count(DISTINCT step) AS seconds FROM rollups WHERE action = 'step' "
            f"AND attempt = {_ATTEMPT} AND rank = (SELECT min(rank) FROM rollups WHERE attempt = {_ATTEMPT}) "
            "AND step > ?",
            [newest - 20],
        )
    if len(found["seconds"]) and found["seconds"][0] == found["seconds"][0]:
        seconds = float(found["seconds"][0] or 0.0)
    first = newest + 1 + (math.ceil(_NOTICE / seconds) if seconds > 0 else 1)
    file = run / "spans" / ASKED
    temporary = file.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(strict_json.dumps({"first": first, "last": first + steps - 1}) + "\n")
    os.replace(temporary, file)
    return first, first + steps - 1


def count_complete_steps(run: Path, first: int, last: int) -> int:
    """Count the steps of which the newest attempt has the spans of all its ranks."""
    with SpanTables(run) as tables:
        found = tables.query(
            "SELECT step FROM (SELECT step, count(DISTINCT rank) AS ranks FROM spans WHERE action = 'step' AND "
            f"attempt = {_ATTEMPT} AND step BETWEEN ? AND ? GROUP BY step) WHERE ranks >= (SELECT count(DISTINCT rank) "
            f"FROM rollups WHERE action = 'step' AND attempt = {_ATTEMPT})",
            [first, last],
        )
        return len(found["step"])
