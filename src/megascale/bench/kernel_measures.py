"""Measurements of `megascale bench kernels`: checks against float64 first, then device time; a failure is a row."""

from __future__ import annotations

import functools
import itertools
import platform
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megascale import torch_private
from megascale.bench import kernel_float8, kernel_grouped, timing
from megascale.bench.kernel_cases import (
    TINY,
    Bench,
    KernelCase,
    KernelRow,
    Sizes,
    cases,
    distance,
    head_inputs,
    plain_head,
)
from megascale.errors import TrainingError
from megascale.ops import attention, dispatch, linear
from megascale.ops.adam import adamw_apply, adamw_apply_reference, lamb_apply, lamb_direction, lamb_direction_reference
from megascale.ops.attention_backends import BACKENDS, list_candidates
from megascale.ops.cross_entropy import compute_loss_and_gradient_, linear_cross_entropy
from megascale.ops.dropout import dropout, make_keep_mask_reference
from megascale.ops.gradient_sink import GradientSink, SinkParameter, attach
from megascale.ops.reduce import sum_columns
from megascale.ops.rope import split_qkv
from megascale.ops.segments import Segments, square_sums

TOLERANCE = 8e-3  # norm-wise against float64 on the same bfloat16 numbers; rounding the result alone gives 1.7e-3
CHECK_TOKENS = 256


def _tuple(value: Any) -> tuple[Tensor, ...]:
    if isinstance(value, (tuple, list)):
        return tuple(value)
    return (value,)


def check(case: KernelCase, tokens: int) -> float:
    """Return the largest norm-wise distance of outputs and gradients from the float64 reference."""
    inputs = case.inputs(tokens)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    expected = _tuple(case.reference(*wide))
    upstream = [torch.randn_like(t).to(inputs[0].dtype) for t in expected]
    expected += torch.autograd.grad(expected, wide, [u.double() for u in upstream])
    # A copy of the first input, because an operator may overwrite a projection's output.
    actual = _tuple(case.fused(inputs[0] * 1, *inputs[1:]))
    actual += torch.autograd.grad(actual, inputs, upstream)
    return max(distance(a, b) for a, b in zip(actual, expected, strict=True))


def measure_case(bench: Bench, case: KernelCase) -> None:
    """Measure forward and backward rows of one operator."""
    away = check(case, min(case.tokens, CHECK_TOKENS))
    forward = KernelRow(case.op, case.shape, distance=away)
    backward = KernelRow(f"{case.op}, backward", case.shape, distance=away)
    bench.add(forward, TOLERANCE)
    bench.add(backward, TOLERANCE)
    rate = bench.facts["copy_bytes_per_s"]
    forward.bound, backward.bound = case.forward_bytes / rate, case.backward_bytes / rate
    inputs = case.inputs(case.tokens)
    variants = {"fused": case.fused, "eager": case.reference, "compiled": bench.compiled(case.reference, case.op)}
    for name, function in variants.items():
        if function is None:
            continue
        call = functools.partial(function, *inputs)
        bench.seconds(forward, name, call)
        try:
            out = _tuple(call())
        except Exception as error:
            backward.error += f"{name}: {error}"
            continue
        upstream = [torch.randn_like(t) for t in out]
        gradients = functools.partial(torch.autograd.grad, out, inputs, upstream, retain_graph=True)
        bench.seconds(backward, name, gradients)
        if name == "fused":
            forward.host = timing.launch_seconds(call)
            backward.host = timing.launch_seconds(gradients)
        del out, upstream, gradients


def measure_dropout_bits(bench: Bench) -> None:
    """Check that the device draws the mask that the CPU draws."""
    shape, key = (33, 5, 130), 123456789012345
    y = dropout(torch.ones(shape, device=bench.device), 0.3, key, 70, 2**31 - 9)
    mask = make_keep_mask_reference(torch.Size(shape), 0.3, key, 70, 2**31 - 9, torch.device("cpu"))
    is_equal = torch.equal((y != 0).cpu(), mask)
    bench.facts["dropout_bits_equal_cpu"] = is_equal
    if not is_equal:
        raise TrainingError("the device's dropout mask differs from the CPU's")


