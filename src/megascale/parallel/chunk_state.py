"""Progress of a chunk's present backward, and its communication in flight (data_parallel.py)."""

from __future__ import annotations

from megascale.core.schedule import ActionKind
from megascale.parallel.buffers import ParamAndGradBuffer
from megascale.parallel.collectives import Pending
from megascale.parallel.float8_gather import Float8Gather


class ChunkState:
    """Communication in flight for the buckets of one chunk, and the progress of the chunk's present backward.

    A contribution is an addition to a parameter's gradient.

    Attributes:
        recorded_counts: number of contributions to each parameter by a backward of each kind, recorded in the first
            backward of the kind.
        counts: number of contributions to each parameter in the present backward so far.
        expected_counts: by kind of backward, the number of parameters of each bucket that get a gradient. A parameter
            gets none if another chunk's copy is in use.
        incomplete_counts: number of parameters of each bucket whose gradient is not complete in the present backward.
        unit_buckets: buckets that each unit of the forward needs.
        is_armed: whether the next backward, or the present one, is reduced.
        reduces_as_filled: whether the present backward reduces each bucket as soon as its gradients are complete.
        armed_count: number of backwards of this step that were armed.
        reduces_resident: whether the present backward completes the gradients of resident parameters: the one of the
            step's last micro-batch, if the number of micro-batches is known.
    """

    def __init__(self, chunk: int, buffer: ParamAndGradBuffer, float8: bool) -> None:
        self.chunk = chunk
        self.buffer = buffer
        self.float8 = Float8Gather(buffer) if float8 and buffer.zero < 3 else None
        self.recorded_counts: dict[ActionKind, list[int]] = {}
        self.counts = [0] * len(buffer.parameters)
        self.backward_kind = ActionKind.BACKWARD
        self.expected_counts: dict[ActionKind, list[int]] = {}
        self.incomplete_counts: list[int] = []
        self.unit_buckets: list[list[int]] = []
        self.is_armed = False
        self.reduces_as_filled = False
        self.armed_count = 0
        self.reduces_resident = True
        self.pending_reductions: dict[int, Pending] = {}
        self.pending_gathers: dict[int, Pending] = {}

    def count_microbatch_contributions(self) -> list[int]:
        """Return the number of contributions to each parameter per micro-batch, all 0 while unknown."""
        counts = self.recorded_counts.get(ActionKind.BACKWARD)
        if counts is not None:
            return counts
        input_counts = self.recorded_counts.get(ActionKind.BACKWARD_INPUT)
        weight_counts = self.recorded_counts.get(ActionKind.BACKWARD_WEIGHT)
        if input_counts is None or weight_counts is None:
            return [0] * len(self.counts)
        return [sum(pair) for pair in zip(input_counts, weight_counts, strict=True)]

    def record_contributions(self, kind: ActionKind) -> None:
        """Record the contributions in the present backward if it is the first of its kind."""
        if kind in self.recorded_counts:
            return
        self.recorded_counts[kind] = list(self.counts)
        expected_counts = []
        for bucket in self.buffer.layout.buckets:
            expected_counts.append(sum(1 for param_index in bucket.members if self.counts[param_index]))
        self.expected_counts[kind] = expected_counts

    def drop_communication(self) -> None:
        """Forget everything in flight and the recorded contributions, because the step has failed."""
        self.pending_reductions.clear()
        self.pending_gathers.clear()
        self.is_armed = False
        self.reduces_as_filled = False
        self.armed_count = 0
        self.recorded_counts.clear()
        self.expected_counts.clear()
        if self.float8 is not None:
            self.float8.drop_communication()
