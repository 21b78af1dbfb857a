"""Llama and its relatives of the same tensor names. Serial block, RMSNorm, SwiGLU, rotary halves, grouped queries.

Mistral has a sliding window in all layers. Qwen2 has biases on query, key and value, and a window in some layers.
Qwen3 has norms of queries and keys instead of the biases.
SmolLM3 has layers without rotary positions, and a window in some layers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

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

_SLIDING, _FULL = "sliding_attention", "full_attention"
_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32, "smollm3": 4}
_ROPE_BASES = {"smollm3": 2e6}
_TITLES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "smollm3": "SmolLM3"}
# Families whose classes read attention_bias, and mlp_bias.
_ATTENTION_BIASES = ("llama", "qwen3", "smollm3")
_MLP_BIASES = ("llama", "smollm3")
# Kinds of layers by whether they have a window and whether they have rotary positions.
_LETTERS = {(True, True): "S", (False, True): "L", (True, False): "N", (False, False): "G"}
_UNROTATED_KINDS = {"N": {"positions": "none"}, "G": {"positions": "none", "window": 0}}


def read(keys: ConfigKeys, family: str) -> dict[str, Any]:
    """See Family.read_config."""
    hidden, heads = keys.require_count("hidden_size"), keys.require_count("num_attention_heads")
    has_output_bias = family in _ATTENTION_BIASES and keys.get("attention_bias", default=False)
    model = {
        "layers": keys.require_layers("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        # A missing key means the class's default, null means one per head.
        "kv_heads": keys.values.get("num_key_value_heads", _KV_HEADS.get(family)) or heads,
        "ffn_hidden": keys.require_count("intermediate_size"),
        "vocab_size": keys.require_count("vocab_size"),
        "sequence_length": keys.require_count("max_position_embeddings"),
        "norm": "rmsnorm",
        "norm_eps": keys.get("rms_norm_eps", default=1e-6),
        "activation": keys.translate("hidden_act", {"silu": "swiglu", "swish": "swiglu"}, "silu"),
        **keys.read_rotary(1.0, "rope_theta", default_base=_ROPE_BASES.get(family, 10000.0)),
        "attention_bias": has_output_bias or family == "qwen2",
        "attention_out_bias": has_output_bias,
        "mlp_bias": family in _MLP_BIASES and keys.get("mlp_bias", default=False),
        "qk_norm": "head" if family == "qwen3" else "none",
        "tied_embeddings": keys.get("tie_word_embeddings", default=family == "smollm3"),
        "dropout": keys.read_dropout(attention="attention_dropout"),
        "init_std": keys.get("initializer_range", default=0.02),
    }
    if model["rotary_fraction"] != 1.0:
        raise keys.make_error(
            "partial_rotary_factor", model["rotary_fraction"], "transformers ignores it here, so its meaning is unclear"
        )
    head_dim = keys.get("head_dim", default=128 if family == "qwen3" else hidden // heads)
    if head_dim * heads != hidden:
        model["head_dim"] = head_dim
    if family == "smollm3":
        return model | _read_smollm3_layers(keys, model["layers"])
    return model | _read_windows(keys, family, model["layers"])


def _read_windows(keys: ConfigKeys, family: str, layers: int) -> dict[str, Any]:
    if family == "mistral":
        # A missing key means the class's default, null means no window.
        window = keys.values.get("sliding_window", 4096)
        return {} if window is None else {"window": window}
    if family not in ("qwen2", "qwen3"):
        return {}
    # As with Mistral, a missing key means the class's default, null means no window.
    if keys.get("use_sliding_window", default=False):
        window = keys.values.get("sliding_window", 4096)
    else:
        window = None
    first_windowed = keys.get("max_window_layers", default=28)
    defaults = [_FULL if window is None or i < first_windowed else _SLIDING for i in range(layers)]
    kinds = _read_layer_types(keys, defaults)
    if _SLIDING not in kinds:
        return {}
    _require_window(keys, window, kinds)
    pattern = "".join("S" if kind == _SLIDING else "L" for kind in kinds)
    return {"window": window, "layer_pattern": pattern}


def _read_layer_types(keys: ConfigKeys, defaults: list[str]) -> list[str]:
    """Return the kind of attention of each layer."""
    kinds: list[str] = keys.get("layer_types") or defaults
    unknown = [kind for kind in kinds if kind not in (_SLIDING, _FULL)]
    if unknown:
        raise keys.make_error("layer_types", unknown[0], f"only {_SLIDING} and {_FULL} are supported")
    if len(kinds) != len(defaults):
        raise keys.make_error("layer_types", kinds, f"num_hidden_layers is {len(defaults)}")
    return kinds


def _require_window(keys: ConfigKeys, window: int | None, kinds: list[str]) -> None:
    if window is None:
        raise keys.make_error("layer_types", kinds, "use_sliding_window or sliding_window says that there is no window")


def _read_smollm3_layers(keys: ConfigKeys, layers: int) -> dict[str, Any]:
    """Return windows and the layers without rotary positions."""
    window = keys.get("sliding_window") if keys.get("use_sliding_window", default=False) else None
    interval = keys.get("no_rope_layer_interval", default=4)
    if type(interval) is not int or interval < 1:
        raise keys.make_error("no_rope_layer_interval", interval, "it must be an integer of at least 1")
    rotated = keys.get("no_rope_layers", default=[int((i + 1) % interval != 0) for i in range(layers)])
    if not isinstance(rotated, list) or len(rotated) < layers:
        raise keys.make_error("no_rope_layers", rotated, f"it must list the {layers} layers of num_hidden_layers")
    rotated = [bool(value) for value in rotated[:layers]]
    defaults = [_FULL if window is None or is_rotated else _SLIDING for is_rotated in rotated]
    windowed = [kind == _SLIDING for kind in _read_layer_types(keys, defaults)]
    if any(windowed):
        _require_window(keys, window, keys.get("layer_types"))
    else:
        window = None
        windowed = [True] * layers  # without a window, the kinds with one are the simplest
    pattern = "".join(_LETTERS[kind] for kind in zip(windowed, rotated, strict=True))
    kinds = {letter: kind for letter, kind in _UNROTATED_KINDS.items() if letter in pattern}
    return {"layer_pattern": pattern, "layer_kinds": kinds} | ({} if window is None else {"window": window})


def write(model: ModelConfig, family: str) -> dict[str, Any]:
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
        # transformers 5 reads the first key, older versions the second.
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rotary_base},
        "rope_theta": model.rotary_base,
        "attention_dropout": 0.0,
    }
    if family != "qwen2" or model.head_size * model.heads != model.hidden:
        config["head_dim"] = model.head_size  # Qwen2's class accepts the key although it does not declare it
    if family in _ATTENTION_BIASES:
        config["attention_bias"] = model.attention_bias or model.out_bias
    if family in _MLP_BIASES:
        config["mlp_bias"] = model.mlp_bias
    if family == "smollm3":
        windowed = list_windowed_layers(model)
        config |= {
            "pad_token_id": None,  # the class's default may lie outside the vocabulary
            "no_rope_layers": [int(layer.rope is not None) for layer in resolve_layers(model)],
            "use_sliding_window": any(windowed),
            "sliding_window": model.window if any(windowed) else None,
            "layer_types": [_SLIDING if is_windowed else _FULL for is_windowed in windowed],
        }
    elif family == "mistral":
        if any(list_windowed_layers(model)):
            config["sliding_window"] = model.window
        else:
            config["sliding_window"] = None
    elif family in ("qwen2", "qwen3"):
        windowed = list_windowed_layers(model)
        config |= {
            "use_sliding_window": any(windowed),
            "sliding_window": model.window if any(windowed) else None,
            "max_window_layers": windowed.index(True) if any(windowed) else model.layers,
            "layer_types": [_SLIDING if is_windowed else _FULL for is_windowed in windowed],
        }
    return config


def faults(model: ModelConfig, family: str) -> list[str]:
    """See Family.find_faults."""
    title = _TITLES[family]
    supported: dict[str, list[Any]] = {
        "block": ["serial"],
        "norm": ["rmsnorm"],
        "activation": ["swiglu"],
        "positions": ["rotary"],
        "rotary_interleaved": [False],
        "rotary_fraction": [1.0],
        "head_bias": [False],
        "qk_norm": ["head" if family == "qwen3" else "none"],
    }
    if family not in _MLP_BIASES:
        supported["mlp_bias"] = [False]
    if family not in _ATTENTION_BIASES:
        supported["out_bias"] = [False]
    if family == "mistral":
        supported["attention_bias"] = [False]
    family_faults = find_unsupported_values(model, title, supported, allows_unrotated=family == "smollm3")
    if family == "llama":
        family_faults += find_window_faults(model, title)
    elif family == "mistral" and len(set(list_windowed_layers(model))) > 1:
        family_faults.append(f"model.layer_pattern={model.layer_pattern!r}, and {title} has one window for all layers")
    if family == "smollm3" and all(layer.rope is not None for layer in resolve_layers(model)):
        family_faults.append(
            f"model.layer_pattern={model.layer_pattern!r} has no layer without positions, unlike {title}"
        )
    if family != "mistral" and model.hidden % model.heads:
        family_faults.append(
            f"model.hidden={model.hidden} is not a multiple of model.heads={model.heads}, which {title} requires"
        )
    return family_faults


def weights(model: ModelConfig, family: str) -> list[StoredWeight]:
    """See Family.list_weights."""
    bias = family in _ATTENTION_BIASES and (model.attention_bias or model.out_bias)
    table = [StoredWeight("model.embed_tokens.weight", ("embedding.token.weight",))]
    for i in range(model.layers):
        hf_layer, layer = f"model.layers.{i}", f"layers.{i}"
        table += linear_weights(f"{hf_layer}.input_layernorm", f"{layer}.norm1", bias=False)
        for name, part in (("q", "query"), ("k", "key"), ("v", "value")):
            part = f"{layer}.attention.{part}"
            table += linear_weights(f"{hf_layer}.self_attn.{name}_proj", part, bias=bias or family == "qwen2")
        if family == "qwen3":
            for name, part in (("q_norm", "query_norm"), ("k_norm", "key_norm")):
                table += linear_weights(f"{hf_layer}.self_attn.{name}", f"{layer}.attention.{part}", bias=False)
        table += linear_weights(f"{hf_layer}.self_attn.o_proj", f"{layer}.attention.output", bias=bias)
        table += linear_weights(f"{hf_layer}.post_attention_layernorm", f"{layer}.norm2", bias=False)
        for name, part in (("gate_proj", "gate"), ("up_proj", "in"), ("down_proj", "out")):
            table += linear_weights(f"{hf_layer}.mlp.{name}", f"{layer}.mlp.{part}", bias=model.mlp_bias)
    table += linear_weights("model.norm", "norm", bias=False)
    if model.tied_embeddings:
        return table
    return [*table, StoredWeight("lm_head.weight", ("head.weight",))]


def _family(name: str, architecture: str) -> Family:
    return Family(
        name=name,
        architecture=architecture,
        prefix="model.",
        head="lm_head.weight",
        read_config=partial(read, family=name),
        write_config=partial(write, family=name),
        find_faults=partial(faults, family=name),
        list_weights=partial(weights, family=name),
        buffers=r"rotary_emb\.inv_freq$",
    )


LLAMA = _family("llama", "LlamaForCausalLM")
MISTRAL = _family("mistral", "MistralForCausalLM")
QWEN2 = _family("qwen2", "Qwen2ForCausalLM")
QWEN3 = _family("qwen3", "Qwen3ForCausalLM")
SMOLLM3 = _family("smollm3", "SmolLM3ForCausalLM")
