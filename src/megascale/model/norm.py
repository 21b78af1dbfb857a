"""Norm before a part: LayerNorm or RMSNorm over hidden, fused with the preceding residual sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megascale.config import ModelConfig
from megascale.config.parts import NORMS, NormFacts
from megascale.config.registry import Registry
from megascale.core.inventory import LogicalTensor
from megascale.model.context import ResidualStream, is_recomputed
from megascale.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from megascale.parallel.parameters import local_parameter
from megascale.parallel.tensor import ColumnLinear


@dataclass(frozen=True)
class NormOperators:
    """Operators of a norm, by the name in model.norm.

    Attributes:
        norm: (x, weight, bias or None, eps) -> the norm of x [..., H].
        add_norm: (x, residual, weight, bias or None, eps, x_bias or None) -> residual + x + x_bias, and the norm of it,
            in one pass; None: sum and norm run separately.
    """

    norm: Callable[[Tensor, Tensor, Tensor | None, float], Tensor]
    add_norm: Callable[[Tensor, Tensor, Tensor, Tensor | None, float, Tensor | None], tuple[Tensor, Tensor]] | None = (
        None
    )


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    assert bias is not None
    return layer_norm(x, weight, bias, eps)


NORM_OPERATORS: Registry[NormOperators] = Registry(
    NORMS.key,
    {
        "layernorm": NormOperators(_layer_norm, add_layer_norm),
        "rmsnorm": NormOperators(lambda x, weight, bias, eps: rms_norm(x, weight, eps), add_rms_norm),
    },
)


def register(name: str, operators: NormOperators, bias: bool) -> None:
    """Register a norm as a value of model.norm; `bias` tells whether it has a bias."""
    NORMS.register(name, NormFacts(bias))
    NORM_OPERATORS.register(name, operators)


class Norm(nn.Module):
    """Norm over hidden, on this rank's part of the sequence."""

    def __init__(self, model: ModelConfig, tensors: Sequence[LogicalTensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.eps, self._operators = model.norm_eps, NORM_OPERATORS[model.norm]
        weight, *bias = tensors
        self.weight = local_parameter([weight], 0, 1, dtype)
        self.bias = local_parameter(bias, 0, 1, dtype) if bias else None

    def forward(self, x_SBH: Tensor) -> Tensor:
        """Return the norm of x."""
        parameters: Any = (
            self._parameters
        )  # faster than `self.weight`, which nn.Module looks up in several dictionaries
        return self._operators.norm(x_SBH, parameters["weight"], parameters.get("bias"), self.eps)

    def add_and_norm(self, x: ResidualStream) -> tuple[Tensor, Tensor]:
        """Return x and its norm. A deferred sum and its norm are computed in one pass, forward and backward."""
        if isinstance(x, Tensor):
            return x, self(x)
        if self._operators.add_norm is None:
            total = x.add()
            return total, self(total)
        weight: Any = self._parameters["weight"]
        bias = self._parameters.get("bias")
        return self._operators.add_norm(x.y_SBH, x.residual_SBH, weight, bias, self.eps, x.bias)


def norm_and_project(
    norm: Norm, projection: ColumnLinear | None, x: ResidualStream, recompute: str, fused_bias_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the residual stream, and the projection of its norm (without a projection, the norm)."""
    if projection is None:
        return norm.add_and_norm(x)
    if is_recomputed(recompute, "norms"):
        x_SBH = x if isinstance(x, Tensor) else x.add()
        return x_SBH, projection.forward(x_SBH, norm, fused_bias_gradient)
    x_SBH, normed = norm.add_and_norm(x)
    return x_SBH, projection.forward(normed, None, fused_bias_gradient)
