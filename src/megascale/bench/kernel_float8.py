"""Float8 in `megascale bench kernels`: casts compared with a copy's bytes, and GEMMs compared with bfloat16."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megascale.bench import timing
from megascale.bench.kernel_cases import Bench, KernelRow, distance
from megascale.errors import ConfigError
from megascale.ops import linear
from megascale.ops.float8 import cublaslt, gemm
from megascale.ops.float8.cast import cast_by_amax, cast_by_scale, cast_rows, compute_amax
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
# Tokens, inputs, outputs of each linear layer. wide: the parallel block's QKV and MLP input in one.
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
CASTS = [(4096, 5120), (4096, 20480), (4096, 35840), (8192, 2048), (8192, 28672)]
TINY_LINEARS = {"tiny": (16, 32, 48)}
TINY_CASTS = [(16, 32)]
# Norm-wise, measured: precise sums 1.3e-4 in float32 and 1.7e-3 in bfloat16, fast ones (14 bits) 2.3e-3 at K = 5,120
# and more with K.
ADDED, ROUNDED, FAST = 1e-3, 3e-3, 2e-2


def refusal(device: torch.device) -> str:
    """Return why this device has no float8, or "" if it has."""
    if device.type != "cuda":
        return ""  # the references, which --tiny checks
    try:
        gemm.check_device(device)
    except ConfigError as error:
        return str(error)
    return ""


def _gauss(device: torch.device, *shape: int, size: float = 1.0, dtype: torch.dtype = BF16) -> Tensor:
    return (torch.randn(shape, device=device) * size).to(dtype)


def _in_turn(xs: list[Tensor]) -> Callable[[], Tensor]:
    """Return a function that returns one tensor after the other, so that none is in the cache."""
    tensors = itertools.cycle(xs)
    return lambda: next(tensors)


def _bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)


def check_casts(bench: Bench, M: int, N: int) -> None:
    """Check every cast's bytes, scales, amax and counts against the reference's, from bfloat16 and float32."""

    def cast_all(kind: Format, dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the actual and the expected tensor by name."""
        x = _gauss(bench.device, M, N + 16, dtype=dtype)[:, :N]
        scale, amax = torch.full((), 0.013, device=x.device), torch.zeros((), device=x.device)
        counts, expected_counts = (torch.zeros(2, dtype=torch.int64, device=x.device) for _ in range(2))
        by_scale, current = cast_by_scale(x, kind, scale), cast_by_amax(x, kind)
        collecting = cast_by_scale(x, kind, scale, amax=amax, counts=counts)
        by_row = cast_rows(x, kind, columns=True)
        current_scale = scale_from_amax(amax_reference(x), kind)
        rows, columns = (scale_from_amax(amax_reference(x, dim), kind, power_of_2=True) for dim in (1, 0))
        q, q_current = quantise_reference(x, scale, kind, expected_counts), quantise_reference(x, current_scale, kind)
        pairs = {
            "given scale": (by_scale.rows, q),
            "given scale, transposed": (by_scale.columns, q.t()),
            "collecting": (collecting.rows, q),
            "collecting, transposed": (collecting.columns, q.t()),
            "amax": (amax, amax_reference(x)),
            "counts": (counts, expected_counts),
            "current": (current.rows, q_current),
            "current, transposed": (current.columns, q_current.t()),
            "current scale": (current.rows_scale, current_scale),
            "row-wise": (by_row.rows, quantise_reference(x, rows, kind)),
            "row-wise scales": (by_row.rows_scale, rows),
            "row-wise, transposed": (by_row.columns, quantise_reference(x, columns, kind).t()),
            "row-wise scales, transposed": (by_row.columns_scale, columns.t()),
        }
        return {name: (got, want) for name, (got, want) in pairs.items() if got is not None}

    for kind in (E4M3, E5M2):
        for dtype in (BF16, torch.float32):
            wrong = []
            for name, (got, want) in cast_all(kind, dtype).items():
                share = (_bytes(got) != _bytes(want)).float().mean()
                if share:
                    wrong.append(f"{name} ({share:.1%} of bytes)")
            if wrong:
                error = f"not the reference's bytes: {', '.join(wrong)}"
            else:
                error = ""
            name = f"float8 casts, {str(kind.dtype)[13:17]}: check"
            bench.rows.append(KernelRow(name, f"{M} x {N}", str(dtype)[6:], distance=float(len(wrong)), error=error))


