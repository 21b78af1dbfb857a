"""The seam of linear layers: gradients where buffers want them, whatever the implementation."""

from __future__ import annotations

import pytest
import torch

from megascale.config import from_tree
from megascale.errors import ConfigError
from megascale.parallel.collectives import ALONE
from megascale.parallel.linear import LINEARS, make_linears
from megascale.parallel.tensor import gather_linear


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_linear_accumulates_into_main_grad(dtype):
    x, w, b = randn(3, 2, 8).to(dtype), randn(5, 8, seed=1).to(dtype), randn(5, seed=2).to(dtype)
    x, w, b = (t.detach().requires_grad_() for t in (x, w, b))
    plain = gather_linear(x, w, b)
    assert torch.equal(plain, torch.nn.functional.linear(x, w, b))
    dy = randn(3, 2, 5, seed=3).to(dtype)
    want = torch.autograd.grad(plain, (x, w, b), dy)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    called = []
    for p in (w, b):
        p.main_grad = torch.ones(p.shape, dtype=wide)
        p.grad_ready = lambda p=p: called.append(p.shape)
    for _ in range(2):
        gather_linear(x, w, b).backward(dy)
    assert called == [w.shape, b.shape] * 2
    assert w.grad is None
    assert b.grad is None
    exact_w = 1 + 2 * dy.double().flatten(0, 1).T @ x.detach().double().flatten(0, 1)
    exact_b = 1 + 2 * dy.double().flatten(0, 1).sum(0)
    rtol = 1e-6 if dtype != torch.float64 else 1e-12  # bfloat16 too: the sum is never rounded to it
    torch.testing.assert_close(w.main_grad.double(), exact_w, rtol=rtol, atol=rtol)
    torch.testing.assert_close(b.main_grad.double(), exact_b, rtol=rtol, atol=rtol)
    torch.testing.assert_close(x.grad, 2 * want[0])
    # What an unset gradient holds is undefined: the first GEMM writes it, the next one adds.
    w.main_grad.fill_(float("nan"))
    w.overwrite_main_grad = True
    for _ in range(2):
        gather_linear(x, w, b).backward(dy)
    torch.testing.assert_close(w.main_grad.double(), exact_w - 1, rtol=rtol, atol=rtol)


def test_an_unknown_precision_is_told_with_those_there_are():
    for refuse in (lambda: from_tree({"train": {"linear_precision": "defualt"}}), lambda: make_linears("x", ALONE)):
        with pytest.raises(ConfigError, match=r"train.linear_precision='\w+' is not known; .*choose among 'default'"):
            refuse()
    assert LINEARS.names() == ["default"]
