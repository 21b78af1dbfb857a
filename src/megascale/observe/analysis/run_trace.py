"""A run's spans as a trace of operations (operation_trace.py), for what-if and for ByteDance's StragglerAnalysis.

What stands for what:

- forward-compute, backward-compute: from the arrival of what the action waited for to its end; the loader's samples
  and exchanges with tensor peers are part of it, the waiting for those is in `waited`;
- sends and receives: from the moment the side has posted it to the arrival. A receiver that is busy sees a message
  late; such a transfer counts no more than the median of those that a receiver waited for;
- grads-reduce-scatter: the exposed part, since buckets leave within backwards; params-all-gather from its start until
  it was awaited;
- optimizer-clip-main-grad: the all-reduce of the gradients' norm; optimizer: the rest of the update;
- operations that StragglerAnalysis asks for and this engine has not (gc, layernorm-grads-all-reduce): no time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import numpy as np

from megascale.errors import DataError
from megascale.observe.analysis.operation_trace import (
    BACKWARD,
    CLIP,
    EMBEDDING,
    FORWARD,
    GARBAGE,
    GATHER,
    NORMS,
    OPTIMIZER,
    REDUCE,
    TRANSFERS,
    OperationTrace,
    make_trace,
)
from megascale.observe.analysis.run_steps import ActionSpan, RankStep, read_rank_steps
from megascale.observe.store.tables import SpanTables

# A wait shorter than this (ns) was for a message that had come before.
_NO_WAIT = 100_000
_COMPUTES = {"forward": FORWARD, "backward": BACKWARD}
_MESSAGES = {
    "send_forward": "forward-send",
    "recv_forward": "forward-recv",
    "send_backward": "backward-send",
    "recv_backward": "backward-recv",
}


def read_run_trace(tables: SpanTables, steps: list[int]) -> OperationTrace:
    """The operations of these steps of a run. DataError if they hold no compute."""
    out = _Rows()
    of_step: list[RankStep] = []
    for one in read_rank_steps(tables, steps):
        if of_step and of_step[0].step != one.step:
            out.take(of_step)
            of_step = []
        of_step.append(one)
    if of_step:
        out.take(of_step)
    return out.trace()


class _Rows:
    """Rows of the table under construction; times in nanoseconds."""

    def __init__(self) -> None:
        self.rows: list[tuple[Any, ...]] = []
        # Of transfers: kind, what it took, whether the receiver waited for it, and the rows of both sides.
        self.moved: list[tuple[str, int, bool, tuple[int, int]]] = []

    def take(self, ranks: list[RankStep]) -> None:
        """All ranks of one step."""
        stages = max(one.coordinates[1] for one in ranks) + 1
        last = max((act.chunk for one in ranks for act in one.actions if act.action in _COMPUTES), default=0) * stages
        last += stages - 1
        # Sides of transfers by replica, tensor, kind, the model's chunk at that side and micro-batch: their rows.
        sides: dict[tuple[int, int, str, int, int], int] = {}
        arrived: dict[tuple[int, int, str, int, int], tuple[int, int]] = {}
        for one in ranks:
            self._rank(one, stages, last, sides, arrived)
        for (data, tensor, kind, whole, batch), sent in sides.items():
            if not TRANSFERS[kind][1]:
                continue
            receive = (data, tensor, kind.replace("send", "recv"), whole + TRANSFERS[kind][2], batch)
            if receive not in sides or receive not in arrived:
                continue
            received = sides[receive]
            ready = max(self.rows[sent][_BEGIN], self.rows[received][_BEGIN])
            end, waited = arrived[receive]
            self.moved.append((kind, max(0, end - ready), waited > _NO_WAIT, (sent, received)))

    def _rank(
        self,
        one: RankStep,
        stages: int,
        last: int,
        sides: dict[tuple[int, int, str, int, int], int],
        arrived: dict[tuple[int, int, str, int, int], tuple[int, int]],
    ) -> None:
        tensor, stage, data = one.coordinates
        seen: Counter[str] = Counter()

        def row(kind: str, begin: int, end: int, chunk: int = -1, batch: int = -1, waited: int = 0) -> int:
            whole = chunk * stages + stage if kind in _COMPUTES.values() else -1
            self.rows.append(
                (data, stage, one.rank, one.step, kind, seen[kind], chunk, batch, whole, begin, max(begin, end), waited)
            )
            seen[kind] += 1
            return len(self.rows) - 1

        computed = one.begin
        tail: dict[str, tuple[int, int]] = {}
        for act in one.actions:
            whole = act.chunk * stages + stage
            if kind := _COMPUTES.get(act.action):
                begin = act.begin
                before = (
                    act.select_waits("pipeline", "data") if act.action == "forward" else act.select_waits("pipeline")
                )
                begin = max([begin, *(wait.end for wait in before)])
                peers = sum(wait.end - wait.begin for wait in act.select_waits("tensor"))
                row(kind, begin, act.end, act.chunk, act.microbatch, peers)
                computed = act.end
                if stages > 1 and (whole > 0 if kind == FORWARD else whole < last):
                    message = next(iter(act.select_waits("pipeline")), None)
                    came = (message.end, message.end - message.begin) if message else (act.begin, 0)
                    name = "forward-recv" if kind == FORWARD else "backward-recv"
                    arrived[data, tensor, name, whole, act.microbatch] = came
            elif kind := _MESSAGES.get(act.action):
                # What it belongs to is told by the sequence; chunk and micro-batch have no meaning there.
                sides[data, tensor, kind, whole, act.microbatch] = row(kind, act.begin, act.end)
            elif act.action == "gather_params" and (moved := act.select_transfers("data")):
                row(GATHER, moved[0].begin, max(one.end for one in moved), act.chunk)
            elif act.action == "finish_reductions":
                self._reductions(act, tail)
            elif act.action == "optimizer":
                norm = [(wait.begin, wait.end) for wait in act.select_transfers("world")][:1]
                tail[CLIP] = norm[0] if norm else (act.begin, act.begin)
                tail[OPTIMIZER] = (tail[CLIP][1], act.end)
        row(GARBAGE, computed, computed)
        at = computed
        for kind in (NORMS, EMBEDDING, REDUCE, CLIP, OPTIMIZER):
            if kind == EMBEDDING and stage not in (0, stages - 1):
                continue
            if kind == REDUCE and kind not in tail:
                continue
            begin, end = tail.get(kind, (at, at))
            row(kind, begin, end, 0 if kind == REDUCE else -1)
            at = max(at, end)

    @staticmethod
    def _reductions(act: ActionSpan, tail: dict[str, tuple[int, int]]) -> None:
        if moved := act.select_transfers("embedding"):
            tail[EMBEDDING] = (moved[0].begin, max(one.end for one in moved))
        if waits := act.select_waits("data"):
            tail[REDUCE] = (act.begin, max(wait.end for wait in waits))

    def trace(self) -> OperationTrace:
        """The table."""
        if not self.rows:
            raise DataError("the steps have no spans; see megascale spans RUN")
        exact: dict[str, list[int]] = defaultdict(list)
        for kind, took, waited, _ in self.moved:
            if waited:
                exact[kind].append(took)
        typical = {kind: int(np.median(times)) for kind, times in exact.items()}
        for kind, took, waited, sides in self.moved:
            if not waited and kind in typical:
                took = min(took, typical[kind])
            end = max(self.rows[side][_BEGIN] for side in sides) + took
            for side in sides:
                self.rows[side] = (*self.rows[side][: _BEGIN + 1], end, 0)
        names = ("replica", "stage", "rank", "step", "kind", "sequence", "chunk", "microbatch", "global_chunk")
        columns: dict[str, Any] = dict(
            zip((*names, "begin", "end", "waited"), zip(*self.rows, strict=True), strict=True)
        )
        begin, end, step = (np.array(columns.pop(name), dtype=np.int64) for name in ("begin", "end", "step"))
        # From each step's first operation, in seconds.
        _, number = np.unique(step, return_inverse=True)
        first = np.full(number.max() + 1, np.iinfo(np.int64).max)
        np.minimum.at(first, number.ravel(), begin)
        columns |= {"start": (begin - first[number.ravel()]) / 1e9, "duration": (end - begin) / 1e9, "step": step}
        columns["waited"] = np.minimum(np.array(columns["waited"]) / 1e9, columns["duration"])
        return make_trace(columns)


_BEGIN = 9
