"""The seam of linear layers: gradients where buffers want them, whatever the implementation."""

from __future__ import annotations

import pytest
import torch

from megascale.config import from_tree
from megascale.errors import ConfigError
from megascale.ops.gradient_sink import GradientSink, SinkParameter, attach, get_main_grad, get_sink
from megascale.ops.linear import Operand
from megascale.ops.side_stream import InlineStream
from megascale.parallel.collectives import SINGLE_RANK, Axis
from megascale.parallel.linear import LINEARS, LinearPrecision, make_linears
from megascale.parallel.runtime import Runtime
from megascale.parallel.tensor import gather_linear, linear_scatter


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_linear_accumulates_into_sinks(dtype):
    x = randn(3, 2, 8).to(dtype).requires_grad_()
    w = SinkParameter(randn(5, 8, seed=1).to(dtype))
    b = SinkParameter(randn(5, seed=2).to(dtype))
    plain = gather_linear(x, w, b)
    assert torch.equal(plain, torch.nn.functional.linear(x, w, b))
    dy = randn(3, 2, 5, seed=3).to(dtype)
    want = torch.autograd.grad(plain, (x, w, b), dy)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    called = []
    for p in (w, b):
        attach(p, GradientSink(torch.ones(p.shape, dtype=wide), lambda p=p: called.append(p.shape)))
    for _ in range(2):
        gather_linear(x, w, b).backward(dy)
    assert called == [w.shape, b.shape] * 2
    assert w.grad is None
    assert b.grad is None
    exact_w = 1 + 2 * dy.double().flatten(0, 1).T @ x.detach().double().flatten(0, 1)
    exact_b = 1 + 2 * dy.double().flatten(0, 1).sum(0)
    rtol = 1e-6 if dtype != torch.float64 else 1e-12  # bfloat16 too: the sum is never rounded to it
    torch.testing.assert_close(get_main_grad(w).double(), exact_w, rtol=rtol, atol=rtol)
    torch.testing.assert_close(get_main_grad(b).double(), exact_b, rtol=rtol, atol=rtol)
    torch.testing.assert_close(x.grad, 2 * want[0])
    # An unset gradient has undefined values: the first GEMM writes it, the next one adds.
    get_main_grad(w).fill_(float("nan"))
    get_sink(w).should_overwrite = True
    for _ in range(2):
        gather_linear(x, w, b).backward(dy)
    torch.testing.assert_close(get_main_grad(w).double(), exact_w - 1, rtol=rtol, atol=rtol)


class Noting(LinearPrecision):
    """A precision that makes something of gradients, as float8 does, and notes when."""

    def __init__(self, axis: Axis, notes: list[str]) -> None:
        super().__init__(axis)
        self.notes = notes

    def prepare_gradient(self, dy: torch.Tensor, weight: torch.Tensor, for_gather: bool = False) -> Operand:
        self.notes.append("cast")
        return super().prepare_gradient(dy, weight, for_gather)


class NotingStream(InlineStream):
    """A side stream that notes from which point on a work may run."""

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes

    def record_event(self) -> str:
        self.notes.append("event")
        return "event"


def test_a_weight_gradient_on_the_side_stream_begins_after_its_operands_are_made():
    notes: list[str] = []
    axis = Axis(runtime=Runtime(stream=NotingStream(notes)))
    x, w = randn(3, 2, 8).requires_grad_(), randn(5, 8, seed=1).requires_grad_()
    gather_linear(x, w, None, Noting(axis, notes)).backward(randn(3, 2, 5, seed=3))
    assert notes == ["cast", "event"]


