"""Duration of a recorded job's steps if a rank, stage, replica or kind of operation were normal.

The normal duration of a kind of operation is its typical duration over all steps and ranks of the trace: the mean for
computes, optimizer and garbage collection, the median for other kinds (StragglerAnalysis, OSDI 2025). The job is
replayed several times. Each replay keeps the recorded durations of some operations and gives all others their normal
duration. Launch gaps (recorded pauses before operations that could have started) are left out. The replay `original`,
with all durations as recorded, is therefore slightly shorter than the recorded step. Figures:

- Subset: the operations of a kind, stage, replica or rank.
- Slow-down: duration of `original` divided by the duration of `ideal`, the replay in which every operation is normal.
- Slow-down of a subset alone: the duration of the replay in which only this subset is as recorded, divided by ideal
  (S_t of kinds, S_w of workers).
- Share that a subset explains: (original - normal) / (original - ideal), where `normal` is the duration of the replay
  in which only this subset is normal.
- M_S: the share that the last stage explains. M_W: the share that the slowest 3% of the ranks explain.
- Score of a worker (a stage of a replica): the smaller of the slow-downs of its replica alone and its stage alone. Only
  the ranks with the highest scores are replayed.
"""

from __future__ import annotations

import math
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
class SubsetResult:
    """Effect of a subset of the job's operations.

    Attributes:
        alone: slow-down with only this subset as recorded; NaN if not replayed.
        explains: fraction of the slow-down that disappears if the subset is normal; NaN without a slow-down.
        seconds: seconds per step that are saved if the subset is normal.
    """

    alone: float
    explains: float
    seconds: float


@dataclass(frozen=True)
class WhatIf:
    """Time that a job lost to operations that were not normal. Times are means over steps in seconds.

    Attributes:
        steps: number of replayed steps.
        skipped_steps: why each other step was not replayed, by step.
        recorded, replayed: duration of a step, and of its replay with launch gaps. They must be equal.
        original, ideal: replay without launch gaps, with all operations as recorded and with all operations normal.
        ranks: results by rank, for the ranks with the highest scores and the requested ranks.
        scores: scores of the workers, [stages, replicas].
        rank_grid: global ranks, [stages, replicas, tensor].
        stage_share, worker_share: M_S and M_W; NaN with one stage or without a slow-down.
        slowest: ranks that are normal in the replay of M_W.
    """

    steps: int
    skipped_steps: dict[int, str]
    recorded: float
    replayed: float
    original: float
    ideal: float
    kinds: dict[str, SubsetResult]
    stages: dict[int, SubsetResult]
    replicas: dict[int, SubsetResult]
    ranks: dict[int, SubsetResult]
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
    """Return the name of a kind's subset. The sends and the receives of a direction form one subset."""
    if kind in TRANSFERS:
        return f"{kind.partition('-')[0]}-pp-comm"
    return kind


def analyse_trace(trace: OperationTrace, ranks: tuple[int, ...] = ()) -> WhatIf:
    """Replay a trace with different subsets normal. Raises ConfigError if the trace lacks one of the `ranks`."""
    graphs, skipped_steps = build_graphs(trace)
    return _Replays(graphs).analyse(skipped_steps, ranks)


