"""Made-up recorded jobs with known times: a schedule replayed, written down as a trace of operations."""

from __future__ import annotations

from typing import Any

import numpy as np

from megascale.core.replay import ActionGraph, replay_schedule
from megascale.core.schedule import ActionKind, build_pipeline_schedule
from megascale.observe.analysis.operation_trace import OperationTrace, make_trace

NAMES = {
    ActionKind.FORWARD: "forward-compute",
    ActionKind.BACKWARD: "backward-compute",
    ActionKind.SEND_FORWARD: "forward-send",
    ActionKind.RECV_FORWARD: "forward-recv",
    ActionKind.SEND_BACKWARD: "backward-send",
    ActionKind.RECV_BACKWARD: "backward-recv",
}
# Seconds: forward, backward, transfer; after the pipeline reduction, norm of the gradients, optimizer.
FORWARD = 1.0
BACKWARD = 2.0
MOVE = 0.05
REDUCE = 0.5
CLIP = 0.1
UPDATE = 0.4


class Job:
    """A pipelined data-parallel job. Worker (stage, replica) computes `slow` times as long; ranks go replica first.

    Attributes:
        trace: what was recorded.
        seconds: of a step.
        ideal: of a step, had every compute taken the mean of its kind.
    """

    def __init__(
        self,
        stages: int = 4,
        virtual: int = 1,
        microbatches: int = 8,
        replicas: int = 3,
        steps: int = 2,
        slow: dict[tuple[int, int], float] | None = None,
        noise: float = 0.0,
    ) -> None:
        self.graph = ActionGraph.compile(build_pipeline_schedule(stages, virtual, microbatches))
        self.shape = (stages, replicas)
        factors = np.ones((stages, replicas))
        for worker, factor in (slow or {}).items():
            factors[worker] = factor
        rng = np.random.default_rng(0)
        rows: list[tuple[Any, ...]] = []
        lengths, computes = [], []
        for step in range(steps):
            duration = self.graph.durations(FORWARD, BACKWARD, MOVE, MOVE)[:, None] * np.ones(replicas)
            computed = self.graph.kind <= ActionKind.BACKWARD
            duration[computed] *= factors[self.graph.stage[computed]] * (
                1 + noise * rng.random((computed.sum(), replicas))
            )
            computes.append(duration)
            lengths.append(self._record(step, duration, rows))
        self.seconds = float(np.mean(lengths))
        mean = np.concatenate(computes, axis=1)
        normal = mean[:, 0].copy()
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
            normal[self.graph.kind == kind] = mean[self.graph.kind == kind].mean()
        self.ideal = float(replay_schedule(self.graph, normal).makespan) + REDUCE + CLIP + UPDATE
        names = ("replica", "stage", "rank", "step", "kind", "sequence", "chunk", "microbatch", "global_chunk")
        self.trace: OperationTrace = make_trace(
            dict(zip(names + ("start", "duration"), map(np.array, zip(*rows, strict=True)), strict=True))
        )

    def _record(self, step: int, duration: np.ndarray[Any, Any], rows: list[tuple[Any, ...]]) -> float:
        graph, (stages, replicas) = self.graph, self.shape
        timeline = replay_schedule(graph, duration)
        computed = np.flatnonzero(graph.kind <= ActionKind.BACKWARD)
        last = np.zeros((stages, replicas))
        np.maximum.at(last, graph.stage[computed], timeline.end[computed])
        reduced = last.max(axis=1) + REDUCE
        for replica in range(replicas):
            order = np.lexsort((graph.kind, timeline.start[:, replica]))
            observed: dict[tuple[str, int], int] = {}

            def row(kind: str, stage: int, begin: float, end: float, chunk: int = -1, batch: int = -1) -> None:
                sequence = observed[kind, stage] = observed.get((kind, stage), -1) + 1  # noqa: B023
                full = chunk * stages + stage if batch >= 0 else -1
                rank = stage * replicas + replica  # noqa: B023
                rows.append((replica, stage, rank, step, kind, sequence, chunk, batch, full, begin, end - begin))  # noqa: B023

            for n in order.tolist():
                kind = ActionKind(int(graph.kind[n]))
                if kind not in NAMES:
                    continue
                begin, end = float(timeline.start[n, replica]), float(timeline.end[n, replica])
                named = (int(graph.chunk[n]), int(graph.microbatch[n])) if kind <= ActionKind.BACKWARD else (-1, -1)
                row(NAMES[kind], int(graph.stage[n]), begin, end, *named)
            for stage in range(stages):
                row("grads-reduce-scatter", stage, float(last[stage, replica]), float(reduced[stage]), 0)
                ready = float(reduced.max())
                row("optimizer-clip-main-grad", stage, float(reduced[stage]), ready + CLIP)
                row("optimizer", stage, ready + CLIP, ready + CLIP + UPDATE)
        return float(reduced.max()) + CLIP + UPDATE
