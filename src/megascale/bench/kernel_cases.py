"""Cases and rows of `megascale bench kernels`: each operator with its reference, inputs and bytes, and its figures."""

from __future__ import annotations

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
    """Widths of the measured shapes; the defaults are those of gpt-13b, llama-8b and (small) gpt2-124m."""

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

    Attributes:
        fused, reference: functions of `inputs(tokens)` that return a tensor or a tuple of tensors.
        forward_bytes, backward_bytes: bytes that must be read and written at least.
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
    """Return the operators with a forward and a backward pass over activations."""
    T, B = sizes.tokens, sizes.batch
    H, E = sizes.hidden, sizes.small
    L, F = sizes.llama_hidden, sizes.llama_ffn
    item = dtype.itemsize

    def rows(*widths: int) -> Callable[[int], list[Tensor]]:
        """Return activations [tokens / batch, batch, width] for positive widths, vectors for negative ones."""

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

    eps, p = 1e-5, 0.1
    key = dropout.make_dropout_key(1, 2, 3)
    N, G = sizes.heads, sizes.groups
    D = sizes.head_size
    C = (N + 2 * G) * D
    rotated = (N + G) * D
    M = H // D
    W = 3 * M * D + 4 * H
    cos, sin = rope.make_rotary_tables(T // B, D, 1e4, device)

    def rotary(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: function(x.unflatten(-1, (N, D)), cos[: x.shape[0]], sin[: x.shape[0]], False)

    def split(function: Callable[..., Any], with_tables: bool) -> Callable[..., Any]:
        if not with_tables:
            return lambda qkv: function(qkv, N, G, None, None, False)
        return lambda qkv: function(qkv, N, G, cos[: qkv.shape[0]], sin[: qkv.shape[0]], False)

    def split_norm(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda qkv, q, k: function(qkv, N, G, q, k, eps, cos[: qkv.shape[0]], sin[: qkv.shape[0]], False)

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
            lambda x, b: activation.gelu(x, b, is_bias_added=True),
            lambda x, b: activation.gelu_reference(activation.add_bias_to_graph(x, b)),
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
            rotary(rope.apply_rotary),
            rotary(rope.apply_rotary_reference),
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
            moved(rotated, rotated),
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
            "split qkv, norms and rotary",
            C,
            split_norm(norm_rotary.split_norm_rotary),
            split_norm(norm_rotary.split_norm_rotary_reference),
            rows(C, -D, -D),
            moved(2 * (N + G) * D),
            moved(C, C, (N + G) * D),
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
    """Return x [tokens, hidden], weight [padded vocab, hidden], targets [tokens], token_grad (0-d)."""
    g = torch.Generator(device).manual_seed(2)
    padded = -(-sizes.vocab // 128) * 128
    x = torch.randn(tokens, sizes.hidden, device=device, generator=g).to(dtype).requires_grad_()
    w = (0.02 * torch.randn(padded, sizes.hidden, device=device, generator=g)).to(dtype).requires_grad_()
    targets = torch.randint(0, sizes.vocab, (tokens,), device=device, generator=g)
    return x, w, targets, torch.tensor(1.0 / tokens, device=device)


def plain_head(x: Tensor, w: Tensor, targets: Tensor, vocab: int) -> Tensor:
    """Compute the per-token loss from all logits at once."""
    return cross_entropy.cross_entropy(torch.nn.functional.linear(x, w), targets, vocab)


@dataclass
class KernelRow:
    """One line of the table: seconds, None if not measured. error: why a figure is missing or wrong."""

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
    """Collects rows. A failure becomes a row, and the next operator is measured."""

    def __init__(self, sizes: Sizes, device: torch.device, compile_until: float, out: Path) -> None:
        self.sizes = sizes
        self.device = device
        self.compile_until = compile_until
        self.out = out
        self.start = time.monotonic()
        self.rows: list[KernelRow] = []
        self.facts: dict[str, Any] = {}

    def guard(self, op: str, shape: str, function: Callable[[], Any]) -> None:
        """Run a measurement; an exception becomes a row."""
        print(f"{time.monotonic() - self.start:6.1f} s  {op} {shape}", file=sys.stderr, flush=True)
        try:
            function()
        except Exception as error:  # one failing operator must not end the table
            self.rows.append(KernelRow(op, shape, error=f"{type(error).__name__}: {str(error).strip()[:300]}"))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.save()

    def add(self, row: KernelRow, limit: float) -> None:
        """Add a row, with an error if it is further than `limit` from the reference."""
        self.rows.append(row)
        if row.distance is not None and not row.distance <= limit:
            row.error = f"{row.distance:.1e} away from the float64 reference"

    def save(self) -> None:
        """Write the present results, so that an interrupted bench leaves them."""
        self.out.write_text(strict_json.dumps(self.result(), indent=1))

    def result(self) -> dict[str, Any]:
        """Return the content of the JSON file."""
        return {**self.facts, "rows": [asdict(row) for row in self.rows]}

    def compiled(self, function: Callable[..., Any], op: str) -> Callable[..., Any] | None:
        """Return torch.compile of a reference, or None after `compile_until`.

        Philox's rounds of integer arithmetic keep the compiler busy for minutes, so dropout is not compiled.
        """
        if "dropout" in op or time.monotonic() - self.start > self.compile_until:
            return None
        torch.compiler.reset()
        return torch.compile(function, dynamic=False)

    def seconds(self, row: KernelRow, field: str, function: Callable[[], Any]) -> None:
        """Measure one figure of a row, or add the error to the row."""
        try:
            setattr(row, field, timing.device_seconds(function))
        except Exception as error:
            row.error += f"{field}: {type(error).__name__}: {str(error).strip()[:160]} "


def distance(value: Tensor, reference: Tensor) -> float:
    """Return the norm of the difference over the norm of the reference."""
    reference = reference.double()
    return ((value.double() - reference).norm() / reference.norm().clamp(min=1e-300)).item()