def measure_head(bench: Bench) -> None:
    """Measure the cross-entropy kernel alone, and the head with gradients in the forward pass."""
    sizes, device = bench.sizes, bench.device
    T, V = sizes.head_tokens, sizes.vocab
    H = sizes.hidden
    x, w, targets, token_grad = head_inputs(sizes, device, min(T, CHECK_TOKENS))
    loss = linear_cross_entropy(x, w, targets, vocab=V, token_grad=token_grad)
    grads = torch.autograd.grad(loss, (x, w), token_grad.expand(loss.shape))
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    exact = plain_head(wide[0], wide[1], targets, V)
    exact_grads = torch.autograd.grad(exact, wide, token_grad.double().expand(exact.shape))
    away = max(distance(a, b) for a, b in zip((loss, *grads), (exact, *exact_grads), strict=True))
    del wide, exact, exact_grads, loss, grads

    x, w, targets, token_grad = head_inputs(sizes, device, T)
    logits = (x @ w.t()).detach()
    scale = token_grad.expand(T).contiguous()
    rate = bench.facts["copy_bytes_per_s"]
    row = KernelRow("cross entropy kernel", f"{T} x {V}", distance=away, bound=2 * logits.numel() * 2 / rate)
    bench.add(row, TOLERANCE)

    def plain(leaf: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(leaf.float(), targets, reduction="sum")

    leaf = logits.clone().requires_grad_()
    bench.seconds(row, "fused", lambda: compute_loss_and_gradient_(logits, targets, scale, -100, V))
    bench.seconds(row, "eager", lambda: torch.autograd.grad(plain(leaf), leaf))
    compiled = bench.compiled(plain, "cross entropy")
    if compiled is not None:
        bench.seconds(row, "compiled", lambda: torch.autograd.grad(compiled(leaf), leaf))
    w = SinkParameter(w.detach())
    attach(w, GradientSink(torch.zeros(w.shape, device=device)))
    flops = 6 * T * H * w.shape[0]

    def fused_head() -> Any:
        loss = linear_cross_entropy(x, w, targets, vocab=V, token_grad=token_grad)
        return torch.autograd.grad(loss, x, token_grad.expand(T), allow_unused=True)

    def eager_head() -> Any:
        return torch.autograd.grad(plain_head(x, w, targets, V), (x, w), token_grad.expand(T))

    row = KernelRow("head: GEMMs + loss, both passes", f"{T} x {H} x {V}", distance=away)
    bench.rows.append(row)
    bench.seconds(row, "fused", fused_head)
    bench.seconds(row, "eager", eager_head)
    row.set_tflops(flops)


def measure_linear(bench: Bench) -> None:
    """Measure the weight gradient's GEMM that adds into float32, and the bias gradient's sum."""
    sizes, device = bench.sizes, bench.device
    T, H = sizes.tokens, sizes.hidden
    x, dy = (torch.randn(T, n, device=device).to(torch.bfloat16) for n in (H, 4 * H))
    small_x, small_dy = x[:CHECK_TOKENS], dy[:CHECK_TOKENS]
    main = torch.ones(4 * H, H, device=device)
    linear.accumulate_mm(main, small_dy.t(), small_x)
    away = distance(main, 1 + small_dy.double().t() @ small_x.double())
    row = KernelRow("weight gradient += float32", f"{4 * H} x {T} x {H}", distance=away)
    bench.add(row, 1e-5)
    bench.seconds(row, "fused", lambda: linear.accumulate_mm(main, dy.t(), x))
    bench.seconds(row, "eager", lambda: main.add_(dy.t() @ x))
    row.set_tflops(2 * T * H * 4 * H)

    dy = torch.randn(T, 3 * H, device=device).to(torch.bfloat16)
    bias = torch.ones(3 * H, device=device)
    sum_columns(dy, bias)
    away = distance(bias, 1 + dy.double().sum(0))
    bound = dy.numel() * dy.element_size() / bench.facts["copy_bytes_per_s"]
    row = KernelRow("bias gradient += float32", f"{T} x {3 * H}", distance=away, bound=bound)
    bench.add(row, 1e-5)
    bench.seconds(row, "fused", lambda: sum_columns(dy, bias))
    bench.seconds(row, "eager", lambda: bias.add_(dy.sum(0, dtype=torch.float32)))


def measure_optimizers(bench: Bench) -> None:
    """Measure AdamW, both LAMB passes and the norm on a flat shard."""
    device, n = bench.device, bench.sizes.elements
    rate = bench.facts["copy_bytes_per_s"]
    edges = [0, n // 2, n // 2 + n // 64, n - n // 4, n]
    segments = Segments([(a, b, i != 1, i) for i, (a, b) in enumerate(itertools.pairwise(edges))], 4, device)
    adam: dict[str, Any] = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "segments": segments}
    adam |= {"grad_scale": torch.tensor(0.5, device=device), "skip": torch.tensor(False, device=device), "step": 3}

    def state(count: int, dtype: torch.dtype) -> list[Tensor]:
        g = torch.Generator(device).manual_seed(3)
        w, m, grad = (torch.randn(count, device=device, generator=g) for _ in range(3))
        return [t.to(dtype) for t in (w, 0.1 * m, m.square() + 0.01, grad)]

    small = Segments([(0, 5000, True, 0), (5001, 20000, False, 1)], 2, device)
    small_adam = adam | {"segments": small}
    w, m, v, grad = state(20000, torch.float32)
    wide = state(20000, torch.float64)
    adamw_apply(w, m, v, grad, None, lr=0.1, **small_adam)
    adamw_apply_reference(wide[0], wide[1], wide[2], wide[3], None, lr=0.1, **small_adam)
    away = max(distance(x, y) for x, y in zip((w, m, v, grad), wide, strict=True))
    sums = lamb_direction(w, m, v, grad, grad, **small_adam)
    exact = lamb_direction_reference(wide[0], wide[1], wide[2], wide[3], wide[3], **small_adam)
    lamb_away = max(distance(sums, exact), distance(grad, wide[3]))

    w, m, v, grad = state(n, torch.float32)
    out = torch.empty(n, dtype=torch.bfloat16, device=device)
    shape = f"{n >> 20} Mi" if n >= 1 << 20 else str(n)
    rows = [
        KernelRow("adamw", shape, "float32", distance=away, bound=30 * n / rate),
        KernelRow("lamb, direction", shape, "float32", distance=lamb_away, bound=28 * n / rate),
        KernelRow("lamb, apply", shape, "float32", bound=14 * n / rate),
        KernelRow("square sums", shape, "float32", bound=4 * n / rate),
    ]
    for row in rows:
        bench.add(row, 1e-5)
    bench.seconds(rows[0], "fused", lambda: adamw_apply(w, m, v, grad, out, lr=1e-6, **adam))
    bench.seconds(rows[0], "eager", lambda: adamw_apply_reference(w, m, v, grad, out, lr=1e-6, **adam))
    step = torch.tensor(3.0, device=device)

    def torch_fused() -> None:
        torch_private.fused_adamw_(
            [w],
            [grad],
            [m],
            [v],
            [],
            [step],
            lr=1e-6,
            beta1=0.9,
            beta2=0.95,
            weight_decay=0.1,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )
        out.copy_(w)

    if device.type == "cuda":
        torch_adam = KernelRow("adamw by torch (fused) + copy to bf16", shape, "float32")
        bench.rows.insert(-3, torch_adam)
        bench.seconds(torch_adam, "eager", torch_fused)
    bench.seconds(rows[1], "fused", lambda: lamb_direction(w, m, v, grad, grad, **adam))
    total = torch.ones(2, 4, dtype=torch.float64, device=device)
    trust: dict[str, Any] = {"lr": 1e-9, "trust_min": 0.0, "trust_max": 10.0, "segments": segments}
    bench.seconds(rows[2], "fused", lambda: lamb_apply(w, grad, out, total, **trust))
    bench.seconds(rows[3], "fused", lambda: square_sums(grad, segments))
    bench.seconds(rows[3], "eager", lambda: torch.linalg.vector_norm(grad))


ATTENTION = [
    (2048, 2, 40, 40, 128, None),
    (2048, 2, 40, 40, 128, 512),
    (2048, 1, 40, 40, 128, None),
    (2048, 4, 20, 20, 128, None),
    (8192, 1, 32, 8, 128, None),
    (8192, 1, 32, 8, 128, 4096),
    (8192, 1, 32, 8, 128, 1024),
    (2048, 8, 16, 16, 128, None),
    (1024, 16, 12, 12, 64, None),
]


def check_attention(name: str, window: int | None, device: torch.device) -> float:
    """Return the largest norm-wise distance of output and QKV gradient from the explicit float64 mask."""
    S, B = 384, 2
    N, G = 4, 2
    D = 128
    g = torch.Generator(device).manual_seed(4)
    qkv = torch.randn(S, B, (N + 2 * G) * D, device=device, generator=g).to(torch.bfloat16).requires_grad_()
    worst = 0.0
    windows = [None] if window is None else [1, 129, S - 1]  # with the edges of tiles
    for w in windows:
        out = BACKENDS[name](*split_qkv(qkv, N, G), w)
        upstream = torch.randn(out.shape, device=device, generator=g).to(out.dtype)
        (grad,) = torch.autograd.grad(out, qkv, upstream)
        wide = qkv.detach().double().requires_grad_()
        heads = wide.unflatten(-1, (N + 2 * G, D)).split((N, G, G), dim=2)
        exact = attention.attention_reference(*heads, window=w)
        (exact_grad,) = torch.autograd.grad(exact, wide, upstream.double())
        worst = max(worst, distance(out, exact), distance(grad, exact_grad))
    return worst


def measure_attention(bench: Bench) -> None:
    """Check every backend against the explicit mask, then run the start-up probe at the presets' shapes."""
    distances = {}
    for window in (None, 1):
        for name in list_candidates(window):
            kind = "full" if window is None else "windows"
            try:
                away = check_attention(name, window, bench.device)
                distances[f"{name} ({kind})"] = away
                if away <= 2e-2:
                    error = ""
                else:
                    error = f"{away:.1e} away from the explicit mask"
            except ImportError as reason:
                bench.facts[f"attention {name}"] = f"not measured: {reason}"
                continue
            except Exception as reason:
                away, error = None, f"{type(reason).__name__}: {str(reason).strip()[:200]}"
            bench.rows.append(KernelRow(f"attention {name}, {kind}: check", "384 x 2", distance=away, error=error))
    bench.facts["attention_distance"] = distances
    chooser = attention.AttentionChooser()
    for sizes in ATTENTION:
        chooser.choose(*sizes)
    bench.facts["attention"] = chooser.describe()
    for shape, choice in chooser.choices.items():
        area = shape.S * (shape.S + 1) / 2
        if shape.window is not None:
            area -= (shape.S - shape.window) * (shape.S - shape.window + 1) / 2
        flops = 14 * area * shape.B * shape.N * shape.D  # 2 GEMMs forward, 5 backward, of the scores within the mask
        for name, ms in choice.milliseconds.items():
            mark = " *" if name == choice.name else ""
            row = KernelRow(f"attention {name}{mark}, both passes", str(shape).rpartition(",")[0], fused=ms / 1e3)
            row.tflops = flops / ms / 1e9
            bench.rows.append(row)


PARTS = ("operators", "head", "linear", "grouped", "optimizers", "attention", "float8")


def start_bench(sizes: Sizes, device: torch.device, compile_until: float, out: Path) -> Bench:
    """Return a bench with the facts and rates of the machine."""
    bench = Bench(sizes, device, compile_until, out)
    is_cuda = device.type == "cuda"
    if is_cuda:
        # Backward passes run on their forward's stream, and the default stream cannot be captured.
        torch.cuda.set_stream(torch.cuda.Stream())
    rates = _measure_gemm_rates(device)
    bench.facts = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "device": torch.cuda.get_device_name(device) if is_cuda else platform.processor() or "cpu",
        "torch": torch.__version__,
        "triton": dispatch.triton.__version__ if dispatch.HAS_TRITON else None,
        "gemm_burst_flop_per_s": rates.burst,
        "gemm_held_flop_per_s": rates.sustained,
        "copy_bytes_per_s": timing.copy_rate(device, 1 << 30 if is_cuda else 1 << 16),
    }
    return bench


