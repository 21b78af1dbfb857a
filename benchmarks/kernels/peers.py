"""`python -m benchmarks kernel-peers`: MegaScale's operators compared with liger-kernel, quack-kernels and torch.

Forward and backward of each, on the same numbers and checked against each other. None of these packages is a
dependency: a package that is not installed has an empty column, and the reason is printed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor
from torch.nn import functional as F

from megascale.bench import timing
from megascale.bench.kernel_cases import make_head_inputs
from megascale.bench.kernel_measures import start_bench
from megascale.bench.kernel_rows import TINY, Bench, KernelRow, Sizes, compute_distance
from megascale.errors import ConfigError
from megascale.ops import activation, norm
from megascale.ops.cross_entropy import compute_loss_and_gradient_, linear_cross_entropy

PACKAGES = {"liger": "liger-kernel", "quack": "quack-kernels", "torch": "torch"}
WITHIN = 2e-2  # norm-wise, in bfloat16: packages round at different steps
EPS = 1e-5

# Both passes: (inputs) -> outputs and gradients, in one order for all packages.
Passes = Callable[..., tuple[Tensor, ...]]


@dataclass
class PeerRow(KernelRow):
    """Both passes of one operator; seconds of each package's, and why a package has none."""

    peers: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


def register(app: typer.Typer) -> None:
    """Add the benchmark."""
    app.command("kernel-peers")(main)


def main(
    out: Path = typer.Option(Path("kernel-peers.json"), "--out", help="JSON file to write."),
    tiny: bool = typer.Option(False, "--tiny", help="Small shapes: the checks, on any machine; no meaningful times."),
) -> None:
    """Compare forward and backward of fused operators with liger-kernel, quack-kernels and torch."""
    cuda = torch.cuda.is_available()
    if not cuda and not tiny:
        raise ConfigError("kernel-peers measures a CUDA device and none is visible; --tiny runs the checks")
    bench = start_bench(TINY if tiny else Sizes(), torch.device("cuda" if cuda else "cpu"), 0.0, out)
    measure(bench)
    bench.save()
    show(bench)


def measure(bench: Bench) -> None:
    """Measure a row for each operator."""
    bench.facts["packages"] = versions()
    for op, shape, inputs, ours, peers in _cases(bench.sizes, bench.device):
        bench.run_guarded(op, shape, functools.partial(_measure, bench, op, shape, inputs, ours, peers))


def show(bench: Bench) -> None:
    """Print the table, the versions and the missing figures."""
    from rich import box
    from rich.table import Table

    from megascale.core.output_console import OutputConsole

    console = OutputConsole(highlight=False)
    peer_rows = [row for row in bench.rows if isinstance(row, PeerRow)]
    names = list(dict.fromkeys(name for row in peer_rows for name in row.peers))
    table = Table(title="Forward and backward", box=box.SIMPLE_HEAD, padding=(0, 1))
    for name in ("op", "shape", "MegaScale us", *(f"{name} us" for name in names)):
        table.add_column(name, no_wrap=True)
    for row in peer_rows:
        seconds = [row.fused] + [row.peers.get(name) for name in names]
        table.add_row(row.op, row.shape, *("" if s is None else f"{s * 1e6:.1f}" for s in seconds))
    console.print(table)
    for row in peer_rows:
        for name, reason in row.notes.items():
            console.print(f"{row.op}, {name}: {reason}", soft_wrap=True, markup=False)
    for failed in bench.rows:
        if failed.error:
            console.print(f"{failed.op}: {failed.error}", soft_wrap=True, markup=False)
    console.print("; ".join(bench.facts["packages"].values()), markup=False)
    for name, reason in bench.facts.get("missing", {}).items():
        console.print(f"{name}: {reason}", soft_wrap=True, markup=False)


def versions() -> dict[str, str]:
    """Return the version of each package, or that it is not installed."""
    from importlib import metadata

    installed = {}
    for name, package in PACKAGES.items():
        try:
            installed[name] = f"{package} {metadata.version(package)}"
        except metadata.PackageNotFoundError:
            installed[name] = f"{package} is not installed"
    return installed


