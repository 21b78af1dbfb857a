"""Slow machines of a window of steps as the heat map tells of them: the verdict of `megascale stragglers`."""

from __future__ import annotations

from typing import Any

from megascale.observe.analysis.rank_parts import choose_window, rank_parts
from megascale.observe.analysis.stragglers import find_stragglers
from megascale.observe.dashboard.rank_values import finite
from megascale.observe.store.tables import SpanTables

_MOST = 40  # told of
_MOST_VALUES = 250_000  # ranks x steps that are judged at once, in the memory that a query may take
_FEWEST = 10  # steps


def answer_stragglers(tables: SpanTables, first: int | None, last: int | None) -> dict[str, Any]:
    """Slow ranks and links with cause, confidence and evidence. DataError where there are no steps to judge.

    Args:
        first, last: window of steps; None: the newest that the command would judge.
    """
    wanted = f"{first}-{last}" if first is not None and last is not None else ""
    attempt, low, high = choose_window(tables, wanted, None)
    ranks = int(tables.query("SELECT count(DISTINCT rank) AS n FROM ranks")["n"][0])
    low = max(low, high + 1 - max(_FEWEST, _MOST_VALUES // max(1, ranks)))
    found = find_stragglers(rank_parts(tables, attempt, low, high), tables)
    judged, steps = found.judgement, found.parts.steps
    return {
        "steps": {"first": int(steps[0]), "last": int(steps[-1])},
        "compared": len(found.parts.ranks) - judged.lonely,
        "lonely": judged.lonely,
        "spread": finite(judged.spread),
        "limit": finite(judged.limit),
        "count": len(found.ranks) + len(found.links),
        "ranks": [
            {
                "rank": one.slow_rank.rank, "hostname": one.hostname, "slower": finite(one.slow_rank.excess),
                "state": one.slow_rank.state, "first": one.slow_rank.first, "last": one.slow_rank.last, "cause": one.cause,
                "costs": finite(one.delay_seconds), "confidence": finite(one.slow_rank.confidence), "evidence": list(one.evidence),
            }
            for one in found.ranks[:_MOST]
        ],
        "links": [
            {
                "ranks": list(one.ranks[:64]), "axis": one.axis, "share": finite(one.share),
                "seconds": finite(one.seconds), "confidence": finite(one.confidence), "evidence": list(one.evidence),
            }
            for one in found.links[:_MOST]
        ],
    }  # fmt: skip
