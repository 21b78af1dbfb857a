"""The span record and the recorder's protocol: what one piece of work on one rank took, and what it waited for."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Protocol

SCHEMA = 1


@dataclass(frozen=True)
class Span:
    """One timed action. Times are nanoseconds since the epoch on the host's clock.

    Attributes:
        schema: version of this record.
        job, attempt: which run and which start of it.
        host, rank, step: where and when.
        action: what was done, such as forward, backward, send_forward, gather, optimizer.
        chunk, microbatch: which part of the model and of the batch, -1 where it has no meaning.
        axis: the grid axis a transfer runs along, else "".
        bytes: bytes moved, 0 for compute.
        waited_on: rank or service that had to act first, -1 where unknown or none.
    """

    job: str
    attempt: int
    host: int
    rank: int
    step: int
    action: str
    chunk: int
    microbatch: int
    axis: str
    bytes: int
    start_ns: int
    end_ns: int
    waited_on: int = -1
    schema: int = SCHEMA

    def to_json(self) -> str:
        """One line of `spans/host=H/`."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> Span:
        """The inverse of to_json; ValueError on another schema or missing keys."""
        record = json.loads(line)
        if record.get("schema") != SCHEMA:
            raise ValueError(f"span schema {record.get('schema')!r} is not {SCHEMA}")
        try:
            return cls(**record)
        except TypeError as error:
            raise ValueError(f"not a span: {error}") from None


class Recorder(Protocol):
    """What the engine needs from a timer; `observe` provides the real ones."""

    def start(self, action: str, chunk: int = -1, microbatch: int = -1, axis: str = "", bytes: int = 0) -> int:
        """Mark the start of an action on the current stream; returns a handle for `stop`."""

    def stop(self, handle: int) -> None:
        """Mark its end."""


class NoRecorder:
    """Records nothing, costs nothing."""

    def start(self, action: str, chunk: int = -1, microbatch: int = -1, axis: str = "", bytes: int = 0) -> int:
        return 0

    def stop(self, handle: int) -> None:
        return None
