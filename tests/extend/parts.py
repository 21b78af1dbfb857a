"""Parts as somebody outside the package would write them; each registers under a name of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megascale.config import ModelConfig
from megascale.core.inventory import MLP_PARTS, LogicalTensor, PartInventory, SavedActivation, output_init_std
from megascale.core.inventory import linear_tensors as linear_tensors
from megascale.model import block, mlp, norm
from megascale.model.block import SerialBlock
from megascale.model.context import (
    Branch,
    ForwardContext,
    LayerSetup,
    ResidualStream,
    Rotary,
    add_residual,
    sum_branches,
)
from megascale.model.norm import norm_and_project
from megascale.ops import activation
from megascale.ops.gradient_sink import GradientSink
from megascale.ops.linear import Gemms, Operand
from megascale.parallel import linear
from megascale.parallel.collectives import all_reduce
from megascale.parallel.linear import DEFAULT_PRECISION, LinearPrecision
from megascale.parallel.parameters import local_parameter
from megascale.parallel.tensor import ColumnLinear, RowLinear


def squared_relu(x: Tensor) -> Tensor:
    """So et al. 2021."""
    return torch.relu(x) ** 2


def l1_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Normalise by the mean magnitude."""
    return x / (x.abs().mean(-1, keepdim=True) + eps) * weight


class MlpFirst(SerialBlock):
    """A serial block whose halves stand the other way round."""

    def forward(
        self, x: ResidualStream, rotary: Rotary, context: ForwardContext, defer_add: bool = False
    ) -> ResidualStream:
        """As SerialBlock."""
        at, like = self.setup, x if isinstance(x, Tensor) else x.y_SBH
        fused = self.mlp.fuses_bias_gradient(like)
        x_SBH, inner = norm_and_project(self.norm1, self.mlp_in, x, self.recompute, fused)
        y = sum_branches(at.linears, self.mlp(inner, self.mlp_in, self.recompute))
        between = add_residual(at, y, x_SBH, 0, context, True, self.mlp.residual_bias)
        x_SBH, qkv = norm_and_project(self.norm2, self.attention_in, between, self.recompute)
        y = sum_branches(at.linears, self.attention(qkv, rotary, context))
        return add_residual(at, y, x_SBH, 1, context, defer_add, self.attention.residual_bias)


class ScaledMlp(mlp.DenseMlp):
    """A dense MLP whose input columns are scaled by a learnt vector: a part with a tensor of its own."""

    def __init__(self, at: LayerSetup) -> None:
        super().__init__(at)
        scale, self.columns = self.columns[-1], self.columns[:-1]
        self.scale = local_parameter([scale], at.axis.rank, at.axis.size, at.dtype)

    def forward(self, inner: Tensor, projection: ColumnLinear | None, recompute: str) -> Branch:
        """As DenseMlp."""
        return super().forward(inner * self.scale, projection, recompute)


class GatherMlp(nn.Module):
    """A part that names no columns: it gets the norm and makes its own GEMMs, as an expert layer would."""

    columns: tuple[()] = ()
    residual_bias = None

    def __init__(self, at: LayerSetup) -> None:
        super().__init__()
        into, out = at.tensors.mlp
        self.into = ColumnLinear([into], at.linears, at.dtype)
        self.out = RowLinear([out], at.linears, at.dtype)

    def fuses_bias_gradient(self, x: Tensor) -> bool:
        """It has no bias."""
        return False

    def forward(self, normed_SBH: Tensor, projection: ColumnLinear | None, recompute: str) -> Branch:
        """[s/t, b, h] -> its share of the output."""
        assert projection is None
        return Branch(torch.tanh(self.into(normed_SBH)), self.out.weight)


DENSE = MLP_PARTS["dense"]


def scaled_tensors(model: ModelConfig, name: str) -> list[LogicalTensor]:
    """Return the tensors of a dense MLP, and the scale."""
    return DENSE.tensors(model, name) + [LogicalTensor(f"{name}.mlp.scale", (model.ffn,), 0, init_value=0.5)]


