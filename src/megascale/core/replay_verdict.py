"""Votes over executions of the same micro-batch by several replicas, which name a faulty rank. No torch.

The rank at the same coordinate in each replica traces the same results (parallel/compute_trace.py). Executions of one
micro-batch on healthy devices have equal traces. Of unequal ones the majority is right. The first entry that differs
is compared between the ranks of the faulty replica: a fault travels along the pipeline and through the collectives of
ranks that share a micro-batch, so that the rank where it comes first in the order of the computation is at fault.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np


class Phase(IntEnum):
    """Parts of a micro-batch's computation, in order."""

    FORWARD = 0
    BACKWARD = 1
    WEIGHT_GRADIENTS = 2
    UPDATE = 3

    @property
    def label(self) -> str:
        """Name for people."""
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True)
class TracePoint:
    """The place of a checksum in the computation.

    Attributes:
        phase: part of the computation.
        chunk: position of the chunk in the model.
        collectives: collectives of tensor-parallel ranks that this part of the computation has started before.
        number: number of the checksum within this part. Tensor-parallel ranks may divide a GEMM into unequal numbers
            of parts between two collectives.
        operator: what computed the tensor.
        parameter: the parameter that the operator read, "" if none.
    """

    phase: Phase
    chunk: int
    collectives: int
    number: int
    operator: str
    parameter: str

    @property
    def order(self) -> tuple[int, int, int, int]:
        """Key of the order in which a fault travels: forwards up the chunks, backwards down."""
        if self.phase == Phase.FORWARD:
            return (self.phase, self.chunk, self.collectives, self.number)
        return (self.phase, -self.chunk, self.collectives, self.number)

    @property
    def action(self) -> str:
        """The action for people."""
        return f"{self.phase.label} of chunk {self.chunk}"

    @property
    def tensor(self) -> str:
        """The tensor for people."""
        if self.operator == "gradient":
            return f"gradient of {self.parameter}" if self.parameter else "gradient of a parameter"
        if self.parameter:
            return f"result of {self.operator} with {self.parameter}"
        if self.operator.startswith(("input", "output", "loss", "gradient")):
            return self.operator
        return f"result of {self.operator}"


@dataclass(frozen=True)
class Execution:
    """One execution of a micro-batch, as one coordinate of the replica traced it.

    Attributes:
        owner: replica that trains on the micro-batch.
        executor: replica that ran it.
        sums: its checksums, int64.
    """

    owner: int
    executor: int
    sums: np.ndarray


@dataclass(frozen=True)
class Suspicion:
    """Executions that differ from others, at one coordinate.

    Attributes:
        executors: replicas of which at least one is wrong; one replica if the executions tell which.
        owner: replica that trains on the micro-batch.
        first: index of the first checksum that differs.
        wrong, total: executions of the micro-batch by these replicas that differ, and all of them.
    """

    executors: tuple[int, ...]
    owner: int
    first: int
    wrong: int
    total: int


def judge_executions(executions: Sequence[Execution]) -> list[Suspicion]:
    """Return what differs between the executions of each micro-batch at one coordinate."""
    by_owner: dict[int, list[Execution]] = defaultdict(list)
    for execution in executions:
        by_owner[execution.owner].append(execution)
    suspicions = []
    for owner in sorted(by_owner):
        suspicions += _judge_micro_batch(owner, by_owner[owner])
    return suspicions


def _judge_micro_batch(owner: int, executions: Sequence[Execution]) -> list[Suspicion]:
    variants: dict[bytes, list[Execution]] = defaultdict(list)
    for execution in executions:
        variants[execution.sums.tobytes()].append(execution)
    if len(variants) == 1:
        return []
    right = _choose_right(list(variants.values()))
    if right is None:
        replicas = tuple(sorted({execution.executor for execution in executions}))
        first = min(find_first_difference(a.sums, executions[0].sums) for a in executions[1:])
        return [Suspicion(replicas, owner, first, len(executions), len(executions))]
    suspicions = []
    for executor in sorted({execution.executor for execution in executions}):
        repeats = [execution for execution in executions if execution.executor == executor]
        firsts = [find_first_difference(execution.sums, right.sums) for execution in repeats]
        wrong = [first for first in firsts if first < len(right.sums)]
        if wrong:
            suspicions.append(Suspicion((executor,), owner, min(wrong), len(wrong), len(repeats)))
    return suspicions


