"""The section [model]: the shape of the transformer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from megascale.config.base import DEEP, MOST, Section
from megascale.config.parts import ACTIVATIONS, ATTENTIONS, BLOCKS, MLPS, NORMS
from megascale.errors import ConfigError


class ModelConfig(Section):
    """The transformer's shape. Sizes are counts, not bytes."""

    preset: str | None = Field(None, description="start from a shipped shape, such as gpt2-124m; own keys override")
    layers: int = Field(4, ge=1, le=DEEP, description="number of transformer blocks")
    hidden: int = Field(256, ge=1, le=1_000_000, description="width of the residual stream")
    heads: int = Field(
        4, ge=1, le=1_000_000, description="attention heads; must divide hidden unless head_dim is given"
    )
    kv_heads: int | None = Field(
        None, ge=1, le=1_000_000, description="key/value heads (grouped-query); default: heads"
    )
    head_dim: int | None = Field(None, ge=1, le=1_000_000, description="width of a head; default: hidden / heads")
    ffn_hidden: int | None = Field(None, ge=1, le=100_000_000, description="width inside the MLP; default: 4 x hidden")
    vocab_size: int | None = Field(None, ge=2, le=1_000_000_000, description="default: the tokenizer's")
    sequence_length: int = Field(256, ge=2, le=1_000_000_000, description="tokens in a training sample")
    block: Annotated[str, AfterValidator(BLOCKS.validate_name)] = Field(
        "serial", description="serial: x + MLP(LN(x + Attn(LN x))); parallel: x + Attn(LN x) + MLP(LN x)"
    )
    parallel_norms: Literal[1, 2] = Field(1, description="parallel block: one shared norm (GPT-J) or two (GPT-NeoX)")
    attention: Annotated[str, AfterValidator(ATTENTIONS.validate_name)] = Field(
        "causal", description="which attention a block has"
    )
    mlp: Annotated[str, AfterValidator(MLPS.validate_name)] = Field("dense", description="which MLP a block has")
    norm: Annotated[str, AfterValidator(NORMS.validate_name)] = Field(
        "layernorm",
        description="layernorm: mean and deviation taken out; rmsnorm: divided by the root mean square (Llama)",
    )
    norm_eps: float = Field(1e-5, gt=0, description="added to the variance inside norms")
    activation: Annotated[str, AfterValidator(ACTIVATIONS.validate_name)] = Field(
        "gelu", description="of the MLP: gelu (erf), gelu_tanh (GPT-2's), swiglu (gated, Llama)"
    )
    positions: Literal["learned", "rotary", "none"] = Field(
        "learned", description="learned: an embedding of each position; rotary: queries and keys turned; none"
    )
    rotary_fraction: float = Field(1.0, gt=0, le=1, description="part of each head that rotates")
    rotary_base: float = Field(10000.0, gt=0, description="base of the rotary angles; larger for longer sequences")
    rotary_interleaved: bool = Field(False, description="rotate neighbouring pairs (GPT-J) instead of halves")
    attention_bias: bool = Field(True, description="biases on query, key and value")
    attention_out_bias: bool | None = Field(None, description="bias on the attention output; default: attention_bias")
    mlp_bias: bool = Field(True, description="biases in the MLP")
    head_bias: bool = Field(False, description="bias on the logits (GPT-J)")
    tied_embeddings: bool = Field(True, description="logits use the token embedding")
    window: int | None = Field(
        None, ge=1, le=MOST, description="sliding window: a query sees itself and the window-1 tokens before it"
    )
    window_pattern: str = Field(
        "S", pattern="^[SL]+$", max_length=DEEP, description="repeated over layers: S = windowed, L = full attention"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="on embeddings and residual branches, none in attention")
    init_std: float = Field(0.02, gt=0, description="standard deviation of initial weights")
    vocab_multiple: int = Field(
        128, ge=1, le=1_000_000, description="the stored vocabulary is padded to a multiple of this"
    )

    @property
    def kv(self) -> int:
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
    def gated(self) -> bool:
        """Whether the MLP has a gate (two input projections)."""
        return ACTIVATIONS[self.activation].gated

    @property
    def out_bias(self) -> bool:
        """Whether the attention output projection has a bias."""
        return self.attention_bias if self.attention_out_bias is None else self.attention_out_bias

    @property
    def vocab(self) -> int:
        """Vocabulary size; only valid once the tokenizer (or the user) has set it."""
        if self.vocab_size is None:
            raise ConfigError("model.vocab_size is not set and no data set gives one; set --model.vocab_size=N")
        return self.vocab_size

    @property
    def padded_vocab(self) -> int:
        """Vocabulary rounded up to `vocab_multiple`; rows beyond `vocab` exist in memory only."""
        return -(-self.vocab // self.vocab_multiple) * self.vocab_multiple

    def layer_window(self, layer: int) -> int | None:
        """The sliding window of `layer` (0-based) in tokens, or None for full attention.

        One as long as the training sequence stays a window: generation may go further.
        """
        if self.window is None:
            return None
        return self.window if self.window_pattern[layer % len(self.window_pattern)] == "S" else None

    @model_validator(mode="after")
    def _shapes(self) -> ModelConfig:
        if self.head_dim is None and self.hidden % self.heads:
            raise ValueError(
                f"model.hidden={self.hidden} is not divisible by model.heads={self.heads}; "
                f"choose heads among the divisors of hidden or set model.head_dim"
            )
        if self.heads % self.kv:
            raise ValueError(
                f"model.heads={self.heads} is not a multiple of model.kv_heads={self.kv}; "
                "each key/value head must serve the same number of query heads"
            )
        if self.positions == "rotary":
            self._check_rotary_width()
        return self

    def _check_rotary_width(self) -> None:
        """Raise ValueError unless rotary positions turn at least one pair of each head."""
        width = int(self.head_size * self.rotary_fraction)
        if width % 2:
            raise ValueError(
                f"model.rotary_fraction={self.rotary_fraction} of a head of {self.head_size} gives an odd width; "
                "rotary positions turn pairs, so choose a fraction that gives an even width"
            )
        if width == 0:
            raise ValueError(
                f"model.rotary_fraction={self.rotary_fraction} of a head of {self.head_size} is less than one pair, so "
                "the model would have no positions; choose a fraction that gives at least 2, or set "
                "model.positions=none"
            )
