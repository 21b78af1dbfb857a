"""What `megascale bench kernels` measures: each operator with its reference, its inputs and the bytes it must move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megascale.ops import activation, cross_entropy, dropout, fused_projection, norm, rope

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Sizes:
    """Widths of the shapes measured; the full ones are those of gpt-13b, llama-8b and (small) gpt2-124m."""

    tokens: int = 8192
    batch: int = 4
    hidden: int = 5120
    llama_hidden: int = 4096
    llama_ffn: int = 14336
    heads: int = 32
    groups: int = 8
    head_size: int = 128
    vocab: int = 64000
    head_tokens: int = 4096
    elements: int = 256 << 20
    small: int = 768


TINY = Sizes(8, 2, 32, 32, 24, 2, 1, 16, 100, 8, 5000, 20)


@dataclass
class KernelCase:
    """One operator at one shape.

    fused, reference: functions of `inputs(tokens)` that return a tensor or a tuple of them. forward_bytes,
    backward_bytes: what must be read and written at least.
    """

    op: str
    shape: str
    fused: Callable[..., Any]
    reference: Callable[..., Any]
    inputs: Callable[[int], list[Tensor]]
    forward_bytes: float
    backward_bytes: float
    tokens: int


def cases(sizes: Sizes, device: torch.device, dtype: torch.dtype = BF16) -> list[KernelCase]:
    """The operators with a forward and a backward pass over activations."""
    T, B = sizes.tokens, sizes.batch
    H, L, F, E = sizes.hidden, sizes.llama_hidden, sizes.llama_ffn, sizes.small
    item = dtype.itemsize

    def rows(*widths: int) -> Callable[[int], list[Tensor]]:
        """Activations [tokens / batch, batch, width] for positive widths, vectors for negative ones."""

        def make(tokens: int) -> list[Tensor]:
            g = torch.Generator(device).manual_seed(1)
            shapes = [(tokens // B, B, w) if w > 0 else (-w,) for w in widths]
            return [torch.randn(s, device=device, generator=g).to(dtype).requires_grad_() for s in shapes]

        return make

    def moved(*widths: int) -> float:
        return float(sum(widths)) * T * item

    def case(
        op: str, width: int, fused: Any, reference: Any, inputs: Any, forward: float, backward: float
    ) -> KernelCase:
        return KernelCase(op, f"{T} x {width}", fused, reference, inputs, forward, backward, T)

    eps, key, p = 1e-5, dropout.dropout_key(1, 2, 3), 0.1
    N, G, D = sizes.heads, sizes.groups, sizes.head_size
    C = (N + 2 * G) * D
    turned = (N + G) * D
    M = H // D
    W = 3 * M * D + 4 * H
    cos, sin = rope.rotary_tables(T // B, D, 1e4, device)

    def turn(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: function(x.unflatten(-1, (N, D)), cos[: x.shape[0]], sin[: x.shape[0]], False)

    def split(function: Callable[..., Any], with_tables: bool) -> Callable[..., Any]:
        if not with_tables:
            return lambda qkv: function(qkv, N, G, None, None, False)
        return lambda qkv: function(qkv, N, G, cos[: qkv.shape[0]], sin[: qkv.shape[0]], False)

    def added(width: int) -> KernelCase:
        return case(
            "add + layer norm",
            width,
            lambda x, r, c, w, b: norm.add_norm(x, r, w, b, eps, "layernorm", c),
            lambda x, r, c, w, b: norm.add_norm_reference(x, r, w, b, eps, "layernorm", c),
            rows(width, width, -width, -width, -width),
            moved(width, width, width, width),
            moved(width, width, width, width),
        )

    return [
        case(
            "layer norm",
            H,
            lambda x, w, b: norm.layer_norm(x, w, b, eps),
            lambda x, w, b: norm.layer_norm_reference(x, w, b, eps),
            rows(H, -H, -H),
            moved(H, H),
            moved(H, H, H),
        ),
        case(
            "rms norm",
            L,
            lambda x, w: norm.rms_norm(x, w, eps),
            lambda x, w: norm.rms_norm_reference(x, w, eps),
            rows(L, -L),
            moved(L, L),
            moved(L, L, L),
        ),
        added(H),
        added(E),
        case(
            "add + rms norm",
            L,
            lambda x, r, w: norm.add_norm(x, r, w, None, eps, "rmsnorm"),
            lambda x, r, w: norm.add_norm_reference(x, r, w, None, eps, "rmsnorm", None),
            rows(L, L, -L),
            moved(L, L, L, L),
            moved(L, L, L, L),
        ),
        case(
            "gelu + bias",
            4 * H,
            activation.gelu,
            activation.gelu_reference,
            rows(4 * H, -4 * H),
            moved(4 * H, 4 * H),
            moved(4 * H, 4 * H, 4 * H),
        ),
        case(
            "gelu, GEMM's bias",
            4 * H,
            lambda x, b: activation.gelu(x, b, added=True),
            lambda x, b: activation.gelu_reference(activation.fuse_bias_gradient(x, b)),
            rows(4 * H, -4 * H),
            moved(4 * H, 4 * H),
            moved(4 * H, 4 * H, 4 * H),
        ),
        case(
            "gelu tanh",
            4 * H,
            lambda x: activation.gelu(x, None, "tanh"),
            lambda x: activation.gelu_reference(x, None, "tanh"),
            rows(4 * H),
            moved(4 * H, 4 * H),
            moved(4 * H, 4 * H, 4 * H),
        ),
        case(
            "swiglu",
            2 * F,
            activation.swiglu,
            activation.swiglu_reference,
            rows(2 * F),
            moved(2 * F, F),
            moved(2 * F, F, 2 * F),
        ),
        case(
            "rotary q",
            N * D,
            turn(rope.apply_rotary),
            turn(rope.apply_rotary_reference),
            rows(N * D),
            moved(N * D, N * D),
            moved(N * D, N * D),
        ),
        case(
            "split qkv rotary",
            C,
            split(rope.split_qkv, True),
            split(rope.split_qkv_reference, True),
            rows(C),
            moved(turned, turned),
            moved(C, C),
        ),
        case(
            "split qkv",
            C,
            split(rope.split_qkv, False),
            split(rope.split_qkv_reference, False),
            rows(C),
            0.0,
            moved(C, C),
        ),
        case(
            "split fused projection gelu",
            W,
            lambda x: fused_projection.split_fused_projection(x, M, M, D, "gelu")[:4],
            lambda x: fused_projection.split_fused_projection_reference(x, M, M, D, "gelu", None, None, None, False),
            rows(W),
            moved(4 * H, 4 * H),
            moved(W, W, 4 * H),
        ),
        case(
            "dropout",
            H,
            lambda x: dropout.dropout(x, p, key, 0, 0),
            lambda x: dropout._DropoutReference.apply(x, p, key, 0, 0),
            rows(H),
            moved(H, H),
            moved(H, H),
        ),
        case(
            "bias + dropout + add",
            H,
            lambda x, b, r: dropout.dropout_add(x, b, r, p, key, 0, 0),
            lambda x, b, r: r + dropout._DropoutReference.apply(x + b, p, key, 0, 0),
            rows(H, -H, H),
            moved(H, H, H),
            moved(H, H),
        ),
        case(
            "bias + add",
            H,
            lambda x, b, r: dropout.dropout_add(x, b, r, 0.0, key, 0, 0),
            lambda x, b, r: r + (x + b),
            rows(H, -H, H),
            moved(H, H, H),
            moved(H),
        ),
    ]


def head_inputs(sizes: Sizes, device: torch.device, tokens: int, dtype: torch.dtype = BF16) -> tuple[Tensor, ...]:
    """x [tokens, hidden], weight [padded vocab, hidden], targets [tokens], token_grad (0-d)."""
    g = torch.Generator(device).manual_seed(2)
    padded = -(-sizes.vocab // 128) * 128
    x = torch.randn(tokens, sizes.hidden, device=device, generator=g).to(dtype).requires_grad_()
    w = (0.02 * torch.randn(padded, sizes.hidden, device=device, generator=g)).to(dtype).requires_grad_()
    targets = torch.randint(0, sizes.vocab, (tokens,), device=device, generator=g)
    return x, w, targets, torch.tensor(1.0 / tokens, device=device)


def plain_head(x: Tensor, w: Tensor, targets: Tensor, vocab: int) -> Tensor:
    """Per-token loss with all logits held at once."""
    return cross_entropy.cross_entropy(torch.nn.functional.linear(x, w), targets, vocab)
