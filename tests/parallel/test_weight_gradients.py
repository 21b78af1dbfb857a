"""The queue of weight gradients: each is computed once and in order, and its memory stays within the limit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.ops.gradient_sink import GradientSink, SinkParameter, attach, get_main_grad
from megascale.ops.linear import Operand
from megascale.parallel.collectives import Axis
from megascale.parallel.linear import LinearPrecision
from megascale.parallel.runtime import Runtime
from megascale.parallel.tensor import gather_linear
from megascale.parallel.weight_gradients import WeightGradientQueue

BYTES = 8  # of a number in float64


def operand(numbers: int) -> Operand:
    return Operand(torch.zeros(numbers, dtype=torch.float64))


# What a schedule does: queue a gradient of so many numbers in (chunk, micro-batch), or flush.
actions = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 1), st.integers(0, 2), st.integers(0, 40)),
    st.tuples(st.just("flush"), st.sampled_from([None, 0, 1]), st.sampled_from([None, 0, 1, 2]), st.just(0)),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(actions, max_size=30), st.integers(1, 60))
def test_each_gradient_is_computed_once_in_order_and_memory_is_bounded(program, limit):
    queue = WeightGradientQueue(limit * BYTES)
    computed: list[int] = []
    queued: dict[int, tuple[int, int]] = {}  # number of the gradient -> its chunk and micro-batch
    alive: dict[int, Operand] = {}
    for number, (action, chunk, microbatch, numbers) in enumerate(program):
        if action == "add":
            queued[number] = chunk, microbatch
            expected = [number for number in queued if number not in computed]
            start = len(computed)
            x = operand(numbers)
            with queue.defer(chunk, microbatch):
                queue.add(lambda number=number: computed.append(number), x)
            alive[number] = x
            assert computed[start:] == expected[: len(computed) - start]  # the oldest first
        else:
            expected = [
                number
                for number, (c, i) in queued.items()
                if number not in computed and chunk in (None, c) and microbatch in (None, i)
            ]
            start = len(computed)
            queue.flush(chunk, microbatch)
            assert computed[start:] == expected
        pending = [number for number in queued if number not in computed]
        assert len(queue) == len(pending)
        assert queue.nbytes == sum(alive[number].data.nbytes for number in pending) <= limit * BYTES
        assert queue.nbytes <= queue.peak_bytes <= limit * BYTES
    queue.flush()
    assert sorted(computed) == list(queued)
    assert queue.nbytes == len(queue) == 0


def test_memory_that_gradients_share_is_counted_once():
    queue = WeightGradientQueue(1000 * BYTES)
    shared = operand(100)
    with queue.defer(0, 0):
        queue.add(lambda: None, shared, operand(10))
        queue.add(lambda: None, shared, Operand(shared.data[:5], torch.zeros(20, dtype=torch.float64)))
    assert queue.nbytes == (100 + 10 + 20) * BYTES
    queue.clear()
    assert queue.nbytes == len(queue) == 0


def test_a_queue_without_a_limit_is_refused():
    with pytest.raises(ValueError, match="set limit_bytes first"), WeightGradientQueue().defer(0, 0):
        pass


@pytest.mark.parametrize("limit", [1, 300, 10**6])
def test_a_linear_layer_queues_its_gradient_and_the_sum_is_the_same_to_the_bit(limit):
    def run(deferred: bool) -> tuple[torch.Tensor, list[int]]:
        generator = torch.Generator().manual_seed(0)
        runtime = Runtime(weight_gradients=WeightGradientQueue(limit))
        weight = SinkParameter(torch.randn(5, 8, generator=generator))
        additions: list[int] = []
        sink = GradientSink(
            torch.full((5, 8), torch.nan), lambda: additions.append(len(additions)), should_overwrite=True
        )
        attach(weight, sink)
        for microbatch in range(4):
            x = torch.randn(3, 2, 8, generator=generator).requires_grad_()
            dy = torch.randn(3, 2, 5, generator=generator)
            y = gather_linear(x, weight, None, LinearPrecision(Axis(runtime=runtime)))
            if deferred:
                with runtime.weight_gradients.defer(0, microbatch):
                    y.backward(dy)
            else:
                y.backward(dy)
            runtime.weight_gradients.flush(0, microbatch - 1)
        if deferred and limit > 10**5:
            assert len(additions) == 3  # the last one is still in the queue
        runtime.weight_gradients.flush(0)
        main_grad = get_main_grad(weight)
        assert main_grad is not None
        return main_grad, additions

    (expected, _), (main_grad, additions) = run(False), run(True)
    assert torch.equal(main_grad, expected)
    assert additions == [0, 1, 2, 3]
