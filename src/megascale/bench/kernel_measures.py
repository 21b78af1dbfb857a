"""Measurements of `megascale bench kernels`: each checks an operator against float64, then measures its device time.

Names of sizes: T tokens, H hidden width, V vocabulary.
"""

from __future__ import annotations

import functools
import platform
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megascale.bench import kernel_float8, kernel_float8_experts, kernel_grouped, timing
from megascale.bench.kernel_attention import measure_attention
from megascale.bench.kernel_cases import KernelCase, compute_head_reference, list_cases, make_head_inputs
from megascale.bench.kernel_optimizers import measure_optimizers
from megascale.bench.kernel_rows import FLOAT32_TOLERANCE, TINY, Bench, KernelRow, Sizes, compute_distance
from megascale.errors import TrainingError
from megascale.ops import dispatch, linear
from megascale.ops.cross_entropy import compute_loss_and_gradient_, linear_cross_entropy
from megascale.ops.dropout import dropout, make_keep_mask_reference
from megascale.ops.gradient_sink import GradientSink, SinkParameter, attach
from megascale.ops.reduce import sum_columns

# Limits of the norm-wise distance from float64 on the same inputs. Rounding a result to bfloat16 alone gives 1.7e-3.
TOLERANCE = 8e-3
CHECK_TOKENS = 256  # tokens of a check, since float64 is slow on GPUs


def _as_tuple(value: Any) -> tuple[Tensor, ...]:
    if isinstance(value, (tuple, list)):
        return tuple(value)
    return (value,)


def measure_distance(case: KernelCase, tokens: int) -> float:
    """Return the largest norm-wise distance of outputs and gradients from the float64 reference."""
    inputs = case.make_inputs(tokens)
    inputs64 = [t.detach().double().requires_grad_() for t in inputs]
    expected = _as_tuple(case.reference(*inputs64))
    upstream = [torch.randn_like(t).to(inputs[0].dtype) for t in expected]
    expected += torch.autograd.grad(expected, inputs64, [u.double() for u in upstream])
    # A copy of the first input, because an operator may overwrite a projection's output.
    actual = _as_tuple(case.fused(inputs[0] * 1, *inputs[1:]))
    actual += torch.autograd.grad(actual, inputs, upstream)
    return max(compute_distance(a, b) for a, b in zip(actual, expected, strict=True))


def measure_case(bench: Bench, case: KernelCase) -> None:
    """Add a forward and a backward row of one operator."""
    distance = measure_distance(case, min(case.tokens, CHECK_TOKENS))
    forward = KernelRow(case.op, case.shape, distance=distance)
    backward = KernelRow(f"{case.op}, backward", case.shape, distance=distance)
    bench.add(forward, TOLERANCE)
    bench.add(backward, TOLERANCE)
    rate = bench.facts["copy_bytes_per_s"]
    forward.bound, backward.bound = case.forward_bytes / rate, case.backward_bytes / rate
    inputs = case.make_inputs(case.tokens)
    implementations = {"fused": case.fused, "eager": case.reference, "compiled": bench.compile(case.reference, case.op)}
    for name, function in implementations.items():
        if function is None:
            continue
        call = functools.partial(function, *inputs)
        bench.measure_seconds(forward, name, call)
        try:
            out = _as_tuple(call())
        except Exception as error:
            backward.error += f"{name}: {error}"
            continue
        upstream = [torch.randn_like(t) for t in out]
        gradients = functools.partial(torch.autograd.grad, out, inputs, upstream, retain_graph=True)
        bench.measure_seconds(backward, name, gradients)
        if name == "fused":
            forward.host = timing.measure_launch_seconds(call)
            backward.host = timing.measure_launch_seconds(gradients)
        del out, upstream, gradients


def measure_dropout_bits(bench: Bench) -> None:
    """Check that the device draws the same dropout mask as the CPU. Raises TrainingError if the masks differ."""
    shape, key = (33, 5, 130), 123456789012345
    sequence_start, sample_start = 70, 2**31 - 9  # sample numbers from 2^31 on test the integer arithmetic
    y = dropout(torch.ones(shape, device=bench.device), 0.3, key, sequence_start, sample_start)
    mask = make_keep_mask_reference(torch.Size(shape), 0.3, key, sequence_start, sample_start, torch.device("cpu"))
    is_equal = torch.equal((y != 0).cpu(), mask)
    bench.facts["dropout_bits_equal_cpu"] = is_equal
    if not is_equal:
        raise TrainingError("the device's dropout mask differs from the CPU's")


