"""What if: what a recorded job's steps would have taken had a rank, stage, replica or kind of operation been normal.

Normal is a kind's typical duration over all steps and ranks of the trace: the mean of computes, the median of the rest
(StragglerAnalysis, OSDI 2025). Launch gaps are left out, so that `original` is a little shorter than the recorded
step, and what is compared are durations alone:

- slow-down: original / ideal, where ideal has every operation normal;
- a part *alone*: that part as recorded, the rest normal, over ideal (S_t of kinds, S_w of workers);
- a part *made normal*: the rest as recorded; explains (original - made normal) / (original - ideal);
- M_S: what the last stage explains so; M_W: what the slowest 3% of workers do;
- a worker's score: the smaller of what its replica and its stage take alone. Only those of the highest are replayed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megascale.errors import ConfigError
from megascale.observe.analysis.operation_trace import COMPUTE, GARBAGE, OPTIMIZER, TRANSFERS, Array, OperationTrace
from megascale.observe.analysis.trace_graph import TraceGraph, graphs_of

# Of all ranks, the percentage that M_W makes normal.
SLOWEST = 3
# Ranks of the highest scores that are replayed one by one.
_EACH = 8
# Bytes that the arrays of one replay may take.
_MEMORY = 64 << 20


@dataclass(frozen=True)
class Part:
    """A part of the job.

    Attributes:
        alone: slow-down with only this part as recorded; nan if it was not asked.
        explains: share of the slow-down that goes when it is made normal; nan where there is no slow-down.
        seconds: of a step, saved when it is made normal.
    """

    alone: float
    explains: float
    seconds: float


@dataclass(frozen=True)
class WhatIf:
    """What a job lost to operations that were not normal. Times are means over steps, seconds.

    Attributes:
        steps: how many were replayed; left_out: the others and why.
        recorded, replayed: a step, and its replay with launch gaps, which must be the same.
        original, ideal: replayed without gaps, as recorded and with everything normal.
        kinds, stages, replicas, ranks: parts by name; ranks only those of the highest scores and those asked for.
        scores: [stages, replicas] of the workers (heat map).
        ranks_at: [stages, replicas, tensor].
        stage_share, worker_share: M_S and M_W; nan with one stage, or where there is no slow-down.
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
    ranks_at: Array
    stage_share: float
    worker_share: float
    slowest: tuple[int, ...]

    @property
    def slow_down(self) -> float:
        """Original over ideal."""
        return self.original / self.ideal


def group_of(kind: str) -> str:
    """The name under which a kind is made normal: sends and receives of a direction together."""
    return f"{kind.partition('-')[0]}-pp-comm" if kind in TRANSFERS else kind


def what_if(trace: OperationTrace, ranks: tuple[int, ...] = ()) -> WhatIf:
    """Ask all of a trace. ConfigError if one of `ranks` is none of its."""
    graphs, left_out = graphs_of(trace)
    return _Questions(graphs).answer(left_out, ranks)


def ideal_durations(graphs: list[TraceGraph]) -> list[Array]:
    """The normal duration of each node: [nodes] for each graph."""
    typical = {}
    for kind in {str(kind) for graph in graphs for kind in graph.kind}:
        times = np.concatenate([graph.own[graph.kind == kind].ravel() for graph in graphs])
        mean = kind in (*COMPUTE, OPTIMIZER, GARBAGE)
        typical[kind] = float(times.mean() if mean else np.median(times))
    return [np.array([typical[str(kind)] for kind in graph.kind]) for graph in graphs]


# A question: which operations of a graph take as recorded, a mask that broadcasts to [nodes, replicas, tensor].
Mask = Array


