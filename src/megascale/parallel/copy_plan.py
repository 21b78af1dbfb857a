"""Order of the copies of an exchange's call (exchange.py)."""

from __future__ import annotations

from dataclasses import dataclass

# Parts of at least this many bytes are copied one after another if a rank has several peers. Measured on four H200 in
# graphs (dev/log.md, 2026-11-27), one after another and at the same time, in GB/s of the whole tensor:
#
#   bytes of a part   gather     scatter    all-to-all
#    2.5e6            130, 142   125, 127   138, 159
#    5e6              196, 198   183, 170   210, 200
#   10e6              281, 257   243, 220   290, 239
#
# Three copies at the same time share a link at a lower rate than one copy has.
SERIAL_BYTES = 4_000_000


@dataclass(frozen=True)
class CopyPlan:
    """Order of the copies of one call.

    Attributes:
        queues: number of copies at the same time; 0: one per peer.
        waits_first: await the flags of all peers before the first copy. Flags between two copies would be more nodes
            of a graph. An all-to-all then writes all parts before the first copy.
        piece_bytes: length of the pieces that are copied from the peers in turn; 0: whole parts.
    """

    queues: int = 1
    waits_first: bool = False
    piece_bytes: int = 0


IN_ORDER = CopyPlan()
SERIAL = CopyPlan(waits_first=True)
TOGETHER = CopyPlan(queues=0)


def choose_plan(nbytes: int, is_captured: bool, has_work: bool = False) -> CopyPlan:
    """Return the order of copies of parts of `nbytes`.

    Args:
        has_work: whether the call writes its parts while it copies.
    """
    if not is_captured:
        # Outside of a graph, the events that order several queues would cost the host more than they save.
        return IN_ORDER
    if nbytes < SERIAL_BYTES:
        return TOGETHER
    if has_work:
        return IN_ORDER
    return SERIAL