def measure_casts(bench: Bench, M: int, N: int) -> None:
    """Measure casts of a bfloat16 [M, N]; the bound is the time of the bytes at the copy rate."""
    device = bench.device
    if device.type == "cuda":
        count = max(2, int(4e8 / (2 * M * N)))
    else:
        count = 1
    x = _in_turn([_gauss(device, M, N) for _ in range(count)])
    scale, amax = torch.full((), 0.013, device=device), torch.zeros((), device=device)
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    compute_amax(x(), amax)

    def plain() -> tuple[Tensor, Tensor]:
        q = quantise_reference(x(), scale, E4M3)
        return q, q.t().contiguous()

    cases: list[tuple[str, int, Callable[[], Any], Callable[[], Any] | None]] = [
        ("amax", 2, lambda: compute_amax(x(), amax), lambda: amax_reference(x())),
        ("cast, given scale", 3, lambda: cast_by_scale(x(), E4M3, scale, columns=False), None),
        ("cast + transpose, given scale", 4, lambda: cast_by_scale(x(), E4M3, scale), plain),
        ("cast + transpose + amax", 4, lambda: cast_by_scale(x(), E4M3, scale, amax=amax), None),
        (
            "cast + transpose + amax + counts",
            4,
            lambda: cast_by_scale(x(), E4M3, scale, amax=amax, counts=counts),
            None,
        ),
        ("cast + transpose, current, amax known", 4, lambda: cast_by_amax(x(), E4M3, amax), None),
        ("cast + transpose, current, both passes", 6, lambda: cast_by_amax(x(), E4M3), None),
        ("row-wise cast", 3, lambda: cast_rows(x(), E4M3), None),
        ("row-wise cast, both ways (a weight)", 8, lambda: cast_rows(x(), E4M3, columns=True), None),
    ]
    for name, bytes_each, fused, eager in cases:
        row = KernelRow(f"float8 {name}", f"{M} x {N}", bound=bytes_each * M * N / bench.facts["copy_bytes_per_s"])
        bench.rows.append(row)
        bench.seconds(row, "fused", fused)
        if eager is not None:
            bench.seconds(row, "eager", eager)
        row.host = timing.launch_seconds(fused)


def _timed(bench: Bench, row: KernelRow, flops: float, function: Callable[[], Any]) -> None:
    bench.rows.append(row)
    bench.seconds(row, "fused", function)
    row.set_tflops(flops)


