"""Multi-head latent attention (DeepSeek-V2, section 2.1) as a package of its own would add it: one file.

Keys and values come from a latent vector per token, which is narrower than they are and is all that tensor-parallel
ranks exchange. A part of each key carries the rotary position; all heads share it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megascale.config import ModelConfig
from megascale.core.inventory import LogicalTensor, PartInventory, SavedActivation, linear_tensors
from megascale.core.layer_spec import LayerSpec, RopeSpec
from megascale.model import attention
from megascale.model.context import ForwardContext, LayerSetup, Rotary
from megascale.model.fusion import Branch
from megascale.model.norm import Norm
from megascale.ops.attention import attention as attend
from megascale.ops.rope import apply_rotary
from megascale.parallel.collectives import gather_sequence
from megascale.parallel.parameters import local_parameter
from megascale.parallel.tensor import ColumnLinear, RowLinear

LATENT_FRACTION = 4  # the latent vector has a quarter of the width of all heads


@dataclass(frozen=True)
class LatentSpec:
    """Specification of the mixer.

    Attributes:
        head_size: width of a query, a key and a value; the first half of queries and keys carries the position.
        latent: width of the latent vector.
    """

    name: str
    heads: int
    head_size: int
    latent: int
    rope: RopeSpec

    @classmethod
    def from_model(cls, model: ModelConfig) -> LatentSpec:
        """Return the mixer of a model whose layers are all alike."""
        rope = RopeSpec(model.head_size // 2, model.rotary_base, model.rotary_interleaved)
        return cls(
            model.attention, model.heads, model.head_size, model.heads * model.head_size // LATENT_FRACTION, rope
        )

    @property
    def up_width(self) -> int:
        """Columns that a head reads of the latent vector: a value, and the key's part without a position."""
        return self.head_size + self.head_size - self.rope.width


class LatentAttention(nn.Module):
    """Causal attention over keys and values made from a latent vector."""

    columns: tuple[()] = ()  # it reads the norm itself

    def __init__(self, setup: LayerSetup) -> None:
        super().__init__()
        spec = setup.layer.mixer
        query, down, norm, up, output = setup.tensors.attention
        axis = setup.axis
        self.spec = spec
        self.index = setup.index
        self.axis = axis
        self.heads = spec.heads // axis.size
        self.query = ColumnLinear([query], setup.linears, setup.dtype)
        self.down = local_parameter([down], axis.rank, axis.size, setup.dtype)
        self.norm = Norm("rmsnorm", setup.layer.norms.eps, [norm], setup.dtype)
        self.up = ColumnLinear([up], setup.linears, setup.dtype)
        self.out = RowLinear([output], setup.linears, setup.dtype)

    def forward(self, x_SBH: Tensor, rotary: Rotary, context: ForwardContext) -> Branch:
        """Attend from the norm [s/t, b, h]; return this rank's share of the output."""
        assert rotary is not None
        width = self.spec.rope.width
        q_SBND = self.query(x_SBH).unflatten(-1, (self.heads, -1))
        latent, shared_key = F.linear(x_SBH, self.down).split((self.spec.latent, width), dim=-1)
        up_SBNC = self.up(self.norm(latent)).unflatten(-1, (self.heads, -1))
        key, v_SBND = up_SBNC.split((self.spec.up_width - self.spec.head_size, self.spec.head_size), dim=-1)
        shared_key = gather_sequence(shared_key, self.axis)[:, :, None].expand(-1, -1, self.heads, -1)
        interleaved = self.spec.rope.interleaved
        q_SBND = apply_rotary(q_SBND, *rotary, interleaved)
        k_SBND = apply_rotary(torch.cat((shared_key, key), dim=-1), *rotary, interleaved)
        if context.cache is not None:
            k_SBND, v_SBND = context.cache.extend(self.index, k_SBND, v_SBND, None)
        return Branch(attend(q_SBND, k_SBND, v_SBND, window=None), self.out.weight)


def list_tensors(layer: LayerSpec, name: str) -> list[LogicalTensor]:
    """Return the five tensors. Every tensor-parallel rank has the whole projection to the latent vector."""
    spec = layer.mixer
    width = spec.heads * spec.head_size
    name = f"{name}.attention"
    down = LogicalTensor(
        f"{name}.down.weight", (spec.latent + spec.rope.width, layer.hidden), None, layer.init_std, is_gemm_weight=True
    )
    return [
        *linear_tensors(f"{name}.query", width, layer.hidden, 0, False, layer.init_std),
        down,
        LogicalTensor(f"{name}.latent_norm.weight", (spec.latent,), init_value=1.0),
        *linear_tensors(f"{name}.up", spec.heads * spec.up_width, spec.latent, 0, False, layer.init_std),
        *linear_tensors(f"{name}.output", layer.hidden, width, 1, False, layer.output_init_std),
    ]


def list_saved_activations(layer: LayerSpec) -> list[SavedActivation]:
    """Return queries, keys, values and the result of attention, which backward reads."""
    spec = layer.mixer
    width = spec.heads * spec.head_size
    return [
        SavedActivation("query_key_value", 3 * width, "columns", has_gradient=True),
        SavedActivation("attention_output", width, "columns", has_gradient=True, gemm_input="also"),
        SavedActivation("attention_logsumexp", spec.heads, "columns", is_statistic=True),
    ]


def count_score_flops(layer: LayerSpec, sequence: int) -> float:
    """Return the forward FLOPs per token of scores and weighted values."""
    return 4.0 * sequence * layer.mixer.heads * layer.mixer.head_size


def register() -> None:
    """Register the part as model.attention=latent."""
    inventory = PartInventory(list_tensors, list_saved_activations, count_score_flops, make_spec=LatentSpec.from_model)
    attention.register("latent", LatentAttention, inventory, "keys and values from a latent vector")
