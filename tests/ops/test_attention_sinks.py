"""Attention sinks: every way to compute them equals a softmax with one more logit, gradients included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megascale.config import from_tree
from megascale.errors import ConfigError
from megascale.ops import attention_sinks
from megascale.ops.attention import AttentionChooser, AttentionShape, attention, attention_reference, check_mask
from megascale.ops.attention_backends import make_causal_mask
from megascale.ops.attention_documents import DocumentMask, make_synthetic_boundaries
from megascale.ops.attention_sinks import LseKernel, attend_corrected, explain_missing_sinks
from megascale.train.attention_choice import list_shapes

CPU = torch.device("cpu")


def make_inputs(length: int, batch: int = 2) -> list[Tensor]:
    """Return random q, k, v and sinks, of which some exceed all scores."""
    draw = torch.Generator().manual_seed(length)
    q, k, v = torch.randn(length, batch, 8, 4, generator=draw, dtype=torch.float64).split((4, 2, 2), dim=2)
    sinks = torch.tensor([-3.0, 0.0, 1.0, 9.0], dtype=torch.float64)
    return [t.clone().requires_grad_() for t in (q, k, v, sinks)]


def append_null_key(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int | None) -> Tensor:
    """Compute attention head by head over the keys and one more logit, whose value is zero."""
    heads_per_group = q.shape[2] // k.shape[2]
    mask = make_causal_mask(q.shape[0], k.shape[0], window, CPU)
    outputs = []
    for b in range(q.shape[1]):
        for head in range(q.shape[2]):
            group = head // heads_per_group
            scores = (q[:, b, head] @ k[:, b, group].T / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
            exponentials = torch.exp(scores - 9)
            total = exponentials.sum(-1, keepdim=True) + torch.exp(sinks[head] - 9)
            outputs.append(exponentials / total @ v[:, b, group])
    return torch.stack(outputs, 1).view(*q.shape).flatten(2)


def run_plain(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """Return attention without sinks [S, B, N, D] and the log-sum-exp [B, N, S], differentiable."""
    group = q.shape[2] // k.shape[2]
    keys, values = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("sbnd,tbnd->bnst", q, keys) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~make_causal_mask(q.shape[0], k.shape[0], window, CPU), -torch.inf)
    return torch.einsum("bnst,tbnd->sbnd", scores.softmax(-1), values), scores.logsumexp(-1)


def run_flash_like(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Compute the forward of a kernel as FlashAttention does."""
    out, lse = run_plain(q, k, v, window)
    return out, lse, ()


def run_flash_like_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, state: Any, window: int | None
) -> tuple[Tensor, ...]:
    """Compute the backward of FlashAttention (Dao 2023, algorithm 2), from the output and the log-sum-exp it gets."""
    group = q.shape[2] // k.shape[2]
    keys, values = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scale = q.shape[-1] ** -0.5
    scores = torch.einsum("sbnd,tbnd->bnst", q, keys) * scale
    scores = scores.masked_fill(~make_causal_mask(q.shape[0], k.shape[0], window, CPU), -torch.inf)
    weights = torch.exp(scores - lse.unsqueeze(-1))
    d_weights = torch.einsum("sbnd,tbnd->bnst", dy, values)
    delta = (dy * y).sum(-1).permute(1, 2, 0).unsqueeze(-1)
    d_scores = weights * (d_weights - delta) * scale
    dk = torch.einsum("bnst,sbnd->tbnd", d_scores, q).unflatten(2, (-1, group)).sum(3)
    dv = torch.einsum("bnst,sbnd->tbnd", weights, dy).unflatten(2, (-1, group)).sum(3)
    return torch.einsum("bnst,tbnd->sbnd", d_scores, keys), dk, dv


FLASH_LIKE = LseKernel(run_flash_like, run_flash_like_backward)


@given(length=st.integers(1, 24), window=st.sampled_from([None, 1, 5]))
@settings(max_examples=25, deadline=None)
def test_every_way_equals_one_more_logit(length: int, window: int | None) -> None:
    upstream = torch.randn(length, 2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    inputs = make_inputs(length)
    expected = append_null_key(*inputs, window)
    expected_gradients = torch.autograd.grad(expected, inputs, upstream)
    ways = {
        "reference": lambda q, k, v, s: attention_reference(q, k, v, window=window, sinks_N=s),
        "chosen": lambda q, k, v, s: attention(q, k, v, window=window, sinks_N=s),
        "corrected": lambda q, k, v, s: attend_corrected(FLASH_LIKE, q, k, v, window, s),
    }
    for name, compute in ways.items():
        inputs = make_inputs(length)
        out = compute(*inputs)
        for actual, wanted in zip(
            (out, *torch.autograd.grad(out, inputs, upstream)), (expected, *expected_gradients), strict=True
        ):
            torch.testing.assert_close(actual, wanted, rtol=1e-10, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")


def test_sinks_hold_within_documents_and_for_bounded_scores():
    documents = DocumentMask.from_boundaries(make_synthetic_boundaries(20, 2, 4), 20)
    q, k, v, sinks = make_inputs(20)
    for softcap in (None, 0.7):
        options: dict[str, Any] = {"window": 5, "documents": documents, "softcap": softcap, "sinks_N": sinks}
        out = attention(q, k, v, **options)
        torch.testing.assert_close(out, attention_reference(q, k, v, **options), rtol=1e-12, atol=1e-12)
        without = attention(q, k, v, window=5, documents=documents, softcap=softcap)
        assert not torch.allclose(out, without)


def test_a_kernel_whose_correction_is_wrong_is_refused(monkeypatch):
    shape = AttentionShape(32, 1, 4, 2, 8, None, torch.float64, has_sinks=True)
    check_mask("eager", shape, CPU)

    def forget_sinks(*arguments: Any) -> Tensor:
        q, k, v, window = arguments[1:5]
        return run_plain(q, k, v, window)[0].flatten(2) + 0 * arguments[-1].sum()

    monkeypatch.setattr("megascale.ops.attention.run_with_sinks", forget_sinks)
    with pytest.raises(NotImplementedError, match=r"its output with sinks is .* away from the reference"):
        check_mask("eager", shape, CPU)


@pytest.mark.parametrize("name", ["cudnn", "flash", "sdpa"])
def test_a_kernel_without_log_sum_exp_is_refused_by_name(name):
    q, k, v, sinks = make_inputs(8)
    with pytest.raises(ConfigError, match=f"kernels.attention='{name}' has no attention sinks.*attention_sinks=true"):
        attention(q, k, v, window=None, backend=name, sinks_N=sinks)
    shape = AttentionShape(8, 2, 4, 2, 4, None, torch.bfloat16, has_sinks=True)
    assert "has no attention sinks" in AttentionChooser().explain_refusal(name, shape, CPU)


@pytest.mark.parametrize("name", attention_sinks.LSE_KERNELS)
def test_kernels_with_log_sum_exp_have_neither_softcaps_nor_documents_with_sinks(name):
    assert explain_missing_sinks(name, None, has_documents=False) == ""
    assert "together with a softcap" in explain_missing_sinks(name, 2.0, has_documents=False)
    assert "together with documents" in explain_missing_sinks(name, None, has_documents=True)


def test_layers_with_and_without_sinks_are_shapes_of_their_own():
    model = {"layer_pattern": "SD", "layer_kinds": {"D": {"attention_sinks": True}}, "vocab_size": 64}
    shapes = list_shapes(from_tree({"model": model}), 1, torch.float32)
    assert [shape.has_sinks for shape in shapes] == [False, True]
    assert str(shapes[1]).endswith(", full, sinks, float32")
