"""Traces of ranks that exchange by copies between GPUs: a wrong result comes first on the rank that computed it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megascale.core.replay_verdict import Phase, TracePoint, find_first_difference
from megascale.parallel.collectives import Axis, gather_sequence, transpose_sequence
from megascale.parallel.compute_trace import ComputeTrace
from megascale.parallel.linear_precision import LinearPrecision
from megascale.parallel.tensor import gather_linear, linear_scatter
from tests.parallel.test_tensor import BATCH, COLUMNS, HIDDEN, ROWS, draw, make_leaf, run_ranks

FAULTY_RANK = 1


def trace_layers(axis: Axis, wrong: str) -> tuple[np.ndarray, list[TracePoint]]:
    """Return the checksums and points of some layers, with a wrong bit on one rank.

    Args:
        wrong: operator without a checksum of its own that is wrong: "norm" before a linear layer's gather, "activation"
            before its scatter, "tokens" before a gather and "heads" before an all-to-all, "gradient" before the
            backward; "" for none.
    """
    is_faulty = axis.rank == FAULTY_RANK
    x = draw(ROWS, BATCH, HIDDEN, seed=axis.rank)
    if wrong == "norm" and is_faulty:
        x = x * (1 + 2**-40)
    x = make_leaf(x)
    weights = [draw(COLUMNS, HIDDEN, seed=2), draw(HIDDEN, COLUMNS, seed=3)]
    buffer: Any = SimpleNamespace(params=torch.zeros(1), parameters=[], sinks=[])
    trace = ComputeTrace([buffer], [0], [axis], axis.runtime)
    with trace.record(Phase.FORWARD, 0):
        hidden = gather_linear(x, weights[0], None, LinearPrecision(axis), None)
        hidden = torch.tanh(hidden)
        if wrong == "activation" and is_faulty:
            hidden = hidden * (1 + 2**-40)
        y = linear_scatter(LinearPrecision(axis), hidden, weights[1])
        if wrong == "tokens" and is_faulty:
            y = y * (1 + 2**-40)
        tokens = gather_sequence(y, axis).view(-1, HIDDEN) @ draw(HIDDEN, HIDDEN, seed=5)
        if wrong == "heads" and is_faulty:
            tokens = tokens * (1 + 2**-40)
        y = transpose_sequence(tokens, axis) @ draw(HIDDEN, HIDDEN, seed=6)
    gradient = draw(*y.shape, seed=4)
    if wrong == "gradient" and is_faulty:
        gradient = gradient * (1 + 2**-40)
    with trace.record(Phase.BACKWARD, 0), torch.autograd.set_multithreading_enabled(False):
        y.backward(gradient)
    trace.finish()
    return trace.sums[: len(trace)].numpy(), trace.list_points()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("wrong", ["norm", "activation", "tokens", "heads", "gradient"])
def test_a_wrong_result_comes_first_on_its_own_rank(size, wrong):
    healthy = run_ranks(size, lambda axis: trace_layers(axis, ""))
    faulty = run_ranks(size, lambda axis: trace_layers(axis, wrong))
    orders = []
    for (right_sums, points), (wrong_sums, _) in zip(healthy, faulty, strict=True):
        first = find_first_difference(right_sums, wrong_sums)
        orders.append(points[first].order if first < len(points) else (99,))
    assert orders.index(min(orders)) == FAULTY_RANK
    assert orders.count(min(orders)) == 1