def scaled_keeps(model: ModelConfig) -> list[SavedActivation]:
    """Return the saved activations of a dense MLP, and the scaled tensor."""
    return [SavedActivation("mlp_projection", model.ffn, "columns", has_gradient=True)] + DENSE.saved_activations(model)


def gather_tensors(model: ModelConfig, name: str) -> list[LogicalTensor]:
    """Two matrices without biases."""
    into = linear_tensors(f"{name}.mlp.in", model.ffn, model.hidden, 0, False, model.init_std)
    return into + linear_tensors(f"{name}.mlp.out", model.hidden, model.ffn, 1, False, output_init_std(model))


def gather_keeps(model: ModelConfig) -> list[SavedActivation]:
    """The result of tanh, which is what its gradient and the GEMM behind it need."""
    return [SavedActivation("mlp_activation", model.ffn, "columns", has_gradient=True)]


class EightBit(LinearPrecision):
    """Operands of eight bits with one scale, agreed over the tensor axis: a matrix for_gather as its bytes.

    Attributes:
        calls: how often each GEMM was made.
        sent: type of the tensors that GEMMs read.
    """

    calls: ClassVar[Counter[str]] = Counter()
    sent: ClassVar[set[torch.dtype]] = set()

    @property
    def logits(self) -> Gemms:
        """The vocabulary's matrix stays as it is."""
        return DEFAULT_PRECISION

    def _cast(self, x: Tensor) -> Operand:
        scale = all_reduce(x.detach().abs().amax(), self.axis, torch.distributed.ReduceOp.MAX).wait() / 127
        return Operand((x.detach() / scale).round().to(torch.int8), scale)

    def _wide(self, x: Operand) -> Tensor:
        assert x.scale is not None
        self.sent.add(x.data.dtype)
        return x.data * x.scale

    def prepare_input(self, x: Tensor, weight: Tensor, amax: Any = None, for_gather: bool = False) -> Operand:
        """See Gemms."""
        self.calls["input"] += 1
        return self._cast(x)

    def prepare_gradient(self, dy: Tensor, weight: Tensor, for_gather: bool = False) -> Operand:
        """See Gemms."""
        self.calls["gradient"] += 1
        return self._cast(dy)

    def forward(
        self, x: Operand, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None, add: bool = False
    ) -> Tensor:
        """See Gemms."""
        self.calls["forward"] += 1
        return super().forward(Operand(self._wide(x)), weight, bias, out, add)

    def dgrad(self, dy: Operand, weight: Tensor, out: Tensor | None = None, add: bool = False) -> Tensor:
        """See Gemms."""
        self.calls["dgrad"] += 1
        return super().dgrad(Operand(self._wide(dy)), weight, out, add)

    def accumulate_wgrad(self, main: Tensor, dy: Operand, x: Operand, overwrite: bool = False) -> None:
        """See Gemms."""
        self.calls["wgrad"] += 1
        super().accumulate_wgrad(main, Operand(self._wide(dy)), Operand(self._wide(x)), overwrite)


