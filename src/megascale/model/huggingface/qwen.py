"""Qwen2, with biases on queries, keys and values, and Qwen3, with norms of queries and keys over each head.

In both families some layers may have a window.
"""

from __future__ import annotations

from typing import Any

from megascale.config import ModelConfig
from megascale.model.huggingface.family import ConfigKeys, list_windowed_layers
from megascale.model.huggingface.layer_rules import (
    LayerRules,
    make_layer_pattern,
    read_layer_types,
    require_window,
    write_layer_types,
)
from megascale.model.huggingface.llama_like import LlamaLike


def _read_windows(keys: ConfigKeys, layers: int) -> dict[str, Any]:
    # null means no window.
    window = keys.get_nullable("sliding_window", default=4096)
    if not keys.get("use_sliding_window", default=False):
        window = None
    first_windowed = keys.get("max_window_layers", default=28)
    defaults = [window is not None and i >= first_windowed for i in range(layers)]
    windowed = read_layer_types(keys, defaults)
    if any(windowed):
        require_window(keys, window)
    return make_layer_pattern(windowed, window)


def _write_windows(model: ModelConfig) -> dict[str, Any]:
    windowed = list_windowed_layers(model)
    first_windowed = windowed.index(True) if any(windowed) else model.layers
    return {"max_window_layers": first_windowed, **write_layer_types(model)}


_LAYERS = LayerRules(_read_windows, _write_windows, find_faults=lambda model, title: [])

QWEN2 = LlamaLike(
    "qwen2",
    "Qwen2ForCausalLM",
    "Qwen2",
    kv_heads=32,
    biases="input",
    declares_head_dim=False,
    layer_rules=_LAYERS,
    required_values={"use_mrope": False},
).make_family()
QWEN3 = LlamaLike(
    "qwen3",
    "Qwen3ForCausalLM",
    "Qwen3",
    kv_heads=32,
    head_dim=128,
    biases="shared",
    qk_norm="head",
    layer_rules=_LAYERS,
).make_family()
