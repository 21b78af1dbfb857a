"""What is known of this machine's ranks when a job stands still: calls, stacks, flight records, one message a rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from megascale.errors import MegascaleError
from megascale.observe.hang.evidence import collect_evidence
from megascale.observe.hang.scene import Scene
from megascale.observe.hang.sent_evidence import pack_evidence
from megascale.resilience.protocol.agent_messages import Evidence, Explain


def collect_evidence(run: Path, ranks: Iterable[int], order: Explain, keep: bool) -> Iterator[Evidence]:
    """Ask the ranks of this machine for their stacks, and say what is known of each; takes up to some seconds."""
    try:
        scene = collect_evidence(run, watch_seconds=order.watch, ranks=frozenset(ranks))
    except (MegascaleError, OSError):
        scene = Scene({}, 0)
    for rank in ranks:
        what = scene.ranks.get(rank)
        data = pack_evidence(what, order.history) if what is not None else b""
        yield Evidence(order.order, rank, data, rank in scene.moving, keep)
