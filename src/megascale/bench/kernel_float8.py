"""Float8 in `megascale bench kernels`: casts compared with the copy rate, and GEMMs compared with bfloat16.

A cast writes a float8 matrix and, if asked, its transpose. It takes its scale from the caller ("given scale"), from the
tensor's own amax, the largest magnitude ("current"), or from the amax of each row ("row-wise"). A collecting cast also
raises a running amax and adds the counts of clipped and flushed numbers to running counts.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megascale.bench import timing
from megascale.bench.kernel_rows import Bench, KernelRow, compute_distance
from megascale.errors import ConfigError
from megascale.ops import linear
from megascale.ops.float8 import cublaslt, gemm
from megascale.ops.float8.cast import (
    cast_by_amax,
    cast_rows,
    compute_amax,
    transpose_scaled_rows,
)
from megascale.ops.float8.formats import (
    E4M3,
    E5M2,
    Float8,
    Format,
    amax_reference,
    dequantise,
    quantise_reference,
    scale_from_amax,
)

BF16 = torch.bfloat16
# Tokens, input features and output features of each linear layer. "wide" is the parallel block's projection to QKV and
# the MLP's hidden layer in one.
LINEARS = {
    "gpt-1.3b qkv": (8192, 2048, 6144),
    "gpt-1.3b attention out": (8192, 2048, 2048),
    "gpt-1.3b mlp in": (8192, 2048, 8192),
    "gpt-1.3b mlp out": (8192, 8192, 2048),
    "gpt-13b DP2 wide": (4096, 5120, 35840),
    "gpt-13b DP2 attention out": (4096, 5120, 5120),
    "gpt-13b DP2 mlp out": (4096, 20480, 5120),
    "gpt-13b TP2 wide": (8192, 5120, 17920),
    "gpt-13b TP2 attention out": (8192, 2560, 5120),
    "gpt-13b TP2 mlp out": (8192, 10240, 5120),
    "llama-8b qkv": (8192, 4096, 6144),
    "llama-8b attention out": (8192, 4096, 4096),
    "llama-8b gate + up": (8192, 4096, 28672),
    "llama-8b down": (8192, 14336, 4096),
}
# Shapes [M, N] of the tensors that are cast.
CASTS = [(4096, 5120), (4096, 20480), (4096, 35840), (8192, 2048), (8192, 28672)]
TINY_LINEARS = {"tiny": (16, 32, 48)}
TINY_CASTS = [(16, 32)]
# Limits of the norm-wise distance from a GEMM of the dequantised matrices. Measured distances: 1.3e-4 for precise sums
# with a float32 result and 1.7e-3 with a bfloat16 result; 2.3e-3 for fast sums (14 bits) at K = 5,120, growing with K.
FLOAT32_LIMIT = 1e-3
BF16_LIMIT = 3e-3
FAST_LIMIT = 2e-2


def explain_missing_float8(device: torch.device) -> str:
    """Return why this device lacks float8, or an empty string if it has float8."""
    if device.type != "cuda":
        return ""  # --tiny runs the references on the CPU
    try:
        gemm.check_device(device)
    except ConfigError as error:
        return str(error)
    return ""


def _draw_normal(device: torch.device, *shape: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> Tensor:
    return (torch.randn(shape, device=device) * scale).to(dtype)


def _rotate(tensors: list[Tensor]) -> Callable[[], Tensor]:
    """Return a function that returns the tensors in turn.

    With many tensors, the L2 cache no longer holds a tensor when its turn comes again.
    """
    cycle = itertools.cycle(tensors)
    return lambda: next(cycle)


def _view_bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)


class _CastCase(NamedTuple):
    """A cast that is measured.

    Attributes:
        element_bytes: bytes that are read and written per element.
        fused: this package's cast.
        eager: the same without fusion; None: not measured.
    """

    name: str
    element_bytes: int
    fused: Callable[[], Any]
    eager: Callable[[], Any] | None = None


class _GemmCase(NamedTuple):
    """A GEMM that is measured in bfloat16 and in float8.

    Attributes:
        operands: matrices and scales of the float8 GEMM, with one scale per matrix.
        row_wise_operands: the same with one scale per row.
    """

    name: str
    bf16_gemm: Callable[[], Any]
    out: Tensor
    operands: tuple[Any, ...]
    row_wise_operands: tuple[Any, ...]


def check_casts(bench: Bench, M: int, N: int) -> None:
    """Compare all results of every cast with the references byte by byte, for bfloat16 and float32 tensors [M, N].

    Adds one row per format and dtype; its distance is the number of wrong results.
    """

    def cast_all(float8_format: Format, dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the actual and the expected tensor of each result, by the result's name."""
        x = _draw_normal(bench.device, M, N + 16, dtype=dtype)[:, :N]  # a view, since casts accept strided rows
        counts = torch.zeros(2, dtype=torch.int64, device=x.device)
        expected_counts = torch.zeros_like(counts)
        current = cast_by_amax(x, float8_format)
        counting = cast_by_amax(x, float8_format, counts=counts)
        by_row = cast_rows(x, float8_format, columns=True)
        current_scale = scale_from_amax(amax_reference(x), float8_format)
        row_scales = scale_from_amax(amax_reference(x, 1), float8_format, power_of_2=True)
        column_scales = scale_from_amax(amax_reference(x, 0), float8_format, power_of_2=True)
        q = quantise_reference(x, current_scale, float8_format, expected_counts)
        pairs = {
            "amax": (compute_amax(x), amax_reference(x)),
            "counting": (counting.rows, q),
            "counting, transposed": (counting.columns, q.t()),
            "counts": (counts, expected_counts),
            "current": (current.rows, q),
            "current, transposed": (current.columns, q.t()),
            "current scale": (current.rows_scale, current_scale),
            "row-wise": (by_row.rows, quantise_reference(x, row_scales, float8_format)),
            "row-wise scales": (by_row.rows_scale, row_scales),
            "row-wise, transposed": (by_row.columns, quantise_reference(x, column_scales, float8_format).t()),
            "row-wise scales, transposed": (by_row.columns_scale, column_scales.t()),
        }
        if float8_format == E4M3:
            assert by_row.rows is not None
            largest = row_scales.amax()
            columns, columns_scale = transpose_scaled_rows(by_row.rows, row_scales)
            rescaled = (by_row.rows.float() * (row_scales / largest)).to(E4M3.dtype)
            pairs["row-wise, transposed with one scale"] = columns, rescaled.t()
            pairs["scale of the transpose"] = columns_scale, largest
        # Some casts do not write the transpose.
        return {name: (actual, expected) for name, (actual, expected) in pairs.items() if actual is not None}

    for float8_format in (E4M3, E5M2):
        for dtype in (BF16, torch.float32):
            differences = []
            for name, (actual, expected) in cast_all(float8_format, dtype).items():
                wrong_fraction = (_view_bytes(actual) != _view_bytes(expected)).float().mean()
                if wrong_fraction:
                    differences.append(f"{name} ({wrong_fraction:.1%} of bytes)")
            error = ""
            if differences:
                error = f"bytes differ from the reference's bytes: {', '.join(differences)}"
            format_name = str(float8_format.dtype).removeprefix("torch.float8_")[:4]  # e4m3 or e5m2
            op = f"float8 casts, {format_name}: check"
            dtype_name = str(dtype).removeprefix("torch.")
            bench.rows.append(KernelRow(op, f"{M} x {N}", dtype_name, distance=float(len(differences)), error=error))


