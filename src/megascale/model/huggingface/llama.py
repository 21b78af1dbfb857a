"""Llama and its relatives of the same tensor names: Mistral (a sliding window in all layers) and Qwen2 (biases on
query, key and value; a window in some layers). Serial block, RMSNorm, SwiGLU, rotary halves, grouped queries."""

from __future__ import annotations

from functools import partial
from typing import Any

from megascale.config import ModelConfig
from megascale.model.huggingface.settings import Family, Keys, asks, no_windows, windows
from megascale.model.huggingface.tensor_names import Weight, linear

_SLIDING, _FULL = "sliding_attention", "full_attention"
_KV_HEADS = {"mistral": 8, "qwen2": 32}
_TITLES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2"}


def read(keys: Keys, family: str) -> dict[str, Any]:
    """See Family.read."""
    hidden, heads = keys.need("hidden_size"), keys.need("num_attention_heads")
    # Only Llama's classes know attention_bias and mlp_bias; the others pass over them.
    attention_bias = family == "qwen2" or (family == "llama" and keys.get("attention_bias", default=False))
    model = {
        "layers": keys.layers("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        # Left out it is the class's own; null is one for each head.
        "kv_heads": keys.values.get("num_key_value_heads", _KV_HEADS.get(family)) or heads,
        "ffn_hidden": keys.need("intermediate_size"),
        "vocab_size": keys.need("vocab_size"),
        "sequence_length": keys.need("max_position_embeddings"),
        "norm": "rmsnorm",
        "norm_eps": keys.get("rms_norm_eps", default=1e-6),
        "activation": keys.choice("hidden_act", {"silu": "swiglu", "swish": "swiglu"}, "silu"),
        **keys.rotary(1.0, "rope_theta"),
        "attention_bias": attention_bias,
        "attention_out_bias": attention_bias and family == "llama",
        "mlp_bias": family == "llama" and keys.get("mlp_bias", default=False),
        "tied_embeddings": keys.get("tie_word_embeddings", default=False),
        "dropout": keys.dropout(attention="attention_dropout"),
        "init_std": keys.get("initializer_range", default=0.02),
    }
    if model["rotary_fraction"] != 1.0:
        raise keys.refuse(
            "partial_rotary_factor", model["rotary_fraction"], "transformers ignores it here, so its meaning is unclear"
        )
    head_dim = keys.get("head_dim", default=hidden // heads)
    if head_dim * heads != hidden:
        model["head_dim"] = head_dim
    return model | _windows_in(keys, family, model["layers"])


def _windows_in(keys: Keys, family: str, layers: int) -> dict[str, Any]:
    if family == "mistral":
        # The class's own default is a window; a null in the file means none.
        window = keys.values.get("sliding_window", 4096)
        return {} if window is None else {"window": window}
    if family != "qwen2":
        return {}
    # As with Mistral: left out it is the class's own, null is none.
    window = keys.values.get("sliding_window", 4096) if keys.get("use_sliding_window", default=False) else None
    full = keys.get("max_window_layers", default=28)
    kinds = keys.get("layer_types") or [_FULL if window is None or i < full else _SLIDING for i in range(layers)]
    unknown = [kind for kind in kinds if kind not in (_SLIDING, _FULL)]
    if unknown:
        raise keys.refuse("layer_types", unknown[0], f"only {_SLIDING} and {_FULL} can be represented here")
    if len(kinds) != layers:
        raise keys.refuse("layer_types", kinds, f"num_hidden_layers is {layers}")
    if _SLIDING not in kinds:
        return {}
    if window is None:
        raise keys.refuse("layer_types", kinds, "use_sliding_window or sliding_window says that there is no window")
    pattern = "".join("S" if kind == _SLIDING else "L" for kind in kinds)
    return {"window": window, "window_pattern": pattern}


def write(model: ModelConfig, family: str) -> dict[str, Any]:
    """See Family.write."""
    config: dict[str, Any] = {
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv,
        "intermediate_size": model.ffn,
        "max_position_embeddings": model.sequence_length,
        "rms_norm_eps": model.norm_eps,
        "hidden_act": "silu",
        # transformers 5 reads the first, older versions the second.
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rotary_base},
        "rope_theta": model.rotary_base,
        "attention_dropout": 0.0,
    }
    if family != "qwen2" or model.head_size * model.heads != model.hidden:
        config["head_dim"] = model.head_size  # Qwen2's class takes it over though it does not name it
    if family == "llama":
        config |= {"attention_bias": model.attention_bias or model.out_bias, "mlp_bias": model.mlp_bias}
    elif family == "mistral":
        config["sliding_window"] = model.window if any(windows(model)) else None
    else:
        short = windows(model)
        config |= {
            "use_sliding_window": any(short),
            "sliding_window": model.window if any(short) else None,
            "max_window_layers": short.index(True) if any(short) else model.layers,
            "layer_types": [_SLIDING if s else _FULL for s in short],
        }
    return config


def faults(model: ModelConfig, family: str) -> list[str]:
    """See Family.faults."""
    title = _TITLES[family]
    wanted: dict[str, list[Any]] = {
        "block": ["serial"],
        "norm": ["rmsnorm"],
        "activation": ["swiglu"],
        "positions": ["rotary"],
        "rotary_interleaved": [False],
        "rotary_fraction": [1.0],
        "head_bias": [False],
    }
    if family != "llama":
        wanted |= {"out_bias": [False], "mlp_bias": [False]}
    if family == "mistral":
        wanted["attention_bias"] = [False]
    found = asks(model, title, wanted)
    if family == "llama":
        found += no_windows(model, title)
    elif family == "mistral" and len(set(windows(model))) > 1:
        found.append(f"model.window_pattern={model.window_pattern!r}, and {title} has one window for all layers")
    if family != "mistral" and model.hidden % model.heads:
        found.append(f"model.hidden={model.hidden} is no multiple of model.heads={model.heads}, as {title} wants")
    return found


def weights(model: ModelConfig, family: str) -> list[Weight]:
    """See Family.weights."""
    bias = family == "llama" and (model.attention_bias or model.out_bias)
    table = [Weight("model.embed_tokens.weight", ("embedding.token.weight",))]
    for i in range(model.layers):
        there, here = f"model.layers.{i}", f"layers.{i}"
        table += linear(f"{there}.input_layernorm", f"{here}.norm1", bias=False)
        for name, part in (("q", "query"), ("k", "key"), ("v", "value")):
            part = f"{here}.attention.{part}"
            table += linear(f"{there}.self_attn.{name}_proj", part, bias=bias or family == "qwen2")
        table += linear(f"{there}.self_attn.o_proj", f"{here}.attention.output", bias=bias)
        table += linear(f"{there}.post_attention_layernorm", f"{here}.norm2", bias=False)
        for name, part in (("gate_proj", "gate"), ("up_proj", "in"), ("down_proj", "out")):
            table += linear(f"{there}.mlp.{name}", f"{here}.mlp.{part}", bias=model.mlp_bias)
    table += linear("model.norm", "norm", bias=False)
    return table if model.tied_embeddings else [*table, Weight("lm_head.weight", ("head.weight",))]


def _family(name: str, architecture: str) -> Family:
    return Family(
        name=name,
        architecture=architecture,
        prefix="model.",
        head="lm_head.weight",
        read_config=partial(read, family=name),
        write=partial(write, family=name),
        faults=partial(faults, family=name),
        list_weights=partial(weights, family=name),
        buffers=r"rotary_emb\.inv_freq$",
    )


LLAMA = _family("llama", "LlamaForCausalLM")
MISTRAL = _family("mistral", "MistralForCausalLM")
QWEN2 = _family("qwen2", "Qwen2ForCausalLM")
