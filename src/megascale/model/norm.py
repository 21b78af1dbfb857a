"""Norms of the residual stream, of queries and of keys, and the registry of their operators.

A value of model.norm is in two registries: `NORMS` holds its facts for the configuration, `NORM_OPERATORS` its code.
The operator of a norm may also compute the residual sum that precedes the norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megascale.config.parts import NORMS, NormFacts
from megascale.config.registry import Registry
from megascale.core.inventory_records import LogicalTensor
from megascale.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from megascale.parallel.collectives import SINGLE_RANK, Axis
from megascale.parallel.column_norm import rms_norm_columns
from megascale.parallel.module import DirectModule
from megascale.parallel.parameters import local_parameter


@dataclass(frozen=True)
class NormOperators:
    """Operators of one value of model.norm.

    Attributes:
        norm: (x, weight, bias or None, eps) -> the norm of x [..., H].
        add_norm: (x, residual, weight, bias or None, eps, x_bias or None) -> the sum residual + x + x_bias, and the
            norm of the sum, in one pass; None: sum and norm run separately.
    """

    norm: Callable[[Tensor, Tensor, Tensor | None, float], Tensor]
    add_norm: Callable[[Tensor, Tensor, Tensor, Tensor | None, float, Tensor | None], tuple[Tensor, Tensor]] | None = (
        None
    )


def _layer_norm_with_bias(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    assert bias is not None
    return layer_norm(x, weight, bias, eps)


def _zero_centred_rms_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return RMSNorm with the gain 1 + weight, in float32 because bfloat16 would round small weights away."""
    return rms_norm(x, _widen(weight) + 1, eps)


def _add_zero_centred_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, x_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    return add_rms_norm(x, residual, _widen(weight) + 1, None, eps, x_bias)


def _widen(weight: Tensor) -> Tensor:
    return weight.to(torch.promote_types(weight.dtype, torch.float32))


NORM_OPERATORS: Registry[NormOperators] = Registry(
    NORMS.key,
    {
        # `layer_norm` and `add_layer_norm` both accept a bias or None. `core.inventory_records.norm_tensors` gives each
        # norm a bias or none, so that the assertion is only a check.
        "layernorm": NormOperators(_layer_norm_with_bias, add_layer_norm),
        "layernorm_no_bias": NormOperators(layer_norm, add_layer_norm),
        "rmsnorm_zero_centred": NormOperators(_zero_centred_rms_norm, _add_zero_centred_rms_norm),
        "rmsnorm": NormOperators(lambda x, weight, bias, eps: rms_norm(x, weight, eps), add_rms_norm),
    },
)


def register(name: str, operators: NormOperators, bias: bool) -> None:
    """Register a value of model.norm. `bias`: whether the norm has a bias."""
    NORMS.register(name, NormFacts(bias))
    NORM_OPERATORS.register(name, operators)


class Norm(DirectModule):
    """Norm over the last dimension.

    A DirectModule is an nn.Module with faster access to its parameters.

    Args:
        name: value of model.norm.
        eps: constant that is added to the variance.
        tensors: the norm's weight, and its bias if it has one.
        is_recomputed: whether backward recomputes the norm instead of saving it. `fusion.norm_and_project` reads it
            and lets the projection that follows call `forward`, in forward and again in backward.
        axis: for norms of queries and keys the tensor-parallel axis. It divides the weight if model.qk_norm is
            "projection". `normalise_queries_and_keys` then replaces `forward`, which covers this rank's columns only.
    """

    def __init__(
        self,
        name: str,
        eps: float,
        tensors: Sequence[LogicalTensor],
        dtype: torch.dtype,
        is_recomputed: bool = False,
        axis: Axis = SINGLE_RANK,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.is_recomputed = is_recomputed
        self._operators = NORM_OPERATORS[name]
        weight, *bias = tensors
        self.weight = local_parameter([weight], axis.rank, axis.size, dtype)
        self.bias = local_parameter(bias, axis.rank, axis.size, dtype) if bias else None

    @property
    def has_fused_add(self) -> bool:
        """Whether `add_and_norm` is available."""
        return self._operators.add_norm is not None

    def forward(self, x_SBH: Tensor) -> Tensor:
        """Return the norm of x, with the shape of x."""
        return self._operators.norm(x_SBH, self.weight, self.bias, self.eps)

    def add_and_norm(self, y_SBH: Tensor, residual_SBH: Tensor, y_bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return residual + y + y_bias and its norm, computed in one pass, forward and backward."""
        assert self._operators.add_norm is not None
        return self._operators.add_norm(y_SBH, residual_SBH, self.weight, self.bias, self.eps, y_bias)


def normalise_queries_and_keys(
    q_SBND: Tensor, k_SBGD: Tensor, query_norm: Norm, key_norm: Norm, axis: Axis
) -> tuple[Tensor, Tensor]:
    """Normalise queries over all query heads of the model, and keys over all key heads (model.qk_norm=projection).

    Both norms are RMSNorm with one eps: the configuration refuses every other model.norm, and norm_eps is the model's.

    Args:
        axis: the tensor-parallel axis, which divides the heads between ranks.
    """
    q = q_SBND.flatten(-2)
    k = k_SBGD.flatten(-2)
    if axis.size == 1:
        q = query_norm(q)
        k = key_norm(k)
    else:
        q, k = rms_norm_columns(q, k, query_norm.weight, key_norm.weight, query_norm.eps, axis)
    return q.view(q_SBND.shape), k.view(k_SBGD.shape)
