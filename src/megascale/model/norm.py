"""The norm in front of a part: LayerNorm or RMSNorm over hidden, with the residual sum before it in the same pass."""

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
from megascale.model.fusion import Flow, recomputes
from megascale.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from megascale.parallel.parameters import local_parameter
from megascale.parallel.tensor import ColumnLinear


@dataclass(frozen=True)
class NormOperators:
    """What model.norm names.

    Attributes:
        norm: (x, weight, bias or None, eps) -> the norm of x [..., H].
        add_norm: (x, residual, weight, bias or None, eps, x_bias or None) -> residual + x + x_bias, and the norm of it,
            in one pass; None: one after the other.
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
    """Let `model.norm` be `name`. bias: whether it has one beside its weight."""
    NORMS.register(name, NormFacts(bias))
    NORM_OPERATORS.register(name, operators)


class Norm(nn.Module):
    """A norm over hidden, on this rank's part of the sequence."""

    def __init__(self, model: ModelConfig, tensors: Sequence[LogicalTensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.eps, self._operators = model.norm_eps, NORM_OPERATORS[model.norm]
        weight, *bias = tensors
        self.weight = local_parameter([weight], 0, 1, dtype)
        self.bias = local_parameter(bias, 0, 1, dtype) if bias else None

    def forward(self, x_SBH: Tensor) -> Tensor:
        own: Any = self._parameters  # as `self.weight` and `self.bias`, which nn.Module looks for in several places
        return self._operators.norm(x_SBH, own["weight"], own.get("bias"), self.eps)

    def of(self, x: Flow) -> tuple[Tensor, Tensor]:
        """x and the norm of it; a sum that is still to be taken is taken and normed in one pass each way."""
        if isinstance(x, Tensor):
            return x, self(x)
        if self._operators.add_norm is None:
            total = x.total()
            return total, self(total)
        own: Any = self._parameters
        return self._operators.add_norm(x.y_SBH, x.residual_SBH, own["weight"], own.get("bias"), self.eps, x.bias)


def norm_and_project(
    norm: Norm, projection: ColumnLinear | None, x: Flow, recompute: str, fused_bias_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """The residual stream as it enters, and the projection of its norm; without a projection the norm itself."""
    if projection is None:
        return norm.of(x)
    if recomputes(recompute, "norms"):
        x_SBH = x if isinstance(x, Tensor) else x.total()
        return x_SBH, projection.forward(x_SBH, norm, fused_bias_gradient)
    x_SBH, normed = norm.of(x)
    return x_SBH, projection.forward(normed, None, fused_bias_gradient)
