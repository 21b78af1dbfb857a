"""Parts as somebody outside the package would write them; each registers under a name of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megascale.config import ModelConfig
from megascale.core.inventory import ATTENTION_PARTS, MLP_PARTS, LogicalTensor, PartInventory, SavedActivation
from megascale.core.inventory import linear_tensors as linear_tensors
from megascale.core.layer_spec import LayerSpec
from megascale.model import attention, block, mlp, norm
from megascale.model.block import SerialBlock
from megascale.model.context import ForwardContext, LayerSetup, Rotary
from megascale.model.fusion import Branch, ResidualStream, add_branches, norm_and_project
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
        setup = self.setup
        x_SBH, inner = norm_and_project(self.norm1, self.mlp_in, x, reader=self.mlp)
        fed = self.mlp(inner, self.mlp_in)
        middle = add_branches(setup, x_SBH, [fed], context, defer_add=True)
        x_SBH, qkv = norm_and_project(self.norm2, self.attention_in, middle)
        attended = self.attention(qkv, rotary, context)
        return add_branches(setup, x_SBH, [attended], context, sum_index=1, defer_add=defer_add)


class ScaledMlp(mlp.DenseMlp):
    """A dense MLP whose input columns are scaled by a learnt vector: a part with a tensor of its own."""

    def __init__(self, at: LayerSetup) -> None:
        super().__init__(at)
        scale, self.columns = self.columns[-1], self.columns[:-1]
        self.scale = local_parameter([scale], at.axis.rank, at.axis.size, at.dtype)

    def forward(self, inner: Tensor, projection: ColumnLinear | None) -> Branch:
        """As DenseMlp."""
        return super().forward(inner * self.scale, projection)


class GatherMlp(nn.Module):
    """A part that names no columns: it gets the norm and makes its own GEMMs, as an expert layer would."""

    columns: tuple[()] = ()

    def __init__(self, at: LayerSetup) -> None:
        super().__init__()
        into, out = at.tensors.mlp
        self.into = ColumnLinear([into], at.linears, at.dtype)
        self.out = RowLinear([out], at.linears, at.dtype)

    def fuses_bias_gradient(self, x: Tensor) -> bool:
        """It has no bias."""
        return False

    def forward(self, normed_SBH: Tensor, projection: ColumnLinear | None) -> Branch:
        """[s/t, b, h] -> its share of the output."""
        assert projection is None
        return Branch(torch.tanh(self.into(normed_SBH)), self.out.weight)


@dataclass(frozen=True)
class AverageSpec:
    """Specification of a mixer that is no attention: its width."""

    name: str
    width: int

    @classmethod
    def from_model(cls, model: ModelConfig) -> AverageSpec:
        """Return the mixer of a model whose layers are all alike."""
        return cls(model.attention, model.heads * model.head_size)


class Average(nn.Module):
    """A mixer that gives each token the mean of the values of all tokens up to it."""

    def __init__(self, setup: LayerSetup) -> None:
        super().__init__()
        value, output = setup.tensors.attention
        self.columns = [value]
        self.out = RowLinear([output], setup.linears, setup.dtype)

    def forward(self, values_SBC: Tensor, rotary: Rotary, context: ForwardContext) -> Branch:
        """[s, b, columns/t] -> its share of the output."""
        counts = torch.arange(1, values_SBC.shape[0] + 1, dtype=values_SBC.dtype, device=values_SBC.device)
        return Branch(values_SBC.cumsum(0) / counts[:, None, None], self.out.weight)


def average_tensors(layer: LayerSpec, name: str) -> list[LogicalTensor]:
    """Two matrices without biases."""
    width = layer.mixer.width
    value = linear_tensors(f"{name}.attention.value", width, layer.hidden, 0, False, layer.init_std)
    return value + linear_tensors(f"{name}.attention.output", layer.hidden, width, 1, False, layer.output_init_std)


def average_saved_activations(layer: LayerSpec) -> list[SavedActivation]:
    """The means, which the GEMM behind them needs."""
    return [SavedActivation("means", layer.mixer.width, "columns", has_gradient=True, gemm_input="only")]


DENSE = MLP_PARTS["dense"]


def scaled_tensors(layer: LayerSpec, name: str) -> list[LogicalTensor]:
    """Return the tensors of a dense MLP, and the scale."""
    width = layer.feed_forward.width
    return DENSE.tensors(layer, name) + [LogicalTensor(f"{name}.mlp.scale", (width,), 0, init_value=0.5)]


def scaled_keeps(layer: LayerSpec) -> list[SavedActivation]:
    """Return the saved activations of a dense MLP, and the scaled tensor."""
    scaled = SavedActivation("mlp_projection", layer.feed_forward.width, "columns", has_gradient=True)
    return [scaled] + DENSE.saved_activations(layer)


def gather_tensors(layer: LayerSpec, name: str) -> list[LogicalTensor]:
    """Two matrices without biases."""
    width = layer.feed_forward.width
    into = linear_tensors(f"{name}.mlp.in", width, layer.hidden, 0, False, layer.init_std)
    return into + linear_tensors(f"{name}.mlp.out", layer.hidden, width, 1, False, layer.output_init_std)


def gather_keeps(layer: LayerSpec) -> list[SavedActivation]:
    """The result of tanh, which is what its gradient and the GEMM behind it need."""
    return [SavedActivation("mlp_activation", layer.feed_forward.width, "columns", has_gradient=True)]


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
        assert x.scale.shape == x.data.shape[:-1] + (x.data.shape[-1] // self.BLOCK,)
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
        average = PartInventory(
            average_tensors, average_saved_activations, lambda layer, sequence: 1.0, make_spec=AverageSpec.from_model
        )
        attention.register("average", Average, average, "the mean of all values up to a token")
        norm.register("l1", norm.NormOperators(l1_norm), bias=False)
        block.register("mlp_first", MlpFirst, replace(block.BLOCK_PARTS["serial"], can_split=False), "the MLP first")
        linear.register("eight_bit", EightBit, "eight bits a number")
        linear.register("blocks", BlockScaled, "eight bits a number, a scale a block")
        linear.register("deferred", Deferred, "weight gradients at the end of a backward pass")


def unregister() -> None:
    """Forget them."""
    activation.ACTIVATIONS.remove("squared_relu")
    activation.ACTIVATION_OPERATORS.remove("squared_relu")
    attention.ATTENTIONS.remove("average")
    attention.ATTENTION_MODULES.remove("average")
    ATTENTION_PARTS.remove("average")
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