def measure_gemms(bench: Bench, name: str, T: int, I: int, O: int) -> None:  # noqa: E741
    """Measure y, dx and dw of one linear layer in bfloat16, then in float8 with fast and precise sums."""
    device = bench.device
    flops, shape = 2.0 * T * I * O, f"{T} x {I} x {O}"
    x, dy = _gauss(device, T, I), _gauss(device, T, O, size=1e-4)
    w = _gauss(device, O, I, size=I**-0.5)
    x8, w8 = cast_by_amax(x, E4M3), cast_by_amax(w, E4M3)
    d8 = cast_by_amax(dy, E5M2)
    xr, dr = cast_rows(x, E4M3), cast_rows(dy, E4M3)
    wr = cast_rows(w, E4M3, columns=True)
    main = torch.zeros(O, I, device=device)
    y, dx = torch.empty(T, O, dtype=BF16, device=device), torch.empty(T, I, dtype=BF16, device=device)

    def row(
        gemm_name: str, dtype: str = "float8", result: Tensor | None = None, want: Tensor | None = None
    ) -> KernelRow:
        row = KernelRow(f"{name} {gemm_name}", shape, dtype)
        if result is not None and want is not None:
            row.distance = distance(result, want)
            if result.dtype == torch.float32:
                limit = ADDED
            else:
                limit = ROUNDED
            if not row.distance <= (FAST if "fast" in gemm_name else limit):
                row.error = f"{row.distance:.1e} away from the GEMM of the dequantised numbers"
        return row

    def operands(a: Float8, b: Float8, transposed: str) -> tuple[Any, ...]:
        """Return the tensors of a GEMM. transposed: those of "a" and "b" whose transposed copy is read."""
        tensors: list[Any] = []
        for key, t in (("a", a), ("b", b)):
            tensors += [t.columns, t.columns_scale] if key in transposed else [t.rows, t.rows_scale]
        return tuple(tensors)

    variants: list[tuple[str, Callable[[], Any], Tensor, Float8, Float8, str, Float8, Float8]] = [
        ("y", lambda: torch.mm(x, w.t(), out=y), y, x8, w8, "", xr, wr),
        ("dx", lambda: torch.mm(dy, w, out=dx), dx, d8, w8, "b", dr, wr),
    ]
    for gemm_name, bf16, out, a, b, transposed, by_row, w_row in variants:
        _timed(bench, row(gemm_name, "bfloat16"), flops, bf16)
        tensors = operands(a, b, transposed)
        want = dequantise(tensors[0], tensors[1]) @ dequantise(tensors[2], tensors[3]).t()
        for sums, fast in (("fast", True), ("precise", False)):
            call = functools.partial(gemm.matmul, *tensors, fast=fast)
            _timed(bench, row(f"{gemm_name}, {sums}", result=call(), want=want), flops, call)
            if device.type == "cuda":
                alone = functools.partial(cublaslt.matmul_into, out, *tensors, overwrite=True, fast=fast)
                _timed(bench, row(f"{gemm_name}, {sums}, cuBLASLt called directly"), flops, alone)
        tensors = operands(by_row, w_row, transposed)
        _timed(bench, row(f"{gemm_name}, row-wise, fast"), flops, functools.partial(gemm.matmul, *tensors, fast=True))
        del want
    tensors = operands(d8, x8, "ab")
    want = dequantise(tensors[0], tensors[1]) @ dequantise(tensors[2], tensors[3]).t()
    _timed(bench, row("dw += float32", "bfloat16"), flops, lambda: linear.accumulate_mm(main, dy.t(), x))
    accumulate = functools.partial(gemm.matmul_into, main, *tensors)
    accumulate(overwrite=True)
    into = row("dw = float32, precise", result=main, want=want)
    accumulate()
    added_to = row("dw += float32, precise", result=main / 2, want=want)
    del want
    _timed(bench, into, flops, functools.partial(accumulate, overwrite=True))
    _timed(bench, added_to, flops, accumulate)
    _timed(bench, row("dw += float32, fast"), flops, functools.partial(accumulate, fast=True))
    added = lambda: main.add_(gemm.matmul(*tensors, dtype=torch.float32))
    _timed(bench, row("dw, float32, precise, and an addition"), flops, added)
    if device.type == "cuda":
        best = cublaslt.tune(main, *tensors)
        if best:
            tuned = row(f"dw += float32, precise, proposal {best + 1}")
            _timed(bench, tuned, flops, accumulate)
        cublaslt.set_algorithms({})


def measure(bench: Bench, tiny: bool) -> None:
    """Measure all float8 rows, or record why there are none."""
    reason = refusal(bench.device)
    if reason:
        bench.facts["float8"] = f"float8 is not measured: {reason}"
        return
    bench.guard("float8 casts", "check", lambda: check_casts(bench, *((24, 40) if tiny else (400, 1040))))
    for M, N in TINY_CASTS if tiny else CASTS:
        bench.guard("float8 casts", f"{M} x {N}", functools.partial(measure_casts, bench, M, N))
    for name, sizes in (TINY_LINEARS if tiny else LINEARS).items():
        bench.guard(name, "float8 GEMMs", functools.partial(measure_gemms, bench, name, *sizes))
