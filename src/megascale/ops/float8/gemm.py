"""GEMMs of float8 matrices a [M, K] and b [N, K], which both have K as their contiguous dimension.

Hopper's tensor cores read float8 operands in no other layout. A `Float8` therefore holds a matrix and its transpose.

For a linear layer y [T, O] = x [T, I] @ w [O, I]^T:

    forward          y   = x.rows @ w.rows^T
    input gradient   dx  = dy.rows @ w.columns^T
    weight gradient  dw += dy.columns @ x.columns^T, in float32

`fast` lets the tensor cores accumulate in about 14 bits. Forward is fast, and gradients are not. On CPU, and with
kernels.mode=reference, the dequantised numbers are multiplied in float32 (in float64 for a float64 result). An
unsupported device or shape is an error.

All three call cuBLASLt directly (cublaslt.py). dw is added in place: on an H200 this is 10 to 26% faster than
`torch._scaled_mm` followed by an addition. y and dx have the algorithm and the bits of `_scaled_mm`, at less work for
the CPU per call. Where cuBLASLt refuses, `_scaled_mm` runs, and the record of operators has the reason. An earlier
comparison, in which `_scaled_mm` was 1 to 4% faster for y, gave direct calls a workspace of 32 MiB and `_scaled_mm`
torch's 1 MiB, so that the algorithms may have differed. `tests/gpu/gemm_calls.py` compares bits and times.
"""

from __future__ import annotations

import functools
import os

import torch
from torch import Tensor

from megascale import torch_private
from megascale.errors import ConfigError, FitError
from megascale.ops import dispatch
from megascale.ops.float8 import cublaslt
from megascale.ops.float8.formats import ALIGNED, check_operands, check_scales, dequantise

# Whether y and dx call cuBLASLt directly. The variable's value 0 is a workaround, and for comparisons.
CALLS_DIRECTLY = os.environ.get("MEGASCALE_DIRECT_GEMMS", "1") != "0"


def check_device(device: torch.device | int) -> None:
    """Raise ConfigError if a CUDA device has no float8 tensor cores (compute capability below 8.9)."""
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        raise ConfigError(
            "train.linear_precision='float8' needs a device of compute capability 8.9 or higher (Ada, Hopper, "
            f"Blackwell), and {torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}; "
            "set --train.linear_precision=default"
        )


def check_shape(layer: str, tokens: int, inputs: int, outputs: int) -> None:
    """Raise FitError if a linear layer's three GEMMs cannot run in float8: each size must be a multiple of 16.

    Args:
        tokens: rows of the GEMM's input on one rank.
        inputs, outputs: sizes of the weight's shard on one rank.
    """
    for name, size in (("tokens", tokens), ("inputs", inputs), ("outputs", outputs)):
        if size % ALIGNED or not size:
            raise FitError(
                f"train.linear_precision='float8': {layer} has {size} {name} on a rank, and float8 tensor cores take "
                f"multiples of {ALIGNED}; change the sizes or the layout so that it divides, or set "
                "--train.linear_precision=default"
            )


