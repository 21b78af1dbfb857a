"""Operators that `megascale bench kernels` measures, with their references and inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megascale.bench.kernel_rows import Sizes
from megascale.ops import activation, cross_entropy, dropout, fused_projection, norm, norm_rotary, rope

BF16 = torch.bfloat16
NORM_EPS = 1e-5


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
    factory = CaseFactory(sizes, device, dtype)
    cases = list_norm_cases(factory)
    cases += list_activation_cases(factory)
    cases += list_rotary_cases(factory)
    cases += list_split_cases(factory)
    cases += list_dropout_cases(factory)
    return cases


@dataclass(frozen=True)
class CaseFactory:
    """Maker of cases whose inputs have one type and lie on one device."""

    sizes: Sizes
    device: torch.device
    dtype: torch.dtype

    def make_case(
        self,
        op: str,
        width: int,
        *,
        fused: Callable[..., Any],
        reference: Callable[..., Any],
        input_widths: Sequence[int],
        forward_widths: Sequence[int],
        backward_widths: Sequence[int],
    ) -> KernelCase:
        """Return the case of an operator whose activations are [T, width].

        Args:
            input_widths: one width per input. A positive width gives activations [tokens / batch, batch, width], a
                negative width a parameter [-width].
            forward_widths, backward_widths: widths of the activations that each pass must read or write.
        """
        tokens = self.sizes.tokens
        return KernelCase(
            op=op,
            shape=f"{tokens} x {width}",
            fused=fused,
            reference=reference,
            make_inputs=partial(self._make_inputs, input_widths),
            forward_bytes=self._count_bytes(forward_widths),
            backward_bytes=self._count_bytes(backward_widths),
            tokens=tokens,
        )

    def _make_inputs(self, widths: Sequence[int], tokens: int) -> list[Tensor]:
        """Draw one input per width."""
        generator = torch.Generator(self.device).manual_seed(1)
        batch = self.sizes.batch
        inputs = []
        for width in widths:
            shape = (tokens // batch, batch, width) if width > 0 else (-width,)
            tensor = torch.randn(shape, device=self.device, generator=generator)
            inputs.append(tensor.to(self.dtype).requires_grad_())
        return inputs

    def _count_bytes(self, widths: Sequence[int]) -> float:
        """Return the bytes of activations [T, width] of these widths."""
        return float(sum(widths)) * self.sizes.tokens * self.dtype.itemsize


# The functions below give an operator or its reference the arguments that are not measured inputs. In the lambdas, x is
# the input, r the residual, w the weight of a norm, b a bias, and x_bias a bias that is added to x.


def list_norm_cases(factory: CaseFactory) -> list[KernelCase]:
    """Return the norms, alone and after a residual addition."""
    hidden = factory.sizes.hidden
    llama_hidden = factory.sizes.llama_hidden
    eps = NORM_EPS
    return [
        factory.make_case(
            "layer norm",
            hidden,
            fused=lambda x, w, b: norm.layer_norm(x, w, b, eps),
            reference=lambda x, w, b: norm.layer_norm_reference(x, w, b, eps),
            input_widths=(hidden, -hidden, -hidden),
            forward_widths=(hidden, hidden),
            backward_widths=(hidden, hidden, hidden),
        ),
        factory.make_case(
            "rms norm",
            llama_hidden,
            fused=lambda x, w: norm.rms_norm(x, w, eps),
            reference=lambda x, w: norm.rms_norm_reference(x, w, eps),
            input_widths=(llama_hidden, -llama_hidden),
            forward_widths=(llama_hidden, llama_hidden),
            backward_widths=(llama_hidden, llama_hidden, llama_hidden),
        ),
        _make_add_layer_norm_case(factory, hidden),
        _make_add_layer_norm_case(factory, factory.sizes.small_hidden),
        factory.make_case(
            "add + rms norm",
            llama_hidden,
            fused=lambda x, r, w: norm.add_norm(x, r, w, bias=None, eps=eps, kind="rmsnorm"),
            reference=lambda x, r, w: norm.add_norm_reference(x, r, w, bias=None, eps=eps, kind="rmsnorm", x_bias=None),
            input_widths=(llama_hidden, llama_hidden, -llama_hidden),
            forward_widths=(llama_hidden,) * 4,
            backward_widths=(llama_hidden,) * 4,
        ),
    ]


def _make_add_layer_norm_case(factory: CaseFactory, width: int) -> KernelCase:
    eps = NORM_EPS
    return factory.make_case(
        "add + layer norm",
        width,
        fused=lambda x, r, w, b, x_bias: norm.add_norm(x, r, w, b, eps, kind="layernorm", x_bias=x_bias),
        reference=lambda x, r, w, b, x_bias: norm.add_norm_reference(x, r, w, b, eps, kind="layernorm", x_bias=x_bias),
        input_widths=(width, width, -width, -width, -width),
        forward_widths=(width,) * 4,
        backward_widths=(width,) * 4,
    )


def list_activation_cases(factory: CaseFactory) -> list[KernelCase]:
    """Return the activations of the MLP."""
    mlp_width = 4 * factory.sizes.hidden
    ffn = factory.sizes.llama_ffn
    return [
        factory.make_case(
            "gelu + bias",
            mlp_width,
            fused=activation.gelu,
            reference=activation.gelu_reference,
            input_widths=(mlp_width, -mlp_width),
            forward_widths=(mlp_width, mlp_width),
            backward_widths=(mlp_width, mlp_width, mlp_width),
        ),
        factory.make_case(
            "gelu, GEMM's bias",
            mlp_width,
            # x stands for the output of a GEMM that has added b. Neither function adds b to the values again:
            # `add_bias_to_graph` only makes b an input of the autograd graph.
            fused=lambda x, b: activation.gelu(x, b, is_bias_added=True),
            reference=lambda x, b: activation.gelu_reference(activation.add_bias_to_graph(x, b)),
            input_widths=(mlp_width, -mlp_width),
            forward_widths=(mlp_width, mlp_width),
            backward_widths=(mlp_width, mlp_width, mlp_width),
        ),
        factory.make_case(
            "gelu tanh",
            mlp_width,
            fused=lambda x: activation.gelu(x, approximate="tanh"),
            reference=lambda x: activation.gelu_reference(x, approximate="tanh"),
            input_widths=(mlp_width,),
            forward_widths=(mlp_width, mlp_width),
            backward_widths=(mlp_width, mlp_width, mlp_width),
        ),
        factory.make_case(
            "swiglu",
            2 * ffn,
            fused=activation.swiglu,
            reference=activation.swiglu_reference,
            input_widths=(2 * ffn,),
            forward_widths=(2 * ffn, ffn),
            backward_widths=(2 * ffn, ffn, 2 * ffn),
        ),
    ]


def list_rotary_cases(factory: CaseFactory) -> list[KernelCase]:
    """Return the rotation of queries."""
    N = factory.sizes.heads
    D = factory.sizes.head_size
    cos, sin = _make_rotary_tables(factory)

    def rotate(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: function(x.unflatten(-1, (N, D)), cos[: x.shape[0]], sin[: x.shape[0]], interleaved=False)

    return [
        factory.make_case(
            "rotary q",
            N * D,
            fused=rotate(rope.apply_rotary),
            reference=rotate(rope.apply_rotary_reference),
            input_widths=(N * D,),
            forward_widths=(N * D, N * D),
            backward_widths=(N * D, N * D),
        )
    ]


def _make_rotary_tables(factory: CaseFactory) -> tuple[Tensor, Tensor]:
    sizes = factory.sizes
    return rope.make_rotary_tables(sizes.tokens // sizes.batch, sizes.head_size, 1e4, factory.device)


def list_split_cases(factory: CaseFactory) -> list[KernelCase]:
    """Return the splits of a QKV projection into heads, plain, rotated and normalised."""
    # N heads, G key-value heads, D head width
    N = factory.sizes.heads
    G = factory.sizes.groups
    D = factory.sizes.head_size
    qkv_width = (N + 2 * G) * D
    rotated_width = (N + G) * D  # queries and keys
    cos, sin = _make_rotary_tables(factory)

    def split(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda qkv: function(qkv, N, G, cos=None, sin=None, interleaved=False)

    def split_rotary(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda qkv: function(qkv, N, G, cos=cos[: qkv.shape[0]], sin=sin[: qkv.shape[0]], interleaved=False)

    def split_norm_rotary(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(qkv: Tensor, q_weight: Tensor, k_weight: Tensor) -> Any:
            rotation = {"cos": cos[: qkv.shape[0]], "sin": sin[: qkv.shape[0]], "interleaved": False}
            return function(qkv, N, G, q_weight, k_weight, eps=NORM_EPS, **rotation)

        return call

    return [
        factory.make_case(
            "split qkv rotary",
            qkv_width,
            fused=split_rotary(rope.split_qkv),
            reference=split_rotary(rope.split_qkv_reference),
            input_widths=(qkv_width,),
            # Only queries and keys move. The values are a view of the projection.
            forward_widths=(rotated_width, rotated_width),
            backward_widths=(qkv_width, qkv_width),
        ),
        factory.make_case(
            "split qkv",
            qkv_width,
            fused=split(rope.split_qkv),
            reference=split(rope.split_qkv_reference),
            input_widths=(qkv_width,),
            forward_widths=(),  # without rotation, all three results are views of the projection
            backward_widths=(qkv_width, qkv_width),
        ),
        factory.make_case(
            "split qkv, norms and rotary",
            qkv_width,
            fused=split_norm_rotary(norm_rotary.split_norm_rotary),
            reference=split_norm_rotary(norm_rotary.split_norm_rotary_reference),
            input_widths=(qkv_width, -D, -D),
            # Only queries and keys move. The values are a view of the projection.
            forward_widths=(rotated_width, rotated_width),
            backward_widths=(qkv_width, qkv_width, rotated_width),
        ),
        _make_fused_projection_case(factory),
    ]


def _make_fused_projection_case(factory: CaseFactory) -> KernelCase:
    """Return the split of the projection of a parallel block, which computes QKV and the MLP's input."""
    hidden = factory.sizes.hidden
    D = factory.sizes.head_size
    M = hidden // D  # heads of the model with this hidden width
    fused_width = 3 * M * D + 4 * hidden
    return factory.make_case(
        "split fused projection gelu",
        fused_width,
        # The fused function also returns the activation to recompute, which is None here. The reference has no
        # defaults: it gets those of the fused function.
        fused=lambda x: fused_projection.split_fused_projection(x, M, M, D, activation="gelu")[:4],
        reference=lambda x: fused_projection.split_fused_projection_reference(
            x, M, M, D, activation="gelu", mlp_bias=None, cos=None, sin=None, interleaved=False
        ),
        input_widths=(fused_width,),
        # Only the MLP's part moves. Without rotation, q, k and v are views of the projection.
        forward_widths=(4 * hidden, 4 * hidden),
        backward_widths=(fused_width, fused_width, 4 * hidden),
    )


