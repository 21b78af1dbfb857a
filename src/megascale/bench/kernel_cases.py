"""Operators that `megascale bench kernels` measures, with reference and inputs, and the rows of its table."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megascale.bench import timing
from megascale.core import strict_json
from megascale.ops import activation, cross_entropy, dropout, fused_projection, norm, norm_rotary, rope

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measured tensors. The defaults are those of gpt-13b, llama-8b and gpt2-124m."""

    tokens: int = 8192
    batch: int = 4
    hidden: int = 5120  # gpt-13b's
    llama_hidden: int = 4096
    llama_ffn: int = 14336
    heads: int = 32  # attention heads
    groups: int = 8  # key-value heads
    head_size: int = 128
    vocab: int = 64000
    head_tokens: int = 4096  # tokens of the language-model head
    elements: int = 256 << 20  # of the optimizer's flat shard
    small_hidden: int = 768  # gpt2-124m's


TINY = Sizes(
    tokens=8,
    batch=2,
    hidden=32,
    llama_hidden=32,
    llama_ffn=24,
    heads=2,
    groups=1,
    head_size=16,
    vocab=100,
    head_tokens=8,
    elements=5000,
    small_hidden=20,
)


@dataclass
class KernelCase:
    """One operator at one shape.

    Attributes:
        fused, reference: functions of the tensors of `make_inputs`. They return a tensor or a tuple of tensors.
        make_inputs: returns random input tensors for a number of tokens.
        forward_bytes, backward_bytes: fewest bytes that the pass must read and write.
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
        op: str, width: int, fused: Any, reference: Any, make_inputs: Any, forward_bytes: float, backward_bytes: float
    ) -> KernelCase:
        """Return the case of an operator whose activations are [T, width]."""
        return KernelCase(op, f"{T} x {width}", fused, reference, make_inputs, forward_bytes, backward_bytes, T)

    eps, p = 1e-5, 0.1
    key = dropout.make_dropout_key(1, 2, 3)
    N, G = sizes.heads, sizes.groups
    D = sizes.head_size
    qkv_width = (N + 2 * G) * D
    rotated_width = (N + G) * D  # queries and keys
    M = H // D  # heads of the model with hidden width H
    fused_width = 3 * M * D + 4 * H  # QKV and MLP input of a parallel block
    cos, sin = rope.make_rotary_tables(T // B, D, 1e4, device)

    def rotary(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: function(x.unflatten(-1, (N, D)), cos[: x.shape[0]], sin[: x.shape[0]], False)

    def split(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda qkv: function(qkv, N, G, None, None, False)

    def split_rotary(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda qkv: function(qkv, N, G, cos[: qkv.shape[0]], sin[: qkv.shape[0]], False)

    def split_norm_rotary(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda qkv, q, k: function(qkv, N, G, q, k, eps, cos[: qkv.shape[0]], sin[: qkv.shape[0]], False)

    def add_layer_norm(width: int) -> KernelCase:
        return make_case(
            "add + layer norm",
            width,
            lambda x, r, c, w, b: norm.add_norm(x, r, w, b, eps, "layernorm", c),
            lambda x, r, c, w, b: norm.add_norm_reference(x, r, w, b, eps, "layernorm", c),
            make_input_function(width, width, -width, -width, -width),
            count_bytes(width, width, width, width),
            count_bytes(width, width, width, width),
        )

    return [
        make_case(
            "layer norm",
            H,
            lambda x, w, b: norm.layer_norm(x, w, b, eps),
            lambda x, w, b: norm.layer_norm_reference(x, w, b, eps),
            make_input_function(H, -H, -H),
            count_bytes(H, H),
            count_bytes(H, H, H),
        ),
        make_case(
            "rms norm",
            L,
            lambda x, w: norm.rms_norm(x, w, eps),
            lambda x, w: norm.rms_norm_reference(x, w, eps),
            make_input_function(L, -L),
            count_bytes(L, L),
            count_bytes(L, L, L),
        ),
        add_layer_norm(H),
        add_layer_norm(small_H),
        make_case(
            "add + rms norm",
            L,
            lambda x, r, w: norm.add_norm(x, r, w, None, eps, "rmsnorm"),
            lambda x, r, w: norm.add_norm_reference(x, r, w, None, eps, "rmsnorm", None),
            make_input_function(L, L, -L),
            count_bytes(L, L, L, L),
            count_bytes(L, L, L, L),
        ),
        make_case(
            "gelu + bias",
            4 * H,
            activation.gelu,
            activation.gelu_reference,
            make_input_function(4 * H, -4 * H),
            count_bytes(4 * H, 4 * H),
            count_bytes(4 * H, 4 * H, 4 * H),
        ),
        make_case(
            "gelu, GEMM's bias",
            4 * H,
            lambda x, b: activation.gelu(x, b, is_bias_added=True),
            lambda x, b: activation.gelu_reference(activation.add_bias_to_graph(x, b)),
            make_input_function(4 * H, -4 * H),
            count_bytes(4 * H, 4 * H),
            count_bytes(4 * H, 4 * H, 4 * H),
        ),
        make_case(
            "gelu tanh",
            4 * H,
            lambda x: activation.gelu(x, None, "tanh"),
            lambda x: activation.gelu_reference(x, None, "tanh"),
            make_input_function(4 * H),
            count_bytes(4 * H, 4 * H),
            count_bytes(4 * H, 4 * H, 4 * H),
        ),
        make_case(
            "swiglu",
            2 * F,
            activation.swiglu,
            activation.swiglu_reference,
            make_input_function(2 * F),
            count_bytes(2 * F, F),
            count_bytes(2 * F, F, 2 * F),
        ),
        make_case(
            "rotary q",
            N * D,
            rotary(rope.apply_rotary),
            rotary(rope.apply_rotary_reference),
            make_input_function(N * D),
            count_bytes(N * D, N * D),
            count_bytes(N * D, N * D),
        ),
        make_case(
            "split qkv rotary",
            qkv_width,
            split_rotary(rope.split_qkv),
            split_rotary(rope.split_qkv_reference),
            make_input_function(qkv_width),
            count_bytes(rotated_width, rotated_width),
            count_bytes(qkv_width, qkv_width),
        ),
        make_case(
            "split qkv",
            qkv_width,
            split(rope.split_qkv),
            split(rope.split_qkv_reference),
            make_input_function(qkv_width),
            0.0,
            count_bytes(qkv_width, qkv_width),
        ),
        make_case(
            "split qkv, norms and rotary",
            qkv_width,
            split_norm_rotary(norm_rotary.split_norm_rotary),
            split_norm_rotary(norm_rotary.split_norm_rotary_reference),
            make_input_function(qkv_width, -D, -D),
            count_bytes(rotated_width, rotated_width),
            count_bytes(qkv_width, qkv_width, rotated_width),
        ),
        make_case(
            "split fused projection gelu",
            fused_width,
            lambda x: fused_projection.split_fused_projection(x, M, M, D, "gelu")[:4],
            lambda x: fused_projection.split_fused_projection_reference(x, M, M, D, "gelu", None, None, None, False),
            make_input_function(fused_width),
            count_bytes(4 * H, 4 * H),
            count_bytes(fused_width, fused_width, 4 * H),
        ),
        make_case(
            "dropout",
            H,
            lambda x: dropout.dropout(x, p, key, 0, 0),
            lambda x: dropout._DropoutReference.apply(x, p, key, 0, 0),
            make_input_function(H),
            count_bytes(H, H),
            count_bytes(H, H),
        ),
        make_case(
            "bias + dropout + add",
            H,
            lambda x, b, r: dropout.dropout_add(x, b, r, p, key, 0, 0),
            lambda x, b, r: r + dropout._DropoutReference.apply(x + b, p, key, 0, 0),
            make_input_function(H, -H, H),
            count_bytes(H, H, H),
            count_bytes(H, H),
        ),
        make_case(
            "bias + add",
            H,
            lambda x, b, r: dropout.dropout_add(x, b, r, 0.0, key, 0, 0),
            lambda x, b, r: r + (x + b),
            make_input_function(H, -H, H),
            count_bytes(H, H, H),
            count_bytes(H),
        ),
    ]


def make_head_inputs(sizes: Sizes, device: torch.device, tokens: int, dtype: torch.dtype = BF16) -> tuple[Tensor, ...]:
    """Return random inputs of the language-model head.

    Returns: x [tokens, hidden], weight [padded vocab, hidden], targets [tokens], and the gradient of a token's loss [].
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


