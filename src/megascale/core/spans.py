"""Kinds of spans and their axes, the span record, and the interface of the engine's time recorder.

Timers (observe/rank/timers.py) write spans and roll-ups (totals per step) in binary, with the codes of the enumerations
below. The codes are part of the file format, so new kinds are added at the end. They differ from the codes of
`ActionKind`: `SPAN_OF_ACTION` maps an action to its span.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

from megascale.core.schedule import COMPUTES, ActionKind

SPAN_SCHEMA = 1


class SpanKind(IntEnum):
    """Kinds of spans: the schedule's actions, and the work around and within them."""

    FORWARD = 0
    BACKWARD = 1
    SEND_FORWARD = 2
    RECV_FORWARD = 3
    SEND_BACKWARD = 4
    RECV_BACKWARD = 5
    GATHER_PARAMS = 6
    REDUCE_GRADS = 7
    FINISH_REDUCTIONS = 8  # wait for gradient reductions that are still in flight
    CHECKPOINT_STALL = 9  # the update waits for a snapshot of the state
    OPTIMIZER = 10
    CHECKPOINT_SAVE = 11  # between steps: the part of a save for which training waits
    EVALUATE = 12
    GARBAGE = 13  # Python's garbage collection
    STEP = 14  # from a step's first operation to its last
    WAIT = 15  # within an action: wait for other ranks along an axis
    TRANSFER = 16  # from the start of a collective or message until its result was awaited, along an axis
    DATA_WAIT = 17  # within an action: wait for samples
    GARBAGE_PAUSE = 18  # within a step: automatic garbage collections; roll-ups only
    ALLOCATOR_RETRY = 19  # within a step: retries of the CUDA caching allocator; roll-ups only
    PROCESSOR_WAIT = 20  # within a step: time in which the runnable thread had no CPU; roll-ups only
    BACKWARD_INPUT = 21  # first half of a divided backward: the gradient of the chunk's input
    BACKWARD_WEIGHT = 22  # second half of a divided backward: the gradients of linear layers' weights

    @property
    def label(self) -> str:
        """Lower-case name, such as `send_forward`."""
        return self.name.lower()


SPAN_OF_ACTION = {
    ActionKind.FORWARD: SpanKind.FORWARD,
    ActionKind.BACKWARD: SpanKind.BACKWARD,
    ActionKind.BACKWARD_INPUT: SpanKind.BACKWARD_INPUT,
    ActionKind.BACKWARD_WEIGHT: SpanKind.BACKWARD_WEIGHT,
    ActionKind.SEND_FORWARD: SpanKind.SEND_FORWARD,
    ActionKind.RECV_FORWARD: SpanKind.RECV_FORWARD,
    ActionKind.SEND_BACKWARD: SpanKind.SEND_BACKWARD,
    ActionKind.RECV_BACKWARD: SpanKind.RECV_BACKWARD,
    ActionKind.GATHER_PARAMS: SpanKind.GATHER_PARAMS,
    ActionKind.REDUCE_GRADS: SpanKind.REDUCE_GRADS,
}

BACKWARD_LABELS = tuple(SPAN_OF_ACTION[kind].label for kind in COMPUTES if kind != ActionKind.FORWARD)
COMPUTE_LABELS = (SpanKind.FORWARD.label, *BACKWARD_LABELS)

# Kinds of spans within an action during which this rank waits.
WAIT_KINDS = (SpanKind.WAIT, SpanKind.DATA_WAIT)


class SpanAxis(IntEnum):
    """Axis of the grid along which a wait or a transfer runs."""

    NONE = 0
    TENSOR = 1
    PIPELINE = 2
    DATA = 3
    WORLD = 4
    STAGE = 5
    EMBEDDING = 6
    CONTEXT = 7
    OTHER = 8  # an axis of a plugin

    @classmethod
    def of_group(cls, kind: str) -> SpanAxis:
        """Return the axis of a kind of process group (rendezvous/group_plan.py), such as DATA for data_reduce."""
        if kind in ("replica", "state"):
            return cls.STAGE
        if kind == "replicate":
            return cls.DATA
        if kind == "slice":
            return cls.CONTEXT
        return cls.__members__.get(kind.partition("_")[0].upper(), cls.OTHER)

    @property
    def label(self) -> str:
        """Lower-case name, empty for NONE."""
        if self is SpanAxis.NONE:
            return ""
        return self.name.lower()


@dataclass(frozen=True)
class Span:
    """One timed action. Times are nanoseconds since the epoch on the host's clock.

    Attributes:
        schema: version of this record.
        job: name of the run.
        attempt: index of the run's start.
        host, rank: host and rank that did the work.
        action: label of the SpanKind, such as forward, send_forward, wait or optimizer.
        chunk, microbatch: model chunk and micro-batch, -1 where they do not apply.
        axis: grid axis along which a wait or transfer runs, else "".
        bytes: bytes moved, 0 for compute.
        start_ns, end_ns: start and end of the action.
        waited_on: rank or process that a wait was for; -1 for other actions, or if it is unknown.
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
        """Return the span as one line of JSON, as exports hold it."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> Span:
        """Parse a line of `to_json`. Raises ValueError for another schema or missing keys."""
        record = json.loads(line)
        if record.get("schema") != SPAN_SCHEMA:
            raise ValueError(f"span schema {record.get('schema')!r} is not {SPAN_SCHEMA}")
        try:
            return cls(**record)
        except TypeError as error:
            raise ValueError(f"not a span: {error}") from None


# A point in time in the recorder's own form: nanoseconds, or an event of a device; None if nothing is recorded.
Mark = Any


class Recorder:
    """Recorder of the engine's times. This base class records nothing; its subclasses are in `observe.rank`.

    Actions follow each other (`begin_action`, `end_action`); waits and transfers lie within them. The thread that runs
    the step calls all methods, and none of them waits for a device.
    """

    def begin_step(self, step: int) -> None:
        """Record that the step's first operation comes next."""

    def end_step(self) -> None:
        """Record that the step's last operation has been queued."""

    def begin_action(self, kind: int, chunk: int = -1, microbatch: int = -1) -> None:
        """Record that an action starts on the current stream."""

    def end_action(self) -> None:
        """Record that the action has ended on its stream."""

    def mark(self) -> Mark:
        """Return the current time, for `record_wait`."""
        return None

    def record_wait(self, since: Mark, kind: int, axis: int = 0, waited_on: int = -1) -> None:
        """Record that the stream has waited from `since` on, for another rank or for samples."""

    def begin_transfer(self, axis: int, nbytes: int) -> Mark:
        """Record that a transfer of `nbytes` bytes starts, and return its start time."""
        return None

    def end_transfer(self, since: Mark, axis: int, nbytes: int, waited_on: int = -1) -> None:
        """Record that a transfer that started at `since` has been awaited."""

    def record_count(self, kind: int, count: int, nanoseconds: int = 0, longest: int = 0) -> None:
        """Record work that the host did `count` times in this step.

        Args:
            nanoseconds: total time of all repetitions.
            longest: nanoseconds of the longest repetition.
        """