def measure_head(bench: Bench) -> None:
    """Measure the cross-entropy kernel alone, then the language-model head: projection and loss with gradients."""
    sizes, device = bench.sizes, bench.device
    T, V = sizes.head_tokens, sizes.vocab
    H = sizes.hidden
    x, w, targets, token_grad = make_head_inputs(sizes, device, min(T, CHECK_TOKENS))
    loss = linear_cross_entropy(x, w, targets, vocab=V, token_grad=token_grad)
    grads = torch.autograd.grad(loss, (x, w), token_grad.expand(loss.shape))
    inputs64 = [t.detach().double().requires_grad_() for t in (x, w)]
    exact = compute_head_reference(inputs64[0], inputs64[1], targets, V)
    exact_grads = torch.autograd.grad(exact, inputs64, token_grad.double().expand(exact.shape))
    distance = max(compute_distance(a, b) for a, b in zip((loss, *grads), (exact, *exact_grads), strict=True))
    del inputs64, exact, exact_grads, loss, grads

    x, w, targets, token_grad = make_head_inputs(sizes, device, T)
    logits = (x @ w.t()).detach()
    scale = token_grad.expand(T).contiguous()
    rate = bench.facts["copy_bytes_per_s"]
    # The kernel reads each bfloat16 logit and overwrites it with its gradient.
    row = KernelRow("cross entropy kernel", f"{T} x {V}", distance=distance, bound=2 * logits.nbytes / rate)
    bench.add(row, TOLERANCE)

    def compute_plain_loss(logits: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(logits.float(), targets, reduction="sum")

    tracked_logits = logits.clone().requires_grad_()
    bench.measure_seconds(row, "fused", lambda: compute_loss_and_gradient_(logits, targets, scale, -100, V))
    bench.measure_seconds(row, "eager", lambda: torch.autograd.grad(compute_plain_loss(tracked_logits), tracked_logits))
    compiled = bench.compile(compute_plain_loss, "cross entropy")
    if compiled is not None:
        bench.measure_seconds(row, "compiled", lambda: torch.autograd.grad(compiled(tracked_logits), tracked_logits))
    # The fused head adds the weight's gradient to its float32 sink, as in training.
    w = SinkParameter(w.detach())
    attach(w, GradientSink(torch.zeros(w.shape, device=device)))
    flops = 6 * T * H * w.shape[0]

    def fused_head() -> Any:
        loss = linear_cross_entropy(x, w, targets, vocab=V, token_grad=token_grad)
        return torch.autograd.grad(loss, x, token_grad.expand(T), allow_unused=True)

    def eager_head() -> Any:
        return torch.autograd.grad(compute_head_reference(x, w, targets, V), (x, w), token_grad.expand(T))

    row = KernelRow("head: GEMMs + loss, both passes", f"{T} x {H} x {V}", distance=distance)
    bench.rows.append(row)
    bench.measure_seconds(row, "fused", fused_head)
    bench.measure_seconds(row, "eager", eager_head)
    row.set_tflops(flops)


def measure_linear(bench: Bench) -> None:
    """Measure the weight gradient's GEMM that adds into float32, and the bias gradient's sum."""
    sizes, device = bench.sizes, bench.device
    T, H = sizes.tokens, sizes.hidden
    x = torch.randn(T, H, device=device).to(torch.bfloat16)
    dy = torch.randn(T, 4 * H, device=device).to(torch.bfloat16)
    small_x, small_dy = x[:CHECK_TOKENS], dy[:CHECK_TOKENS]
    main_grad = torch.ones(4 * H, H, device=device)
    linear.accumulate_mm(main_grad, small_dy.t(), small_x)
    distance = compute_distance(main_grad, 1 + small_dy.double().t() @ small_x.double())
    row = KernelRow("weight gradient += float32", f"{4 * H} x {T} x {H}", distance=distance)
    bench.add(row, FLOAT32_TOLERANCE)
    bench.measure_seconds(row, "fused", lambda: linear.accumulate_mm(main_grad, dy.t(), x))
    bench.measure_seconds(row, "eager", lambda: main_grad.add_(dy.t() @ x))
    row.set_tflops(2 * T * H * 4 * H)

    dy = torch.randn(T, 3 * H, device=device).to(torch.bfloat16)
    bias = torch.ones(3 * H, device=device)
    sum_columns(dy, bias)
    distance = compute_distance(bias, 1 + dy.double().sum(0))
    bound = dy.numel() * dy.element_size() / bench.facts["copy_bytes_per_s"]
    row = KernelRow("bias gradient += float32", f"{T} x {3 * H}", distance=distance, bound=bound)
    bench.add(row, FLOAT32_TOLERANCE)
    bench.measure_seconds(row, "fused", lambda: sum_columns(dy, bias))
    bench.measure_seconds(row, "eager", lambda: bias.add_(dy.sum(0, dtype=torch.float32)))


# Values of --only. "head" is the language-model head, "grouped" the GEMMs of experts, "experts_float8" those in float8.
MEASUREMENTS = ("operators", "head", "linear", "grouped", "experts_float8", "optimizers", "attention", "float8")


def start_bench(sizes: Sizes, device: torch.device, compile_until: float, out: Path) -> Bench:
    """Return a bench whose `facts` hold the device, the versions and the measured rates of the machine.

    On a GPU it makes a new stream the current one.
    """
    bench = Bench(sizes, device, compile_until, out)
    is_cuda = device.type == "cuda"
    if is_cuda:
        # A backward pass runs on the stream of its forward pass, and the default stream cannot be captured.
        torch.cuda.set_stream(torch.cuda.Stream())
    rates = _measure_gemm_rates(device)
    bench.facts = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "device": torch.cuda.get_device_name(device) if is_cuda else platform.processor() or "cpu",
        "torch": torch.__version__,
        "triton": dispatch.triton.__version__ if dispatch.HAS_TRITON else None,
        "gemm_burst_flop_per_s": rates.burst,
        "gemm_held_flop_per_s": rates.sustained,
        "copy_bytes_per_s": timing.measure_copy_rate(device, 1 << 30 if is_cuda else 1 << 16),
    }
    return bench


