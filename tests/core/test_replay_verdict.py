"""Votes over executions: whatever rank errs, it alone is named, or the pair that the executions cannot tell apart."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megascale.core.replay_verdict import Execution, LocatedSuspicion, judge_executions, name_ranks

LENGTH = 6


def execute(replicas: int, distance: int, wrong: dict[tuple[int, int, int], int]) -> list[Execution]:
    """Return the executions of a check with a mismatch.

    Args:
        wrong: (owner, executor, occasion) -> first wrong checksum. The value is what a fault adds.
    """
    distances = [(0, 0), (distance, 0)]
    distances += [(0, 1), (distance, 1)] if replicas == 2 else [(1 + distance % (replicas - 1), 0)]
    executions = []
    for executor in range(replicas):
        for d, occasion in distances:
            owner = (executor - d) % replicas
            sums = np.arange(LENGTH) + 100 * owner
            first = wrong.get((owner, executor, occasion))
            if first is not None:
                sums[first:] += 7
            executions.append(Execution(owner, executor, sums))
    return executions


@given(st.integers(2, 6), st.data())
def test_a_passing_fault_is_named(replicas, data):
    distance = data.draw(st.integers(1, replicas - 1))
    executor = data.draw(st.integers(0, replicas - 1))
    owner = data.draw(st.sampled_from([executor, (executor - distance) % replicas]))
    first = data.draw(st.integers(0, LENGTH - 1))
    (suspicion,) = judge_executions(execute(replicas, distance, {(owner, executor, 0): first}))
    assert (suspicion.executors, suspicion.owner, suspicion.first) == ((executor,), owner, first)


@given(st.integers(2, 6), st.data())
def test_a_persistent_fault_is_named_by_three_replicas_and_halved_by_two(replicas, data):
    distance = data.draw(st.integers(1, replicas - 1))
    executor = data.draw(st.integers(0, replicas - 1))
    first = data.draw(st.integers(0, LENGTH - 1))
    wrong = {(owner, executor, occasion): first for owner in range(replicas) for occasion in (0, 1)}
    suspicions = judge_executions(execute(replicas, distance, wrong))
    expected = (executor,) if replicas > 2 else (0, 1)
    assert len(suspicions) == min(replicas, 3)
    assert all(suspicion.executors == expected and suspicion.first == first for suspicion in suspicions)


def test_of_two_replicas_the_one_that_differs_from_itself_is_named():
    executions = execute(2, 1, {(0, 1, 0): 2, (0, 1, 1): 3})
    (suspicion,) = judge_executions(executions)
    assert (suspicion.executors, suspicion.first, suspicion.wrong, suspicion.total) == ((1,), 2, 2, 2)


def test_healthy_executions_raise_no_suspicion():
    assert judge_executions(execute(4, 2, {})) == []


@given(st.permutations(range(3)))
def test_the_first_rank_of_the_computation_is_named_whoever_reports_first(order):
    def suspect(rank: int, key: tuple[int, int, int, int]) -> LocatedSuspicion:
        return LocatedSuspicion((rank,), 0, key, "forward of chunk 1", f"tensor of {rank}", 1, 1)

    # Rank 5 errs in chunk 1; its tensor-parallel peer sees it after a collective, the first stage in backward.
    suspicions = [suspect(5, (0, 1, 2, 9)), suspect(4, (0, 1, 3, 4)), suspect(1, (1, 0, 0, 0))]
    verdict = name_ranks(8, [suspicions[i] for i in order])
    assert (verdict.ranks, verdict.is_sure, verdict.is_persistent) == ((5,), True, False)
    assert verdict.tensor == "tensor of 5"
    assert verdict.describe([f"gpu {rank}" for rank in range(6)]).startswith("rank 5 (gpu 5) computed other bits once")
