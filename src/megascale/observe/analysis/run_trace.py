"""Conversion of a run's spans to a trace of operations (operation_trace.py):

- forward-compute, backward-compute: from the arrival of the compute's input to its end. The time includes the wait for
  samples and exchanges with tensor peers; waits for these peers are in `waited`.
- sends and receives: from the moment at which the rank posted the operation to the arrival of the message. A busy
  receiver observes a message late. Its transfer therefore counts at most the median of the transfers that a receiver
  waited for.
- grads-reduce-scatter: only the wait after the backwards, because buckets are sent during backwards.
- params-all-gather: from its start to the end of the wait for it.
- optimizer-clip-main-grad: the all-reduce of the gradients' norm. optimizer: the remaining update.
- gc, layernorm-grads-all-reduce: zero seconds, because StragglerAnalysis requires them and this engine lacks them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, fields
from itertools import groupby
from typing import NamedTuple

import numpy as np

from megascale.core.chunk_map import Placement, make_chunk_map
from megascale.errors import DataError
from megascale.observe.analysis.operation_trace import (
    BACKWARD,
    CLIP,
    COMPUTE,
    EMBEDDING,
    FORWARD,
    GARBAGE,
    GATHER,
    NORMS,
    OPTIMIZER,
    REDUCE,
    TRANSFERS,
    WEIGHT,
    OperationTrace,
    make_trace,
)
from megascale.observe.analysis.run_steps import ActionSpan, RankStep, read_placement, read_rank_steps
from megascale.observe.store.tables import SpanTables

_NO_WAIT_NS = 100_000  # a recorded wait that is shorter is overhead: the message had already arrived
# Kind of operation by the label of a span.
_COMPUTE_KINDS = {"forward": FORWARD, "backward": BACKWARD, "backward_input": BACKWARD, "backward_weight": WEIGHT}
_MESSAGE_KINDS = {
    "send_forward": "forward-send",
    "recv_forward": "forward-recv",
    "send_backward": "backward-send",
    "recv_backward": "backward-recv",
}


def read_run_trace(tables: SpanTables, steps: list[int]) -> OperationTrace:
    """Convert the spans of these steps of a run to a trace. Raises DataError if they contain no operation."""
    builder = _TraceBuilder(read_placement(tables))
    for _, ranks in groupby(read_rank_steps(tables, steps), key=lambda rank_step: rank_step.step):
        builder.add_step(list(ranks))
    return builder.make_trace()


@dataclass
class _Row:
    """An operation of a trace under construction. Times are nanoseconds."""

    replica: int
    stage: int
    rank: int
    step: int
    kind: str
    sequence: int
    chunk: int
    microbatch: int
    global_chunk: int
    begin: int
    end: int
    waited: int


class _MessageKey(NamedTuple):
    """Identity of a send or a receive.

    Attributes:
        replica, tensor: coordinates of the rank.
        kind: name in TRANSFERS.
        global_chunk: position in the model of the chunk whose compute precedes the send or follows the receive.
    """

    replica: int
    tensor: int
    kind: str
    global_chunk: int
    microbatch: int


class _Arrival(NamedTuple):
    """Arrival of a message: its time, and the nanoseconds that the receiver waited for it."""

    time: int
    wait_ns: int


@dataclass(frozen=True)
class _Transfer:
    """A message.

    Attributes:
        duration: nanoseconds from the later of send and receive to the arrival.
        was_awaited: whether the receiver waited for the message.
        rows: rows of the send and of the receive.
    """

    kind: str
    duration: int
    was_awaited: bool
    rows: tuple[_Row, _Row]


class _TraceBuilder:
    """Converts the spans of one step after another into rows."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._rows: list[_Row] = []
        self._transfers: list[_Transfer] = []
        # State of the step that `add_step` converts.
        self._chunk_map = make_chunk_map(1, 1)
        self._messages: dict[_MessageKey, _Row] = {}  # rows of sends and receives
        self._arrivals: dict[_MessageKey, _Arrival] = {}  # by receive
        # State of the rank that `_add_rank` converts: number of its operations so far, by kind.
        self._sequences: Counter[str] = Counter()

    def add_step(self, ranks: list[RankStep]) -> None:
        stages = max(rank_step.coordinates[1] for rank_step in ranks) + 1
        chunks = [act.chunk for rank_step in ranks for act in rank_step.actions if act.action in _COMPUTE_KINDS]
        self._chunk_map = make_chunk_map(stages, max(chunks, default=0) + 1, self._placement)
        self._messages = {}
        self._arrivals = {}
        for rank_step in ranks:
            self._add_rank(rank_step)
        self._pair_messages()

    def _pair_messages(self) -> None:
        """Add the transfers of the step: its sends with their receives. Sends without a receive are left out."""
        for send_key, send in self._messages.items():
            transfer_kind = TRANSFERS[send_key.kind]
            if not transfer_kind.is_send:
                continue
            receive_key = send_key._replace(
                kind=send_key.kind.replace("send", "recv"), global_chunk=send_key.global_chunk + transfer_kind.offset
            )
            receive = self._messages.get(receive_key)
            arrival = self._arrivals.get(receive_key)
            if receive is None or arrival is None:
                continue
            self._transfers.append(
                _Transfer(
                    kind=send_key.kind,
                    duration=max(0, arrival.time - max(send.begin, receive.begin)),
                    was_awaited=arrival.wait_ns > _NO_WAIT_NS,
                    rows=(send, receive),
                )
            )

    def _add_row(
        self,
        rank_step: RankStep,
        kind: str,
        *,
        begin: int,
        end: int,
        chunk: int = -1,
        microbatch: int = -1,
        waited: int = 0,
    ) -> _Row:
        _, stage, replica = rank_step.coordinates
        if kind in COMPUTE:
            global_chunk = self._find_global_chunk(stage, chunk)
        else:
            global_chunk = -1
        row = _Row(
            replica=replica,
            stage=stage,
            rank=rank_step.rank,
            step=rank_step.step,
            kind=kind,
            sequence=self._sequences[kind],
            chunk=chunk,
            microbatch=microbatch,
            global_chunk=global_chunk,
            begin=begin,
            end=max(begin, end),
            waited=waited,
        )
        self._rows.append(row)
        self._sequences[kind] += 1
        return row

    def _find_global_chunk(self, stage: int, chunk: int) -> int:
        """Return the position in the model of a stage's chunk; -1 if a damaged span has an impossible chunk."""
        if not 0 <= chunk < self._chunk_map.virtual_stages:
            return -1
        return int(self._chunk_map.positions[stage, chunk])

    def _add_rank(self, rank_step: RankStep) -> None:
        tensor, stage, replica = rank_step.coordinates
        self._sequences = Counter()
        last_compute_end = rank_step.begin
        # Begin and end of the operations after the last compute, by kind.
        tail: dict[str, tuple[int, int]] = {}
        for act in rank_step.actions:
            if act.action in _COMPUTE_KINDS:
                self._add_compute(rank_step, act)
                last_compute_end = act.end
            elif act.action in _MESSAGE_KINDS:
                # StragglerAnalysis assigns a message to a compute by the sequence, so the row has no chunk or
                # micro-batch.
                kind = _MESSAGE_KINDS[act.action]
                global_chunk = self._find_global_chunk(stage, act.chunk)
                key = _MessageKey(replica, tensor, kind, global_chunk=global_chunk, microbatch=act.microbatch)
                self._messages[key] = self._add_row(rank_step, kind, begin=act.begin, end=act.end)
            elif act.action == "gather_params":
                gathers = act.select_transfers("data")
                if gathers:
                    end = max(gather.end for gather in gathers)
                    self._add_row(rank_step, GATHER, begin=gathers[0].begin, end=end, chunk=act.chunk)
            elif act.action == "finish_reductions":
                reductions = act.select_transfers("embedding")
                if reductions:
                    tail[EMBEDDING] = (reductions[0].begin, max(reduction.end for reduction in reductions))
                waits = act.select_waits("data")
                if waits:
                    tail[REDUCE] = (act.begin, max(wait.end for wait in waits))
            elif act.action == "optimizer":
                # The all-reduce of the gradients' norm is the only transfer among all ranks.
                norm_transfers = act.select_transfers("world")
                if norm_transfers:
                    tail[CLIP] = (norm_transfers[0].begin, norm_transfers[0].end)
                else:
                    tail[CLIP] = (act.begin, act.begin)
                _, clip_end = tail[CLIP]
                tail[OPTIMIZER] = (clip_end, act.end)
        self._add_tail(rank_step, tail, last_compute_end)

    def _add_compute(self, rank_step: RankStep, act: ActionSpan) -> None:
        """Add a compute, and the arrival of its input if the input came as a message."""
        tensor, stage, replica = rank_step.coordinates
        kind = _COMPUTE_KINDS[act.action]
        if act.action == "forward":
            input_axes: tuple[str, ...] = ("pipeline", "data")  # of activations and of gathered parameters
        else:
            input_axes = ("pipeline",)
        begin = max([act.begin] + [wait.end for wait in act.select_waits(*input_axes)])
        waited = sum(wait.end - wait.begin for wait in act.select_waits("tensor"))
        self._add_row(
            rank_step,
            kind,
            begin=begin,
            end=act.end,
            chunk=act.chunk,
            microbatch=act.microbatch,
            waited=waited,
        )
        if kind == WEIGHT:
            return
        global_chunk = self._find_global_chunk(stage, act.chunk)
        if global_chunk < 0:
            return
        if kind == FORWARD:
            receive_kind, sender_offset = "forward-recv", -1
        else:
            receive_kind, sender_offset = "backward-recv", 1
        sender = self._chunk_map.neighbour(stage, act.chunk, sender_offset)
        if sender is None:
            return
        sender_stage, _ = sender
        if sender_stage == stage:
            return  # the input came without a message
        waits = act.select_waits("pipeline")
        if waits:
            arrival = _Arrival(waits[0].end, waits[0].end - waits[0].begin)
        else:
            arrival = _Arrival(act.begin, 0)
        key = _MessageKey(replica, tensor, receive_kind, global_chunk=global_chunk, microbatch=act.microbatch)
        self._arrivals[key] = arrival

    def _add_tail(self, rank_step: RankStep, tail: dict[str, tuple[int, int]], last_compute_end: int) -> None:
        """Add the operations after the last compute.

        Args:
            tail: begin and end of the recorded operations by kind; other kinds take zero seconds.
        """
        self._add_row(rank_step, GARBAGE, begin=last_compute_end, end=last_compute_end)
        previous_end = last_compute_end
        for kind in (NORMS, EMBEDDING, REDUCE, CLIP, OPTIMIZER):
            if kind == EMBEDDING and rank_step.coordinates[1] not in self._chunk_map.end_stages:
                continue
            if kind == REDUCE and kind not in tail:
                continue
            begin, end = tail.get(kind, (previous_end, previous_end))
            # The wait is for the reductions of all chunks; chunk 0 stands for them.
            chunk = 0 if kind == REDUCE else -1
            self._add_row(rank_step, kind, begin=begin, end=end, chunk=chunk)
            previous_end = max(previous_end, end)

    def make_trace(self) -> OperationTrace:
        """Return the trace of all added steps. Raises DataError if there are none."""
        if not self._rows:
            raise DataError("the steps have no spans; request some with megascale spans RUN --steps 5")
        self._end_transfers()
        columns = {field.name: np.array([getattr(row, field.name) for row in self._rows]) for field in fields(_Row)}
        begin = columns.pop("begin")
        columns["duration"] = (columns.pop("end") - begin) / 1e9
        # Start times are seconds since each step's first operation.
        _, step_index = np.unique(columns["step"], return_inverse=True)
        step_begins = np.full(step_index.max() + 1, np.iinfo(np.int64).max)
        np.minimum.at(step_begins, step_index.ravel(), begin)
        columns["start"] = (begin - step_begins[step_index.ravel()]) / 1e9
        columns["waited"] = np.minimum(columns["waited"] / 1e9, columns["duration"])
        return make_trace(columns)

    def _end_transfers(self) -> None:
        """Let the rows of each transfer end when the message arrived.

        The arrival of a message for which the receiver did not wait is known only from above. Such a transfer takes at
        most the median of the awaited transfers of its kind.
        """
        awaited_durations: dict[str, list[int]] = defaultdict(list)
        for transfer in self._transfers:
            if transfer.was_awaited:
                awaited_durations[transfer.kind].append(transfer.duration)
        typical_durations = {kind: int(np.median(durations)) for kind, durations in awaited_durations.items()}
        for transfer in self._transfers:
            duration = transfer.duration
            if not transfer.was_awaited:
                duration = min(duration, typical_durations.get(transfer.kind, duration))
            end = max(row.begin for row in transfer.rows) + duration
            for row in transfer.rows:
                row.end = end
