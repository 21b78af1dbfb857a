"""Mistral, Mistral Nemo (heads of their own size) and Ministral: one window for all layers, or none."""

from __future__ import annotations

from typing import Any

from megascale.config import ModelConfig
from megascale.model.huggingface.family import ConfigKeys, list_windowed_layers
from megascale.model.huggingface.llama_like import LayerRules, LlamaLike


def _write(model: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": model.window if any(list_windowed_layers(model)) else None}


def find_mixed_windows(model: ModelConfig, title: str) -> list[str]:
    """Return the faults for a family with one window for all layers, or none."""
    if len(set(list_windowed_layers(model))) > 1:
        return [f"model.layer_pattern={model.layer_pattern!r}, and {title} has one window for all layers"]
    return []


def make_window_rules(default_window: int | None) -> LayerRules:
    """Return the rules of one window for all layers, which a missing `sliding_window` gives the default."""

    def read(keys: ConfigKeys, layers: int) -> dict[str, Any]:
        # A missing key means the class's default, null means no window.
        window = keys.get_present("sliding_window", default=default_window)
        return {} if window is None else {"window": window}

    return LayerRules(read, _write, find_mixed_windows)


MISTRAL = LlamaLike(
    "mistral",
    "MistralForCausalLM",
    "Mistral",
    kv_heads=8,
    divides_hidden=False,
    layers=make_window_rules(default_window=4096),
).make_family()