def _measure_gemm_rates(device: torch.device) -> timing.GemmRates:
    if device.type == "cuda":
        return timing.measure_gemm_rates(device)
    return timing.measure_gemm_rates(device, seconds=0.02, size=128)


def run(
    sizes: Sizes, device: torch.device, compile_until: float, out: Path, measurements: Collection[str] = MEASUREMENTS
) -> dict[str, Any]:
    """Run the named measurements and return the content of the JSON file `out`, which is written after each operator.

    Args:
        compile_until: seconds after the start when compiling of references ends.
    """
    bench = start_bench(sizes, device, compile_until, out)
    if "operators" in measurements:
        for case in list_cases(sizes, device):
            bench.run_guarded(case.op, case.shape, functools.partial(measure_case, bench, case))
        bench.run_guarded("dropout bits", "", functools.partial(measure_dropout_bits, bench))
    if "head" in measurements:
        bench.run_guarded("cross entropy", "", functools.partial(measure_head, bench))
    if "linear" in measurements:
        bench.run_guarded("weight gradient", "", functools.partial(measure_linear, bench))
    if "grouped" in measurements:
        kernel_grouped.measure(bench, sizes == TINY)
    if "grouped" in measurements or "experts_float8" in measurements:
        kernel_float8_experts.measure(bench, sizes == TINY)
    if "optimizers" in measurements:
        bench.run_guarded("optimizers", "", functools.partial(measure_optimizers, bench))
    if "attention" in measurements and device.type == "cuda":
        bench.run_guarded("attention", "", functools.partial(measure_attention, bench))
    if "float8" in measurements:
        kernel_float8.measure(bench, sizes == TINY)
    bench.facts["gemm_held_again_flop_per_s"] = _measure_gemm_rates(device).sustained
    bench.facts["seconds"] = time.monotonic() - bench.start
    bench.facts["active"] = dispatch.list_choices()
    bench.save()
    return bench.make_result()
