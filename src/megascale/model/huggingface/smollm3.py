"""SmolLM3: layers without rotary positions, and a window in some layers."""

from __future__ import annotations

from typing import Any

from megascale.config import ModelConfig
from megascale.model.huggingface.family import ConfigKeys
from megascale.model.huggingface.layer_rules import (
    LayerRules,
    find_unrotated_layers,
    read_layer_types,
    require_window,
    write_layer_types,
)
from megascale.model.huggingface.llama_like import LlamaLike

# Kinds of layers by whether they have a window and whether they have rotary positions.
_LETTERS = {(True, True): "S", (False, True): "L", (True, False): "N", (False, False): "G"}
_UNROTATED_KINDS = {"N": {"positions": "none"}, "G": {"positions": "none", "window": 0}}


def _read(keys: ConfigKeys, layers: int) -> dict[str, Any]:
    """Return windows and the layers without rotary positions."""
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
        window = None
        windowed = [True] * layers  # without a window, the kinds with one are the simplest
    pattern = "".join(_LETTERS[kind] for kind in zip(windowed, rotated, strict=True))
    kinds = {letter: kind for letter, kind in _UNROTATED_KINDS.items() if letter in pattern}
    return {"layer_pattern": pattern, "layer_kinds": kinds} | ({} if window is None else {"window": window})


def _write(model: ModelConfig) -> dict[str, Any]:
    return {
        "pad_token_id": None,  # the class's default may lie outside the vocabulary
        "no_rope_layers": [int(not is_unrotated) for is_unrotated in find_unrotated_layers(model)],
        **write_layer_types(model),
    }


def _find_faults(model: ModelConfig, title: str) -> list[str]:
    if any(find_unrotated_layers(model)):
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
    layers=LayerRules(_read, _write, _find_faults, allows_unrotated=True),
    ignored_keys=frozenset({"pretraining_tp", "max_window_layers"}),
).make_family()
