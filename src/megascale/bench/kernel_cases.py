"""Operators that `megascale bench kernels` measures, with their references and inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megascale.bench.kernel_rows import Sizes
from megascale.ops import activation, cross_entropy, dropout, fused_projection, norm, norm_rotary, rope

BF16 = torch.bfloat16


@dataclass
class KernelCase:
    """One operator at one shape.

    Attributes:
        op, shape: operator and sizes of its activations, as text.
        fused, reference: functions of the tensors of `make_inputs`. They return a tensor or a tuple of tensors.
        make_inputs: returns random input tensors for a number of tokens.
        forward_bytes, backward_bytes: fewest bytes that the forward and the backward must read and write.
        tokens: number of tokens of the measured inputs.
    """

    op: str
    shape: str
    fused: Callable[..., Any]
    reference: Callable[..., Any]
    make_inputs: Callable[[int], list[Tensor]]
    forward_bytes: float
    backward_bytes: float
    tokens: int


def list_cases(sizes: Sizes, device: torch.device, dtype: torch.dtype = BF16) -> list[KernelCase]:
    """Return the operators with a forward and a backward pass over activations."""
    # T tokens, B batch, F FFN width, N heads, G key-value heads, D head width. H, small_H and L are hidden widths of
    # the models in `Sizes`.
    T, B = sizes.tokens, sizes.batch
    H, small_H = sizes.hidden, sizes.small_hidden
    L, F = sizes.llama_hidden, sizes.llama_ffn

    def make_input_function(*widths: int) -> Callable[[int], list[Tensor]]:
        """Return a function that draws one input per width for a number of tokens.

        A positive width gives activations [tokens / batch, batch, width], a negative width a parameter [-width].
        """

        def make_inputs(tokens: int) -> list[Tensor]:
            generator = torch.Generator(device).manual_seed(1)
            inputs = []
            for width in widths:
                shape = (tokens // B, B, width) if width > 0 else (-width,)
                tensor = torch.randn(shape, device=device, generator=generator)
                inputs.append(tensor.to(dtype).requires_grad_())
            return inputs

        return make_inputs

    def count_bytes(*widths: int) -> float:
        """Return the bytes of activations [T, width] of these widths."""
        return float(sum(widths)) * T * dtype.itemsize

    def make_case(
        op: str,
        width: int,
        *,
        fused: Callable[..., Any],
        reference: Callable[..., Any],
        make_inputs: Callable[[int], list[Tensor]],
        forward_bytes: float,
        backward_bytes: float,
    ) -> KernelCase:
        """Return the case of an operator whose activations are [T, width]."""
        return KernelCase(
            op=op,
            shape=f"{T} x {width}",
            fused=fused,
            reference=reference,
            make_inputs=make_inputs,
            forward_bytes=forward_bytes,
            backward_bytes=backward_bytes,
            tokens=T,
        )

    eps, p = 1e-5, 0.1
    key = dropout.make_dropout_key(1, 2, 3)
    N, G = sizes.heads, sizes.groups
    D = sizes.head_size
    qkv_width = (N + 2 * G) * D
    rotated_width = (N + G) * D  # queries and keys
    M = H // D  # heads of the model with hidden width H
    fused_width = 3 * M * D + 4 * H  # QKV and MLP input of a parallel block
    cos, sin = rope.make_rotary_tables(T // B, D, 1e4, device)

    # Dropout's inputs begin at the first position of the sequence and at the first sample of the batch.
    sequence_start = 0
    sample_start = 0

    # The functions below give an operator or its reference the arguments that are not measured inputs. In the lambdas,
    # x is the input, r the residual, w the weight of a norm, b a bias, and x_bias a bias that is added to x.

    def rotary(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: function(x.unflatten(-1, (N, D)), cos[: x.shape[0]], sin[: x.shape[0]], interleaved=False)

    def split(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda qkv: function(qkv, N, G, cos=None, sin=None, interleaved=False)

    def split_rotary(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda qkv: function(qkv, N, G, cos=cos[: qkv.shape[0]], sin=sin[: qkv.shape[0]], interleaved=False)

    def split_norm_rotary(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda qkv, q_weight, k_weight: function(
            qkv,
            N,
            G,
            q_weight,
            k_weight,
            eps=eps,
            cos=cos[: qkv.shape[0]],
            sin=sin[: qkv.shape[0]],
            interleaved=False,
        )

    def add_layer_norm(width: int) -> KernelCase:
        return make_case(
            "add + layer norm",
            width,
            fused=lambda x, r, w, b, x_bias: norm.add_norm(x, r, w, b, eps, kind="layernorm", x_bias=x_bias),
            reference=lambda x, r, w, b, x_bias: norm.add_norm_reference(
                x, r, w, b, eps, kind="layernorm", x_bias=x_bias
            ),
            make_inputs=make_input_function(width, width, -width, -width, -width),
            forward_bytes=count_bytes(width, width, width, width),
            backward_bytes=count_bytes(width, width, width, width),
        )

    return [
        make_case(
            "layer norm",
            H,
            fused=lambda x, w, b: norm.layer_norm(x, w, b, eps),
            reference=lambda x, w, b: norm.layer_norm_reference(x, w, b, eps),
            make_inputs=make_input_function(H, -H, -H),
            forward_bytes=count_bytes(H, H),
            backward_bytes=count_bytes(H, H, H),
        ),
        make_case(
            "rms norm",
            L,
            fused=lambda x, w: norm.rms_norm(x, w, eps),
            reference=lambda x, w: norm.rms_norm_reference(x, w, eps),
            make_inputs=make_input_function(L, -L),
            forward_bytes=count_bytes(L, L),
            backward_bytes=count_bytes(L, L, L),
        ),
        add_layer_norm(H),
        add_layer_norm(small_H),
        make_case(
            "add + rms norm",
            L,
            fused=lambda x, r, w: norm.add_norm(x, r, w, bias=None, eps=eps, kind="rmsnorm"),
            reference=lambda x, r, w: norm.add_norm_reference(x, r, w, bias=None, eps=eps, kind="rmsnorm", x_bias=None),
            make_inputs=make_input_function(L, L, -L),
            forward_bytes=count_bytes(L, L, L, L),
            backward_bytes=count_bytes(L, L, L, L),
        ),
        make_case(
            "gelu + bias",
            4 * H,
            fused=activation.gelu,
            reference=activation.gelu_reference,
            make_inputs=make_input_function(4 * H, -4 * H),
            forward_bytes=count_bytes(4 * H, 4 * H),
            backward_bytes=count_bytes(4 * H, 4 * H, 4 * H),
        ),
        make_case(
            "gelu, GEMM's bias",
            4 * H,
            # x stands for the output of a GEMM that has added b. Neither function adds b to the values again:
            # `add_bias_to_graph` only makes b an input of the autograd graph.
            fused=lambda x, b: activation.gelu(x, b, is_bias_added=True),
            reference=lambda x, b: activation.gelu_reference(activation.add_bias_to_graph(x, b)),
            make_inputs=make_input_function(4 * H, -4 * H),
            forward_bytes=count_bytes(4 * H, 4 * H),
            backward_bytes=count_bytes(4 * H, 4 * H, 4 * H),
        ),
        make_case(
            "gelu tanh",
            4 * H,
            fused=lambda x: activation.gelu(x, approximate="tanh"),
            reference=lambda x: activation.gelu_reference(x, approximate="tanh"),
            make_inputs=make_input_function(4 * H),
            forward_bytes=count_bytes(4 * H, 4 * H),
            backward_bytes=count_bytes(4 * H, 4 * H, 4 * H),
        ),
        make_case(
            "swiglu",
            2 * F,
            fused=activation.swiglu,
            reference=activation.swiglu_reference,
            make_inputs=make_input_function(2 * F),
            forward_bytes=count_bytes(2 * F, F),
            backward_bytes=count_bytes(2 * F, F, 2 * F),
        ),
        make_case(
            "rotary q",
            N * D,
            fused=rotary(rope.apply_rotary),
            reference=rotary(rope.apply_rotary_reference),
            make_inputs=make_input_function(N * D),
            forward_bytes=count_bytes(N * D, N * D),
            backward_bytes=count_bytes(N * D, N * D),
        ),
        make_case(
            "split qkv rotary",
            qkv_width,
            fused=split_rotary(rope.split_qkv),
            reference=split_rotary(rope.split_qkv_reference),
            make_inputs=make_input_function(qkv_width),
            # Only queries and keys move. The values are a view of the projection.
            forward_bytes=count_bytes(rotated_width, rotated_width),
            backward_bytes=count_bytes(qkv_width, qkv_width),
        ),
        make_case(
            "split qkv",
            qkv_width,
            fused=split(rope.split_qkv),
            reference=split(rope.split_qkv_reference),
            make_inputs=make_input_function(qkv_width),
            forward_bytes=0.0,  # without rotation, all three results are views of the projection
            backward_bytes=count_bytes(qkv_width, qkv_width),
        ),
        make_case(
            "split qkv, norms and rotary",
            qkv_width,
            fused=split_norm_rotary(norm_rotary.split_norm_rotary),
            reference=split_norm_rotary(norm_rotary.split_norm_rotary_reference),
            make_inputs=make_input_function(qkv_width, -D, -D),
            # Only queries and keys move. The values are a view of the projection.
            forward_bytes=count_bytes(rotated_width, rotated_width),
            backward_bytes=count_bytes(qkv_width, qkv_width, rotated_width),
        ),
        make_case(
            "split fused projection gelu",
            fused_width,
            # The fused function also returns the activation to recompute, which is None here. The reference has no
            # defaults: it gets those of the fused function.
            fused=lambda x: fused_projection.split_fused_projection(x, M, M, D, activation="gelu")[:4],
            reference=lambda x: fused_projection.split_fused_projection_reference(
                x, M, M, D, activation="gelu", mlp_bias=None, cos=None, sin=None, interleaved=False
            ),
            make_inputs=make_input_function(fused_width),
            # Only the MLP's part moves. Without rotation, q, k and v are views of the projection.
            forward_bytes=count_bytes(4 * H, 4 * H),
            backward_bytes=count_bytes(fused_width, fused_width, 4 * H),
        ),
        make_case(
            "dropout",
            H,
            fused=lambda x: dropout.dropout(x, p, key, sequence_start, sample_start),
            reference=lambda x: dropout._DropoutReference.apply(x, p, key, sequence_start, sample_start),
            make_inputs=make_input_function(H),
            forward_bytes=count_bytes(H, H),
            backward_bytes=count_bytes(H, H),
        ),
        make_case(
            "bias + dropout + add",
            H,
            fused=lambda x, b, r: dropout.dropout_add(x, b, r, p, key, sequence_start, sample_start),
            reference=lambda x, b, r: r + dropout._DropoutReference.apply(x + b, p, key, sequence_start, sample_start),
            make_inputs=make_input_function(H, -H, H),
            forward_bytes=count_bytes(H, H, H),
            backward_bytes=count_bytes(H, H),
        ),
        make_case(
            "bias + add",
            H,
            fused=lambda x, b, r: dropout.dropout_add(x, b, r, 0.0, key, sequence_start, sample_start),
            reference=lambda x, b, r: r + (x + b),
            make_inputs=make_input_function(H, -H, H),
            forward_bytes=count_bytes(H, H, H),
            backward_bytes=count_bytes(H),
        ),
    ]


def make_head_inputs(sizes: Sizes, device: torch.device, tokens: int, dtype: torch.dtype = BF16) -> tuple[Tensor, ...]:
    """Return random inputs of the language-model head.

    Returns:
        x [tokens, hidden], weight [padded vocab, hidden], targets [tokens], and the gradient of a token's loss [].
    """
    generator = torch.Generator(device).manual_seed(2)
    padded_vocab = math.ceil(sizes.vocab / 128) * 128
    x = torch.randn(tokens, sizes.hidden, device=device, generator=generator).to(dtype).requires_grad_()
    w = 0.02 * torch.randn(padded_vocab, sizes.hidden, device=device, generator=generator)
    w = w.to(dtype).requires_grad_()
    targets = torch.randint(0, sizes.vocab, (tokens,), device=device, generator=generator)
    return x, w, targets, torch.tensor(1.0 / tokens, device=device)


def compute_head_reference(x: Tensor, w: Tensor, targets: Tensor, vocab: int) -> Tensor:
    """Return the loss of each token [tokens], computed from all logits at once."""
    return cross_entropy.cross_entropy(torch.nn.functional.linear(x, w), targets, vocab)
