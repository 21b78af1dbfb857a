"""Conversion of windows and rotary positions that differ between layers, between config.json and [model].

In [model] a pattern has one letter per layer. In config.json `layer_types` has one name per layer.
"""

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
# Letters in model.layer_pattern: S for a layer with the window and L for a layer without one (config/model_section.py).
# This letter is for layers without a window whose rotary positions differ from those of layers with a window.
_FULL_ROPE = "G"


@dataclass(frozen=True)
class LayerRules:
    """Rules of a family for windows and rotary positions that differ between layers.

    By default all layers are equal and have no window.

    Attributes:
        read: returns settings of [model], given config.json and the number of layers.
        write: returns keys of config.json for a model.
        find_faults: returns reasons why a model's layers do not fit the family, given the family's title.
        allows_unrotated: whether some layers may have no rotary positions.
        allows_rope_by_kind: whether rotary positions may differ between layers with and without a window.
        reads_rotary: whether `read` and `write` also convert rotary positions.
    """

    read: Callable[[ConfigKeys, int], dict[str, Any]] = lambda keys, layers: {}
    write: Callable[[ModelConfig], dict[str, Any]] = lambda model: {}
    find_faults: Callable[[ModelConfig, str], list[str]] = find_window_faults
    allows_unrotated: bool = False
    allows_rope_by_kind: bool = False
    reads_rotary: bool = False


EQUAL_LAYERS = LayerRules()


def read_layer_types(keys: ConfigKeys, defaults: list[bool]) -> list[bool]:
    """Return for each layer whether it has a window, from `layer_types`, or the defaults if that is missing.

    Raises DataError for an unknown name or a wrong number of layers.
    """
    layer_types: list[str] | None = keys.get("layer_types")
    if not layer_types:
        return defaults
    unknown = [name for name in layer_types if name not in (_SLIDING, _FULL)]
    if unknown:
        raise keys.make_error("layer_types", unknown[0], f"only {_SLIDING} and {_FULL} are supported")
    if len(layer_types) != len(defaults):
        raise keys.make_error("layer_types", layer_types, f"num_hidden_layers is {len(defaults)}")
    return [name == _SLIDING for name in layer_types]


def require_window(keys: ConfigKeys, window: int | None) -> None:
    """Raise DataError if there is no `window` although `layer_types` names layers with a window."""
    if window is None:
        reason = "use_sliding_window or sliding_window says that there is no window"
        raise keys.make_error("layer_types", keys.get("layer_types"), reason)