def measure_casts(bench: Bench, M: int, N: int) -> None:
    """Measure casts of a bfloat16 [M, N]; the bound is the time that the bytes take at the copy rate."""
    device = bench.device
    if device.type == "cuda":
        tensor_count = max(2, int(4e8 / (2 * M * N)))  # 400 MB in total, which no L2 cache holds
    else:
        tensor_count = 1
    x = _rotate([_draw_normal(device, M, N) for _ in range(tensor_count)])
    amax = torch.zeros((), device=device)
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    compute_amax(x(), amax)

    scale = scale_from_amax(amax, E4M3)

    def cast_eager() -> tuple[Tensor, Tensor]:
        q = quantise_reference(x(), scale, E4M3)
        return q, q.t().contiguous()

    by_row = cast_rows(x(), E4M3)
    q_rows, row_scales = by_row.rows, by_row.rows_scale
    assert q_rows is not None
    assert row_scales is not None
    cases = [
        _CastCase("amax", 2, lambda: compute_amax(x(), amax), lambda: amax_reference(x())),
        _CastCase("cast, current, amax known", 3, lambda: cast_by_amax(x(), E4M3, amax, columns=False)),
        _CastCase("cast + transpose, current, amax known", 4, lambda: cast_by_amax(x(), E4M3, amax), cast_eager),
        _CastCase("cast + transpose + counts, current", 4, lambda: cast_by_amax(x(), E4M3, amax, counts=counts)),
        _CastCase("cast + transpose, current, both passes", 6, lambda: cast_by_amax(x(), E4M3)),
        _CastCase("row-wise cast", 3, lambda: cast_rows(x(), E4M3)),
        _CastCase("row-wise cast, both ways (a weight)", 8, lambda: cast_rows(x(), E4M3, columns=True)),
        _CastCase("transpose of scaled rows", 2, lambda: transpose_scaled_rows(q_rows, row_scales)),
    ]
    for case in cases:
        bound = case.element_bytes * M * N / bench.facts["copy_bytes_per_s"]
        row = KernelRow(f"float8 {case.name}", f"{M} x {N}", bound=bound)
        bench.rows.append(row)
        bench.measure_seconds(row, "fused", case.fused)
        if case.eager is not None:
            bench.measure_seconds(row, "eager", case.eager)
        row.host = timing.measure_launch_seconds(case.fused)


