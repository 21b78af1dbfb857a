"""Mistral, Mistral Nemo (heads of their own size) and Ministral: one window for all layers, or none."""

from __future__ import annotations

from typing import Any

from megascale.config import ModelConfig
from megascale.model.huggingface.family import ConfigKeys, list_windowed_layers
from megascale.model.huggingface.llama_like import LayerRules, LlamaLike


def _read(keys: ConfigKeys, layers: int) -> dict[str, Any]:
    # A missing key means the class's default, null means no window.
    window = keys.get_present("sliding_window", default=4096)
    return {} if window is None else {"window": window}


def _write(model: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": model.window if any(list_windowed_layers(model)) else None}


def _find_faults(model: ModelConfig, title: str) -> list[str]:
    if len(set(list_windowed_layers(model))) > 1:
        return [f"model.layer_pattern={model.layer_pattern!r}, and {title} has one window for all layers"]
    return []


MISTRAL = LlamaLike(
    "mistral",
    "MistralForCausalLM",
    "Mistral",
    kv_heads=8,
    divides_hidden=False,
    layers=LayerRules(_read, _write, _find_faults),
).make_family()