def write_layer_types(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of config.json for windows in some of the layers."""
    windowed = list_windowed_layers(model)
    return {
        "use_sliding_window": any(windowed),
        "sliding_window": model.window if any(windowed) else None,
        "layer_types": [_SLIDING if is_windowed else _FULL for is_windowed in windowed],
    }


def list_unrotated_layers(model: ModelConfig) -> list[bool]:
    """Return for each layer whether it has no rotary positions."""
    return [layer.rope is None for layer in resolve_layers(model)]


def read_window_interval(keys: ConfigKeys, layers: int, default: int) -> list[bool]:
    """Return for each layer whether it has a window, by the interval n in `sliding_window_pattern`.

    Every n-th layer has no window. Raises DataError if `layer_types` contradicts this.
    """
    interval = keys.get("sliding_window_pattern", default=default)
    if type(interval) is not int or interval < 1:
        raise keys.make_error("sliding_window_pattern", interval, "it must be an integer of at least 1")
    windowed = [(i + 1) % interval != 0 for i in range(layers)]
    if keys.get("sliding_window_pattern") is not None and read_layer_types(keys, windowed) != windowed:
        raise keys.make_error("sliding_window_pattern", interval, "but layer_types gives another pattern")
    return windowed


def make_layer_pattern(windowed: list[bool], window: int | None, full_letter: str = "L") -> dict[str, Any]:
    """Return the keys of [model] for a window in the layers that `windowed` marks. Others get `full_letter`."""
    if not any(windowed):
        return {}
    pattern = "".join("S" if is_windowed else full_letter for is_windowed in windowed)
    return {"window": window, "layer_pattern": pattern}


def make_shared_window_rules(default: int | None) -> LayerRules:
    """Return the rules of a family in which all layers have the same window, or all have none.

    Args:
        default: window if config.json has no key; None: no window.
    """

    def read(keys: ConfigKeys, layers: int) -> dict[str, Any]:
        # null means no window.
        window = keys.get_nullable("sliding_window", default=default)
        return {} if window is None else {"window": window}

    def write(model: ModelConfig) -> dict[str, Any]:
        return {"sliding_window": model.window if any(list_windowed_layers(model)) else None}

    def find_faults(model: ModelConfig, title: str) -> list[str]:
        if len(set(list_windowed_layers(model))) > 1:
            return [f"model.layer_pattern={model.layer_pattern!r}, and {title} has one window for all layers"]
        return []

    return LayerRules(read, write, find_faults)


def make_listed_window_rules(
    default_layers: Callable[[ConfigKeys, int], list[bool]], default_window: int | None = 4096
) -> LayerRules:
    """Return the rules of a family in which `layer_types` says which layers have the window.

    Args:
        default_layers: returns for each layer whether it has a window, if config.json has no layer_types.
        default_window: window if config.json has no key.
    """

    def read(keys: ConfigKeys, layers: int) -> dict[str, Any]:
        window = keys.get_nullable("sliding_window", default=default_window)
        windowed = read_layer_types(keys, default_layers(keys, layers))
        if any(windowed):
            require_window(keys, window)
        return make_layer_pattern(windowed, window)

    return LayerRules(read, write_window_list, find_faults=lambda model, title: [])


def write_window_list(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of config.json for windows in some of the layers, without `use_sliding_window`."""
    layer_types = write_layer_types(model)["layer_types"]
    # transformers makes a window's mask for models without windows too, so the key must be a number.
    return {"sliding_window": model.window or model.sequence_length, "layer_types": layer_types}


def make_rope_by_kind_rules(
    default_layers: Callable[[ConfigKeys, int], list[bool]],
    default_bases: tuple[float, float],
    local_base_key: str | None = None,
) -> LayerRules:
    """Return the rules of a family in which rotary positions differ between layers with and without a window.

    Args:
        default_layers: returns for each layer whether it has a window, if config.json has no layer_types.
        default_bases: default bases of rotary positions, in layers with and in layers without a window.
        local_base_key: key of the base of layers with a window in older files.
    """

    def read(keys: ConfigKeys, layers: int) -> dict[str, Any]:
        local, full = read_rotary_of_kinds(keys, default_bases, local_base_key)
        window = keys.get_nullable("sliding_window", default=4096)
        windowed = read_layer_types(keys, default_layers(keys, layers))
        if not any(windowed):
            return full
        require_window(keys, window)
        if all(windowed) or local == full:
            return local | make_layer_pattern(windowed, window)
        # [model] has the settings of layers with a window, and the kind has those that differ.
        full_kind = {"window": 0, **full}
        if "rotary_scaling" in local and "rotary_scaling" not in full:
            full_kind["rotary_scaling"] = {"method": "none"}
        pattern = make_layer_pattern(windowed, window, _FULL_ROPE)
        return local | pattern | {"layer_kinds": {_FULL_ROPE: full_kind}}

    def write(model: ModelConfig) -> dict[str, Any]:
        local, full = _find_ropes(model)
        assert local[0] is not None
        assert full[0] is not None
        return write_window_list(model) | write_rotary_of_kinds(local[0], full[0], local_base_key)

    def find_faults(model: ModelConfig, title: str) -> list[str]:
        local, full = _find_ropes(model)
        # A list has several entries if rotary positions differ between layers with a window, or between the others.
        if len(local) > 1 or len(full) > 1:
            return [f"model.layer_kinds give layers of equal windows other positions, and {title} has no such layers"]
        scalings = [rope.scaling for rope in (*local, *full) if rope is not None]
        if any(scaling is not None and scaling.is_range_rounded is False for scaling in scalings):
            return [f"model.rotary_scaling.is_range_rounded=False, and {title} only has True"]
        return []

    return LayerRules(read, write, find_faults, allows_rope_by_kind=True, reads_rotary=True)


def _find_ropes(model: ModelConfig) -> tuple[list[RopeSpec | None], list[RopeSpec | None]]:
    """Return the distinct rotary positions of layers with a window, and those of layers without a window.

    If all layers have a window, or none has, both results are the list of all layers.
    """
    layers = list(zip(resolve_layers(model), list_windowed_layers(model), strict=True))
    local = list(dict.fromkeys(layer.rope for layer, is_windowed in layers if is_windowed))
    full = list(dict.fromkeys(layer.rope for layer, is_windowed in layers if not is_windowed))
    return local or full, full or local