def _choose_right(variants: Sequence[Sequence[Execution]]) -> Execution | None:
    """Return an execution with the right result, None if the executions do not tell.

    The result that most replicas computed is right. If as many replicas computed another, a replica that has computed
    different results of one micro-batch is not believed.
    """
    results_of: dict[int, int] = defaultdict(int)
    for variant in variants:
        for executor in {execution.executor for execution in variant}:
            results_of[executor] += 1
    for believed in (set(results_of), {executor for executor, count in results_of.items() if count == 1}):
        votes = [len({execution.executor for execution in variant} & believed) for variant in variants]
        best = max(votes)
        if best and votes.count(best) == 1:
            return variants[votes.index(best)][0]
    return None


def find_first_difference(a: np.ndarray, b: np.ndarray) -> int:
    """Return the index of the first element that differs, or the length of both."""
    differences = np.flatnonzero(a != b)
    if len(differences):
        return int(differences[0])
    return len(a)


@dataclass(frozen=True)
class LocatedSuspicion:
    """A suspicion of one coordinate with what its ranks know of it; every type may travel between processes.

    Attributes:
        ranks: the suspected ranks: this coordinate's in each suspected replica.
        owner: replica that trains on the micro-batch.
        order: `TracePoint.order` of the first difference.
        action, tensor: of the first difference, for people.
        wrong, total: as in `Suspicion`.
    """

    ranks: tuple[int, ...]
    owner: int
    order: tuple[int, int, int, int]
    action: str
    tensor: str
    wrong: int
    total: int


@dataclass(frozen=True)
class ReplayVerdict:
    """The outcome of a replay whose checksums differ.

    Attributes:
        step: step whose micro-batches were replayed.
        ranks: ranks at fault; if `is_sure` each of them, else at least one.
        is_sure: whether the executions tell which rank computed wrongly.
        is_persistent: whether the ranks computed wrongly each time.
        action, tensor: first difference.
    """

    step: int
    ranks: tuple[int, ...]
    is_sure: bool
    is_persistent: bool
    action: str
    tensor: str

    def describe(self, devices: Sequence[str]) -> str:
        """Return a sentence for people. `devices`: name of each rank's device and host."""
        names = [f"rank {rank} ({devices[rank]})" for rank in self.ranks]
        if self.is_sure:
            subject = " and ".join(names)
        else:
            subject = "one of " + " and ".join(names)
        times = "each time" if self.is_persistent else "once"
        return f"{subject} computed other bits {times} in step {self.step}: {self.action}, {self.tensor}"


def name_ranks(step: int, suspicions: Sequence[LocatedSuspicion]) -> ReplayVerdict:
    """Return the verdict on the suspicions of all coordinates; ValueError without any.

    Of each micro-batch's suspicions the first in the order of the computation counts: the others follow from it.
    """
    if not suspicions:
        raise ValueError("there are no suspicions to judge")
    by_owner: dict[int, list[LocatedSuspicion]] = defaultdict(list)
    for suspicion in suspicions:
        by_owner[suspicion.owner].append(suspicion)
    causes: list[LocatedSuspicion] = []
    for group in by_owner.values():
        # What is sure at one coordinate decides over what is unsure at the same point of another.
        first = min(suspicion.order for suspicion in group)
        causes += [suspicion for suspicion in group if suspicion.order == first]
    sure = [cause for cause in causes if len(cause.ranks) == 1]
    relevant = sure or causes
    ranks = tuple(sorted({rank for cause in relevant for rank in cause.ranks}))
    earliest = min(relevant, key=lambda cause: cause.order)
    is_wrong_always = all(cause.wrong == cause.total for cause in relevant)
    is_persistent = is_wrong_always and len({cause.owner for cause in relevant}) > 1
    return ReplayVerdict(step, ranks, bool(sure), is_persistent, earliest.action, earliest.tensor)
