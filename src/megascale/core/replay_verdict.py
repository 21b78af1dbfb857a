"""Verdict on a replayed step: the faulty rank, from several replicas' executions of the same micro-batch. No torch.

Each rank traces checksums of its results (parallel/compute_trace.py). A coordinate is a position within a replica. The
ranks at one coordinate of different replicas have equal traces of one micro-batch if their devices are healthy. If
traces differ, the majority is right. The fault spreads along the pipeline and through collectives to other ranks of the
faulty replica. Among these ranks, the one whose first difference comes earliest in the order of the computation is at
fault.
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
        """Name in messages, such as `weight gradients`."""
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True)
class TracePoint:
    """Point of the computation at which a checksum was taken.

    Attributes:
        phase: phase of the micro-batch.
        chunk: position of the chunk in the model.
        collectives: number of tensor-parallel collectives that this phase of the chunk has started before the point.
        number: index of the checksum within the phase of the chunk. In `order` it comes after `collectives`, because
            tensor-parallel ranks may divide a GEMM into different numbers of pieces between two collectives.
        operator: name of the operator that computed the tensor.
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
        """Sort key of the order of the computation: forwards with rising chunk, backwards with falling chunk."""
        if self.phase == Phase.FORWARD:
            return (self.phase, self.chunk, self.collectives, self.number)
        return (self.phase, -self.chunk, self.collectives, self.number)

    @property
    def action(self) -> str:
        """Name of the action in messages."""
        return f"{self.phase.label} of chunk {self.chunk}"

    @property
    def tensor(self) -> str:
        """Name of the tensor in messages."""
        if self.operator == "gradient":
            return f"gradient of {self.parameter}" if self.parameter else "gradient of a parameter"
        if self.parameter:
            return f"result of {self.operator} with {self.parameter}"
        if self.operator.startswith(("input", "output", "loss", "gradient")):
            return self.operator
        return f"result of {self.operator}"


@dataclass(frozen=True)
class Execution:
    """One execution of a micro-batch, as the rank at one coordinate of a replica traced it.

    Attributes:
        owner: replica that trains on the micro-batch.
        executor: replica that executed it.
        sums: checksums in the order of the computation: [points], int64.
    """

    owner: int
    executor: int
    sums: np.ndarray


@dataclass(frozen=True)
class Suspicion:
    """Replicas whose executions of a micro-batch differ from others at one coordinate.

    Attributes:
        executors: replicas of which at least one is wrong; a single replica if a majority decides.
        owner: replica that trains on the micro-batch.
        first: index of the first checksum that differs.
        wrong: number of the executors' executions that differ.
        total: number of the executors' executions of the micro-batch.
    """

    executors: tuple[int, ...]
    owner: int
    first: int
    wrong: int
    total: int


def judge_executions(executions: Sequence[Execution]) -> list[Suspicion]:
    """Return the suspicions from the executions of all micro-batches at one coordinate; empty if all are equal."""
    by_owner: dict[int, list[Execution]] = defaultdict(list)
    for execution in executions:
        by_owner[execution.owner].append(execution)
    suspicions = []
    for owner in sorted(by_owner):
        suspicions += _judge_micro_batch(owner, by_owner[owner])
    return suspicions


def _judge_micro_batch(owner: int, executions: Sequence[Execution]) -> list[Suspicion]:
    """Return the suspicions from the executions of one micro-batch.

    If the vote on the right result is tied, the only suspicion names all executors.
    """
    variants: dict[bytes, list[Execution]] = defaultdict(list)
    for execution in executions:
        variants[execution.sums.tobytes()].append(execution)
    if len(variants) == 1:
        return []
    right = _choose_right(list(variants.values()))
    if right is None:
        executors = tuple(sorted({execution.executor for execution in executions}))
        reference = executions[0].sums
        first = min(find_first_difference(execution.sums, reference) for execution in executions[1:])
        return [Suspicion(executors, owner, first, wrong=len(executions), total=len(executions))]
    suspicions = []
    for executor in sorted({execution.executor for execution in executions}):
        repeats = [execution for execution in executions if execution.executor == executor]
        first_differences = []  # index of the first difference of each wrong execution
        for execution in repeats:
            index = find_first_difference(execution.sums, right.sums)
            if index < len(right.sums):
                first_differences.append(index)
        if first_differences:
            suspicions.append(
                Suspicion(
                    (executor,),
                    owner,
                    first=min(first_differences),
                    wrong=len(first_differences),
                    total=len(repeats),
                )
            )
    return suspicions