def _measure(
    bench: Bench,
    op: str,
    shape: str,
    inputs: Callable[[], list[Tensor]],
    ours: Passes,
    peers: dict[str, Callable[[], Passes]],
) -> None:
    row = PeerRow(op, shape)
    bench.rows.append(row)
    expected = ours(*inputs())
    tensors = inputs()
    bench.measure_seconds(row, "fused", lambda: ours(*tensors))
    for name, make_passes in peers.items():
        try:
            passes = make_passes()
        except (ImportError, AttributeError) as error:
            bench.facts.setdefault("missing", {}).setdefault(name, str(error))
            continue
        except Exception as error:  # an installed package may be incompatible with its own dependencies
            row.notes[name] = f"{type(error).__name__}: {str(error).strip()[:200]}"
            continue
        try:
            away = max(compute_distance(a, b) for a, b in zip(passes(*inputs()), expected, strict=True))
            if not away <= WITHIN:
                raise ValueError(f"{away:.1e} away from MegaScale's")
            row.peers[name] = timing.measure_device_seconds(functools.partial(passes, *tensors))
        except Exception as error:  # a package may fail in many ways; the others are still measured
            row.notes[name] = f"{type(error).__name__}: {str(error).strip()[:200]}"


def _forward_and_backward(forward: Callable[..., Any], order: tuple[int, ...] | None = None) -> Passes:
    """Return forward and the gradients of all inputs for a fixed upstream gradient. order: of the outputs."""
    upstream: list[Tensor] = []

    def passes(*inputs: Tensor) -> tuple[Tensor, ...]:
        out = forward(*inputs)
        if isinstance(out, tuple):
            outs = tuple(out)
        else:
            outs = (out,)
        if order is not None:
            outs = tuple(outs[i] for i in order)
        if not upstream:
            generator = torch.Generator(outs[0].device).manual_seed(7)
            upstream.extend(torch.randn(t.shape, device=t.device, generator=generator).to(t.dtype) for t in outs)
        return (*(t.detach() for t in outs), *torch.autograd.grad(outs, inputs, upstream))

    return passes


def _cases(
    sizes: Sizes, device: torch.device
) -> list[tuple[str, str, Callable[[], list[Tensor]], Passes, dict[str, Callable[[], Passes]]]]:
    T = sizes.tokens
    L = sizes.llama_hidden
    H = sizes.hidden
    FF = sizes.llama_ffn

    def tensors(*widths: int) -> list[Tensor]:
        """Return [tokens, width] for positive widths, [width] for negative ones."""
        g = torch.Generator(device).manual_seed(6)
        shapes = [(T, w) if w > 0 else (-w,) for w in widths]
        return [torch.randn(s, device=device, generator=g).to(torch.bfloat16).requires_grad_() for s in shapes]

    def rms_by_liger() -> Passes:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction as function

        return _forward_and_backward(lambda x, w: function.apply(x, w, EPS, 0.0, "llama", False))

    def rms_by_quack() -> Passes:
        from quack import rmsnorm

        return _forward_and_backward(lambda x, w: rmsnorm(x, w, eps=EPS))

    def added_by_liger() -> Passes:
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction as function

        return _forward_and_backward(lambda x, r, w: function.apply(x, r, w, EPS, 0.0, "llama", False), (1, 0))

    def added_by_quack() -> Passes:
        from quack import rmsnorm

        return _forward_and_backward(lambda x, r, w: rmsnorm(x, w, residual=r, eps=EPS, prenorm=True), (1, 0))

    def layer_by_liger() -> Passes:
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction as function

        return _forward_and_backward(lambda x, w, b: function.apply(x, w, b, EPS))

    def swiglu_by_liger() -> Passes:
        from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction as function

        return _forward_and_backward(lambda x: function.apply(x, False))

    return [
        (
            "rms norm",
            f"{T} x {L}",
            lambda: tensors(L, -L),
            _forward_and_backward(lambda x, w: norm.rms_norm(x, w, EPS)),
            {
                "liger": rms_by_liger,
                "quack": rms_by_quack,
                "torch": lambda: _forward_and_backward(lambda x, w: F.rms_norm(x, w.shape, w, EPS)),
            },
        ),
        (
            "add + rms norm",
            f"{T} x {L}",
            lambda: tensors(L, L, -L),
            _forward_and_backward(lambda x, r, w: norm.add_norm(x, r, w, None, EPS, "rmsnorm")),
            {"liger": added_by_liger, "quack": added_by_quack},
        ),
        (
            "layer norm",
            f"{T} x {H}",
            lambda: tensors(H, -H, -H),
            _forward_and_backward(lambda x, w, b: norm.layer_norm(x, w, b, EPS)),
            {
                "liger": layer_by_liger,
                "torch": lambda: _forward_and_backward(lambda x, w, b: F.layer_norm(x, w.shape, w, b, EPS)),
            },
        ),
        (
            "swiglu",
            f"{T} x {2 * FF}",
            lambda: tensors(2 * FF),
            _forward_and_backward(activation.swiglu),
            {"liger": swiglu_by_liger},
        ),
        _loss(sizes, device),
        _head(sizes, device),
    ]