class BlockScaled(LinearPrecision):
    """Activations and gradients of eight bits with one scale per block of a row, as DeepSeek-V3's of 1 x 128.

    Blocks are whole on each rank, so that ranks need not agree. The gradient of a weight reads the quantised numbers.
    """

    BLOCK = 4

    @property
    def logits(self) -> Gemms:
        """The vocabulary's matrix stays as it is."""
        return DEFAULT_PRECISION

    def _quantise(self, x: Tensor) -> Operand:
        blocks = x.detach().unflatten(-1, (-1, self.BLOCK))
        scales = blocks.abs().amax(-1).clamp_min(1e-30) / 127
        return Operand((blocks / scales[..., None]).round().to(torch.int8).flatten(-2), scales)

    def _dequantise(self, x: Operand) -> Operand:
        assert x.scale is not None
        assert x.scale.shape == (*x.data.shape[:-1], x.data.shape[-1] // self.BLOCK)
        return Operand((x.data.unflatten(-1, (-1, self.BLOCK)) * x.scale[..., None]).flatten(-2))

    def prepare_input(self, x: Tensor, weight: Tensor, amax: Any = None, for_gather: bool = False) -> Operand:
        """See Gemms."""
        return self._quantise(x)

    def prepare_gradient(self, dy: Tensor, weight: Tensor, for_gather: bool = False) -> Operand:
        """See Gemms."""
        return self._quantise(dy)

    def forward(
        self, x: Operand, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None, add: bool = False
    ) -> Tensor:
        """See Gemms."""
        return super().forward(self._dequantise(x), weight, bias, out, add)

    def dgrad(self, dy: Operand, weight: Tensor, out: Tensor | None = None, add: bool = False) -> Tensor:
        """See Gemms."""
        return super().dgrad(self._dequantise(dy), weight, out, add)

    def accumulate_wgrad(self, main: Tensor, dy: Operand, x: Operand, overwrite: bool = False) -> None:
        """See Gemms."""
        super().accumulate_wgrad(main, self._dequantise(dy), self._dequantise(x), overwrite)


class Deferred(LinearPrecision):
    """Weight gradients made after all of a backward pass, as a schedule that fills the pipeline with them would.

    Attributes:
        most: how many waited at once.
    """

    most = 0

    def __init__(self, axis: Any = DEFAULT_PRECISION.axis) -> None:
        super().__init__(axis)
        self._later: list[Callable[[], None]] = []

    def accumulate_gradient(
        self, sink: GradientSink, dy: Operand, x: Operand | Callable[[], Operand], after: object = None
    ) -> None:
        """See LinearPrecision."""
        if not self._later:
            torch.autograd.Variable._execution_engine.queue_callback(self.flush)
        self._later.append(lambda: super(Deferred, self).accumulate_gradient(sink, dy, x))
        Deferred.most = max(Deferred.most, len(self._later))

    @torch.no_grad()
    def flush(self) -> None:
        """Make them."""
        later, self._later = self._later, []
        for make in later:
            make()


def register() -> None:
    """All parts of this file, once a process."""
    if "eight_bit" not in linear.LINEARS:
        activation.register("squared_relu", activation.Activation(squared_relu, "squared relu"))
        mlp.register(
            "scaled", ScaledMlp, PartInventory(scaled_tensors, scaled_keeps), "a dense MLP with a learnt scale"
        )
        mlp.register("gather", GatherMlp, PartInventory(gather_tensors, gather_keeps), "makes its own GEMMs")
        norm.register("l1", norm.NormOperators(l1_norm), bias=False)
        block.register("mlp_first", MlpFirst, block.BLOCK_PARTS["serial"], "the MLP before the attention")
        linear.register("eight_bit", EightBit, "eight bits a number")
        linear.register("blocks", BlockScaled, "eight bits a number, a scale a block")
        linear.register("deferred", Deferred, "weight gradients at the end of a backward pass")


def unregister() -> None:
    """Forget them."""
    activation.ACTIVATIONS.remove("squared_relu")
    activation.KINDS.remove("squared_relu")
    norm.NORMS.remove("l1")
    norm.NORM_OPERATORS.remove("l1")
    block.BLOCKS.remove("mlp_first")
    block.BLOCK_MODULES.remove("mlp_first")
    block.BLOCK_PARTS.remove("mlp_first")
    for name in ("scaled", "gather"):
        mlp.MLPS.remove(name)
        mlp.MLP_MODULES.remove(name)
        MLP_PARTS.remove(name)
    for name in ("eight_bit", "blocks", "deferred"):
        linear.LINEAR_PRECISIONS.remove(name)
        linear.LINEARS.remove(name)
