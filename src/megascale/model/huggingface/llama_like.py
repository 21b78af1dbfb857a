"""Model families of transformers with Llama's tensor names, rotary positions, grouped queries and a gated MLP.

Each family is one `LlamaLike` in a file of its own. `LayerRules` describe how windows and positions differ between its
layers. A `Scalar` describes a number that config.json has under a name of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megascale.config import ModelConfig
from megascale.model.huggingface.family import (
    GELU,
    ConfigKeys,
    Family,
    StoredWeight,
    find_unsupported_values,
    list_linear_weights,
)
from megascale.model.huggingface.layer_rules import EQUAL_LAYERS, LayerRules
from megascale.model.huggingface.rotary import ROPE_TYPES, read_rotary, write_rotary

# Norms of a layer by their placement ("parallel": of a parallel block): pairs of the name in the file and the logical
# name, which is this package's name of the parameter.
_LAYER_NORMS = {
    "pre": (("input_layernorm", "norm1"), ("post_attention_layernorm", "norm2")),
    "post": (("post_attention_layernorm", "post_norm1"), ("post_feedforward_layernorm", "post_norm2")),
    "both": (
        ("input_layernorm", "norm1"),
        ("post_attention_layernorm", "post_norm1"),
        ("pre_feedforward_layernorm", "norm2"),
        ("post_feedforward_layernorm", "post_norm2"),
    ),
    "parallel": (("input_layernorm", "norm1"),),
}
# By model.activation: its names in config.json. The first name is written.
_ACTIVATION_NAMES = {
    "swiglu": ["silu", "swish"],
    "swiglu_clamped": ["silu", "swish"],
    "geglu_tanh": ["gelu_pytorch_tanh"] + [name for name, activation in GELU.items() if activation == "gelu_tanh"],
}


@dataclass(frozen=True)
class Scalar:
    """Number of config.json that is a setting of [model].

    Attributes:
        key: key of [model].
        hf_key: key of config.json.
        default: value that the family's class in transformers has if the key is missing. A key with the value null is
            read as None.
        read: converts the value of config.json to that of [model].
        write: returns the value of config.json for a model; None: the value of [model].
        has_value: returns whether config.json can express the model's value of the setting.
    """

    key: str
    hf_key: str
    default: float | None
    read: Callable[[Any], float] = float
    write: Callable[[ModelConfig], Any] | None = None
    has_value: Callable[[ModelConfig], bool] = lambda model: True

    def read_value(self, keys: ConfigKeys) -> float | None:
        """Return the value for [model]."""
        value = keys.get_nullable(self.hf_key, default=self.default)
        if value is None:
            return None
        try:
            return self.read(value)
        except (TypeError, ValueError, ArithmeticError):
            raise keys.make_error(self.hf_key, value, "it must be a positive number") from None

    def write_value(self, model: ModelConfig) -> Any:
        """Return the value for config.json."""
        if self.write is not None:
            return self.write(model)
        return getattr(model, self.key)


@dataclass(frozen=True)
class LlamaLike:
    """Description of a family.

    "Default of KEY" is the value that the family's class in transformers has if config.json lacks KEY.
    "The only supported value" is that of every model of the family.

    Attributes:
        name: `model_type` in config.json.
        architecture: class name in config.json.
        title: name in messages.
        kv_heads: default of num_key_value_heads; None: one per query head.
        head_dim: default of head_dim; None: hidden / heads.
        norm_eps: default of `norm_eps_key`.
        rope_base: default of rope_theta.
        is_tied: default of tie_word_embeddings.
        norm: the only supported value of model.norm.
        norm_eps_key: key of the norms' eps in config.json.
        block: the only supported value of model.block.
        activation: the only supported value of model.activation.
        activation_key: key of the activation in config.json. Files of Gemma have the key hidden_act in addition.
        is_interleaved: whether rotary positions rotate neighbouring elements instead of the two halves of a head.
        rope_types: supported types of scaled rotary positions.
        has_partial_rotary: whether rotary positions may rotate only a part of each head.
        is_fused: whether files store queries, keys and values as one tensor, and gate and up projection as one tensor.
        scalars: numbers in config.json that other families do not have.
        is_embedding_scaled: whether embeddings are multiplied by sqrt(hidden).
        biases: which linear layers of attention have biases. none: no layer; input: query, key and value layers;
            shared: all layers or none, by attention_bias; separate: input layers by attention_bias, and the output
            layer by attention_out_bias.
        has_bias_by_default: default of attention_bias if `biases` is "shared".
        has_sinks: whether each attention head has a sink.
        has_mlp_bias: whether config.json has the key mlp_bias.
        qk_norm, norm_placement: the only supported value of the setting.
        dropout_keys: keys of dropout on residual branches.
        declares_head_dim: whether head_dim is always written. Other families write head_dim only if it is not
            hidden / heads.
        has_divisible_hidden: whether transformers requires hidden to be a multiple of heads.
        layer_rules: how windows and rotary positions differ between layers.
        mlp: the only supported value of model.mlp. Weights of experts are described by `Mixture`.
        ignored_keys, required_values: see Family.
    """

    name: str
    architecture: str
    title: str
    kv_heads: int | None = None
    head_dim: int | None = None
    norm_eps: float = 1e-6
    rope_base: float = 10000.0
    is_tied: bool = False
    norm: str = "rmsnorm"
    norm_eps_key: str = "rms_norm_eps"
    block: str = "serial"
    activation: str = "swiglu"
    activation_key: str = "hidden_act"
    is_interleaved: bool = False
    rope_types: tuple[str, ...] = ROPE_TYPES
    has_partial_rotary: bool = False
    is_fused: bool = False
    scalars: tuple[Scalar, ...] = ()
    is_embedding_scaled: bool = False
    biases: Literal["none", "input", "shared", "separate"] = "none"
    has_bias_by_default: bool = False
    has_sinks: bool = False
    has_mlp_bias: bool = False
    qk_norm: str = "none"
    norm_placement: Literal["pre", "post", "both"] = "pre"
    dropout_keys: tuple[str, ...] = ()
    declares_head_dim: bool = True
    has_divisible_hidden: bool = True
    layer_rules: LayerRules = EQUAL_LAYERS
    mlp: str = "dense"
    ignored_keys: frozenset[str] = frozenset()
    required_values: Mapping[str, Any] = field(default_factory=dict)

    def make_family(self) -> Family:
        """Return the family for import and export."""
        return Family(
            name=self.name,
            architecture=self.architecture,
            prefix="model.",
            head_name="lm_head.weight",
            read_config=self.read_config,
            write_config=self.write_config,
            find_faults=self.find_faults,
            list_weights=self.list_weights,
            ignored_tensors=r"rotary_emb\.inv_freq$",
            ignored_keys=self.ignored_keys,
            required_values=self._list_absent_biases() | dict(self.required_values),
        )

    def _list_absent_biases(self) -> dict[str, bool]:
        """Return keys of biases that the family never has. Files may contain such a key with the value false."""
        required = {}
        if self.biases == "none":
            required["attention_bias"] = False
        if not self.has_mlp_bias:
            required["mlp_bias"] = False
        return required

    def read_config(self, keys: ConfigKeys) -> dict[str, Any]:
        """See Family.read_config."""
        hidden = keys.require_count("hidden_size")
        heads = keys.require_count("num_attention_heads")
        layers = keys.require_layers("num_hidden_layers")
        model = {
            "layers": layers,
            "hidden": hidden,
            "heads": heads,
            # None (from null, or from the default) means one key/value head per query head.
            "kv_heads": keys.get_nullable("num_key_value_heads", default=self.kv_heads) or heads,
            "ffn_hidden": keys.require_count("intermediate_size"),
            "vocab_size": keys.require_count("vocab_size"),
            "sequence_length": keys.require_count("max_position_embeddings"),
            "block": self.block,
            "norm": self.norm,
            "norm_eps": keys.get(self.norm_eps_key, default=self.norm_eps),
            "activation": self._read_activation(keys),
            **self._read_rotary(keys),
            **self._read_biases(keys),
            "mlp_bias": self.has_mlp_bias and keys.get("mlp_bias", default=False),
            "qk_norm": self.qk_norm,
            "attention_sinks": self.has_sinks,
            "norm_placement": self.norm_placement,
            "tied_embeddings": keys.get("tie_word_embeddings", default=self.is_tied),
            "dropout": keys.read_dropout(*self.dropout_keys, attention="attention_dropout"),
            "init_std": keys.get("initializer_range", default=0.02),
        }
        for scalar in self.scalars:
            model[scalar.key] = scalar.read_value(keys)
        if self.is_embedding_scaled:
            model["embedding_multiplier"] = hidden**0.5
        head_dim = keys.get("head_dim", default=self.head_dim or hidden // heads)
        if head_dim * heads != hidden:
            model["head_dim"] = head_dim
        return model | self.layer_rules.read(keys, layers)

    def _read_activation(self, keys: ConfigKeys) -> str:
        """Return model.activation."""
        names = _ACTIVATION_NAMES[self.activation]
        return keys.translate_activation(
            self.activation_key, dict.fromkeys(names, self.activation), names[0], "hidden_act"
        )

    def _read_rotary(self, keys: ConfigKeys) -> dict[str, Any]:
        """Return the keys of [model] for rotary positions that all layers share."""
        if self.layer_rules.reads_rotary:
            return {"positions": "rotary"}  # the rules read the other keys, per kind of layer
        default_fraction = 1.0  # of each head's elements that are rotated
        rotary = read_rotary(keys, default_fraction, "rope_theta", default_base=self.rope_base, types=self.rope_types)
        if rotary["rotary_fraction"] != 1.0 and not self.has_partial_rotary:
            raise keys.make_error(
                "partial_rotary_factor",
                rotary["rotary_fraction"],
                "transformers ignores this key in this family, so its meaning is unclear",
            )
        return rotary | {"rotary_interleaved": self.is_interleaved}

    def _read_biases(self, keys: ConfigKeys) -> dict[str, bool]:
        """Return attention_bias and attention_out_bias of [model]."""
        has_input_bias = self.biases == "input"
        has_output_bias = False
        if self.biases == "shared":
            has_input_bias = has_output_bias = bool(keys.get("attention_bias", default=self.has_bias_by_default))
        elif self.biases == "separate":
            has_input_bias = bool(keys.get("attention_bias", default=True))
            has_output_bias = bool(keys.get("attention_out_bias", default=False))
        return {"attention_bias": has_input_bias, "attention_out_bias": has_output_bias}

    def write_config(self, model: ModelConfig) -> dict[str, Any]:
        """See Family.write_config."""
        config: dict[str, Any] = {
            "num_hidden_layers": model.layers,
            "hidden_size": model.hidden,
            "num_attention_heads": model.heads,
            "num_key_value_heads": model.num_kv_heads,
            "intermediate_size": model.ffn,
            "max_position_embeddings": model.sequence_length,
            self.norm_eps_key: model.norm_eps,
            self.activation_key: _ACTIVATION_NAMES[self.activation][0],
            "attention_dropout": 0.0,
            **dict.fromkeys(self.dropout_keys, model.dropout),
        }
        if not self.layer_rules.reads_rotary:
            config |= write_rotary(model, self.has_partial_rotary)
        for scalar in self.scalars:
            config[scalar.hf_key] = scalar.write_value(model)
        if self.declares_head_dim or model.head_size * model.heads != model.hidden:
            config["head_dim"] = model.head_size
        if self.biases == "shared":
            config["attention_bias"] = model.attention_bias or model.out_bias
        elif self.biases == "separate":
            config |= {"attention_bias": model.attention_bias, "attention_out_bias": model.out_bias}
        if self.has_mlp_bias:
            config["mlp_bias"] = model.mlp_bias
        return config | self.layer_rules.write(model)

    def find_faults(self, model: ModelConfig) -> list[str]:
        """See Family.find_faults."""
        supported: dict[str, list[Any]] = {
            "block": [self.block],
            "norm": [self.norm],
            "activation": [self.activation],
            "positions": ["rotary"],
            "rotary_interleaved": [self.is_interleaved],
            "head_bias": [False],
            "qk_norm": [self.qk_norm],
            "attention_sinks": [self.has_sinks],
            "norm_placement": [self.norm_placement],
            "mlp": [self.mlp],
        }
        scaling = model.rotary_scaling
        if scaling is None or scaling.method in ("none", *self.rope_types):
            supported["rotary_scaling"] = [scaling]
        if not self.has_partial_rotary:
            supported["rotary_fraction"] = [1.0]
        if self.block == "parallel":
            supported["parallel_norms"] = [1]
        for scalar in self.scalars:
            supported[scalar.key] = [getattr(model, scalar.key)]
        if self.is_embedding_scaled:
            supported["embedding_multiplier"] = [model.hidden**0.5]
        if not self.has_mlp_bias:
            supported["mlp_bias"] = [False]
        if self.biases in ("none", "input"):
            supported["out_bias"] = [False]
        if self.biases == "none":
            supported["attention_bias"] = [False]
        faults = find_unsupported_values(
            model,
            self.title,
            supported,
            allows_unrotated=self.layer_rules.allows_unrotated,
            allows_rope_by_kind=self.layer_rules.allows_rope_by_kind,
        )
        faults += self.layer_rules.find_faults(model, self.title)
        for scalar in self.scalars:
            if not scalar.has_value(model):
                value = getattr(model, scalar.key)
                faults.append(f"model.{scalar.key}={value}, which {scalar.hf_key} of {self.title} cannot express")
        if self.has_divisible_hidden and model.hidden % model.heads:
            faults.append(
                f"model.hidden={model.hidden} is not a multiple of model.heads={model.heads}, which {self.title} "
                "requires"
            )
        return faults

    def list_weights(self, model: ModelConfig) -> list[StoredWeight]:
        """See Family.list_weights."""
        has_output_bias = model.out_bias
        has_input_bias = model.attention_bias or self.biases == "input"
        if self.biases == "shared":
            has_input_bias = has_output_bias = model.attention_bias or model.out_bias
        weights = [StoredWeight("model.embed_tokens.weight", ("embedding.token.weight",))]
        for i in range(model.layers):
            weights += self._list_layer_weights(
                model, i, has_input_bias=has_input_bias, has_output_bias=has_output_bias
            )
        weights += list_linear_weights("model.norm", "norm", has_bias=False)
        if model.tied_embeddings:
            return weights
        return [*weights, StoredWeight("lm_head.weight", ("head.weight",))]

    def _list_layer_weights(
        self, model: ModelConfig, layer_index: int, has_input_bias: bool, has_output_bias: bool
    ) -> list[StoredWeight]:
        """Return the stored tensors of a layer.

        Args:
            has_input_bias: whether the projections to query, key and value have biases.
            has_output_bias: whether the projection of attention's output has a bias.
        """
        hf_layer, layer = f"model.layers.{layer_index}", f"layers.{layer_index}"
        norms = dict(_LAYER_NORMS["parallel" if self.block == "parallel" else self.norm_placement])
        if self.qk_norm != "none":
            norms |= {"self_attn.q_norm": "attention.query_norm", "self_attn.k_norm": "attention.key_norm"}
        weights: list[StoredWeight] = []
        for hf_name, name in norms.items():
            weights += list_linear_weights(f"{hf_layer}.{hf_name}", f"{layer}.{name}", has_bias=False)
        if self.is_fused:
            weights += _list_fused_inputs(model, hf_layer, layer)
        else:
            for hf_name, name in (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value")):
                weights += list_linear_weights(
                    f"{hf_layer}.self_attn.{hf_name}", f"{layer}.attention.{name}", has_bias=has_input_bias
                )
            for hf_name, name in (("gate_proj", "gate"), ("up_proj", "in")):
                weights += list_linear_weights(
                    f"{hf_layer}.mlp.{hf_name}", f"{layer}.mlp.{name}", has_bias=model.mlp_bias
                )
        if self.has_sinks:
            weights.append(StoredWeight(f"{hf_layer}.self_attn.sinks", (f"{layer}.attention.sink.weight",)))
        output = f"{layer}.attention.output"
        weights += list_linear_weights(f"{hf_layer}.self_attn.o_proj", output, has_bias=has_output_bias)
        weights += list_linear_weights(f"{hf_layer}.mlp.down_proj", f"{layer}.mlp.out", has_bias=model.mlp_bias)
        return weights


def _list_fused_inputs(model: ModelConfig, hf_layer: str, layer: str) -> list[StoredWeight]:
    """Return the fused input matrices of attention and MLP, which have no biases."""
    qkv = tuple(f"{layer}.attention.{name}.weight" for name in ("query", "key", "value"))
    kv_rows = model.num_kv_heads * model.head_size
    row_counts = (model.heads * model.head_size, kv_rows, kv_rows)
    return [
        StoredWeight(f"{hf_layer}.self_attn.qkv_proj.weight", qkv, row_counts=row_counts),
        StoredWeight(f"{hf_layer}.mlp.gate_up_proj.weight", (f"{layer}.mlp.gate.weight", f"{layer}.mlp.in.weight")),
    ]