def _loss(sizes: Sizes, device: torch.device) -> Any:
    """Return the case of cross entropy of given logits, and their gradient."""
    T, V = sizes.head_tokens, sizes.vocab
    g = torch.Generator(device).manual_seed(8)
    targets = torch.randint(0, V, (T,), device=device, generator=g)
    scale = torch.full((T,), 1 / T, device=device)

    def inputs() -> list[Tensor]:
        g = torch.Generator(device).manual_seed(9)
        return [torch.randn(T, V, device=device, generator=g).to(torch.bfloat16)]

    def ours(logits: Tensor) -> tuple[Tensor, ...]:
        _, loss = compute_loss_and_gradient_(logits, targets, scale, -100, V)
        return loss.mean(), logits

    def by(function: Callable[[Tensor], Tensor]) -> Passes:
        def passes(logits: Tensor) -> tuple[Tensor, ...]:
            leaf = logits.detach().requires_grad_()
            loss = function(leaf)
            return loss.detach(), torch.autograd.grad(loss, leaf)[0]

        return passes

    def by_liger() -> Passes:
        from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction as function

        return by(lambda x: function.apply(x, targets, None)[0])

    def by_quack() -> Passes:
        from quack import cross_entropy

        return by(lambda x: cross_entropy(x, targets, inplace_backward=True))

    return (
        "cross entropy",
        f"{T} x {V}",
        inputs,
        ours,
        {"liger": by_liger, "quack": by_quack, "torch": lambda: by(lambda x: F.cross_entropy(x, targets))},
    )


def _head(sizes: Sizes, device: torch.device) -> Any:
    """Return the case of the head GEMM and the loss, with the gradients of activations and matrix."""
    T = sizes.head_tokens
    V = sizes.vocab
    H = sizes.hidden
    targets = make_head_inputs(sizes, device, T)[2]
    token_grad = torch.tensor(1 / T, device=device)

    def inputs() -> list[Tensor]:
        x, w = make_head_inputs(sizes, device, T)[:2]
        return [x, w.detach()[:V].contiguous().requires_grad_()]

    def by(function: Callable[[Tensor, Tensor], Tensor]) -> Passes:
        def passes(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
            loss = function(x, w)
            return loss.detach(), *torch.autograd.grad(loss, (x, w))

        return passes

    def ours(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        loss = linear_cross_entropy(x, w, targets, token_grad=token_grad)
        return loss.detach().mean(), *torch.autograd.grad(loss, (x, w), token_grad.expand(T))

    def by_liger() -> Passes:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as function

        return by(lambda x, w: function.apply(x, w, targets)[0])

    def by_quack() -> Passes:
        from quack.linear_cross_entropy import chunked_linear_cross_entropy

        return by(lambda x, w: chunked_linear_cross_entropy(x, w, targets))

    def by_torch() -> Passes:
        options = torch.nn.LinearCrossEntropyOptions()
        return by(lambda x, w: F.linear_cross_entropy(x, w, targets, options=options))

    return (
        "linear + cross entropy",
        f"{T} x {H} x {V}",
        inputs,
        ours,
        {"liger": by_liger, "quack": by_quack, "torch": by_torch},
    )
