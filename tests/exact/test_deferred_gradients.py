"""Weight gradients that a schedule computes later: the same bits as at once, within a bound on their memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from megascale.parallel import pipeline
from tests.exact.cases import TWO_LAYERS, case
from tests.exact.training import FEW_STEPS, RankReport, make_engine, observe, run_step, state_of, train

pytestmark = pytest.mark.xdist_group("processes")

MICROBATCHES = 4


@contextmanager
def split_backward(engine: Any, is_first_step: bool) -> Iterator[None]:
    """Queue each backward's weight gradients, and compute them one micro-batch of the chunk later.

    The first step counts the contributions to each gradient, so that it computes them within the same backward.
    """
    queue = engine.runtime.weight_gradients
    run_backward = pipeline.EagerRunner.backward

    def backward(runner: Any, chunk: int, i: int, grad: torch.Tensor | None) -> torch.Tensor | None:
        with queue.defer(chunk, i):
            x_grad = run_backward(runner, chunk, i, grad)
        if is_first_step or i == MICROBATCHES - 1:
            queue.flush(chunk)
        elif i:
            queue.flush(chunk, i - 1)
        return x_grad

    with mock.patch.object(pipeline.EagerRunner, "backward", backward):
        yield


def train_deferred(rank: int, world: int, tree: dict[str, Any], limit: int) -> tuple[RankReport, int, int]:
    """Train with split backwards; returns the report and the queue's limit and peak in bytes."""
    engine = make_engine(rank, world, tree)
    queue = engine.runtime.weight_gradients
    queue.limit_bytes = limit
    report = RankReport()
    observe(engine, report)
    for step in range(1, FEW_STEPS + 1):
        with split_backward(engine, is_first_step=step == 1):
            run_step(engine, step, report)
        assert len(queue) == queue.nbytes == 0
    report.state = state_of(engine)
    return report, limit, queue.peak_bytes


def values(report: RankReport) -> list[bytes]:
    boxes = [box for step in report.gradients for box in step] + report.state
    return [box.values.tobytes() for box in boxes]


@pytest.mark.parametrize("limit", [3000, 10**9])
@pytest.mark.parametrize("name", ["tensor", "pipeline", "tensor, float8_rowwise, recompute"])
def test_deferred_gradients_are_the_same_to_the_bit(name, limit, pool):
    options: dict[str, Any] = {"model": TWO_LAYERS, "microbatches": MICROBATCHES}
    layout = {
        "tensor": case(2, **options),
        "pipeline": case(1, 2, **options),
        "tensor, float8_rowwise, recompute": case(
            2, train={"linear_precision": "float8_rowwise"}, parallel={"recompute": "selective"}, **options
        ),
    }[name]
    expected = pool.run(train, layout.world, layout.tree, FEW_STEPS)
    for (report, _, peak), reference in zip(
        pool.run(train_deferred, layout.world, layout.tree, limit), expected, strict=True
    ):
        assert (report.losses, report.norms) == (reference.losses, reference.norms)
        assert values(report) == values(reference)
        assert 0 < peak <= limit
