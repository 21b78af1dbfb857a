"""Attention within documents: every kernel's mask is that of the documents apart."""

from __future__ import annotations

import warnings
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_mask, flex_attention

from megascale.config import from_tree
from megascale.errors import ConfigError
from megascale.ops import attention as chooser_module
from megascale.ops.attention import (
    AttentionChoice,
    AttentionChooser,
    AttentionShape,
    attention,
    attention_reference,
    check_mask,
)
from megascale.ops.attention_documents import (
    DOCUMENT_BACKENDS,
    DocumentMask,
    _FlashVarlen,
    make_block_mask,
    make_synthetic_boundaries,
    sdpa,
)
from megascale.train.attention_choice import list_shapes

CPU = torch.device("cpu")


def make_inputs(length: int, batch: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(length)
    heads = torch.randn(length, batch, 8, 4, generator=draw).to(dtype)
    q, k, v = heads.split((4, 2, 2), dim=2)
    return q, k, v


@given(
    length=st.integers(1, 40),
    batch=st.integers(1, 3),
    limit=st.integers(1, 20),
    window=st.sampled_from([None, 1, 5]),
    softcap=st.sampled_from([None, 0.7]),
)
@settings(max_examples=60, deadline=None)
def test_documents_are_attended_apart(
    length: int, batch: int, limit: int, window: int | None, softcap: float | None
) -> None:
    q, k, v = make_inputs(length, batch)
    boundaries = make_synthetic_boundaries(length, batch, limit)
    documents = DocumentMask.from_boundaries(boundaries, length)
    assert documents.max_documents == limit
    out = attention(q, k, v, window=window, documents=documents, softcap=softcap)
    reference = attention_reference(q, k, v, window=window, documents=documents, softcap=softcap)
    torch.testing.assert_close(out, reference, rtol=1e-12, atol=1e-12)
    for sample in range(batch):
        part = slice(sample, sample + 1)
        for start, stop in pairwise(boundaries[:, sample].unique().tolist()):
            apart = attention(
                q[start:stop, part], k[start:stop, part], v[start:stop, part], window=window, softcap=softcap
            )
            torch.testing.assert_close(out[start:stop, part], apart, rtol=1e-12, atol=1e-12)
    stops = documents.cumulative_lengths.unique().tolist()
    expected = {0} | {sample * length + edge for sample in range(batch) for edge in boundaries[1:, sample].tolist()}
    assert stops == sorted(expected)
    assert len(documents.cumulative_lengths) == batch * limit + 1


@pytest.mark.parametrize("window", [None, 40, 200])
@pytest.mark.parametrize("length", [640, 700])
def test_blocks_of_flex_attention_cover_the_mask(length: int, window: int | None) -> None:
    """A block that is not listed holds no visible key, and unlisted blocks exist."""
    documents = DocumentMask.from_boundaries(make_synthetic_boundaries(length, 2, 9), length)
    blocks = make_block_mask(documents, window)
    visible = documents.make_mask(window, documents.starts_BS.shape[1])
    assert torch.equal(create_mask(blocks.mask_mod, 2, 1, length, length, device="cpu"), visible)
    count = -(-length // 128)
    padded = torch.nn.functional.pad(visible, (0, count * 128 - length, 0, count * 128 - length))
    holds_any = padded.unflatten(3, (count, 128)).unflatten(2, (count, 128)).any(5).any(3)
    listed = blocks.to_dense().bool()
    assert torch.equal(listed, holds_any)
    assert listed.sum() < 2 * count * (count + 1) / 2
    q, k, v = (heads.float().permute(1, 2, 0, 3) for heads in make_inputs(length, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it is not compiled
        out = flex_attention(q, k, v, block_mask=blocks, enable_gqa=True)
    expected = sdpa(*make_inputs(length, 2, torch.float32), window, documents)
    torch.testing.assert_close(out.permute(2, 0, 1, 3).flatten(2), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["cudnn", "flash", "flash_window"])
def test_a_kernel_that_cannot_mask_documents_is_refused_by_name(name: str) -> None:
    q, k, v = make_inputs(8, 1)
    documents = DocumentMask.from_boundaries(make_synthetic_boundaries(8, 1, 3), 8)
    with pytest.raises(
        ConfigError, match=rf"kernels.attention='{name}' cannot keep attention within documents.*flash4"
    ):
        attention(q, k, v, window=None, chooser=AttentionChooser(name), documents=documents)


@pytest.mark.parametrize("name", ["flash_varlen", "flash4", "cudnn_frontend", "flex"])
def test_a_kernel_for_gpus_is_refused_on_a_cpu(name: str) -> None:
    q, k, v = make_inputs(8, 1)
    documents = DocumentMask.from_boundaries(make_synthetic_boundaries(8, 1, 3), 8)
    with pytest.raises(ConfigError, match=rf"'{name}' (runs|trains) on CUDA devices; set --kernels.attention=auto"):
        attention(q, k, v, window=None, backend=name, documents=documents)


class Context:
    """What an autograd function's passes use of their context."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("batch", [1, 2])
def test_flash_attention_2_takes_the_arguments(window: int | None, batch: int) -> None:
    """torch's own description of the operators checks types and shapes without a GPU."""
    S, N, G, D = 512, 4, 2, 128
    with FakeTensorMode(), torch.no_grad():
        context = Context()
        q, k, v = torch.empty(S, batch, N + 2 * G, D, dtype=torch.bfloat16, device="cuda").split((N, G, G), dim=2)
        cumulative = torch.empty(batch * 17 + 1, dtype=torch.int32, device="cuda")
        out = _FlashVarlen.forward(context, q, k, v, window, cumulative)
        assert out.shape == (S, batch, N * D)
        *grads, _, _ = _FlashVarlen.backward(context, torch.empty_like(out))
        assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]


def test_a_kernel_for_documents_alone_is_refused_without_them() -> None:
    shape = AttentionShape(8, 1, 4, 2, 4, None, torch.float64)
    reason = AttentionChooser().explain_refusal("flash_varlen", shape, CPU)
    assert "computes attention within documents only; set --data.document_mask=true" in reason


@pytest.mark.parametrize("fault", ["full", "one token off", "gradient"])
def test_a_kernel_with_a_wrong_mask_is_refused_at_the_start(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check sees a kernel that ignores documents, shifts them by a token, or has wrong gradients only."""

    def broken(q: Tensor, k: Tensor, v: Tensor, window: int | None, documents: DocumentMask) -> Tensor:
        if fault == "full":
            return attention(q, k, v, window=window)
        if fault == "gradient":
            out = sdpa(q, k, v, window, documents)
            full = attention(q, k, v, window=window)
            return out.detach() + full - full.detach()
        starts = (documents.starts_BS + 1).clamp(max=torch.arange(documents.starts_BS.shape[1]))
        return sdpa(q, k, v, window, DocumentMask(starts.to(torch.int32), documents.cumulative_lengths))

    shape = AttentionShape(2048, 2, 4, 2, 4, None, torch.float32, 64)
    check_mask("sdpa", shape, CPU)
    monkeypatch.setitem(DOCUMENT_BACKENDS, "flex", broken)
    part = "gradient" if fault == "gradient" else "output"
    with pytest.raises(NotImplementedError, match=f"its {part} within documents is .* away from the reference's"):
        check_mask("flex", shape, CPU)
    assert f"its {part} within documents" in AttentionChooser().explain_refusal("flex", shape, CPU)


def test_held_out_samples_with_more_documents_run_the_agreed_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that measured on their own would run different kernels."""
    agreed = AttentionShape(64, 1, 2, 2, 8, None, torch.float32, 5)
    monkeypatch.setitem(DOCUMENT_BACKENDS, "flex", sdpa)
    chooser = AttentionChooser()
    chooser.adopt(agreed, "flex")
    measured: list[AttentionShape] = []

    def measure(shape: AttentionShape, device: torch.device) -> AttentionChoice:
        measured.append(shape)
        return AttentionChoice("sdpa")

    chooser.measure = measure
    more = agreed._replace(max_documents=9)
    assert chooser.choose(*more[:7], CPU, more.max_documents) == "flex"
    assert measured == []
    others = [
        agreed._replace(max_documents=9, window=16),
        agreed._replace(max_documents=3),
        agreed._replace(max_documents=0),
    ]
    for shape in others:
        assert chooser.choose(*shape[:7], CPU, shape.max_documents) == "sdpa"
    assert measured == others

    # A kernel that cannot run so many documents is not adopted.
    def refuse(*_: object) -> Tensor:
        raise RuntimeError("too many documents")

    monkeypatch.setitem(DOCUMENT_BACKENDS, "flex", refuse)
    assert chooser.choose(*agreed._replace(max_documents=12)[:7], CPU, 12) == "sdpa"


def test_the_choice_depends_on_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    config = from_tree({"model": {"sequence_length": 64, "vocab_size": 8, "hidden": 16, "heads": 2}})
    [plain], [masked] = (list_shapes(config, 1, torch.bfloat16, count) for count in (0, 5))
    assert str(masked) == str(plain).replace("full", "full, up to 5 documents")
    chooser = AttentionChooser()
    chooser.adopt(plain, "cudnn")
    chooser.adopt(masked, "sdpa")
    q_SBND = torch.zeros(64, 1, 2, 8, dtype=torch.bfloat16)
    documents = DocumentMask.from_boundaries(make_synthetic_boundaries(64, 1, 5), 64)
    called: list[str] = []
    run = chooser_module.run_backend
    monkeypatch.setattr(chooser_module, "run_backend", lambda name, *rest: called.append(name) or run(name, *rest))
    attention(q_SBND, q_SBND, q_SBND, window=None, chooser=chooser, documents=documents)
    assert called == ["sdpa"]
