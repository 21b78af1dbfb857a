"""Who waits for whom at this moment, as the grid shows it: the verdict of `megascale hang`, without asking any rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megascale.errors import DataError
from megascale.observe.hang import hang_report
from megascale.observe.hang.verdict import describe_position

_WATCH = 0.5  # seconds to look for movement
_MOST = 20_000  # ranks told of


def hang(run: Path) -> dict[str, Any]:
    """The verdict, its evidence, and each rank's place, call and stack; `known` is false where ranks left nothing."""
    try:
        scene, verdict = hang_report.examine_run(run, ask=False, watch_seconds=_WATCH)
    except DataError:
        why = "No rank has left a record of where it stands: the run has not begun, or its status files are elsewhere."
        return {"known": False, "why": why, "kind": "none", "ranks": [], "waits": [], "by_rank": []}
    return {
        "known": True,
        "kind": verdict.kind,
        "headline": hang_report.format_headline(verdict),
        "ranks": list(verdict.ranks),
        "group": verdict.group,
        "evidence": list(verdict.evidence)[:20],
        "sent": scene.sent,
        "time": scene.now_ns / 1e9,
        "waits": [
            {"rank": w.rank, "group": w.group, "op": w.op, "sequence": w.sequence, "on": list(w.on[:64]),
             "all_came": w.all_came, "seconds": round(w.seconds, 1)}
            for w in verdict.waits[:_MOST]
        ],
        "by_rank": [
            {"rank": rank, "process": what.process, "place": describe_position(what), "answered": what.answered,
             "moving": what.moving, "stack": list(what.stack)}
            for rank, what in sorted(scene.ranks.items())[:_MOST]
        ],
    }  # fmt: skip
