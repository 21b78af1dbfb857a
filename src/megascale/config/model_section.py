"""The section [model]: shape of the transformer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from megascale.config.base import MAX_COUNT, MAX_LAYERS, Section
from megascale.config.experts_section import ExpertsConfig
from megascale.config.parts import ACTIVATIONS, ATTENTIONS, BLOCKS, MLPS, NORMS
from megascale.config.rotary_scaling import RotaryScaling
from megascale.errors import ConfigError


class LayerKind(Section):
    """Settings in which a kind of layer differs from [model]; an unset key has the value of [model]."""

    attention: Annotated[str, AfterValidator(ATTENTIONS.validate_name)] | None = Field(
        None, description="attention of these layers"
    )
    mlp: Annotated[str, AfterValidator(MLPS.validate_name)] | None = Field(None, description="MLP of these layers")
    window: int | None = Field(
        None, ge=0, le=MAX_COUNT, description="sliding window of these layers; 0: full attention"
    )
    positions: Literal["rotary", "none"] | None = Field(
        None, description="rotated queries and keys in these layers, or none"
    )
    rotary_fraction: float | None = Field(None, gt=0, le=1, description="fraction of each head that is rotated")
    rotary_base: float | None = Field(None, gt=0, description="base of the rotary angles")
    rotary_scaling: RotaryScaling | None = Field(None, description="scaling of the rotary angles")
    kv_heads: int | None = Field(None, ge=1, le=1_000_000, description="key/value heads")
    head_dim: int | None = Field(None, ge=1, le=1_000_000, description="width of a head")
    qk_norm: Literal["none", "head", "projection"] | None = Field(None, description="norms of queries and keys")
    attention_sinks: bool | None = Field(None, description="a sink per attention head in these layers")
    ffn_hidden: int | None = Field(None, ge=1, le=100_000_000, description="width inside the MLP")


class LayerKinds(dict[str, LayerKind]):
    """Kinds of layers by letter; hashable, because functions of the model are cached."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


# Kinds of layers that need no table [model.layer_kinds.LETTER]: S is a layer as [model] describes it, L the same with
# full attention instead of the sliding window.
BUILTIN_KINDS = {"S": LayerKind(), "L": LayerKind(window=0)}