def _on_tensor_cores(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> bool:
    """Check a GEMM's arguments. Return whether it runs on tensor cores instead of the reference.

    Raises ConfigError or FitError if the device or the shape has no float8 GEMM.
    """
    _check_shapes(a.shape, b.shape, a_scale.shape, b_scale.shape)
    check_scales(a_scale, b_scale)
    if not a.is_cuda:
        dispatch.record_choice("float8 GEMM", f"reference ({a.device.type} tensors)")
        return False
    if dispatch.get_mode() == "reference":
        dispatch.record_choice("float8 GEMM", "reference (kernels.mode)")
        return False
    _check_problem(a.device, a.shape, b.shape, a.dtype, b.dtype)
    dispatch.record_choice("float8 GEMM", "tensor cores")
    return True


# The next two functions are cached, because a GEMM is called with the same sizes thousands of times per step.
@functools.lru_cache(maxsize=cublaslt.MAX_PLANS)
def _check_shapes(a: torch.Size, b: torch.Size, a_scale: torch.Size, b_scale: torch.Size) -> None:
    """Check that the shapes of operands and scales belong together. Raises ValueError if they do not."""
    M, K = a
    if len(b) != 2 or b[1] != K:
        raise ValueError(f"float8 operands {tuple(a)} and {tuple(b)} have no product a b^T")
    row_wise = (M, 1), (b[0], 1)
    if (a_scale or b_scale) and (a_scale, b_scale) != row_wise:
        raise ValueError(f"scales {tuple(a_scale)} and {tuple(b_scale)} are neither one nor one per row: {row_wise}")


@functools.lru_cache(maxsize=cublaslt.MAX_PLANS)
def _check_problem(
    device: torch.device, a: torch.Size, b: torch.Size, a_type: torch.dtype, b_type: torch.dtype
) -> None:
    """Raise ConfigError or FitError if the device has no float8 GEMM of these shapes and types."""
    check_device(device)
    check_operands(a[0], b[0], a[1], a_type, b_type)


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
    """Multiply a [M, K] @ b [N, K]^T times both scales, plus bias [N] -> [M, N] of `dtype`.

    Raises ConfigError or FitError for a device or a shape without float8.

    Args:
        a_scale, b_scale: float32, [] each, or [M, 1] and [N, 1].
        bias: bfloat16 or float16, as the result.
        fast: accumulate in about 14 bits.
    """
    if not _on_tensor_cores(a, a_scale, b, b_scale):
        y = _reference(a, a_scale, b, b_scale, dtype)
        return (y if bias is None else y + bias).to(dtype)
    out = torch.empty(a.shape[0], b.shape[0], dtype=dtype, device=a.device)
    return _multiply(out, a, a_scale, b, b_scale, fast=fast, bias=bias)


def _multiply(
    out: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, fast: bool, bias: Tensor | None
) -> Tensor:
    """Run `matmul` into `out` on tensor cores, by a direct call of cuBLASLt if possible. Record the choice."""
    if CALLS_DIRECTLY:
        reason = cublaslt.multiply(out, a, a_scale, b, b_scale, bias=bias, fast=fast)
    else:
        reason = "MEGASCALE_DIRECT_GEMMS=0"
    if not reason:
        # Keep the reason of a GEMM that cuBLASLt has refused.
        choices = dispatch.CURRENT.get().choices
        choices.setdefault("float8 GEMM calls", "cuBLASLt, with the algorithm of torch._scaled_mm")
        return out
    dispatch.record_choice("float8 GEMM calls", f"torch._scaled_mm ({reason})")
    return multiply_by_torch(out, a, a_scale, b, b_scale, fast=fast, bias=bias)


def multiply_by_torch(
    out: Tensor,
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    *,
    fast: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """Run `matmul` into `out` by `torch._scaled_mm`."""
    scale_b = b_scale.t() if b_scale.dim() else b_scale
    return torch_private.scaled_mm(
        a, b.t(), a_scale, scale_b, bias=bias, out_dtype=out.dtype, use_fast_accum=fast, out=out
    )


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
    """Compute target [M, N] (float32 or wider) += a [M, K] @ b [N, K]^T times both scales, in one GEMM in place.

    With `overwrite` the product replaces target. Raises the errors of `matmul`, and TrainingError if cuBLASLt fails.
    """
    if target.shape != (a.shape[0], b.shape[0]):
        raise ValueError(f"the product of {tuple(a.shape)} and {tuple(b.shape)} does not fit {tuple(target.shape)}")
    if not _on_tensor_cores(a, a_scale, b, b_scale):
        result = _reference(a, a_scale, b, b_scale, target.dtype)
        if overwrite:
            target.copy_(result)
        else:
            target.add_(result)
        return
    if target.dtype != torch.float32:
        raise ValueError(f"a float8 GEMM adds to float32, not to {target.dtype}")
    if not all(t.is_contiguous() and t.data_ptr() % ALIGNED == 0 for t in (target, a, b)):
        raise ValueError(f"operands of a float8 GEMM are contiguous and aligned to {ALIGNED} bytes")
    cublaslt.matmul_into(target, a, a_scale, b, b_scale, overwrite=overwrite, fast=fast)
    dispatch.record_choice("float8 weight gradient", "added in float32 inside the GEMM")


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
    """Run `matmul` into out [M, N] of bfloat16 (on a CPU of any type); with `add` it adds to out, without bias."""
    if not _on_tensor_cores(a, a_scale, b, b_scale):
        y = _reference(a, a_scale, b, b_scale, out.dtype)
        if add:
            return out.copy_(out + y)
        return out.copy_(y if bias is None else y + bias)
    if add:
        cublaslt.matmul_into(out, a, a_scale, b, b_scale, fast=fast)
        return out
    return _multiply(out, a, a_scale, b, b_scale, fast=fast, bias=bias)