def _choose_right(variants: Sequence[Sequence[Execution]]) -> Execution | None:
    """Return an execution with the right result, or None if the vote is tied.

    Each replica has one vote for each result that it computed, and the result with most votes is right. If the vote is
    tied, it is repeated without the replicas that computed more than one result.

    Args:
        variants: executions grouped by result.
    """
    executors_by_variant = [{execution.executor for execution in variant} for variant in variants]
    result_counts: dict[int, int] = defaultdict(int)  # number of different results of each replica
    for executors in executors_by_variant:
        for executor in executors:
            result_counts[executor] += 1
    consistent_executors = {executor for executor, count in result_counts.items() if count == 1}
    for voters in (set(result_counts), consistent_executors):
        votes = [len(executors & voters) for executors in executors_by_variant]
        most_votes = max(votes)
        if most_votes and votes.count(most_votes) == 1:
            return variants[votes.index(most_votes)][0]
    return None


def find_first_difference(a: np.ndarray, b: np.ndarray) -> int:
    """Return the index of the first element that differs, or the common length if none differs."""
    differences = np.flatnonzero(a != b)
    if len(differences):
        return int(differences[0])
    return len(a)


@dataclass(frozen=True)
class LocatedSuspicion:
    """A suspicion with its ranks and the point of its first difference. Its fields can be sent to other processes.

    Attributes:
        ranks: the suspected ranks: those at this coordinate of each suspected replica.
        owner: replica that trains on the micro-batch.
        order: `TracePoint.order` of the first difference.
        action, tensor: names in messages of the first difference's action and tensor.
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
        is_persistent: whether all executions of the ranks were wrong, for more than one micro-batch.
        action, tensor: names of the first difference's action and tensor.
    """

    step: int
    ranks: tuple[int, ...]
    is_sure: bool
    is_persistent: bool
    action: str
    tensor: str

    def describe(self, devices: Sequence[str]) -> str:
        """Return the verdict as a sentence.

        Args:
            devices: name of each rank's device and host.
        """
        names = [f"rank {rank} ({devices[rank]})" for rank in self.ranks]
        if self.is_sure:
            subject = " and ".join(names)
        else:
            subject = "one of " + " and ".join(names)
        times = "each time" if self.is_persistent else "once"
        return f"{subject} computed other bits {times} in step {self.step}: {self.action}, {self.tensor}"


def name_ranks(step: int, suspicions: Sequence[LocatedSuspicion]) -> ReplayVerdict:
    """Return the verdict on the suspicions of all coordinates. Raises ValueError if there are none.

    For each micro-batch, only the first suspicions in the order of the computation count, because the others are
    consequences.
    """
    if not suspicions:
        raise ValueError("there are no suspicions to judge")
    by_owner: dict[int, list[LocatedSuspicion]] = defaultdict(list)
    for suspicion in suspicions:
        by_owner[suspicion.owner].append(suspicion)
    causes: list[LocatedSuspicion] = []
    for owner_suspicions in by_owner.values():
        first_order = min(suspicion.order for suspicion in owner_suspicions)
        causes += [suspicion for suspicion in owner_suspicions if suspicion.order == first_order]
    # A cause with a single rank decides over a cause at the same point whose vote was tied.
    sure_causes = [cause for cause in causes if len(cause.ranks) == 1]
    is_sure = bool(sure_causes)
    if is_sure:
        causes = sure_causes
    ranks = tuple(sorted({rank for cause in causes for rank in cause.ranks}))
    earliest = min(causes, key=lambda cause: cause.order)
    is_always_wrong = all(cause.wrong == cause.total for cause in causes)
    is_persistent = is_always_wrong and len({cause.owner for cause in causes}) > 1
    return ReplayVerdict(step, ranks, is_sure, is_persistent, earliest.action, earliest.tensor)
