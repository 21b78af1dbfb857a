"""Departures: calls of a rank that differ from the calls that were due."""

from __future__ import annotations

from dataclasses import dataclass

from megascale.core.calls import Call


@dataclass(frozen=True)
class Departure:
    """A rank's departure from the common order.

    Attributes:
        kind: "missing send", "missing call" or "mismatched collective".
        due: call that was due, with its number in the group.
        actual: call that the rank made instead; None if it skipped a transfer.
        sentence: evidence as text.
    """

    kind: str
    due: Call
    actual: Call | None
    sentence: str


def make_key(call: Call) -> tuple[str, str, int]:
    """Return what is equal in calls that count as the same call, whatever their order in the step."""
    return call.group, call.op, call.bytes


def format_call(call: Call) -> str:
    """Return a call as text: operation, bytes and group."""
    return f"{call.op} of {call.bytes} bytes on {call.group}"