def leaves(y: torch.Tensor) -> int:
    """Tensors whose gradient autograd itself accumulates in a backward pass from y."""
    observed, ahead = set(), [y.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in observed:
            observed.add(node)
            ahead += [peer for peer, _ in node.next_functions]
    return sum(type(node).__name__ == "AccumulateGrad" for node in observed)


@pytest.mark.parametrize("of_x", [True, False])
def test_autograd_knows_a_parameter_with_a_sink_only_where_nothing_else_asks_for_backward(of_x):
    x = randn(3, 2, 8).requires_grad_(of_x)
    w, v, b = (SinkParameter(t) for t in (randn(5, 8, seed=1), randn(4, 5, seed=2), randn(5, seed=3)))
    y = linear_scatter(make_linears("default", SINGLE_RANK), gather_linear(x, w, b), v)
    assert leaves(y) == 3 + of_x
    want = torch.autograd.grad(y.sum(), (w, b, v))
    for p in (w, b, v):
        attach(p, GradientSink(torch.zeros_like(p)))
    y = linear_scatter(make_linears("default", SINGLE_RANK), gather_linear(x, w, b), v)
    assert leaves(y) == (1 if of_x else 2)
    y.sum().backward()
    for p, gradient in zip((w, b, v), want, strict=True):
        torch.testing.assert_close(get_main_grad(p), gradient)
        assert p.grad is None


def test_an_unknown_precision_is_told_with_those_there_are():
    for refuse in (
        lambda: from_tree({"train": {"linear_precision": "defualt"}}),
        lambda: make_linears("x", SINGLE_RANK),
    ):
        with pytest.raises(ConfigError, match=r"train.linear_precision='\w+' is not known; .*choose among 'default'"):
            refuse()
    assert LINEARS.names() == ["default", "float8", "float8_rowwise", "float8_rowwise_wgrad"]


class _Recorded(LinearPrecision):
    """Takes note of what it is given, and keeps for backward another tensor than forward read."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[object] = []

    def prepare_input(
        self, x: torch.Tensor, weight: torch.Tensor, amax: object = None, for_gather: bool = False
    ) -> Operand:
        self.recorded.append(amax)
        return Operand(x, wgrad=Operand(x.detach() * 2 / 2))


def test_what_a_producer_knows_reaches_the_precision_and_what_it_keeps_is_all_that_backward_has():
    linears, stored = _Recorded(), []
    x, w, v = (randn(*shape, seed=i).requires_grad_() for i, shape in enumerate([(3, 2, 8), (5, 8), (4, 5)]))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: stored.append(t) or t, lambda t: t):
        y = linear_scatter(linears, gather_linear(x, w, None, linears, amax="of x"), v, amaxes=["of y"])
    assert linears.recorded == ["of x", "of y"]
    assert [t.shape for t in stored] == [x.shape, (3, 2, 5)]
    assert all(t.data_ptr() != x.data_ptr() for t in stored)
    plain = torch.nn.functional.linear(torch.nn.functional.linear(x, w), v)
    torch.testing.assert_close(y, plain)
    for match, expected in zip(*(torch.autograd.grad(z.sum(), (x, w, v)) for z in (y, plain)), strict=True):
        torch.testing.assert_close(match, expected)


def cast_and_back(x: torch.Tensor, dtype: torch.dtype, dim: int | None = None) -> torch.Tensor:
    """Return the numbers that x [M, N] has in float8 with one scale, or one power of two per row (dim=1)."""
    amax = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = amax / torch.finfo(dtype).max
    if dim is not None:
        scale = 2.0 ** torch.ceil(torch.log2(scale))
    return (x / scale).to(dtype).double() * scale


@pytest.mark.parametrize("recipe", ["float8", "float8_rowwise"])
def test_float8_linear_casts_each_operand_to_its_format(recipe):
    """Activations and weights are E4M3. Gradients are E5M2, with one scale; E4M3, with a scale per row.

    Gradients span seven decades here: E5M2 keeps the small ones, which E4M3 flushes to zero.
    """
    x, w = randn(6, 16).requires_grad_(), randn(32, 16, seed=1).requires_grad_()
    dy = randn(6, 32, seed=2) * 10.0 ** torch.linspace(-7, 0, 32, dtype=torch.float64)
    y = gather_linear(x, w, None, make_linears(recipe, SINGLE_RANK))
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    x, w = x.detach(), w.detach()
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    if recipe == "float8":
        x8, dy8 = cast_and_back(x, e4m3), cast_and_back(dy, e5m2)
        rows8 = columns8 = cast_and_back(w, e4m3)
        expected_dw = dy8.t() @ x8
        small = dy.abs() < 1e-6 * dy.abs().max()
        assert (dy8[small] != 0).all()
        assert (cast_and_back(dy, e4m3)[small] == 0).any()
    else:
        x8, dy8 = cast_and_back(x, e4m3, 1), cast_and_back(dy, e4m3, 1)
        rows8, columns8 = cast_and_back(w, e4m3, 1), cast_and_back(w.t(), e4m3, 1).t()
        expected_dw = dy.t() @ x  # not in float8
    for actual, expected in ((y, x8 @ rows8.t()), (dx, dy8 @ columns8), (dw, expected_dw)):
        # Compare row by row: in a norm over all, small gradients would not count.
        separate = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert separate.max() < 1e-5, separate