class ModelConfig(Section):
    """Shape of the transformer."""

    preset: str | None = Field(
        None, description="shipped shape to start from, such as gpt2-124m; other keys override it"
    )
    layers: int = Field(4, ge=1, le=MAX_LAYERS, description="number of transformer blocks")
    hidden: int = Field(256, ge=1, le=1_000_000, description="width of the residual stream")
    heads: int = Field(
        4, ge=1, le=1_000_000, description="attention heads; must divide hidden unless head_dim is given"
    )
    kv_heads: int | None = Field(
        None, ge=1, le=1_000_000, description="key/value heads (grouped-query); default: heads"
    )
    head_dim: int | None = Field(None, ge=1, le=1_000_000, description="width of a head; default: hidden / heads")
    ffn_hidden: int | None = Field(None, ge=1, le=100_000_000, description="width inside the MLP; default: 4 x hidden")
    vocab_size: int | None = Field(
        None, ge=2, le=1_000_000_000, description="vocabulary size; default: the tokenizer's"
    )
    sequence_length: int = Field(256, ge=2, le=1_000_000_000, description="tokens in a training sample")
    block: Annotated[str, AfterValidator(BLOCKS.validate_name)] = Field(
        "serial", description="serial: x + MLP(LN(x + Attn(LN x))); parallel: x + Attn(LN x) + MLP(LN x)"
    )
    parallel_norms: Literal[1, 2] = Field(1, description="parallel block: one shared norm (GPT-J) or two (GPT-NeoX)")
    attention: Annotated[str, AfterValidator(ATTENTIONS.validate_name)] = Field(
        "causal", description="attention of a block, by registered name"
    )
    mlp: Annotated[str, AfterValidator(MLPS.validate_name)] = Field(
        "dense", description="MLP of a block, by registered name"
    )
    experts: ExpertsConfig | None = Field(
        None,
        description="mixture of experts in layers with model.mlp=experts: [model.experts] with some of "
        + ", ".join(ExpertsConfig.model_fields),
    )
    norm: Annotated[str, AfterValidator(NORMS.validate_name)] = Field(
        "layernorm",
        description="layernorm: subtracts the mean and divides by the deviation; rmsnorm: divides by the root mean "
        "square (Llama); layernorm_no_bias: without the bias (Cohere); rmsnorm_zero_centred: multiplies by 1 + weight "
        "(Gemma)",
    )
    norm_placement: Literal["pre", "post", "both"] = Field(
        "pre",
        description="norms of a serial block; pre: before attention and MLP; post: on what they add to the residual "
        "stream (OLMo 2); both",
    )
    norm_eps: float = Field(1e-5, gt=0, description="added to the variance inside norms")
    activation: Annotated[str, AfterValidator(ACTIVATIONS.validate_name)] = Field(
        "gelu",
        description="activation of the MLP: gelu (erf), gelu_tanh (GPT-2's), swiglu (gated, Llama), geglu_tanh (gated, "
        "Gemma), swiglu_clamped (gated, gpt-oss)",
    )
    positions: Literal["learned", "rotary", "none"] = Field(
        "learned",
        description="positional encoding; learned: an embedding per position; rotary: rotated queries and keys; none",
    )
    rotary_fraction: float = Field(1.0, gt=0, le=1, description="fraction of each head that is rotated")
    rotary_base: float = Field(
        10000.0, gt=0, description="base of the rotary angles (rope theta); larger for longer sequences"
    )
    rotary_interleaved: bool = Field(False, description="rotate neighbouring pairs (GPT-J) instead of halves")
    rotary_scaling: RotaryScaling | None = Field(
        None,
        description="scaling of the rotary angles for a longer context: [model.rotary_scaling] with a method and some "
        "of " + ", ".join(key for key in RotaryScaling.model_fields if key != "method"),
    )
    attention_bias: bool = Field(True, description="biases on query, key and value")
    attention_out_bias: bool | None = Field(None, description="bias on the attention output; default: attention_bias")
    mlp_bias: bool = Field(True, description="biases in the MLP")
    qk_norm: Literal["none", "head", "projection"] = Field(
        "none",
        description="norms of queries and keys before their rotation; head: over each head (Qwen3); projection: over "
        "all heads (OLMo 2)",
    )
    attention_multiplier: float | None = Field(
        None, gt=0, description="factor of attention scores; default: 1 / sqrt(width of a head)"
    )
    attention_softcap: float | None = Field(
        None, gt=0, description="bound c of attention scores x, as c tanh(x / c) (Gemma 2)"
    )
    attention_sinks: bool = Field(
        False,
        description="a learned logit per attention head that takes part in the softmax and has no value (gpt-oss)",
    )
    attention_gate: bool = Field(
        False,
        description="multiply the output of attention by a sigmoid of another projection of its input, as wide as the "
        "queries (Qwen3-Next)",
    )
    logit_softcap: float | None = Field(None, gt=0, description="bound c of logits x, as c tanh(x / c) (Gemma 2)")
    embedding_multiplier: float = Field(1.0, gt=0, description="factor of token embeddings (Gemma, Granite)")
    residual_multiplier: float = Field(
        1.0, gt=0, description="factor of what attention and MLP add to the residual stream (Granite)"
    )
    logit_multiplier: float = Field(1.0, gt=0, description="factor of the logits (Cohere, Granite)")
    head_bias: bool = Field(False, description="bias on the logits (GPT-J)")
    tied_embeddings: bool = Field(True, description="logits use the token embedding")
    window: int | None = Field(
        None, ge=1, le=MAX_COUNT, description="sliding window: a query sees itself and the window-1 tokens before it"
    )
    layer_pattern: str = Field(
        "S",
        pattern="^[A-Z]+$",
        max_length=MAX_LAYERS,
        description="kinds of layers, repeated over the layers: S = as [model] says, L = the same without its window, "
        "another letter = as [model.layer_kinds.LETTER] says",
    )
    layer_kinds: Annotated[dict[str, LayerKind], AfterValidator(LayerKinds)] = Field(
        default_factory=LayerKinds,
        description="settings of a kind of layer that differ from [model]: [model.layer_kinds.L] with some of "
        + ", ".join(LayerKind.model_fields),
    )
    dropout: float = Field(
        0.0, ge=0, lt=1, description="dropout probability on embeddings and residual branches; attention has none"
    )
    init_std: float = Field(0.02, gt=0, description="standard deviation of initial weights")
    vocab_multiple: int = Field(
        128, ge=1, le=1_000_000, description="multiple to which the vocabulary is padded in memory"
    )

    @property
    def num_kv_heads(self) -> int:
        """Number of key/value heads."""
        return self.kv_heads or self.heads

    @property
    def head_size(self) -> int:
        """Width of one head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def ffn(self) -> int:
        """Width inside the MLP."""
        return self.ffn_hidden or 4 * self.hidden

    @property
    def expert_settings(self) -> ExpertsConfig:
        """Settings in [model.experts], or their defaults if the table is absent."""
        return self.experts or ExpertsConfig()

    @property
    def has_gated_mlp(self) -> bool:
        """Whether the MLP has a gate (two input projections)."""
        return ACTIVATIONS[self.activation].gated

    @property
    def out_bias(self) -> bool:
        """Whether the attention output projection has a bias."""
        if self.attention_out_bias is None:
            return self.attention_bias
        return self.attention_out_bias

    @property
    def vocab(self) -> int:
        """Vocabulary size. Raises ConfigError if neither the user nor a tokenizer has set it yet."""
        if self.vocab_size is None:
            raise ConfigError("model.vocab_size is not set and no data set provides it; set --model.vocab_size=N")
        return self.vocab_size

    @property
    def padded_vocab(self) -> int:
        """Vocabulary rounded up to `vocab_multiple`; rows beyond `vocab` exist in memory only."""
        return -(-self.vocab // self.vocab_multiple) * self.vocab_multiple

    def resolve_kind(self, letter: str) -> ModelConfig:
        """Return a copy of the model settings in which every layer is of the kind `letter`."""
        overrides: dict[str, Any] = {}
        # Settings of [model.layer_kinds] override those of a built-in kind.
        for kind in (BUILTIN_KINDS.get(letter, LayerKind()), self.layer_kinds.get(letter, LayerKind())):
            overrides |= {key: value for key, value in kind if value is not None}
        if overrides.get("window") == 0:
            overrides["window"] = None  # 0 is full attention in a kind, and None in [model]
        return self.model_copy(update={**overrides, "layer_pattern": "S", "layer_kinds": LayerKinds()})

    def layer_letters(self) -> Iterator[str]:
        """Yield the letter of each layer's kind."""
        for layer in range(self.layers):
            yield self.layer_pattern[layer % len(self.layer_pattern)]

    @model_validator(mode="after")
    def _check_settings(self) -> ModelConfig:
        """Raise ValueError unless the settings fit each other and each has an effect."""
        self._check_layer()
        defined_kinds = {*BUILTIN_KINDS, *self.layer_kinds}
        for letter in sorted(set(self.layer_pattern) - defined_kinds):
            raise ValueError(
                f"model.layer_pattern={self.layer_pattern!r} has the kind {letter}, which is not defined; define "
                f"[model.layer_kinds.{letter}], or use the kinds {', '.join(sorted(defined_kinds))}"
            )
        for letter, kind in self.layer_kinds.items():
            self._check_kind(letter, kind)
        self._check_experts()
        positions_of_kinds = [self.resolve_kind(letter).positions for letter in set(self.layer_pattern)]
        if self.rotary_scaling is not None and "rotary" not in positions_of_kinds:
            raise ValueError(
                f"model.rotary_scaling has no effect, since model.positions={self.positions}; set "
                "model.positions=rotary, or remove [model.rotary_scaling]"
            )
        if self.head_bias and self.logit_multiplier != 1:
            raise ValueError(
                f"model.logit_multiplier={self.logit_multiplier} needs logits without a bias; set "
                "model.head_bias=false or remove model.logit_multiplier"
            )
        if self.positions == "learned" and self.embedding_multiplier != 1:
            raise ValueError(
                f"model.embedding_multiplier={self.embedding_multiplier} needs positions that are not added to the "
                "embeddings; set model.positions=rotary or remove model.embedding_multiplier"
            )
        return self

    def _check_experts(self) -> None:
        """Raise ValueError unless the settings of experts have an effect and are supported."""
        # A search of layouts loads the settings of models with a hundred layers and a few kinds hundreds of times.
        mlp_by_letter = {letter: self.resolve_kind(letter).mlp for letter in set(self.layer_letters())}
        has_experts = "experts" in mlp_by_letter.values()
        if self.experts is not None and not has_experts:
            raise ValueError(
                f"[model.experts] has no effect, since model.mlp={self.mlp}; set model.mlp=experts, or remove "
                "[model.experts]"
            )
        if not has_experts:
            return
        if self.mlp_bias:
            raise ValueError(
                "model.mlp_bias=true does not apply to model.mlp=experts; set model.mlp_bias=false, and "
                "model.experts.biases=true for experts with biases"
            )
        mlps = [mlp_by_letter[letter] for letter in self.layer_letters()]
        dense_layers = self.expert_settings.dense_layers  # number of first layers that are dense in any case
        if "experts" not in mlps[dense_layers:]:
            raise ValueError(
                f"model.experts.dense_layers={dense_layers} leaves no layer of model.layers={self.layers} with "
                "experts; lower dense_layers, or set model.mlp=dense"
            )
        if dense_layers and "experts" not in mlps[:dense_layers]:
            raise ValueError(
                f"model.experts.dense_layers={dense_layers} has no effect, since model.layer_pattern="
                f"{self.layer_pattern} has no experts in the first {dense_layers} layers; remove dense_layers"
            )

    def _check_kind(self, letter: str, kind: LayerKind) -> None:
        """Raise ValueError unless layer_pattern uses the kind and each of its settings has an effect."""
        name = f"model.layer_kinds.{letter}"
        if letter not in self.layer_pattern:
            raise ValueError(
                f"{name} is defined, and model.layer_pattern={self.layer_pattern!r} has no such layer; use the letter "
                f"in model.layer_pattern, or remove {name}"
            )
        if kind.positions is not None and self.positions == "learned":
            raise ValueError(
                f"{name}.positions={kind.positions} with model.positions=learned, which applies to all layers; "
                "set model.positions to rotary or none"
            )
        resolved = self.resolve_kind(letter)
        for key in ("rotary_base", "rotary_fraction", "rotary_scaling"):
            if getattr(kind, key) is not None and resolved.positions != "rotary":
                raise ValueError(
                    f"{name}.{key}={getattr(kind, key)} has no effect, since the positions of these layers are "
                    f"{resolved.positions}; set {name}.positions=rotary, or remove {name}.{key}"
                )
        try:
            resolved._check_layer()
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    def _check_layer(self) -> None:
        """Raise ValueError unless the sizes of a layer fit each other."""
        if self.head_dim is None and self.hidden % self.heads:
            raise ValueError(
                f"model.hidden={self.hidden} is not divisible by model.heads={self.heads}; "
                f"choose a divisor of hidden, or set model.head_dim"
            )
        if self.heads % self.num_kv_heads:
            raise ValueError(
                f"model.heads={self.heads} is not a multiple of model.kv_heads={self.num_kv_heads}; "
                "choose a number of key/value heads that divides heads"
            )
        if self.qk_norm == "projection" and self.norm != "rmsnorm":
            raise ValueError(
                f"model.qk_norm=projection needs model.norm=rmsnorm, and model.norm is {self.norm}; set "
                "model.norm=rmsnorm or model.qk_norm=head"
            )
        if self.norm_placement != "pre" and self.block != "serial":
            raise ValueError(
                f"model.norm_placement={self.norm_placement} needs model.block=serial, and model.block is "
                f"{self.block}; set model.block=serial or model.norm_placement=pre"
            )
        if self.attention_softcap is not None and not ATTENTIONS[self.attention].bounds_scores:
            raise ValueError(
                f"model.attention_softcap={self.attention_softcap:g} has no effect with model.attention="
                f"{self.attention}, which is registered without bounds_scores=True; remove model.attention_softcap, or "
                "set model.attention=causal"
            )
        if self.positions == "rotary":
            self._check_rotary_width()
            self._check_rotary_factors()

    def _check_rotary_factors(self) -> None:
        """Raise ValueError unless rotary_scaling fits rotary_base (yarn) and the number of rotated pairs (longrope)."""
        if self.rotary_scaling is not None and self.rotary_scaling.method == "yarn" and self.rotary_base <= 1:
            raise ValueError(
                f"model.rotary_base={self.rotary_base} gives all pairs the same angle or growing ones, which "
                "model.rotary_scaling of method yarn cannot divide; set model.rotary_base above 1, such as 10000"
            )
        if self.rotary_scaling is None or self.rotary_scaling.method != "longrope":
            return
        pairs = int(self.head_size * self.rotary_fraction) // 2
        for key in ("short_factors", "long_factors"):
            count = len(getattr(self.rotary_scaling, key))
            if count != pairs:
                raise ValueError(
                    f"model.rotary_scaling.{key} has {count} factors for the {pairs} rotated pairs of a head; give one "
                    "factor per pair"
                )

    def _check_rotary_width(self) -> None:
        """Raise ValueError unless rotary positions rotate at least one pair of each head."""
        width = int(self.head_size * self.rotary_fraction)
        if width % 2:
            raise ValueError(
                f"model.rotary_fraction={self.rotary_fraction} of a head of {self.head_size} gives an odd width; "
                "rotary positions rotate pairs, so choose a fraction that gives an even width"
            )
        if width == 0:
            raise ValueError(
                f"model.rotary_fraction={self.rotary_fraction} of a head of {self.head_size} is less than one pair, so "
                "the model would have no positions; choose a fraction that gives at least 2, or set "
                "model.positions=none"
            )
