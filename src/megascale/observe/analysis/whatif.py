"""Duration of a recorded job's steps if a rank, stage, replica or kind of operation were normal.

The normal duration of a kind is its typical duration over all steps and ranks of the trace: the mean of computes, the
median of the rest (StragglerAnalysis, OSDI 2025). Launch gaps are left out, so `original` is slightly shorter than the
recorded step, and only durations are compared:

- slow-down: original / ideal, where in `ideal` every operation is normal;
- a part *alone*: this part as recorded and the rest normal, divided by ideal (S_t of kinds, S_w of workers);
- a part *made normal*: the rest as recorded; it explains (original - made normal) / (original - ideal);
- M_S: the share that the last stage explains; M_W: the share that the slowest 3% of workers explain;
- a worker's score: the smaller of its replica's and its stage's value alone. Only ranks with the highest scores are
  replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megascale.errors import ConfigError
from megascale.observe.analysis.operation_trace import COMPUTE, GARBAGE, OPTIMIZER, TRANSFERS, Array, OperationTrace
from megascale.observe.analysis.trace_graph import TraceGraph, build_graphs

SLOWEST_PERCENT = 3  # share of all ranks that M_W makes normal
_REPLAYED_RANKS = 8  # ranks with the highest scores that are replayed one by one
_BUFFER_BYTES = 64 << 20  # memory of the arrays of one replay


@dataclass(frozen=True)
class Part:
    """A part of the job.

    Attributes:
        alone: slow-down with only this part as recorded; NaN if not replayed.
        explains: share of the slow-down that disappears if it is normal; NaN without a slow-down.
        seconds: time per step saved if it is normal.
    """

    alone: float
    explains: float
    seconds: float


@dataclass(frozen=True)
class WhatIf:
    """Time that a job lost to operations that were not normal. Times are means over steps in seconds.

    Attributes:
        steps: number of replayed steps; skipped_steps: the reason for each other step.
        recorded, replayed: duration of a step, and of its replay with launch gaps, which must be equal.
        original, ideal: replay without gaps, as recorded and with everything normal.
        kinds, stages, replicas, ranks: parts by name; ranks only those with the highest scores and requested ones.
        scores: [stages, replicas] of the workers.
        rank_grid: [stages, replicas, tensor].
        stage_share, worker_share: M_S and M_W; NaN with one stage or without a slow-down.
        slowest: ranks that M_W makes normal.
    """

    steps: int
    skipped_steps: dict[int, str]
    recorded: float
    replayed: float
    original: float
    ideal: float
    kinds: dict[str, Part]
    stages: dict[int, Part]
    replicas: dict[int, Part]
    ranks: dict[int, Part]
    scores: Array
    rank_grid: Array
    stage_share: float
    worker_share: float
    slowest: tuple[int, ...]

    @property
    def slow_down(self) -> float:
        """Original divided by ideal."""
        return self.original / self.ideal


def merge_transfer_kinds(kind: str) -> str:
    """Return the name under which a kind is made normal: sends and receives of a direction share one."""
    if kind in TRANSFERS:
        return f"{kind.partition('-')[0]}-pp-comm"
    return kind


def analyse_trace(trace: OperationTrace, ranks: tuple[int, ...] = ()) -> WhatIf:
    """Replay a trace with each of its parts normal. ConfigError if the trace lacks one of the requested ranks."""
    graphs, skipped_steps = build_graphs(trace)
    return _Replays(graphs).analyse(skipped_steps, ranks)


# Operations of a graph that are as recorded: a mask that broadcasts to [nodes, replicas, tensor].
Mask = Array
# One mask per graph.
Question = list[Mask]


class _Replays:
    """Replays of a job's graphs, many questions at once."""

    def __init__(self, graphs: list[TraceGraph]) -> None:
        self.graphs = graphs
        self.rank_grid = graphs[0].ranks
        self.normal_durations = self._measure_normal_durations()

    def _measure_normal_durations(self) -> list[Array]:
        """Return the normal duration of each node, [nodes] per graph."""
        typical = {}
        for kind in {str(kind) for graph in self.graphs for kind in graph.kind}:
            durations = np.concatenate([graph.own_duration[graph.kind == kind].ravel() for graph in self.graphs])
            uses_mean = kind in (COMPUTE + (OPTIMIZER, GARBAGE))
            typical[kind] = float(durations.mean() if uses_mean else np.median(durations))
        return [np.array([typical[str(kind)] for kind in graph.kind]) for graph in self.graphs]

    def seconds(self, questions: Sequence[Question]) -> Array:
        """Return the mean step of each question."""
        totals = np.zeros(len(questions))
        for number, graph in enumerate(self.graphs):
            normal = self.normal_durations[number][:, None, None, None, None]
            size = min(len(questions), max(1, _BUFFER_BYTES // (8 * graph.own_duration.size)))
            end = np.empty((graph.nodes + 1, size, *graph.own_duration.shape[1:]))
            for begin in range(0, len(questions), size):
                masks = [question[number] for question in questions[begin : begin + size]]
                # [nodes or 1, questions, 1, replicas or 1, tensor or 1]
                shape = np.broadcast_shapes(*(mask.shape for mask in masks))
                is_recorded = np.stack([np.broadcast_to(mask, shape) for mask in masks], axis=1)[:, :, None]

                def get_durations(
                    nodes: Array, graph: TraceGraph = graph, normal: Array = normal, is_recorded: Array = is_recorded
                ) -> Array:
                    if len(is_recorded) > 1:
                        mask = is_recorded[nodes]
                    else:
                        mask = is_recorded
                    return np.where(mask, graph.own_duration[nodes][:, None], normal[nodes])

                totals[begin : begin + size] += graph.seconds(get_durations, end[:, : len(masks)]).sum(axis=-1)
        return totals / sum(len(graph.steps) for graph in self.graphs)

    def select_kind(self, name: str) -> Question:
        """Return the operations of a kind."""
        masks = [np.array([merge_transfer_kinds(str(kind)) == name for kind in graph.kind]) for graph in self.graphs]
        return [mask[:, None, None] for mask in masks]

    def select_stage(self, stage: int) -> Question:
        """Return the operations of a stage."""
        return [(graph.stage == stage)[:, None, None] for graph in self.graphs]

    def select_replica(self, replica: int) -> Question:
        """Return the operations of a replica."""
        mask = np.zeros((1, *self.rank_grid.shape[1:]), bool)
        mask[:, replica] = True
        return [mask for _ in self.graphs]

    def select_ranks(self, ranks: tuple[int, ...]) -> Question:
        """Return the operations of some ranks."""
        return [np.isin(self.rank_grid, ranks)[graph.stage] for graph in self.graphs]

    def analyse(self, skipped_steps: dict[int, str], requested: tuple[int, ...]) -> WhatIf:
        """Replay all questions."""
        trace_ranks = set(self.rank_grid.ravel().tolist())
        for rank in requested:
            if rank not in trace_ranks:
                raise ConfigError(
                    f"--rank={rank}: the trace has no such rank; its ranks are {min(trace_ranks)} to {max(trace_ranks)}"
                )
        kinds = sorted({merge_transfer_kinds(str(kind)) for graph in self.graphs for kind in graph.kind})
        stages = range(self.rank_grid.shape[0])
        replicas = range(self.rank_grid.shape[1])
        by_kind = {kind: self.select_kind(kind) for kind in kinds}
        by_stage = {stage: self.select_stage(stage) for stage in stages}
        by_replica = {replica: self.select_replica(replica) for replica in replicas}
        nothing: Question = [np.zeros((1, 1, 1), bool) for _ in self.graphs]
        parts = list(by_kind.values()) + list(by_stage.values()) + list(by_replica.values())
        ideal, original, *alone_seconds = self.seconds([nothing, _invert(nothing)] + parts).tolist()
        alone = np.array(alone_seconds) / ideal
        alone_stage = alone[len(kinds) : len(kinds) + len(stages)]
        alone_replica = alone[len(kinds) + len(stages) :]
        scores = np.minimum(alone_stage[:, None], alone_replica[None, :])
        order = self._sort_ranks(scores)
        slowest = tuple(order[: -(-len(order) * SLOWEST_PERCENT // 100)])
        ranks = list(dict.fromkeys(order[:_REPLAYED_RANKS] + list(requested)))
        by_rank = {rank: self.select_ranks((rank,)) for rank in ranks}
        alone_rank = self.seconds(list(by_rank.values())) / ideal
        # Of the replicas only those that take longest alone are made normal, like the ranks.
        slow_replicas = np.argsort(-alone_replica, kind="stable")[:_REPLAYED_RANKS].tolist()
        removed = list(by_kind.values()) + list(by_stage.values())
        removed += [by_replica[replica] for replica in slow_replicas]
        removed += list(by_rank.values()) + [self.select_ranks(slowest)]
        without = iter(self.seconds([_invert(question) for question in removed]).tolist())

        def make_part(alone: float, without: float) -> Part:
            saved = original - without
            lost = original - ideal
            return Part(alone=float(alone), explains=saved / lost if lost > 1e-9 * original else np.nan, seconds=saved)

        kind_parts = {kind: make_part(alone[n], next(without)) for n, kind in enumerate(kinds)}
        stage_parts = {stage: make_part(alone_stage[stage], next(without)) for stage in stages}
        without_replica = {replica: next(without) for replica in slow_replicas}
        rank_parts = {rank: make_part(alone_rank[n], next(without)) for n, rank in enumerate(ranks)}
        return WhatIf(
            steps=sum(len(graph.steps) for graph in self.graphs),
            skipped_steps=skipped_steps,
            recorded=_mean([graph.recorded() for graph in self.graphs]),
            replayed=_mean([graph.replay(gaps=True)[1].max(axis=(0, 2, 3)) for graph in self.graphs]),
            original=original,
            ideal=ideal,
            kinds=kind_parts,
            stages=stage_parts,
            replicas={n: make_part(alone_replica[n], without_replica.get(n, np.nan)) for n in replicas},
            ranks=rank_parts,
            scores=scores,
            rank_grid=self.rank_grid,
            stage_share=stage_parts[stages[-1]].explains if len(stages) > 1 else np.nan,
            worker_share=make_part(np.nan, next(without)).explains,
            slowest=slowest,
        )

    def _sort_ranks(self, scores: Array) -> list[int]:
        """Return the ranks by the score of their worker, the highest first; tensor peers by their own compute time."""
        busy = np.zeros(self.rank_grid.shape)
        for graph in self.graphs:
            for node in np.flatnonzero(np.isin(graph.kind, COMPUTE)).tolist():
                busy[graph.stage[node]] += graph.own_duration[node].sum(axis=0)
        keys = [
            (-float(scores[stage, replica]), int(peers.min()), -float(busy[stage, replica, peer]), int(rank))
            for stage, stage_ranks in enumerate(self.rank_grid)
            for replica, peers in enumerate(stage_ranks)
            for peer, rank in enumerate(peers)
        ]
        return [rank for _, _, _, rank in sorted(keys)]


def _mean(seconds: list[Array]) -> float:
    return float(np.concatenate(seconds).mean())


def _invert(question: Question) -> Question:
    return [~mask for mask in question]
