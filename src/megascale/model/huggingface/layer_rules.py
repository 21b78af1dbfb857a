"""Windows and rotary positions of layers that differ from each other, in config.json and in [model]."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megascale.config import ModelConfig
from megascale.core.inventory import resolve_layers
from megascale.core.layer_spec import RopeSpec
from megascale.model.huggingface.family import ConfigKeys, find_window_faults, list_windowed_layers
from megascale.model.huggingface.rotary import read_rotary_of_kinds, write_rotary_of_kinds

_SLIDING, _FULL = "sliding_attention", "full_attention"
_FULL_ROPE = "G"  # letter of layers without a window that have rotary positions of their own


@dataclass(frozen=True)
class LayerRules:
    """Rules for layers that differ from each other; by default all layers are alike, without windows.

    Attributes:
        read: keys of [model] for a number of layers.
        write: keys of config.json.
        find_faults: reasons why a model's layers are not of the family, given its title.
        allows_unrotated: whether layers may be without rotary positions.
        allows_rope_by_kind: whether layers may have rotary positions of their own.
        reads_rotary: whether `read` and `write` are responsible for rotary positions too.
    """

    read: Callable[[ConfigKeys, int], dict[str, Any]] = lambda keys, layers: {}
    write: Callable[[ModelConfig], dict[str, Any]] = lambda model: {}
    find_faults: Callable[[ModelConfig, str], list[str]] = find_window_faults
    allows_unrotated: bool = False
    allows_rope_by_kind: bool = False
    reads_rotary: bool = False


EQUAL_LAYERS = LayerRules()  # without windows


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


def count_from_pattern(keys: ConfigKeys, layers: int, default: int) -> list[bool]:
    """Return for each layer whether it has a window if every n-th layer has none, by `sliding_window_pattern`."""
    interval = keys.get("sliding_window_pattern", default=default)
    if type(interval) is not int or interval < 1:
        raise keys.make_error("sliding_window_pattern", interval, "it must be an integer of at least 1")
    windowed = [(i + 1) % interval != 0 for i in range(layers)]
    if keys.get("sliding_window_pattern") is not None and read_layer_types(keys, windowed) != windowed:
        raise keys.make_error("sliding_window_pattern", interval, "but layer_types gives another pattern")
    return windowed


def make_pattern(windowed: list[bool], window: int | None, full_letter: str = "L") -> dict[str, Any]:
    """Return window and pattern of layers, of which some have the window."""
    if not any(windowed):
        return {}
    pattern = "".join("S" if is_windowed else full_letter for is_windowed in windowed)
    return {"window": window, "layer_pattern": pattern}


def share_window(default: int | None) -> LayerRules:
    """Return the rules of a family with one window for all layers, or none; `default` is its class's."""

    def read(keys: ConfigKeys, layers: int) -> dict[str, Any]:
        # A missing key means the class's default, null means no window.
        window = keys.get_present("sliding_window", default=default)
        return {} if window is None else {"window": window}

    def write(model: ModelConfig) -> dict[str, Any]:
        return {"sliding_window": model.window if any(list_windowed_layers(model)) else None}

    def find_faults(model: ModelConfig, title: str) -> list[str]:
        if len(set(list_windowed_layers(model))) > 1:
            return [f"model.layer_pattern={model.layer_pattern!r}, and {title} has one window for all layers"]
        return []

    return LayerRules(read, write, find_faults)


def list_windows(
    default_layers: Callable[[ConfigKeys, int], list[bool]], default_window: int | None = 4096
) -> LayerRules:
    """Return the rules of a family whose `layer_types` say which layers have the window.

    The defaults are those of the family's class.
    """

    def read(keys: ConfigKeys, layers: int) -> dict[str, Any]:
        window = keys.get_present("sliding_window", default=default_window)
        windowed = read_layer_types(keys, default_layers(keys, layers))
        if any(windowed):
            require_window(keys, window)
        return make_pattern(windowed, window)

    return LayerRules(read, write_window_list, find_faults=lambda model, title: [])


def write_window_list(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of windows of a family without `use_sliding_window`."""
    written = write_layer_types(model)
    # transformers makes the mask of a window for models without one, too.
    return {"sliding_window": model.window or model.sequence_length, "layer_types": written["layer_types"]}


def rope_by_kind(
    default_layers: Callable[[ConfigKeys, int], list[bool]],
    default_bases: tuple[float, float],
    local_base_key: str | None = None,
) -> LayerRules:
    """Return the rules of a family whose layers with and without a window have rotary positions of their own.

    Args:
        default_bases: bases of layers with a window, and of the others.
        local_base_key: older key of the base of layers with a window.
    """

    def read(keys: ConfigKeys, layers: int) -> dict[str, Any]:
        local, full = read_rotary_of_kinds(keys, default_bases, local_base_key)
        window = keys.get_present("sliding_window", default=4096)
        windowed = read_layer_types(keys, default_layers(keys, layers))
        if not any(windowed):
            return full
        require_window(keys, window)
        if all(windowed) or local == full:
            return local | make_pattern(windowed, window)
        kind = {"window": 0, **full}
        if "rotary_scaling" in local and "rotary_scaling" not in full:
            kind["rotary_scaling"] = {"method": "none"}
        return local | make_pattern(windowed, window, _FULL_ROPE) | {"layer_kinds": {_FULL_ROPE: kind}}

    def write(model: ModelConfig) -> dict[str, Any]:
        local, full = _find_ropes(model)
        assert local[0] is not None
        assert full[0] is not None
        return write_window_list(model) | write_rotary_of_kinds(local[0], full[0], local_base_key)

    def find_faults(model: ModelConfig, title: str) -> list[str]:
        local, full = _find_ropes(model)
        if len(local) > 1 or len(full) > 1:
            return [f"model.layer_kinds give layers of equal windows other positions, and {title} has no such layers"]
        scalings = [rope.scaling for rope in (*local, *full) if rope is not None]
        if any(scaling is not None and scaling.is_range_rounded is False for scaling in scalings):
            return [f"model.rotary_scaling.is_range_rounded=False, and {title} only has True"]
        return []

    return LayerRules(read, write, find_faults, allows_rope_by_kind=True, reads_rotary=True)


def _find_ropes(model: ModelConfig) -> tuple[list[RopeSpec | None], list[RopeSpec | None]]:
    """Return the different rotary positions of layers with a window, and of the others; never empty."""
    layers = list(zip(resolve_layers(model), list_windowed_layers(model), strict=True))
    local = list(dict.fromkeys(layer.rope for layer, is_windowed in layers if is_windowed))
    full = list(dict.fromkeys(layer.rope for layer, is_windowed in layers if not is_windowed))
    return local or full, full or local
