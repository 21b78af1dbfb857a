"""The two float8 formats, scales from amaxes, and casts in plain PyTorch.

A scale is the factor from a float8 number to its value: x is about q * scale, and the largest magnitude (amax) maps to
the format's largest number. One float32 scale holds for a whole matrix ("tensor-wise", shape []) or a row of it
("row-wise", shape [rows, 1]).

Finite numbers that are too large are clamped to the largest number. Non-finite numbers become NaN in every format, so
that an overflow in bfloat16 reaches the loss as without float8. An amax of zero, infinity or NaN determines no scale,
and the previous scale stays.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megascale.errors import FitError

# Tensor cores need sizes that are multiples of 16 elements, which are bytes in float8. cuBLASLt needs addresses that
# are multiples of 16 bytes.
ALIGNED = 16

# The float32 reciprocals of smaller scales overflow. A tensor with this scale has an amax near 1e-33, which is zero in
# practice.
SMALLEST_SCALE = 2.0**-120


@dataclass(frozen=True)
class Format:
    """One float8 format.

    Attributes:
        largest: its largest finite number.
        clipped: larger magnitudes are counted as clipped. It is half a step above the largest number.
        flushed: magnitudes up to this become zero. It is half the smallest positive number.
    """

    dtype: torch.dtype
    largest: float
    clipped: float
    flushed: float


E4M3 = Format(torch.float8_e4m3fn, 448.0, 464.0, 2.0**-10)  # activations and weights: more digits
E5M2 = Format(torch.float8_e5m2, 57344.0, 61440.0, 2.0**-17)  # gradients: more range


def view_as_format(x: Tensor, fmt: Format) -> Tensor:
    """Return float8 numbers, or their bytes, as numbers of `fmt`. A view that changes nothing is not made."""
    return x if x.dtype == fmt.dtype else x.view(fmt.dtype)


@dataclass(frozen=True)
class Float8:
    """A matrix [M, N] in float8 and its transpose, since float8 GEMMs read both operands along K.

    Attributes:
        rows: [M, N], or None if not requested.
        rows_scale: float32, [] or [M, 1].
        columns: its transpose [N, M], or None.
        columns_scale: float32, [] (then the same tensor as rows_scale) or [N, 1].
    """

    rows: Tensor | None
    rows_scale: Tensor | None
    columns: Tensor | None
    columns_scale: Tensor | None

    def require_rows(self) -> tuple[Tensor, Tensor]:
        """Return `rows` and `rows_scale`, which must have been requested."""
        assert self.rows is not None
        assert self.rows_scale is not None
        return self.rows, self.rows_scale

    def require_columns(self) -> tuple[Tensor, Tensor]:
        """Return `columns` and `columns_scale`, which must have been requested."""
        assert self.columns is not None
        assert self.columns_scale is not None
        return self.columns, self.columns_scale


def allocate_scales(count: int, device: torch.device | str = "cpu", value: float = 1.0) -> Tensor:
    """Allocate `count` scales (or amaxes), float32 [count], each aligned to 16 bytes.

    cuBLASLt rejects a scale at any other address, as in a plain [count] tensor. An element of the result is a view.
    """
    return torch.full((count, ALIGNED // 4), value, dtype=torch.float32, device=device)[:, 0]


def check_operands(M: int, N: int, K: int, a: torch.dtype, b: torch.dtype) -> None:
    """Raise FitError if tensor cores have no float8 GEMM a [M, K] x b [N, K]^T."""
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
    """Raise FitError for a scale at an address that cuBLASLt rejects."""
    for scale in scales:
        if scale.data_ptr() % ALIGNED or not scale.is_contiguous():
            raise FitError(
                f"a float8 scale {list(scale.shape)} lies {scale.data_ptr() % ALIGNED} bytes past a multiple of "
                f"{ALIGNED} (contiguous: {scale.is_contiguous()}), and cuBLASLt reads scales at multiples of {ALIGNED} "
                "only; keep many scales in one tensor by formats.allocate_scales, or clone this one"
            )


def power_of_2_above(scale: Tensor) -> Tensor:
    """Return the smallest power of two that is at least scale > 0 (float32, normal)."""
    return ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def scale_from_amax(amax: Tensor, fmt: Format, empty_scale: float = 1.0, power_of_2: bool = False) -> Tensor:
    """Return the float32 scale that maps amax to the largest number of `fmt`.

    Args:
        empty_scale: the result for an amax of zero, infinity or NaN.
        power_of_2: round the scale up to a power of two, so that multiplication by it is exact.
    """
    amax = amax.float()
    scale = (amax * (1.0 / fmt.largest)).clamp_min(SMALLEST_SCALE)
    if power_of_2:
        scale = power_of_2_above(scale)
    is_usable = torch.isfinite(amax) & (amax > 0) & torch.isfinite(scale)
    return torch.where(is_usable, scale, empty_scale)


def amax_reference(x: Tensor, dim: int | None = None) -> Tensor:
    """Return the largest magnitude of x in float32, NaN if x has one, over all of x [] or over `dim` (kept)."""
    if dim is None:
        if not x.numel():
            return torch.zeros((), device=x.device)
        return x.abs().amax().float()
    if not x.shape[dim]:
        shape = list(x.shape)
        shape[dim] = 1
        return torch.zeros(shape, device=x.device)
    return x.abs().amax(dim, keepdim=True).float()


def quantise_reference(x: Tensor, scale: Tensor, fmt: Format, counts: Tensor | None = None) -> Tensor:
    """Cast x / scale to `fmt`, clamped; scale broadcasts over x.

    Args:
        counts: int64 [2], increased by the number of clipped elements (finite, magnitude above `fmt.clipped`) and of
            flushed elements (not zero, magnitude up to `fmt.flushed`).
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    scaled = x.to(wide) * (1.0 / scale.float()).to(wide)
    finite = torch.isfinite(x)
    if counts is not None:
        magnitude = scaled.abs()
        counts[0] += ((magnitude > fmt.clipped) & finite).sum()
        counts[1] += ((magnitude <= fmt.flushed) & (x != 0)).sum()
    clamped = torch.where(finite, scaled.clamp(-fmt.largest, fmt.largest), torch.nan)
    return clamped.to(fmt.dtype)


def dequantise(q: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values q * scale."""
    return q.to(dtype) * scale.to(dtype)
