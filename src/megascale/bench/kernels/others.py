"""Operators of this engine beside those of other packages: liger-kernel (BSD-2), quack-kernels (Apache-2.0), torch.

Both passes of each, on the same numbers and checked against each other. None of these packages is a dependency: those
that are not installed have an empty column, and the reason is printed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megascale.bench.kernels.cases import Sizes, head_inputs
from megascale.bench.kernels.rows import Bench, KernelRow, distance
from megascale.ops import activation, norm
from megascale.ops.cross_entropy import linear_cross_entropy, loss_and_gradient_

PACKAGES = {"liger": "liger-kernel", "quack": "quack-kernels", "torch": "torch"}
WITHIN = 2e-2  # norm-wise, in bfloat16: each may round between its steps where another does not
EPS = 1e-5

# Both passes: (inputs) -> outputs and gradients, in one order for all packages.
Passes = Callable[..., tuple[Tensor, ...]]


def measure(bench: Bench) -> None:
    """A row for each operator, with `others` filled."""
    bench.facts["others"] = versions()
    for op, shape, inputs, ours, others in _cases(bench.sizes, bench.device):
        bench.guard(f"{op}, beside others", shape, functools.partial(_measure, bench, op, shape, inputs, ours, others))


def versions() -> dict[str, str]:
    """Of each package, or that it is not there."""
    from importlib import metadata

    found = {}
    for name, package in PACKAGES.items():
        try:
            found[name] = f"{package} {metadata.version(package)}"
        except metadata.PackageNotFoundError:
            found[name] = f"{package} is not installed"
    return found


def _measure(
    bench: Bench,
    op: str,
    shape: str,
    inputs: Callable[[], list[Tensor]],
    ours: Passes,
    others: dict[str, Callable[[], Passes]],
) -> None:
    row = KernelRow(op, shape, compared=True)
    bench.rows.append(row)
    expected = ours(*inputs())
    given = inputs()
    bench.seconds(row, "fused", lambda: ours(*given))
    for name, made in others.items():
        try:
            passes = made()
        except (ImportError, AttributeError) as problem:
            bench.facts.setdefault("others_missing", {}).setdefault(name, str(problem))
            continue
        except Exception as problem:  # a package that is there and does not suit what it is built on
            row.notes[name] = f"{type(problem).__name__}: {str(problem).strip()[:200]}"
            continue
        try:
            found = passes(*inputs())
            away = max(distance(a, b) for a, b in zip(found, expected, strict=True))
            if not away <= WITHIN:
                raise ValueError(f"{away:.1e} away from this engine's")
            row.others[name] = bench.timed(lambda passes=passes: passes(*given))  # type: ignore[misc]
        except Exception as problem:  # theirs may fail in many ways; the others are still measured
            row.notes[name] = f"{type(problem).__name__}: {str(problem).strip()[:200]}"


def _both(forward: Callable[..., Any], order: tuple[int, ...] | None = None) -> Passes:
    """Forward, and the gradients of all inputs for a fixed upstream gradient. order: of the outputs."""
    known: list[Tensor] = []

    def passes(*inputs: Tensor) -> tuple[Tensor, ...]:
        out = forward(*inputs)
        outs = tuple(out) if isinstance(out, tuple) else (out,)
        if order is not None:
            outs = tuple(outs[i] for i in order)
        if not known:
            generator = torch.Generator(outs[0].device).manual_seed(7)
            known.extend(torch.randn(t.shape, device=t.device, generator=generator).to(t.dtype) for t in outs)
        return (*(t.detach() for t in outs), *torch.autograd.grad(outs, inputs, known))

    return passes


def _cases(
    sizes: Sizes, device: torch.device
) -> list[tuple[str, str, Callable[[], list[Tensor]], Passes, dict[str, Callable[[], Passes]]]]:
    T, L, H, FF = sizes.tokens, sizes.llama_hidden, sizes.hidden, sizes.llama_ffn

    def tensors(*widths: int) -> list[Tensor]:
        """[tokens, width] for positive widths, [width] for negative ones."""
        g = torch.Generator(device).manual_seed(6)
        shapes = [(T, w) if w > 0 else (-w,) for w in widths]
        return [torch.randn(s, device=device, generator=g).to(torch.bfloat16).requires_grad_() for s in shapes]

    def rms_by_liger() -> Passes:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction as made

        return _both(lambda x, w: made.apply(x, w, EPS, 0.0, "llama", False))

    def rms_by_quack() -> Passes:
        from quack import rmsnorm

        return _both(lambda x, w: rmsnorm(x, w, eps=EPS))

    def added_by_liger() -> Passes:
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction as made

        return _both(lambda x, r, w: made.apply(x, r, w, EPS, 0.0, "llama", False), (1, 0))

    def added_by_quack() -> Passes:
        from quack import rmsnorm

        return _both(lambda x, r, w: rmsnorm(x, w, residual=r, eps=EPS, prenorm=True), (1, 0))

    def layer_by_liger() -> Passes:
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction as made

        return _both(lambda x, w, b: made.apply(x, w, b, EPS))

    def swiglu_by_liger() -> Passes:
        from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction as made

        return _both(lambda x: made.apply(x, False))

    return [
        (
            "rms norm",
            f"{T} x {L}",
            lambda: tensors(L, -L),
            _both(lambda x, w: norm.rms_norm(x, w, EPS)),
            {
                "liger": rms_by_liger,
                "quack": rms_by_quack,
                "torch": lambda: _both(lambda x, w: F.rms_norm(x, w.shape, w, EPS)),
            },
        ),
        (
            "add + rms norm",
            f"{T} x {L}",
            lambda: tensors(L, L, -L),
            _both(lambda x, r, w: norm.add_norm(x, r, w, None, EPS, "rmsnorm")),
            {"liger": added_by_liger, "quack": added_by_quack},
        ),
        (
            "layer norm",
            f"{T} x {H}",
            lambda: tensors(H, -H, -H),
            _both(lambda x, w, b: norm.layer_norm(x, w, b, EPS)),
            {"liger": layer_by_liger, "torch": lambda: _both(lambda x, w, b: F.layer_norm(x, w.shape, w, b, EPS))},
        ),
        (
            "swiglu",
            f"{T} x {2 * FF}",
            lambda: tensors(2 * FF),
            _both(activation.swiglu),
            {"liger": swiglu_by_liger},
        ),
        _loss(sizes, device),
        _head(sizes, device),
    ]


def _loss(sizes: Sizes, device: torch.device) -> Any:
    """Cross entropy of logits that are there, and their gradient."""
    T, V = sizes.head_tokens, sizes.vocab
    g = torch.Generator(device).manual_seed(8)
    targets = torch.randint(0, V, (T,), device=device, generator=g)
    scale = torch.full((T,), 1 / T, device=device)

    def inputs() -> list[Tensor]:
        g = torch.Generator(device).manual_seed(9)
        return [torch.randn(T, V, device=device, generator=g).to(torch.bfloat16)]

    def ours(logits: Tensor) -> tuple[Tensor, ...]:
        _, loss = loss_and_gradient_(logits, targets, scale, -100, V)
        return loss.mean(), logits

    def by(function: Callable[[Tensor], Tensor]) -> Passes:
        def passes(logits: Tensor) -> tuple[Tensor, ...]:
            leaf = logits.detach().requires_grad_()
            loss = function(leaf)
            return loss.detach(), torch.autograd.grad(loss, leaf)[0]

        return passes

    def by_liger() -> Passes:
        from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction as made

        return by(lambda x: made.apply(x, targets, None)[0])

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
    """The last matrix and the loss, with the gradients of activations and matrix."""
    T, V, H = sizes.head_tokens, sizes.vocab, sizes.hidden
    targets = head_inputs(sizes, device, T)[2]
    token_grad = torch.tensor(1 / T, device=device)

    def inputs() -> list[Tensor]:
        x, w = head_inputs(sizes, device, T)[:2]
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
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as made

        return by(lambda x, w: made.apply(x, w, targets)[0])

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
