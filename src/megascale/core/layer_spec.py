"""Specifications of layers: a mixer, a feed-forward and norms, each with its own settings. No torch.

`inventory.resolve_layers` makes one specification per layer from the configuration. Tensors, FLOPs, memory, traffic and
modules derive from the specifications, so the layers of a model may differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megascale.config import ModelConfig
from megascale.config.experts_section import ExpertsConfig
from megascale.config.parts import ACTIVATIONS, NORMS
from megascale.config.rotary_scaling import RotaryScaling


@dataclass(frozen=True)
class RopeSpec:
    """Rotary positions of an attention.

    Attributes:
        width: number of entries of a head that are rotated, from the first one on.
        interleaved: whether a pair is two neighbouring entries, instead of one entry of each half of the rotated width.
        scaling: scaling of the angles; None: no scaling.
    """

    width: int
    base: float
    interleaved: bool
    scaling: RotaryScaling | None = None


@dataclass(frozen=True)
class AttentionSpec:
    """Mixer that attends with grouped queries.

    Attributes:
        name: registered name, a value of model.attention.
        window: number of tokens that a query sees, itself included; None: all tokens before it.
        rope: rotary positions; None: the attention has no positions.
        input_bias, output_bias: whether the projections have biases.
        qk_norm: what a norm of queries and keys spans before their rotation: each "head", or the whole "projection".
            These norms are of the same kind as the layer's norms. None: no such norms.
        multiplier: factor of the scores; None: 1 / sqrt(head_size).
        softcap: bound c of the scores x, as c tanh(x / c); None: no bound.
        has_sinks: whether each head has a learned logit that takes part in the softmax and has no value.
        has_gate: whether a sigmoid of another projection of the input multiplies the output.
    """

    name: str
    heads: int
    kv_heads: int
    head_size: int
    window: int | None
    rope: RopeSpec | None
    input_bias: bool
    output_bias: bool
    qk_norm: Literal["head", "projection"] | None
    multiplier: float | None = None
    softcap: float | None = None
    has_sinks: bool = False
    has_gate: bool = False

    @classmethod
    def from_model(cls, model: ModelConfig) -> AttentionSpec:
        """Return the attention that the model's settings describe."""
        multiplier = model.attention_multiplier
        if multiplier == model.head_size**-0.5:
            multiplier = None
        rope = None
        if model.positions == "rotary":
            width = int(model.head_size * model.rotary_fraction)
            rope = RopeSpec(width, model.rotary_base, model.rotary_interleaved, model.rotary_scaling)
        return cls(
            name=model.attention,
            heads=model.heads,
            kv_heads=model.num_kv_heads,
            head_size=model.head_size,
            window=model.window,
            rope=rope,
            input_bias=model.attention_bias,
            output_bias=model.out_bias,
            qk_norm=None if model.qk_norm == "none" else model.qk_norm,
            multiplier=multiplier,
            softcap=model.attention_softcap,
            has_sinks=model.attention_sinks,
            has_gate=model.attention_gate,
        )


@dataclass(frozen=True)
class DenseSpec:
    """Dense feed-forward (MLP): every token passes all matrices.

    Attributes:
        name: registered name, a value of model.mlp.
        width: width of the hidden activation.
        activation: value of model.activation.
        bias: whether the projections have biases.
    """

    name: str
    width: int
    activation: str
    bias: bool

    @classmethod
    def from_model(cls, model: ModelConfig) -> DenseSpec:
        """Return the feed-forward that the model's settings describe."""
        return cls(name=model.mlp, width=model.ffn, activation=model.activation, bias=model.mlp_bias)

    @property
    def input_width(self) -> int:
        """Columns of the input projection: twice the width with a gate."""
        if self.is_gated:
            return 2 * self.width
        return self.width

    @property
    def is_gated(self) -> bool:
        """True if the activation multiplies two projections."""
        return ACTIVATIONS[self.activation].gated


@dataclass(frozen=True)
class ExpertsSpec:
    """Feed-forward of many experts, of which a token passes a few, and possibly a shared MLP.

    Attributes:
        name: registered name, a value of model.mlp.
        width: width of an expert's hidden activation.
        activation: value of model.activation.
        settings: the table [model.experts].
        bias: always False. Biases of experts (`settings.biases`) are tensors of their own, not of a linear layer.
    """

    name: str
    width: int
    activation: str
    settings: ExpertsConfig
    bias: bool = False

    @classmethod
    def from_model(cls, model: ModelConfig) -> ExpertsSpec:
        """Return the feed-forward that the model's settings describe."""
        settings = model.expert_settings
        return cls(name=model.mlp, width=settings.width or model.ffn, activation=model.activation, settings=settings)

    @property
    def input_matrices(self) -> int:
        """Input matrices of an expert: two with a gate."""
        return 2 if ACTIVATIONS[self.activation].gated else 1

    @property
    def shared(self) -> DenseSpec | None:
        """The MLP that every token passes, if there is one."""
        if not self.settings.shared_width:
            return None
        return DenseSpec(name="dense", width=self.settings.shared_width, activation=self.activation, bias=False)


@dataclass(frozen=True)
class NormsSpec:
    """Norms of a layer and their placement.

    Attributes:
        block: registered name of the composition, a value of model.block.
        name: registered name of the norm, a value of model.norm.
        eps: added to the variance.
        count: number of norms before attention and MLP; the second one stands before the MLP.
        placement: value of model.norm_placement. "post" has no norms before attention and MLP.
    """

    block: str
    name: str
    eps: float
    count: int
    placement: Literal["pre", "post", "both"] = "pre"

    @property
    def has_pre(self) -> bool:
        """True if norms stand before attention and MLP."""
        return self.placement != "post"

    @property
    def has_post(self) -> bool:
        """True if the outputs of attention and MLP are normalised before they are added to the residual stream."""
        return self.placement != "pre"

    @property
    def moments(self) -> int:
        """Number of statistics per token that a norm saves: 2 for LayerNorm, 1 for RMSNorm."""
        return NORMS[self.name].moments


@dataclass(frozen=True)
class LayerSpec:
    """Layer of a model; equal layers have equal specifications.

    Attributes:
        hidden: width of the residual stream.
        init_std: standard deviation of initial weights.
        output_init_std: the same for the output matrices of attention and MLP (GPT-2).
        mixer: an AttentionSpec, or the specification of a registered attention, which has a `name`.
        feed_forward: a DenseSpec, or the specification of a registered MLP, which has a `name`.
        residual_multiplier: factor of the outputs that attention and MLP add to the residual stream.
    """

    hidden: int
    init_std: float
    output_init_std: float
    mixer: Any
    feed_forward: Any
    norms: NormsSpec
    residual_multiplier: float = 1.0

    @property
    def window(self) -> int | None:
        """Sliding window of the mixer in tokens; None: full attention, or a mixer without windows.

        A window as long as the training sequence remains a window, because generation may exceed that length.
        """
        return getattr(self.mixer, "window", None)

    @property
    def rope(self) -> RopeSpec | None:
        """Rotary positions of the mixer, if it has any."""
        return getattr(self.mixer, "rope", None)