class _Questions:
    def __init__(self, graphs: list[TraceGraph]) -> None:
        self.graphs = graphs
        self.ideal = ideal_durations(graphs)
        self.at = graphs[0].ranks

    def seconds(self, masks: list[list[Mask]]) -> Array:
        """Mean step for each question: masks by question, then by graph."""
        totals = np.zeros(len(masks))
        for number, graph in enumerate(self.graphs):
            normal = self.ideal[number][:, None, None, None, None]
            size = min(len(masks), max(1, _MEMORY // (8 * graph.own.size)))
            end = np.empty((graph.nodes + 1, size, *graph.own.shape[1:]))
            for begin in range(0, len(masks), size):
                part = [of_graphs[number] for of_graphs in masks[begin : begin + size]]
                # [nodes or 1, questions, 1, replicas or 1, tensor or 1]
                across = np.broadcast_shapes(*(mask.shape for mask in part))
                kept = np.stack([np.broadcast_to(mask, across) for mask in part], axis=1)[:, :, None]

                def own_of(
                    nodes: Array, graph: TraceGraph = graph, normal: Array = normal, kept: Array = kept
                ) -> Array:
                    mask = kept[nodes] if len(kept) > 1 else kept
                    return np.where(mask, graph.own[nodes][:, None], normal[nodes])

                totals[begin : begin + size] += graph.seconds(own_of, end[:, : len(part)]).sum(axis=-1)
        return totals / sum(len(graph.steps) for graph in self.graphs)

    def by_node(self, attribute: str, value: object) -> list[Mask]:
        if attribute == "kind":
            found = [np.array([group_of(str(kind)) == value for kind in graph.kind]) for graph in self.graphs]
        else:
            found = [graph.stage == value for graph in self.graphs]
        return [mask[:, None, None] for mask in found]

    def by_replica(self, replica: int) -> list[Mask]:
        here = np.zeros((1, *self.at.shape[1:]), bool)
        here[:, replica] = True
        return [here for _ in self.graphs]

    def by_rank(self, ranks: tuple[int, ...]) -> list[Mask]:
        return [np.isin(self.at, ranks)[graph.stage] for graph in self.graphs]

    def answer(self, left_out: dict[int, str], asked: tuple[int, ...]) -> WhatIf:
        known = set(self.at.ravel().tolist())
        for rank in asked:
            if rank not in known:
                raise ConfigError(f"--rank={rank} is none of the trace's ranks; they are {min(known)} to {max(known)}")
        nothing = [np.zeros((1, 1, 1), bool) for _ in self.graphs]
        kinds = sorted({group_of(str(kind)) for graph in self.graphs for kind in graph.kind})
        stages, replicas = range(self.at.shape[0]), range(self.at.shape[1])
        of_kind = [self.by_node("kind", kind) for kind in kinds]
        of_stage = [self.by_node("stage", stage) for stage in stages]
        of_replica = [self.by_replica(replica) for replica in replicas]
        parts = [*of_kind, *of_stage, *of_replica]
        found = self.seconds([nothing, _inverse(nothing), *parts])
        ideal, original, alone = float(found[0]), float(found[1]), found[2:] / found[0]
        alone_stage = alone[len(kinds) : len(kinds) + len(stages)]
        scores = np.minimum(alone_stage[:, None], alone[None, len(kinds) + len(stages) :])
        order = self._ordered(scores)
        slowest = tuple(order[: -(-len(order) * SLOWEST // 100)])
        each = tuple(dict.fromkeys([*order[:_EACH], *asked]))
        # The replicas that take longest alone, the same way.
        most = np.argsort(-alone[len(kinds) + len(stages) :], kind="stable")[:_EACH].tolist()
        removed = [*of_kind, *of_stage, *(of_replica[n] for n in most), *(self.by_rank((rank,)) for rank in each)]
        without = self.seconds([_inverse(mask) for mask in [*removed, self.by_rank(slowest)]])
        extra = self.seconds([self.by_rank((rank,)) for rank in each]) / ideal
        lost = original - ideal

        def part(alone: float, without: float) -> Part:
            saved = original - float(without)
            return Part(float(alone), saved / lost if lost > 1e-9 * original else np.nan, saved)

        ends = np.cumsum([len(kinds), len(stages), len(most), len(each)])
        of_replicas = dict(zip(most, without[ends[1] : ends[2]], strict=True))
        return WhatIf(
            steps=sum(len(graph.steps) for graph in self.graphs),
            skipped_steps=left_out,
            recorded=self._mean([graph.recorded() for graph in self.graphs]),
            replayed=self._mean([graph.replay(gaps=True)[1].max(axis=(0, 2, 3)) for graph in self.graphs]),
            original=original,
            ideal=ideal,
            kinds={kind: part(alone[n], without[n]) for n, kind in enumerate(kinds)},
            stages={n: part(alone_stage[n], without[ends[0] + n]) for n in stages},
            replicas={n: part(alone[ends[1] + n], of_replicas.get(n, np.nan)) for n in replicas},
            ranks={rank: part(extra[n], without[ends[2] + n]) for n, rank in enumerate(each)},
            scores=scores,
            ranks_at=self.at,
            stage_share=part(np.nan, without[ends[1] - 1]).explains if len(stages) > 1 else np.nan,
            worker_share=part(np.nan, without[-1]).explains,
            slowest=slowest,
        )

    def _ordered(self, scores: Array) -> list[int]:
        """Ranks from the highest score of their worker down; tensor peers by what they compute themselves."""
        busy = np.zeros(self.at.shape)
        for graph in self.graphs:
            for node in np.flatnonzero(np.isin(graph.kind, COMPUTE)).tolist():
                busy[graph.stage[node]] += graph.own[node].sum(axis=0)
        rows = [
            (-float(scores[stage, replica]), int(peers.min()), -float(busy[stage, replica, peer]), int(rank))
            for stage, of_stage in enumerate(self.at)
            for replica, peers in enumerate(of_stage)
            for peer, rank in enumerate(peers)
        ]
        return [rank for *_, rank in sorted(rows)]

    def _mean(self, seconds: list[Array]) -> float:
        return float(np.concatenate(seconds).mean())


def _inverse(masks: list[Mask]) -> list[Mask]:
    return [~mask for mask in masks]
