"""Heads exchanged in two parts: the order in which exchanges start and end, and the memory of a finished backward."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.parallel import collectives
from megascale.parallel.collectives import Axis, Pending
from megascale.parallel.context import attend_in_parts, exchange_for_heads, exchange_for_tokens

AXIS = Axis(size=2)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Exchanges of a rank with itself, which a list records."""
    recorded: list[str] = []

    def start(x: Tensor, axis: Axis) -> Pending:
        recorded.append(f"start {x.shape[-1]}")
        return Pending(x.clone(), finish=lambda: recorded.append(f"end {x.shape[-1]}"))

    monkeypatch.setattr(collectives, "all_to_all_parts", start)
    return recorded


def make_heads() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = (8, 4, 4)
    heads = [torch.randn(6, 1, size, 2, dtype=torch.float64, generator=generator) for size in sizes]
    q, k, v = (x.requires_grad_() for x in heads)
    return q, k, v


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Combine all tokens, for each head alone."""
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, 2) for x in (k, v))
    weights = torch.einsum("sbnd,tbnd->bnst", q, k).softmax(-1)
    return torch.einsum("bnst,tbnd->sbnd", weights, v).flatten(2)


def record(events: list[str], attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Record when `attend` runs in forward and in backward."""

    def run(*heads: Tensor) -> Tensor:
        events.append("attention")
        output = attend(*heads)
        output.register_hook(lambda grad: events.append("backward of attention"))
        return output

    return run


def test_exchanges_overlap_with_the_attention_of_the_other_part(events: list[str]) -> None:
    output = attend_in_parts(*make_heads(), AXIS, 1, record(events, attend))
    # 2 query heads, 1 key and 1 value head of 2 elements come in a part, and 2 heads return.
    assert events == [
        *("start 8", "start 8", "end 8", "attention", "start 4"),
        *("end 8", "attention", "start 4", "end 4", "end 4"),
    ]
    events.clear()
    output.sum().backward()
    assert events == [
        *("start 4", "start 4", "end 4", "backward of attention", "start 8"),
        *("end 4", "backward of attention", "start 8", "end 8", "end 8"),
    ]


def test_results_are_those_of_one_exchange(events: list[str]) -> None:
    in_parts, at_once = make_heads(), make_heads()
    results = attend_in_parts(*in_parts, AXIS, 1, attend)
    expected = exchange_for_tokens(attend(*exchange_for_heads(*at_once, AXIS, 1)), AXIS)
    assert torch.equal(results, expected)
    weights = torch.linspace(-1, 1, results.numel(), dtype=torch.float64).view(results.shape)
    (results * weights).sum().backward()
    (expected * weights).sum().backward()
    for x, y in zip(in_parts, at_once, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-13, atol=1e-13)


def test_a_graph_without_backward_is_freed(events: list[str]) -> None:
    """No cycle keeps what attention has saved."""
    kept: list[Any] = []

    def keep(*heads: Tensor) -> Tensor:
        kept.append(weakref.ref(heads[0]))
        return attend(*heads)

    gc.collect()
    gc.disable()
    try:
        output = attend_in_parts(*make_heads(), AXIS, 1, keep)
        del output
        assert all(reference() is None for reference in kept)
    finally:
        gc.enable()
