"""Families that have Llama's tensor names: serial block, RMSNorm, SwiGLU, rotary halves, grouped queries.

A family is one `LlamaLike` in a file of its own. What its layers differ in (windows, positions) is a `LayerRules`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from megascale.config import ModelConfig
from megascale.core.inventory import resolve_layers
from megascale.model.huggingface.family import (
    ConfigKeys,
    Family,
    StoredWeight,
    find_unsupported_values,
    find_window_faults,
    linear_weights,
    list_windowed_layers,
)
from megascale.model.huggingface.rotary import read_rotary, write_rotary

_SLIDING, _FULL = "sliding_attention", "full_attention"
# Norms of a layer by their placement: the name in the file, and ours.
_LAYER_NORMS = {
    "pre": (("input_layernorm", "norm1"), ("post_attention_layernorm", "norm2")),
    "post": (("post_attention_layernorm", "post_norm1"), ("post_feedforward_layernorm", "post_norm2")),
}


@dataclass(frozen=True)
class LayerRules:
    """What the layers of a family differ in; by default all layers are alike, without windows.

    Attributes:
        read: keys of [model] for a number of layers.
        write: keys of config.json.
        find_faults: reasons why a model's layers are not of the family, given its title.
        allows_unrotated: whether layers may be without rotary positions.
    """

    read: Callable[[ConfigKeys, int], dict[str, Any]] = lambda keys, layers: {}
    write: Callable[[ModelConfig], dict[str, Any]] = lambda model: {}
    find_faults: Callable[[ModelConfig, str], list[str]] = find_window_faults
    allows_unrotated: bool = False


@dataclass(frozen=True)
class LlamaLike:
    """Description of a family; a default is the value that its class has for a missing key.

    Attributes:
        name: `model_type` in config.json.
        architecture: class name in config.json.
        title: name in messages.
        kv_heads: default of num_key_value_heads; None: one per head.
        head_dim: default of head_dim; None: hidden / heads.
        norm_eps: default of rms_norm_eps.
        rope_base: default of rope_theta.
        is_tied: default of tie_word_embeddings.
        biases: biases of attention; none; input: always on queries, keys and values; shared: on all or none, by
            attention_bias; separate: attention_bias and attention_out_bias.
        has_mlp_bias: whether it reads mlp_bias.
        qk_norm, norm_placement: the only value of the setting.
        dropout_keys: keys of dropout on residual branches.
        declares_head_dim: whether the class declares head_dim; the other classes accept it.
        divides_hidden: whether transformers requires hidden to be a multiple of heads.
        layers: what its layers differ in.
        mlp: the only value of the setting; the weights of other feed-forwards than dense ones are not the base's.
    """

    name: str
    architecture: str
    title: str
    kv_heads: int | None = None
    head_dim: int | None = None
    norm_eps: float = 1e-6
    rope_base: float = 10000.0
    is_tied: bool = False
    biases: Literal["none", "input", "shared", "separate"] = "none"
    has_mlp_bias: bool = False
    qk_norm: str = "none"
    norm_placement: Literal["pre", "post"] = "pre"
    dropout_keys: tuple[str, ...] = ()
    declares_head_dim: bool = True
    divides_hidden: bool = True
    layers: LayerRules = LayerRules()
    mlp: str = "dense"

    def make_family(self) -> Family:
        """Return the family for import and export."""
        return Family(
            name=self.name,
            architecture=self.architecture,
            prefix="model.",
            head="lm_head.weight",
            read_config=self.read_config,
            write_config=self.write_config,
            find_faults=self.find_faults,
            list_weights=self.list_weights,
            buffers=r"rotary_emb\.inv_freq$",
        )

    def read_config(self, keys: ConfigKeys) -> dict[str, Any]:
        """See Family.read_config."""
        hidden, heads = keys.require_count("hidden_size"), keys.require_count("num_attention_heads")
        layers = keys.require_layers("num_hidden_layers")
        model = {
            "layers": layers,
            "hidden": hidden,
            "heads": heads,
            # A missing key means the class's default, null means one per head.
            "kv_heads": keys.get_present("num_key_value_heads", default=self.kv_heads) or heads,
            "ffn_hidden": keys.require_count("intermediate_size"),
            "vocab_size": keys.require_count("vocab_size"),
            "sequence_length": keys.require_count("max_position_embeddings"),
            "norm": "rmsnorm",
            "norm_eps": keys.get("rms_norm_eps", default=self.norm_eps),
            "activation": keys.translate("hidden_act", {"silu": "swiglu", "swish": "swiglu"}, "silu"),
            **read_rotary(keys, 1.0, "rope_theta", default_base=self.rope_base),
            **self._read_biases(keys),
            "mlp_bias": self.has_mlp_bias and keys.get("mlp_bias", default=False),
            "qk_norm": self.qk_norm,
            "norm_placement": self.norm_placement,
            "tied_embeddings": keys.get("tie_word_embeddings", default=self.is_tied),
            "dropout": keys.read_dropout(*self.dropout_keys, attention="attention_dropout"),
            "init_std": keys.get("initializer_range", default=0.02),
        }
        if model["rotary_fraction"] != 1.0:
            raise keys.make_error(
                "partial_rotary_factor",
                model["rotary_fraction"],
                "transformers ignores it here, so its meaning is unclear",
            )
        head_dim = keys.get("head_dim", default=self.head_dim or hidden // heads)
        if head_dim * heads != hidden:
            model["head_dim"] = head_dim
        return model | self.layers.read(keys, layers)

    def _read_biases(self, keys: ConfigKeys) -> dict[str, bool]:
        """Return attention_bias and attention_out_bias of [model]."""
        has_input_bias = self.biases == "input"
        has_output_bias = False
        if self.biases == "shared":
            has_input_bias = has_output_bias = bool(keys.get("attention_bias", default=False))
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
            "rms_norm_eps": model.norm_eps,
            "hidden_act": "silu",
            **write_rotary(model),
            "attention_dropout": 0.0,
            **dict.fromkeys(self.dropout_keys, model.dropout),
        }
        if self.declares_head_dim or model.head_size * model.heads != model.hidden:
            config["head_dim"] = model.head_size
        if self.biases == "shared":
            config["attention_bias"] = model.attention_bias or model.out_bias
        elif self.biases == "separate":
            config |= {"attention_bias": model.attention_bias, "attention_out_bias": model.out_bias}
        if self.has_mlp_bias:
            config["mlp_bias"] = model.mlp_bias
        return config | self.layers.write(model)

    def find_faults(self, model: ModelConfig) -> list[str]:
        """See Family.find_faults."""
        supported: dict[str, list[Any]] = {
            "block": ["serial"],
            "norm": ["rmsnorm"],
            "activation": ["swiglu"],
            "positions": ["rotary"],
            "rotary_interleaved": [False],
            "rotary_fraction": [1.0],
            "rotary_scaling": [model.rotary_scaling],
            "head_bias": [False],
            "qk_norm": [self.qk_norm],
            "norm_placement": [self.norm_placement],
            "mlp": [self.mlp],
        }
        if not self.has_mlp_bias:
            supported["mlp_bias"] = [False]
        if self.biases in ("none", "input"):
            supported["out_bias"] = [False]
        if self.biases == "none":
            supported["attention_bias"] = [False]
        faults = find_unsupported_values(model, self.title, supported, allows_unrotated=self.layers.allows_unrotated)
        faults += self.layers.find_faults(model, self.title)
        if self.divides_hidden and model.hidden % model.heads:
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
        table = [StoredWeight("model.embed_tokens.weight", ("embedding.token.weight",))]
        for i in range(model.layers):
            hf_layer, layer = f"model.layers.{i}", f"layers.{i}"
            norms = dict(_LAYER_NORMS[self.norm_placement])
            if self.qk_norm != "none":
                norms |= {"self_attn.q_norm": "attention.query_norm", "self_attn.k_norm": "attention.key_norm"}
            for name, part in norms.items():
                table += linear_weights(f"{hf_layer}.{name}", f"{layer}.{part}", bias=False)
            for name, part in (("q", "query"), ("k", "key"), ("v", "value")):
                part = f"{layer}.attention.{part}"
                table += linear_weights(f"{hf_layer}.self_attn.{name}_proj", part, bias=has_input_bias)
            output = f"{layer}.attention.output"
            table += linear_weights(f"{hf_layer}.self_attn.o_proj", output, bias=has_output_bias)
            for name, part in (("gate_proj", "gate"), ("up_proj", "in"), ("down_proj", "out")):
                table += linear_weights(f"{hf_layer}.mlp.{name}", f"{layer}.mlp.{part}", bias=model.mlp_bias)
        table += linear_weights("model.norm", "norm", bias=False)
        if model.tied_embeddings:
            return table
        return [*table, StoredWeight("lm_head.weight", ("head.weight",))]


# kinds of layers in config.json ------------------------------------------------------------------------------------


def read_layer_types(keys: ConfigKeys, defaults: list[bool]) -> list[bool]:
    """Return for each layer whether it has a window, from `layer_types` or else the defaults."""
    names = [_SLIDING if is_windowed else _FULL for is_windowed in defaults]
    kinds: list[str] = keys.get("layer_types") or names
    unknown = [kind for kind in kinds if kind not in (_SLIDING, _FULL)]
    if unknown:
        raise keys.make_error("layer_types", unknown[0], f"only {_SLIDING} and {_FULL} are supported")
    if len(kinds) != len(defaults):
        raise keys.make_error("layer_types", kinds, f"num_hidden_layers is {len(defaults)}")
    return [kind == _SLIDING for kind in kinds]


def require_window(keys: ConfigKeys, window: int | None) -> None:
    """Raise DataError if layers have a window whose width is missing."""
    if window is None:
        kinds = keys.get("layer_types")
        raise keys.make_error("layer_types", kinds, "use_sliding_window or sliding_window says that there is no window")


def write_layer_types(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of windows of a family whose layers may differ in them."""
    windowed = list_windowed_layers(model)
    return {
        "use_sliding_window": any(windowed),
        "sliding_window": model.window if any(windowed) else None,
        "layer_types": [_SLIDING if is_windowed else _FULL for is_windowed in windowed],
    }


def find_unrotated_layers(model: ModelConfig) -> list[bool]:
    """Return for each layer whether it is without rotary positions."""
    return [layer.rope is None for layer in resolve_layers(model)]
