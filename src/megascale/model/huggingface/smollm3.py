"""SmolLM3: layers without rotary positions, and a window in some layers."""

from __future__ import annotations

from typing import Any

from megascale.config import ModelConfig
from megascale.model.huggingface.family import ConfigKeys
from megascale.model.huggingface.layer_rules import (
    LayerRules,
    list_unrotated_layers,
    read_layer_types,
    require_window,
    write_layer_types,
)
from megascale.model.huggingface.llama_like import LlamaLike

# Letter in model.layer_pattern, by (layer has the window, layer has rotary positions).
_LETTERS = {(True, True): "S", (False, True): "L", (True, False): "N", (False, False): "G"}
_UNROTATED_KINDS = {"N": {"positions": "none"}, "G": {"positions": "none", "window": 0}}


def _read_layers(keys: ConfigKeys, layers: int) -> dict[str, Any]:
    """Return the keys of [model] for the window, and for the layers with the window and with rotary positions."""
    window = keys.get("sliding_window")
    if not keys.get("use_sliding_window", default=False):
        window = None
    interval = keys.get("no_rope_layer_interval", default=4)
    if type(interval) is not int or interval < 1:
        raise keys.make_error("no_rope_layer_interval", interval, "it must be an integer of at least 1")
    rotated = keys.get("no_rope_layers", default=[int((i + 1) % interval != 0) for i in range(layers)])
    if not isinstance(rotated, list) or len(rotated) < layers:
        raise keys.make_error("no_rope_layers", rotated, f"it must list the {layers} layers of num_hidden_layers")
    rotated = [bool(value) for value in rotated[:layers]]
    windowed = read_layer_types(keys, [window is not None and not is_rotated for is_rotated in rotated])
    if any(windowed):
        require_window(keys, window)
    else:
        # Without a window use the letters S and N, whose layers inherit the unset model.window.
        window = None
        windowed = [True] * layers
    pattern = "".join(_LETTERS[key] for key in zip(windowed, rotated, strict=True))
    kinds = {letter: kind for letter, kind in _UNROTATED_KINDS.items() if letter in pattern}
    model: dict[str, Any] = {"layer_pattern": pattern, "layer_kinds": kinds}
    if window is not None:
        model["window"] = window
    return model


def _write_layers(model: ModelConfig) -> dict[str, Any]:
    return {
        "pad_token_id": None,  # The default of pad_token_id may lie outside the vocabulary.
        "no_rope_layers": [int(not is_unrotated) for is_unrotated in list_unrotated_layers(model)],
        **write_layer_types(model),
    }


def _find_faults(model: ModelConfig, title: str) -> list[str]:
    """Return a fault for a model in which all layers have rotary positions."""
    if any(list_unrotated_layers(model)):
        return []
    return [f"model.layer_pattern={model.layer_pattern!r} has no layer without positions, unlike {title}"]


SMOLLM3 = LlamaLike(
    "smollm3",
    "SmolLM3ForCausalLM",
    "SmolLM3",
    kv_heads=4,
    rope_base=2e6,
    is_tied=True,
    biases="shared",
    has_mlp_bias=True,
    layer_rules=LayerRules(_read_layers, _write_layers, _find_faults, allows_unrotated=True),
    ignored_keys=frozenset({"pretraining_tp", "max_window_layers"}),
).make_family()