def _measure_gemm_rates(device: torch.device) -> timing.GemmRates:
    if device.type == "cuda":
        return timing.measure_gemm_rates(device)
    return timing.measure_gemm_rates(device, seconds=0.02, size=128)


def run(
    sizes: Sizes, device: torch.device, compile_until: float, out: Path, parts: Collection[str] = PARTS
) -> dict[str, Any]:
    """Measure these parts; writes `out` after each measurement and returns its content."""
    bench = start_bench(sizes, device, compile_until, out)
    if "operators" in parts:
        for case in cases(sizes, device):
            bench.guard(case.op, case.shape, functools.partial(measure_case, bench, case))
        bench.guard("dropout bits", "", functools.partial(measure_dropout_bits, bench))
    if "head" in parts:
        bench.guard("cross entropy", "", functools.partial(measure_head, bench))
    if "linear" in parts:
        bench.guard("weight gradient", "", functools.partial(measure_linear, bench))
    if "grouped" in parts:
        kernel_grouped.measure(bench, sizes == TINY)
    if "optimizers" in parts:
        bench.guard("optimizers", "", functools.partial(measure_optimizers, bench))
    if "attention" in parts and device.type == "cuda":
        bench.guard("attention", "", functools.partial(measure_attention, bench))
    if "float8" in parts:
        kernel_float8.measure(bench, sizes == TINY)
    bench.facts["gemm_held_again_flop_per_s"] = _measure_gemm_rates(device).sustained
    bench.facts["seconds"] = time.monotonic() - bench.start
    bench.facts["active"] = dispatch.list_choices()
    bench.save()
    return bench.result()
