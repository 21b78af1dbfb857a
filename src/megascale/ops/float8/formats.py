"""The two float8 formats, scales from largest magnitudes, and casts in plain PyTorch.

A scale is what a float8 number is multiplied with to get the number meant: x is about q * scale, and the largest
magnitude (amax) falls on the format's largest number. One float32 scale serves a whole matrix ("tensor-wise", shape
[]) or a row of it ("row-wise", shape [rows, 1]).

What is finite and too large is clamped to the largest number; what is not finite becomes NaN in every format, so
that an overflow in the bfloat16 numbers reaches the loss as it does without float8. An amax of zero, infinity or NaN
says nothing about a scale: the old one stays.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megascale.errors import FitError

ALIGNED = 16  # elements, which are bytes here: what tensor cores want of sizes and cuBLASLt of addresses

# Smaller scales have no float32 reciprocal to speak of; a tensor whose amax is 1e-33 may as well be zero.
SMALLEST_SCALE = 2.0**-120


@dataclass(frozen=True)
class Format:
    """One float8 format.

    Attributes:
        dtype: torch's type of it.
        largest: its largest finite number.
        clipped: magnitudes above this, half a step over the largest number, are changed by more than rounding.
        flushed: magnitudes up to this, half its smallest number, become zero (ties go to even).
    """

    dtype: torch.dtype
    largest: float
    clipped: float
    flushed: float


E4M3 = Format(torch.float8_e4m3fn, 448.0, 464.0, 2.0**-10)  # activations and weights: more digits
E5M2 = Format(torch.float8_e5m2, 57344.0, 61440.0, 2.0**-17)  # gradients: more range


@dataclass(frozen=True)
class Float8:
    """A matrix [M, N] in float8, as it is and transposed: float8 GEMMs read both operands along K.

    Attributes:
        rows: [M, N], or None where it was not asked for.
        rows_scale: float32, [] or [M, 1].
        columns: its transpose [N, M], or None.
        columns_scale: float32, [] (then the same tensor as rows_scale) or [N, 1].
    """

    rows: Tensor | None
    rows_scale: Tensor | None
    columns: Tensor | None
    columns_scale: Tensor | None


def scale_slots(count: int, device: torch.device | str = "cpu", value: float = 1.0) -> Tensor:
    """Places for `count` scales (or amaxes) in one allocation, float32 [count], each aligned to 16 bytes.

    cuBLASLt refuses a scale at any other address, so that a plain [count] tensor will not do. `slots[i]` is a view.
    """
    return torch.full((count, ALIGNED // 4), value, dtype=torch.float32, device=device)[:, 0]


def check_operands(M: int, N: int, K: int, a: torch.dtype, b: torch.dtype) -> None:
    """Raises FitError where tensor cores have no float8 GEMM a [M, K] x b [N, K]^T."""
    if K % ALIGNED or N % ALIGNED or not M * N * K:
        raise FitError(
            f"train.linear_precision='float8': a GEMM [{M}, {K}] x [{N}, {K}]^T has a size that is not a multiple "
            f"of {ALIGNED}, which float8 tensor cores need; change the sizes or set --train.linear_precision=default"
        )
    if a == b == torch.float8_e5m2:
        raise FitError(
            "train.linear_precision='float8': tensor cores do not multiply two E5M2 matrices; one must be E4M3"
        )


def check_scales(*scales: Tensor) -> None:
    """Raises FitError for a scale at an address that cuBLASLt refuses."""
    for scale in scales:
        if scale.data_ptr() % ALIGNED or not scale.is_contiguous():
            raise FitError(
                f"a float8 scale {list(scale.shape)} lies {scale.data_ptr() % ALIGNED} bytes past a multiple of "
                f"{ALIGNED} (contiguous: {scale.is_contiguous()}), and cuBLASLt reads scales at multiples of {ALIGNED} "
                "only; keep many scales in one tensor by formats.scale_slots, or clone this one"
            )


def power_of_2_above(scale: Tensor) -> Tensor:
    """The smallest power of two that is at least scale > 0 (float32, normal)."""
    return ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def scale_from_amax(
    amax: Tensor, kind: Format, previous_scale: Tensor | float = 1.0, margin: int = 0, power_of_2: bool = False
) -> Tensor:
    """The float32 scale at which amax falls on the largest number of `kind`, or 2^margin below it.

    old: the scale that stays where amax is zero, infinite or NaN. power_of_2: the next larger power of two, with which
    nothing is rounded but the cast itself.
    """
    amax = amax.float()
    scale = (amax * (2.0**margin / kind.largest)).clamp_min(SMALLEST_SCALE)
    if power_of_2:
        scale = power_of_2_above(scale)
    usable = torch.isfinite(amax) & (amax > 0) & torch.isfinite(scale)
    previous_scale = torch.as_tensor(previous_scale, dtype=torch.float32, device=amax.device)
    return torch.where(usable, scale, previous_scale)


def amax_reference(x: Tensor, dim: int | None = None) -> Tensor:
    """The largest magnitude of x in float32, NaN if x has one: of all of it [], or kept along `dim`."""
    if dim is None:
        return x.abs().amax().float() if x.numel() else torch.zeros((), device=x.device)
    if not x.shape[dim]:
        shape = list(x.shape)
        shape[dim] = 1
        return torch.zeros(shape, device=x.device)
    return x.abs().amax(dim, keepdim=True).float()


def quantise_reference(x: Tensor, scale: Tensor, kind: Format, counts: Tensor | None = None) -> Tensor:
    """x / scale in `kind`, clamped; scale broadcasts over x. counts: int64 [2]; what was clipped and flushed is added.

    Clipped: finite and above `kind.clipped`. Flushed: became zero and was not.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    scaled = x.to(wide) * (1.0 / scale.float()).to(wide)
    finite = torch.isfinite(x)
    if counts is not None:
        size = scaled.abs()
        counts[0] += ((size > kind.clipped) & finite).sum()
        counts[1] += ((size <= kind.flushed) & (x != 0)).sum()
    clamped = torch.where(finite, scaled.clamp(-kind.largest, kind.largest), torch.nan)
    return clamped.to(kind.dtype)


def dequantise(q: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers that q stands for."""
    return q.to(dtype) * scale.to(dtype)
