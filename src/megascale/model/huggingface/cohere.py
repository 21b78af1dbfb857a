"""Cohere Command R, with parallel blocks, and Command R7B, in which only layers with a window have rotary positions."""

from __future__ import annotations

from typing import Any

from megascale.config import ModelConfig
from megascale.core.inventory import resolve_layers
from megascale.model.huggingface.family import ConfigKeys, list_windowed_layers
from megascale.model.huggingface.layer_rules import (
    LayerRules,
    make_layer_pattern,
    read_layer_types,
    read_window_interval,
    require_window,
    write_window_list,
)
from megascale.model.huggingface.llama_like import LlamaLike, Scalar

# Letter in model.layer_pattern for layers of Command R7B without a window and without rotary positions.
_UNROTATED = "N"


def _read_layers(keys: ConfigKeys, layers: int) -> dict[str, Any]:
    window = keys.get_nullable("sliding_window", default=4096)
    defaults = read_window_interval(keys, layers, default=4)
    interval = keys.get("sliding_window_pattern", default=4)
    if keys.get("layer_switch", default=interval) != interval:
        raise keys.make_error("layer_switch", keys.get("layer_switch"), f"but sliding_window_pattern is {interval}")
    windowed = read_layer_types(keys, defaults)
    if not any(windowed):
        raise keys.make_error("layer_types", keys.get("layer_types"), "no layer has positions")
    require_window(keys, window)
    model = make_layer_pattern(windowed, window, _UNROTATED)
    if not all(windowed):
        model["layer_kinds"] = {_UNROTATED: {"window": 0, "positions": "none"}}
    return model


def _find_faults(model: ModelConfig, title: str) -> list[str]:
    rotated = [layer.rope is not None for layer in resolve_layers(model)]
    if not any(rotated) or rotated != list_windowed_layers(model):
        return [
            f"model.layer_pattern={model.layer_pattern!r}, and {title} has positions exactly in layers with a window"
        ]
    return []


_COMMON: dict[str, Any] = {
    "norm": "layernorm_no_bias",
    "norm_eps_key": "layer_norm_eps",
    "norm_eps": 1e-5,
    "block": "parallel",
    "is_interleaved": True,
    "is_tied": True,
    "biases": "shared",
    "declares_head_dim": False,
    "scalars": (Scalar("logit_multiplier", "logit_scale", 0.0625),),
}
COHERE = LlamaLike(
    "cohere",
    "CohereForCausalLM",
    "Command R",
    rope_base=500000.0,
    ignored_keys=frozenset({"model_max_length", "pretraining_tp"}),
    required_values={"use_qk_norm": False},
    **_COMMON,
).make_family()
COHERE2 = LlamaLike(
    "cohere2",
    "Cohere2ForCausalLM",
    "Command R7B",
    layer_rules=LayerRules(_read_layers, write_window_list, _find_faults, allows_unrotated=True),
    ignored_keys=frozenset({"use_parallel_embedding"}),
    required_values={
        "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj",
        "rotary_pct": 1.0,
        "use_embedding_sharing": True,
        "use_gated_activation": True,
        "use_parallel_block": True,
    },
    **_COMMON,
).make_family()
