"""Attention of a slice's queries over the keys of the tokens before them: masks, kernels and their choice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megascale.config import from_tree
from megascale.core.head_exchange import find_first_key, list_gathered_keys
from megascale.ops.attention import AttentionChooser, AttentionShape, attention, attention_reference, check_mask
from megascale.ops.attention_backends import BACKENDS, _FlashWindow, make_causal_mask, sdpa
from megascale.ops.attention_documents import DocumentMask, make_synthetic_boundaries
from megascale.ops.rope import allocate_attention_gradients
from megascale.train.attention_choice import list_shapes

CPU = torch.device("cpu")
LENGTH = 24
ROWS = 6


def make_inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(LENGTH, 2, heads, 4, generator=draw, dtype=torch.float64) for heads in (4, 2, 2))
    return q.to(dtype), k.to(dtype), v.to(dtype)


@pytest.mark.parametrize("window", [None, 1, 3, 7, 100])
@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_slices_have_the_rows_of_the_whole_sequence(name: str, has_documents: bool, window: int | None) -> None:
    """Only the keys that a slice sees are read."""
    q, k, v = make_inputs()
    documents = None
    if has_documents:
        documents = DocumentMask.from_boundaries(make_synthetic_boundaries(LENGTH, 2, 4), LENGTH)
    softcap = None if name == "sdpa" else 2.0
    options = {"window": window, "softcap": softcap}
    expected = attention_reference(q, k, v, documents=documents, **options)
    for start, keys in zip(range(0, LENGTH, ROWS), list_gathered_keys(LENGTH, 4, window), strict=True):
        stop = start + ROWS
        first = find_first_key(start, window)
        assert stop - first == keys
        mask = None if documents is None else documents.select_tokens(first, stop)
        kernel = attention if name == "sdpa" or documents is None else attention_reference
        out = kernel(q[start:stop], k[first:stop], v[first:stop], documents=mask, **options)
        torch.testing.assert_close(out, expected[start:stop], rtol=0, atol=1e-12)


SLICE = AttentionShape(700, 1, 4, 2, 8, 900, torch.float32, key_count=1500)


@pytest.mark.parametrize("window", [None, 900])
@pytest.mark.parametrize("fault", ["first query at first key", "no window", "one token off", "gradient"])
def test_a_kernel_with_another_alignment_is_refused(
    fault: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "no window" and window is None:
        pytest.skip("there is none to forget")

    def broken(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        S, T = len(q), len(k)
        if fault == "no window":
            return sdpa(q, k, v, None)
        if fault == "gradient":
            full = sdpa(q, k, v, window)
            return full.detach() + (full - full.detach()) * 1.2
        mask = make_causal_mask(S, T, window, q.device)
        mask = make_causal_mask(T, T, window, q.device)[:S] if fault.startswith("first") else mask.roll(1, 1)
        heads = [x.permute(1, 2, 0, 3) for x in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)

    shape = SLICE._replace(window=window)
    check_mask("sdpa", shape, CPU)
    monkeypatch.setitem(BACKENDS, "flash_window", broken)
    with pytest.raises(NotImplementedError, match=r"of a slice is .* away from the reference's"):
        check_mask("flash_window", shape, CPU)


@pytest.mark.parametrize("name", ["cudnn", "flash"])
def test_a_kernel_that_aligns_first_tokens_takes_no_slice(name: str) -> None:
    reason = AttentionChooser().explain_refusal(name, SLICE._replace(window=None), CPU)
    assert reason == "the kernel takes as many keys as queries"


class Context:
    """What an autograd function's passes use of their context."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors


@pytest.mark.parametrize("window", [1024, 100])
def test_flash_attention_2_takes_the_arguments(window: int) -> None:
    """torch's own description of the operators checks types and shapes without a GPU."""
    S, T, N, G, D = 512, 1024, 4, 2, 128
    with FakeTensorMode(), torch.no_grad():
        context = Context()
        q = torch.empty(S, 1, N, D, dtype=torch.bfloat16, device="cuda")
        k, v = torch.empty(T, 1, 2 * G, D, dtype=torch.bfloat16, device="cuda").split((G, G), dim=2)
        out = _FlashWindow.forward(context, q, k, v, window)
        assert out.shape == (S, 1, N * D)
        *grads, _ = _FlashWindow.backward(context, torch.empty_like(out))
        assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]


def test_gradients_of_a_slice_are_apart() -> None:
    q, k, _ = make_inputs()
    assert [grad.shape for grad in allocate_attention_gradients(q[:6], k)] == [q[:6].shape, k.shape, k.shape]


def test_shapes_are_those_of_all_ranks() -> None:
    """Four ranks do not divide six heads; a window of 20 in slices of 16 leaves 16, 32, 35 and 35 keys."""
    model = {"sequence_length": 64, "vocab_size": 8, "hidden": 24, "heads": 6, "layers": 2}
    windows = {"layer_pattern": "SL", "window": 20}
    config = from_tree({"model": {**model, **windows}})
    shapes = list_shapes(config, 1, torch.bfloat16, context=4)
    assert {(shape.S, shape.key_count, shape.window) for shape in shapes} == {
        (16, 0, None),
        (16, 32, None),
        (16, 48, None),
        (16, 64, None),
        (16, 32, 20),
        (16, 35, 20),
    }
    assert "16 x 8, 6 heads (6 kv) of 4, full, over 32 keys, bfloat16" in map(str, shapes)
    assert not list_shapes(config, 1, torch.bfloat16, documents=3, context=4)


def test_a_slice_runs_the_chosen_kernel_and_a_cache_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def record(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        calls.append(len(k))
        return sdpa(q, k, v, window)

    monkeypatch.setitem(BACKENDS, "flash_window", record)
    q, k, v = make_inputs(torch.bfloat16)
    chooser = AttentionChooser()
    shape = AttentionShape(6, 2, 4, 2, 4, None, torch.bfloat16, key_count=18)
    chooser.adopt(shape, "flash_window")
    options = {"window": None, "chooser": chooser}
    attention(q[:6], k[:18], v[:18], is_slice=True, **options)
    attention(q[:6], k[:18], v[:18], **options)
    assert calls == [18]
    assert chooser.choices == {shape: replace(chooser.choices[shape])}