def _add_timed_row(bench: Bench, row: KernelRow, flops: float, function: Callable[[], Any]) -> None:
    """Add a row with the time and the TFLOP/s of a function."""
    bench.rows.append(row)
    bench.measure_seconds(row, "fused", function)
    row.set_tflops(flops)


def measure_gemms(bench: Bench, name: str, T: int, I: int, O: int) -> None:  # noqa: E741
    """Measure y, dx and dw of one linear layer in bfloat16, then in float8 with fast and precise sums.

    T, I and O are tokens, input features and output features. In the names below, a suffix 8 marks a float8 matrix with
    one scale, and a suffix r a float8 matrix with one scale per row. "Fast" sums of a GEMM have 14 bits.
    """
    device = bench.device
    flops, shape = 2.0 * T * I * O, f"{T} x {I} x {O}"
    x, dy = _draw_normal(device, T, I), _draw_normal(device, T, O, scale=1e-4)
    w = _draw_normal(device, O, I, scale=I**-0.5)
    x8, w8 = cast_by_amax(x, E4M3), cast_by_amax(w, E4M3)
    dy8 = cast_by_amax(dy, E5M2)
    xr, dyr = cast_rows(x, E4M3), cast_rows(dy, E4M3)
    wr = cast_rows(w, E4M3, columns=True)
    main_grad = torch.zeros(O, I, device=device)
    y, dx = torch.empty(T, O, dtype=BF16, device=device), torch.empty(T, I, dtype=BF16, device=device)

    def make_row(
        gemm_name: str, dtype: str = "float8", result: Tensor | None = None, expected: Tensor | None = None
    ) -> KernelRow:
        row = KernelRow(f"{name} {gemm_name}", shape, dtype)
        if result is None or expected is None:
            return row
        row.distance = compute_distance(result, expected)
        if "fast" in gemm_name:
            limit = FAST_LIMIT
        elif result.dtype == torch.float32:
            limit = FLOAT32_LIMIT
        else:
            limit = BF16_LIMIT
        if not row.distance <= limit:
            row.error = f"norm-wise error {row.distance:.1e} against the GEMM of the dequantised matrices"
        return row

    def get_operands(a: Float8, b: Float8, a_transposed: bool = False, b_transposed: bool = False) -> tuple[Any, ...]:
        """Return the arguments of a GEMM: matrix and scale of `a`, matrix and scale of `b`."""
        if a_transposed:
            a_operands = (a.columns, a.columns_scale)
        else:
            a_operands = (a.rows, a.rows_scale)
        if b_transposed:
            b_operands = (b.columns, b.columns_scale)
        else:
            b_operands = (b.rows, b.rows_scale)
        return a_operands + b_operands

    cases = [
        _GemmCase(
            "y",
            bf16_gemm=lambda: torch.mm(x, w.t(), out=y),
            out=y,
            operands=get_operands(x8, w8),
            row_wise_operands=get_operands(xr, wr),
        ),
        _GemmCase(
            "dx",
            bf16_gemm=lambda: torch.mm(dy, w, out=dx),
            out=dx,
            operands=get_operands(dy8, w8, b_transposed=True),
            row_wise_operands=get_operands(dyr, wr, b_transposed=True),
        ),
    ]
    for gemm_name, bf16_gemm, out, operands, row_wise_operands in cases:
        _add_timed_row(bench, make_row(gemm_name, "bfloat16"), flops, bf16_gemm)
        expected = dequantise(operands[0], operands[1]) @ dequantise(operands[2], operands[3]).t()
        for sums, fast in (("fast", True), ("precise", False)):
            call = functools.partial(gemm.matmul, *operands, fast=fast)
            row = make_row(f"{gemm_name}, {sums}", result=call(), expected=expected)
            _add_timed_row(bench, row, flops, call)
            if device.type == "cuda":
                torch_call = functools.partial(gemm.multiply_by_torch, out, *operands, fast=fast)
                _add_timed_row(bench, make_row(f"{gemm_name}, {sums}, torch._scaled_mm"), flops, torch_call)
                large_call = functools.partial(cublaslt.matmul_into, out, *operands, overwrite=True, fast=fast)
                _add_timed_row(bench, make_row(f"{gemm_name}, {sums}, workspace of 32 MiB"), flops, large_call)
        for sums, fast in (("fast", True), ("precise", False)):
            call = functools.partial(gemm.matmul, *row_wise_operands, fast=fast)
            _add_timed_row(bench, make_row(f"{gemm_name}, row-wise, {sums}"), flops, call)
        del expected
    operands = get_operands(dy8, x8, a_transposed=True, b_transposed=True)
    expected = dequantise(operands[0], operands[1]) @ dequantise(operands[2], operands[3]).t()
    row = make_row("dw += float32", "bfloat16")
    _add_timed_row(bench, row, flops, lambda: linear.accumulate_mm(main_grad, dy.t(), x))
    accumulate = functools.partial(gemm.matmul_into, main_grad, *operands)
    accumulate(overwrite=True)
    overwrite_row = make_row("dw = float32, precise", result=main_grad, expected=expected)
    accumulate()
    accumulate_row = make_row("dw += float32, precise", result=main_grad / 2, expected=expected)
    del expected
    _add_timed_row(bench, overwrite_row, flops, functools.partial(accumulate, overwrite=True))
    _add_timed_row(bench, accumulate_row, flops, accumulate)
    _add_timed_row(bench, make_row("dw += float32, fast"), flops, functools.partial(accumulate, fast=True))
    multiply_then_add = lambda: main_grad.add_(gemm.matmul(*operands, dtype=torch.float32))
    _add_timed_row(bench, make_row("dw, float32, precise, and an addition"), flops, multiply_then_add)


def measure(bench: Bench, tiny: bool) -> None:
    """Measure all float8 rows, or store in `bench.facts` why this device has none."""
    reason = explain_missing_float8(bench.device)
    if reason:
        bench.facts["float8"] = f"float8 is not measured: {reason}"
        return
    if tiny:
        check_shape = (24, 40)
        cast_shapes = TINY_CASTS
        linears = TINY_LINEARS
    else:
        check_shape = (400, 1040)
        cast_shapes = CASTS
        linears = LINEARS
    bench.run_guarded("float8 casts", "check", functools.partial(check_casts, bench, *check_shape))
    for M, N in cast_shapes:
        bench.run_guarded("float8 casts", f"{M} x {N}", functools.partial(measure_casts, bench, M, N))
    for name, sizes in linears.items():
        bench.run_guarded(name, "float8 GEMMs", functools.partial(measure_gemms, bench, name, *sizes))