# Array of booleans that broadcasts to [nodes, replicas, tensor]: whether each operation of a graph keeps its recorded
# duration.
Mask = Array
# Question that one replay answers, with a mask per graph: how long is a step if only these operations are as recorded?
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

    def replay_questions(self, questions: Sequence[Question]) -> Array:
        """Return the mean seconds of a step in the replay of each question, [questions]."""
        totals = np.zeros(len(questions))
        for number, graph in enumerate(self.graphs):
            normal = self.normal_durations[number][:, None, None, None, None]  # [nodes, 1, 1, 1, 1]
            # As many questions at once as _BUFFER_BYTES holds arrays of float64.
            batch_size = min(len(questions), max(1, _BUFFER_BYTES // (8 * graph.own_duration.size)))
            end = np.empty((graph.node_count + 1, batch_size, *graph.own_duration.shape[1:]))
            for begin in range(0, len(questions), batch_size):
                masks = [question[number] for question in questions[begin : begin + batch_size]]
                # Shape of `is_recorded`: [nodes or 1, questions, 1 (steps), replicas or 1, tensor or 1].
                shape = np.broadcast_shapes(*(mask.shape for mask in masks))
                is_recorded = np.stack([np.broadcast_to(mask, shape) for mask in masks], axis=1)[:, :, None]

                def get_durations(
                    nodes: Array, graph: TraceGraph = graph, normal: Array = normal, is_recorded: Array = is_recorded
                ) -> Array:
                    mask = is_recorded
                    if len(is_recorded) > 1:  # the mask depends on the node
                        mask = is_recorded[nodes]
                    return np.where(mask, graph.own_duration[nodes][:, None], normal[nodes])

                step_seconds = graph.replay_seconds(get_durations, end[:, : len(masks)])
                totals[begin : begin + batch_size] += step_seconds.sum(axis=-1)
        return totals / sum(len(graph.steps) for graph in self.graphs)

    def select_kind(self, name: str) -> Question:
        """Return the question that keeps the operations of a kind as recorded."""
        masks = [np.array([merge_transfer_kinds(str(kind)) == name for kind in graph.kind]) for graph in self.graphs]
        return [mask[:, None, None] for mask in masks]

    def select_stage(self, stage: int) -> Question:
        """Return the question that keeps the operations of a stage as recorded."""
        return [(graph.stage == stage)[:, None, None] for graph in self.graphs]

    def select_replica(self, replica: int) -> Question:
        """Return the question that keeps the operations of a replica as recorded."""
        mask = np.zeros((1, *self.rank_grid.shape[1:]), bool)
        mask[:, replica] = True
        return [mask for _ in self.graphs]

    def select_ranks(self, ranks: tuple[int, ...]) -> Question:
        """Return the question that keeps the operations of some ranks as recorded."""
        return [np.isin(self.rank_grid, ranks)[graph.stage] for graph in self.graphs]

    def analyse(self, skipped_steps: dict[int, str], requested: tuple[int, ...]) -> WhatIf:
        """Return the effect of each subset. Raises ConfigError if the trace lacks one of the `requested` ranks."""
        trace_ranks = set(self.rank_grid.ravel().tolist())
        for rank in requested:
            if rank not in trace_ranks:
                raise ConfigError(
                    f"--rank={rank}: the trace has no such rank; its ranks are {min(trace_ranks)} to {max(trace_ranks)}"
                )
        kinds = sorted({merge_transfer_kinds(str(kind)) for graph in self.graphs for kind in graph.kind})
        stages = range(self.rank_grid.shape[0])
        replicas = range(self.rank_grid.shape[1])
        kind_subsets = {kind: self.select_kind(kind) for kind in kinds}
        stage_subsets = {stage: self.select_stage(stage) for stage in stages}
        replica_subsets = {replica: self.select_replica(replica) for replica in replicas}
        nothing: Question = [np.zeros((1, 1, 1), bool) for _ in self.graphs]
        subsets = list(kind_subsets.values()) + list(stage_subsets.values()) + list(replica_subsets.values())
        ideal, original, *alone_seconds = self.replay_questions([nothing, _invert(nothing)] + subsets).tolist()
        # Slow-down of each subset alone, in the order of `subsets`.
        alone = np.array(alone_seconds) / ideal
        alone_kind, alone_stage, alone_replica = np.split(alone, [len(kinds), len(kinds) + len(stages)])
        scores = np.minimum(alone_stage[:, None], alone_replica[None, :])
        sorted_ranks = self._sort_ranks(scores)
        slowest = tuple(sorted_ranks[: math.ceil(len(sorted_ranks) * SLOWEST_PERCENT / 100)])
        ranks = list(dict.fromkeys(sorted_ranks[:_REPLAYED_RANKS] + list(requested)))
        rank_subsets = {rank: self.select_ranks((rank,)) for rank in ranks}
        alone_rank = self.replay_questions(list(rank_subsets.values())) / ideal
        # A job may have many replicas, so make normal only those with the largest slow-down alone, as with ranks.
        slow_replicas = np.argsort(-alone_replica, kind="stable")[:_REPLAYED_RANKS].tolist()
        normal_subsets = list(kind_subsets.values()) + list(stage_subsets.values())
        normal_subsets += [replica_subsets[replica] for replica in slow_replicas]
        normal_subsets += list(rank_subsets.values()) + [self.select_ranks(slowest)]
        # Results in the order of `normal_subsets`; the statements below take them one by one.
        normal_seconds = iter(self.replay_questions([_invert(subset) for subset in normal_subsets]).tolist())

        def make_result(alone: float, seconds_if_normal: float) -> SubsetResult:
            saved = original - seconds_if_normal
            lost = original - ideal
            explains = np.nan
            if lost > 1e-9 * original:  # more than rounding
                explains = saved / lost
            return SubsetResult(alone=float(alone), explains=explains, seconds=saved)

        kind_results = {kind: make_result(alone_kind[n], next(normal_seconds)) for n, kind in enumerate(kinds)}
        stage_results = {stage: make_result(alone_stage[stage], next(normal_seconds)) for stage in stages}
        seconds_by_replica = {replica: next(normal_seconds) for replica in slow_replicas}
        rank_results = {rank: make_result(alone_rank[n], next(normal_seconds)) for n, rank in enumerate(ranks)}
        return WhatIf(
            steps=sum(len(graph.steps) for graph in self.graphs),
            skipped_steps=skipped_steps,
            recorded=_mean([graph.get_step_seconds() for graph in self.graphs]),
            replayed=_mean([graph.replay(keep_gaps=True)[1].max(axis=(0, 2, 3)) for graph in self.graphs]),
            original=original,
            ideal=ideal,
            kinds=kind_results,
            stages=stage_results,
            replicas={n: make_result(alone_replica[n], seconds_by_replica.get(n, np.nan)) for n in replicas},
            ranks=rank_results,
            scores=scores,
            rank_grid=self.rank_grid,
            stage_share=stage_results[stages[-1]].explains if len(stages) > 1 else np.nan,
            worker_share=make_result(np.nan, next(normal_seconds)).explains,
            slowest=slowest,
        )

    def _sort_ranks(self, scores: Array) -> list[int]:
        """Return the ranks by the score of their worker, the highest first. Tensor peers are sorted by compute time."""
        compute_seconds = np.zeros(self.rank_grid.shape)
        for graph in self.graphs:
            for node in np.flatnonzero(np.isin(graph.kind, COMPUTE)).tolist():
                compute_seconds[graph.stage[node]] += graph.own_duration[node].sum(axis=0)
        sort_keys: dict[int, tuple[float, int, float]] = {}
        for (stage, replica, peer), rank in np.ndenumerate(self.rank_grid):
            # Workers with equal scores are sorted by their lowest rank.
            lowest_rank = int(self.rank_grid[stage, replica].min())
            seconds = float(compute_seconds[stage, replica, peer])
            sort_keys[int(rank)] = (-float(scores[stage, replica]), lowest_rank, -seconds)
        return sorted(sort_keys, key=lambda rank: (sort_keys[rank], rank))


def _mean(seconds: list[Array]) -> float:
    return float(np.concatenate(seconds).mean())


def _invert(question: Question) -> Question:
    return [~mask for mask in question]
