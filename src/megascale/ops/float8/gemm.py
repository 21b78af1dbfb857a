"""GEMMs of float8 matrices, a [M, K] and b [N, K]: both read along K, the only way Hopper's tensor cores take them.

For a linear layer y [T, O] = x [T, I] @ w [O, I]^T:

    forward          y  = x.rows     with w.rows
    input gradient   dx = dy.rows    with w.columns
    weight gradient  dw = dy.columns with x.columns, added to float32 in place

`fast` lets the tensor cores keep their sums in about 14 bits. Forward may; gradients keep the precise ones.
On CPU, and under kernels.mode=reference, the numbers that the float8 values stand for are multiplied in float32 (in
float64 where the result is). There is no other way out: a device or a shape that cannot is an error.

y and dx are `torch._scaled_mm`, dw is cuBLASLt's call that adds in place: on an H200 10 to 26% faster than `_scaled_mm`
and an addition. For y (fast sums) `_scaled_mm` was 1 to 4% faster than `cublaslt` at every shape. With precise sums, as
dx has them, `cublaslt` was 2% faster in bursts and 1% slower sustained: nothing speaks for a second path.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megascale import torch_private
from megascale.errors import ConfigError, FitError
from megascale.ops import dispatch
from megascale.ops.float8 import cublaslt
from megascale.ops.float8.formats import ALIGNED, Float8, check_operands, check_scales, dequantise


def check_device(device: torch.device | int) -> None:
    """Raises ConfigError where a CUDA device has no float8 tensor cores (compute capability below 8.9)."""
    found = torch.cuda.get_device_capability(device)
    if found < (8, 9):
        raise ConfigError(
            "train.linear_precision='float8' needs a device of compute capability 8.9 or higher (Ada, Hopper, "
            f"Blackwell), and {torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}; "
            "set --train.linear_precision=default"
        )


def check_shape(layer: str, tokens: int, inputs: int, outputs: int) -> None:
    """Raises FitError where a linear layer's three GEMMs cannot run in float8: each size must divide by 16.

    tokens: of a micro-batch, as the GEMM sees them. inputs, outputs: of the weight's part on one rank.
    """
    for name, size in (("tokens", tokens), ("inputs", inputs), ("outputs", outputs)):
        if size % ALIGNED or not size:
            raise FitError(
                f"train.linear_precision='float8': {layer} has {size} {name} on a rank, and float8 tensor cores take "
                f"multiples of {ALIGNED}; change the sizes or the layout so that it divides, or set "
                "--train.linear_precision=default"
            )


def _on_tensor_cores(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> bool:
    """Whether this GEMM runs in float8; checks it if so, and its arguments in any case."""
    M, K = a.shape
    N = b.shape[0]
    assert b.shape[1] == K, (a.shape, b.shape)
    row_wise = (M, 1), (N, 1)
    assert a_scale.dim() == b_scale.dim() == 0 or (a_scale.shape, b_scale.shape) == row_wise, (a_scale, b_scale)
    check_scales(a_scale, b_scale)
    if not a.is_cuda:
        dispatch.note("float8 GEMM", f"reference ({a.device.type} tensors)")
        return False
    if dispatch.mode() == "reference":
        dispatch.note("float8 GEMM", "reference (kernels.mode)")
        return False
    check_device(a.device)
    check_operands(M, N, K, a.dtype, b.dtype)
    dispatch.note("float8 GEMM", "tensor cores")
    return True


def _reference(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    wide = torch.promote_types(dtype, torch.float32)
    return dequantise(a, a_scale, wide) @ dequantise(b, b_scale, wide).t()


def matmul(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    fast: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """a [M, K] @ b [N, K]^T times both scales, plus bias [N] -> [M, N] of `dtype`.

    Scales: float32, [] each, or [M, 1] and [N, 1]. bias: bfloat16 or float16, as the result is. Raises ConfigError or
    FitError where the device or the shape has no float8.
    """
    if not _on_tensor_cores(a, a_scale, b, b_scale):
        y = _reference(a, a_scale, b, b_scale, dtype)
        return (y if bias is None else y + bias).to(dtype)
    scale_b = b_scale.t() if b_scale.dim() else b_scale
    return torch_private.scaled_mm(a, b.t(), a_scale, scale_b, bias=bias, out_dtype=dtype, use_fast_accum=fast)


def matmul_into(
    target: Tensor,
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    *,
    overwrite: bool = False,
    fast: bool = False,
) -> None:
    """target [M, N] (float32 or wider) += a [M, K] @ b [N, K]^T times both scales; = where `unset`, whatever it holds.

    One GEMM in place. Raises what `matmul` does, and TrainingError where cuBLASLt refuses.
    """
    assert target.shape == (a.shape[0], b.shape[0]), (target.shape, a.shape, b.shape)
    if not _on_tensor_cores(a, a_scale, b, b_scale):
        result = _reference(a, a_scale, b, b_scale, target.dtype)
        if overwrite:
            target.copy_(result)
        else:
            target.add_(result)
        return
    assert target.dtype == torch.float32, target.dtype
    assert all(t.is_contiguous() and t.data_ptr() % ALIGNED == 0 for t in (target, a, b)), "not aligned to 16 bytes"
    cublaslt.matmul_into(target, a, a_scale, b, b_scale, overwrite=overwrite, fast=fast)
    dispatch.note("float8 weight gradient", "added in float32 inside the GEMM")


def matmul_out(
    out: Tensor,
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    *,
    fast: bool = False,
    bias: Tensor | None = None,
    add: bool = False,
) -> Tensor:
    """`matmul` into out [M, N] of bfloat16 (on a CPU of any type); with `add` what out holds is added, and no bias.

    Raises what `matmul` does.
    """
    if not _on_tensor_cores(a, a_scale, b, b_scale):
        y = _reference(a, a_scale, b, b_scale, out.dtype)
        if add:
            return out.copy_(out + y)
        return out.copy_(y if bias is None else y + bias)
    if add:
        cublaslt.matmul_into(out, a, a_scale, b, b_scale, fast=fast)
        return out
    scale_b = b_scale.t() if b_scale.dim() else b_scale
    options = {"bias": bias, "out_dtype": out.dtype, "use_fast_accum": fast}
    return torch_private.scaled_mm(a, b.t(), a_scale, scale_b, **options, out=out)


def _given(*parts: Tensor | None) -> list[Tensor]:
    assert all(part is not None for part in parts), "a cast left out what this GEMM reads"
    return [part for part in parts if part is not None]


def forward(x: Float8, w: Float8, dtype: torch.dtype = torch.bfloat16, bias: Tensor | None = None) -> Tensor:
    """x [T, I], w [O, I] -> x @ w^T + bias [T, O], with fast accumulation."""
    return matmul(*_given(x.rows, x.rows_scale, w.rows, w.rows_scale), dtype=dtype, fast=True, bias=bias)


def input_gradient(dy: Float8, w: Float8, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """dy [T, O], w [O, I] -> dy @ w [T, I]."""
    return matmul(*_given(dy.rows, dy.rows_scale, w.columns, w.columns_scale), dtype=dtype)


def weight_gradient(dy: Float8, x: Float8, main: Tensor, unset: bool = False) -> None:
    """dy [T, O], x [T, I]: dy^T @ x is added to main [O, I] (float32), or written there where it is `unset`."""
    matmul_into(main, *_given(dy.columns, dy.columns_scale, x.columns, x.columns_scale), overwrite=unset)