def list_dropout_cases(factory: CaseFactory) -> list[KernelCase]:
    """Return dropout, and the residual addition with a bias, with and without dropout."""
    hidden = factory.sizes.hidden
    p = 0.1
    key = dropout.make_dropout_key(1, 2, 3)
    # The inputs begin at the first position of the sequence and at the first sample of the batch.
    sequence_start = 0
    sample_start = 0
    return [
        factory.make_case(
            "dropout",
            hidden,
            fused=lambda x: dropout.dropout(x, p, key, sequence_start, sample_start),
            reference=lambda x: dropout._DropoutReference.apply(x, p, key, sequence_start, sample_start),
            input_widths=(hidden,),
            forward_widths=(hidden, hidden),
            backward_widths=(hidden, hidden),
        ),
        factory.make_case(
            "bias + dropout + add",
            hidden,
            fused=lambda x, b, r: dropout.dropout_add(x, b, r, p, key, sequence_start, sample_start),
            reference=lambda x, b, r: r + dropout._DropoutReference.apply(x + b, p, key, sequence_start, sample_start),
            input_widths=(hidden, -hidden, hidden),
            forward_widths=(hidden, hidden, hidden),
            backward_widths=(hidden, hidden),
        ),
        factory.make_case(
            "bias + add",
            hidden,
            fused=lambda x, b, r: dropout.dropout_add(x, b, r, 0.0, key, sequence_start, sample_start),
            reference=lambda x, b, r: r + (x + b),
            input_widths=(hidden, -hidden, hidden),
            forward_widths=(hidden, hidden, hidden),
            backward_widths=(hidden,),
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
