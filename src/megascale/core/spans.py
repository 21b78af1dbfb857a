"""What is timed: the kinds of spans and axes, the span record, and what the engine needs of a recorder.

Timers (observe/rank/timers.py) write spans and roll-ups in binary, with the codes below; the numbers are part of the
format, so new kinds go to the end. Readers see names.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any, Protocol

from megascale.core.schedule import ActionKind

SPAN_SCHEMA = 1


class SpanKind(IntEnum):
    """What a span was: first the schedule's actions under their own numbers, then what surrounds and lies in them."""

    FORWARD = ActionKind.FORWARD
    BACKWARD = ActionKind.BACKWARD
    SEND_FORWARD = ActionKind.SEND_FORWARD
    RECV_FORWARD = ActionKind.RECV_FORWARD
    SEND_BACKWARD = ActionKind.SEND_BACKWARD
    RECV_BACKWARD = ActionKind.RECV_BACKWARD
    GATHER_PARAMS = ActionKind.GATHER_PARAMS
    REDUCE_GRADS = ActionKind.REDUCE_GRADS
    FINISH_REDUCTIONS = 8  # awaits what is still under way of the gradients
    CHECKPOINT_STALL = 9  # the update waits for a copy of the state
    OPTIMIZER = 10
    CHECKPOINT_SAVE = 11  # between steps: the part of a save that training waits for
    EVALUATE = 12
    GARBAGE = 13  # Python's garbage collection
    STEP = 14  # from a step's first operation to its last
    WAIT = 15  # within an action: for other ranks, along an axis
    TRANSFER = 16  # from the start of a collective or message until its result was awaited, along an axis
    DATA_WAIT = 17  # within an action: for samples
    GARBAGE_PAUSE = 18  # within a step: garbage collections that Python began by itself; roll-ups only
    ALLOCATOR_RETRY = 19  # within a step: times that the device's memory was full of cached blocks; roll-ups only
    PROCESSOR_WAIT = 20  # within a step: its thread was ready to run and had no processor; roll-ups only

    @property
    def label(self) -> str:
        """Lower-case name, such as send_forward."""
        return self.name.lower()


# What lies within an action and is no work of this rank's.
WAITS = (SpanKind.WAIT, SpanKind.DATA_WAIT)


class SpanAxis(IntEnum):
    """Along which axis of the grid a wait or a transfer goes."""

    NONE = 0
    TENSOR = 1
    PIPELINE = 2
    DATA = 3
    WORLD = 4
    STAGE = 5
    EMBEDDING = 6

    @property
    def label(self) -> str:
        """Lower-case name; empty for none."""
        return "" if self is SpanAxis.NONE else self.name.lower()


@dataclass(frozen=True)
class Span:
    """One timed action. Times are nanoseconds since the epoch on the host's clock.

    Attributes:
        schema: version of this record.
        job, attempt: which run and which start of it.
        host, rank, step: where and when.
        action: what was done, such as forward, backward, send_forward, wait, optimizer (SpanKind).
        chunk, microbatch: which part of the model and of the batch, -1 where it has no meaning.
        axis: the grid axis a wait or transfer runs along, else "".
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
    schema: int = SPAN_SCHEMA

    def to_json(self) -> str:
        """One line of an export."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> Span:
        """The inverse of to_json; ValueError on another schema or missing keys."""
        record = json.loads(line)
        if record.get("schema") != SPAN_SCHEMA:
            raise ValueError(f"span schema {record.get('schema')!r} is not {SPAN_SCHEMA}")
        try:
            return cls(**record)
        except TypeError as error:
            raise ValueError(f"not a span: {error}") from None


# A point in time as a recorder keeps it: nanoseconds, or an event of a device; None while nothing is recorded.
Mark = Any


class Recorder(Protocol):
    """What the engine tells of its work; `observe.rank` provides the real one.

    Actions follow each other (`begin`, `end`); waits and transfers lie in them. All of it is called by the thread that
    runs the step, and none of it waits for a device.
    """

    def step_begins(self, step: int) -> None:
        """A step's first operation comes next."""

    def step_ended(self) -> None:
        """Its last operation has been queued."""

    def begin_action(self, kind: int, chunk: int = -1, microbatch: int = -1) -> None:
        """An action starts on the current stream."""

    def end_action(self) -> None:
        """It has ended there."""

    def mark(self) -> Mark:
        """Now, for `waited`."""

    def record_wait(self, since: Mark, kind: int, axis: int = 0, waited_on: int = -1) -> None:
        """The stream has waited from `since` on: for another rank, or for samples."""

    def begin_transfer(self, axis: int, nbytes: int) -> Mark:
        """A transfer of so many bytes starts."""

    def landed(self, since: Mark, axis: int, nbytes: int, waited_on: int = -1) -> None:
        """A transfer that started at `since` has been awaited."""

    def record_count(self, kind: int, count: int, nanoseconds: int = 0, longest: int = 0) -> None:
        """Within this step something happened so often, and took the host so long in all."""


class NoRecorder:
    """Records nothing."""

    def step_begins(self, step: int) -> None: ...

    def step_ended(self) -> None: ...

    def begin(self, kind: int, chunk: int = -1, microbatch: int = -1) -> None: ...

    def end(self) -> None: ...

    def mark(self) -> Mark:
        return None

    def waited(self, since: Mark, kind: int, axis: int = 0, waited_on: int = -1) -> None: ...

    def launched(self, axis: int, nbytes: int) -> Mark:
        return None

    def landed(self, since: Mark, axis: int, nbytes: int, waited_on: int = -1) -> None: ...

    def counted(self, kind: int, count: int, nanoseconds: int = 0, longest: int = 0) -> None: ...