@dataclass
class KernelRow:
    """One row of the table.

    Attributes:
        fused, eager, compiled: device seconds per call of each implementation; None if not measured.
        bound: seconds that the operator's bytes take at the copy rate.
        distance: norm-wise distance from the float64 reference.
        tflops: TFLOP/s of the fused kernel.
        host: seconds that the host takes to launch the fused kernel.
        error: why a figure is missing or wrong.
    """

    op: str
    shape: str
    dtype: str = "bfloat16"
    fused: float | None = None
    eager: float | None = None
    compiled: float | None = None
    bound: float | None = None
    distance: float | None = None
    tflops: float | None = None
    host: float | None = None
    error: str = ""

    def set_tflops(self, flops: float) -> None:
        """Compute TFLOP/s from the fused kernel's seconds."""
        if self.fused:
            self.tflops = flops / self.fused / 1e12


class Bench:
    """Collects the rows of the table and writes them to a JSON file.

    If a measurement fails, the error is a row, and the next operator is measured.

    Args:
        compile_until: seconds after the start when compiling of references ends.
        out: JSON file.

    Attributes:
        facts: properties and rates of the machine, by key of the JSON file.
    """

    def __init__(self, sizes: Sizes, device: torch.device, compile_until: float, out: Path) -> None:
        self.sizes = sizes
        self.device = device
        self.compile_until = compile_until
        self.out = out
        self.start = time.monotonic()
        self.rows: list[KernelRow] = []
        self.facts: dict[str, Any] = {}

    def run_guarded(self, op: str, shape: str, function: Callable[[], Any]) -> None:
        """Run a measurement; an exception becomes a row of the table."""
        print(f"{time.monotonic() - self.start:6.1f} s  {op} {shape}", file=sys.stderr, flush=True)
        try:
            function()
        except Exception as error:  # The remaining operators are still measured.
            self.rows.append(KernelRow(op, shape, error=f"{type(error).__name__}: {str(error).strip()[:300]}"))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.save()

    def add(self, row: KernelRow, limit: float) -> None:
        """Add a row. Set its `error` if its distance from the reference is above `limit`, or NaN."""
        self.rows.append(row)
        if row.distance is not None and not row.distance <= limit:
            row.error = f"norm-wise error {row.distance:.1e}, limit {limit:.1e}"

    def save(self) -> None:
        """Write the results so far, so that the file exists even if the bench is interrupted."""
        self.out.write_text(strict_json.dumps(self.make_result(), indent=1))

    def make_result(self) -> dict[str, Any]:
        """Return the content of the JSON file."""
        return {**self.facts, "rows": [asdict(row) for row in self.rows]}

    def compile(self, function: Callable[..., Any], op: str) -> Callable[..., Any] | None:
        """Return a reference compiled by torch.compile, or None after `compile_until` seconds and for dropout.

        Dropout is not compiled, since the integer arithmetic of Philox takes the compiler minutes.
        """
        if "dropout" in op or time.monotonic() - self.start > self.compile_until:
            return None
        torch.compiler.reset()
        return torch.compile(function, dynamic=False)

    def measure_seconds(self, row: KernelRow, field: str, function: Callable[[], Any]) -> None:
        """Set `field` of a row to the device seconds of a call, or add the exception to the row's error."""
        try:
            setattr(row, field, timing.measure_device_seconds(function))
        except Exception as error:
            row.error += f"{field}: {type(error).__name__}: {str(error).strip()[:160]} "


def compute_distance(value: Tensor, reference: Tensor) -> float:
    """Return the norm of the difference divided by the norm of the reference, computed in float64."""
    reference = reference.double()
    return ((value.double() - reference).norm() / reference.norm().clamp(min=1e-300)).item()
