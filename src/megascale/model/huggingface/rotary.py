"""Rotary positions in config.json: base, rotated fraction and scaling, as transformers reads and writes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from megascale.config import ModelConfig
from megascale.config.rotary_scaling import REQUIRED_KEYS, RotaryScaling
from megascale.core.layer_spec import RopeSpec
from megascale.model.huggingface.family import ConfigKeys

# Keys of a table of rotary positions that all types have.
_COMMON_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
# Names of our keys in config.json, by type.
_SCALING_KEYS = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "original_length": "original_max_position_embeddings",
        "low_frequency_factor": "low_freq_factor",
        "high_frequency_factor": "high_freq_factor",
    },
    "yarn": {
        "factor": "factor",
        "original_length": "original_max_position_embeddings",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
        "is_range_rounded": "truncate",
    },
    "longrope": {
        "original_length": "original_max_position_embeddings",
        "short_factors": "short_factor",
        "long_factors": "long_factor",
        "attention_factor": "attention_factor",
    },
}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # of most families
_MSCALE_KEYS = ("mscale", "mscale_all_dim")  # of yarn; they give the attention factor


def read_rotary(
    keys: ConfigKeys,
    fraction: float,
    base_key: str,
    fraction_key: str = "partial_rotary_factor",
    *,
    default_base: float = 10000.0,
    types: Sequence[str] = ROPE_TYPES,
) -> dict[str, Any]:
    """Return the keys of rotary positions as transformers reads them.

    `rope_scaling` has priority over `rope_parameters`, and missing values come from the keys of older files. Raises
    DataError if a key that transformers would ignore differs, or for a type or a key that is not supported.

    Args:
        types: types of scaling that the family has.
    """
    tables: dict[str, dict[str, Any]] = {}
    for name in ("rope_scaling", "rope_parameters"):
        rope = keys.get(name, default={})
        if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
            raise keys.make_error(name, rope, "rotary positions that differ between layers are not supported")
        if rope:
            tables[name] = rope
    table_name, rope = next(iter(tables.items()), ("rope_parameters", {}))
    base = rope.get("rope_theta") or keys.get(base_key, default=default_base)
    rotary_fraction = rope.get("partial_rotary_factor") or keys.get(fraction_key, default=fraction)
    scalings = {name: _read_scaling(keys, name, values, types) for name, values in tables.items()}
    for name, values in tables.items():
        for key, value in (("rope_theta", base), ("partial_rotary_factor", rotary_fraction)):
            if values.get(key, value) not in (value, None):
                raise keys.make_error(f"{name}.{key}", values[key], f"but {table_name} gives {value!r}")
        if scalings[name] != scalings[table_name]:
            raise keys.make_error(name, values, f"but {table_name} gives {rope!r}")
    for key, value in ((base_key, base), ("rope_theta", base), (fraction_key, rotary_fraction)):
        if keys.get(key, default=value) != value:
            raise keys.make_error(key, keys.values[key], f"but {table_name} gives {value!r}")
    model = {"positions": "rotary", "rotary_base": float(base), "rotary_fraction": float(rotary_fraction)}
    if scalings.get(table_name) is not None:
        model["rotary_scaling"] = scalings[table_name]
    return model


def read_rotary_of_kinds(
    keys: ConfigKeys, defaults: tuple[float, float], local_base_key: str | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the keys of rotary positions of the layers with a window, and of the others.

    `rope_parameters` has a table for each kind of layer. Older files have one base for each, and the scaling of the
    layers without a window in `rope_scaling`. Raises DataError like `read_rotary`.

    Args:
        defaults: bases of both kinds.
        local_base_key: older key of the base of layers with a window.
    """
    tables = keys.get("rope_parameters", default={})
    scaling = keys.get("rope_scaling", default={})
    kinds = {"sliding_attention", "full_attention"}
    if not isinstance(tables, dict) or not set(tables) <= kinds:
        raise keys.make_error("rope_parameters", tables, f"it must have a table for each of {', '.join(sorted(kinds))}")
    if not isinstance(scaling, dict):
        raise keys.make_error("rope_scaling", scaling, "it must be a table")
    settings = []
    for kind, default, base_key in (
        ("sliding_attention", defaults[0], local_base_key),
        ("full_attention", defaults[1], "rope_theta"),
    ):
        name = f"rope_parameters.{kind}"
        table = dict(tables.get(kind) or {})
        for key, value in scaling.items() if kind == "full_attention" else ():
            if table.get(key, value) != value and "rope_type" in table:
                raise keys.make_error(f"{name}.{key}", table[key], f"but rope_scaling gives {value!r}")
            table[key] = value
        outer_base = None if base_key is None else keys.get(base_key)
        base = table.get("rope_theta") or outer_base or default
        if outer_base is not None and outer_base != base:
            raise keys.make_error(f"{name}.rope_theta", base, f"but {base_key} is {outer_base!r}")
        if table.get("partial_rotary_factor") not in (None, 1.0):
            raise keys.make_error(name, table, "rotary positions on a part of a head are not supported here")
        if table.get("truncate") is False:
            raise keys.make_error(f"{name}.truncate", False, "transformers ignores it here, so its meaning is unclear")
        setting: dict[str, Any] = {"rotary_base": float(base)}
        scaled = _read_scaling(keys, name, table, ROPE_TYPES)
        if scaled is not None:
            setting["rotary_scaling"] = scaled
        settings.append(setting)
    return settings[0], settings[1]


def write_rotary_of_kinds(local: RopeSpec, full: RopeSpec, local_base_key: str | None) -> dict[str, Any]:
    """Return the keys of rotary positions of layers with a window and of the others; see `read_rotary_of_kinds`."""
    written: dict[str, Any] = {
        "rope_parameters": {"sliding_attention": _write_rope(local), "full_attention": _write_rope(full)},
        "rope_theta": full.base,
    }
    if local_base_key is not None:
        written[local_base_key] = local.base
    return written


def _write_rope(rope: RopeSpec) -> dict[str, Any]:
    table = {"rope_type": "default", "rope_theta": rope.base}
    if rope.scaling is None or rope.scaling.method == "none":
        return table
    return table | _write_scaling(rope.scaling)


def _read_scaling(keys: ConfigKeys, name: str, rope: dict[str, Any], types: Sequence[str]) -> dict[str, Any] | None:
    """Return the table [model.rotary_scaling] of a table of config.json, or None without scaling."""
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type == "su":
        rope_type = "longrope"  # its name in older files
    if rope_type not in types:
        raise keys.make_error(
            f"{name}.rope_type",
            rope_type,
            f"scaled rotary positions of the types {', '.join(types)} are supported",
        )
    names = _SCALING_KEYS[rope_type]
    accepted_names = [*_COMMON_KEYS, *names.values()]
    if rope_type == "yarn":
        accepted_names += _MSCALE_KEYS
    elif rope_type == "longrope":
        accepted_names.append("factor")
    for key, value in rope.items():
        if key not in accepted_names and value is not None:
            raise keys.make_error(
                f"{name}.{key}", value, f"the type {rope_type} has no such key, or it is not supported"
            )
    if rope_type == "default":
        return None
    scaling = {ours: rope[theirs] for ours, theirs in names.items() if rope.get(theirs) is not None}
    if "original_length" in names:
        scaling["original_length"] = _read_original_length(keys, name, rope)
    missing = [names[key] for key in REQUIRED_KEYS[rope_type] if key not in scaling]
    if missing:
        raise keys.make_error(f"{name}.rope_type", rope_type, f"the table has no {missing[0]}")
    if rope_type == "yarn" and "attention_factor" not in scaling:
        scaling["attention_factor"] = _yarn_attention_factor(rope)
    elif rope_type == "longrope" and "attention_factor" not in scaling:
        factor = rope.get("factor") or keys.require_count("max_position_embeddings") / scaling["original_length"]
        scaling["attention_factor"] = _longrope_attention_factor(factor, scaling["original_length"])
    return {"method": rope_type, **scaling}


def _read_original_length(keys: ConfigKeys, name: str, rope: dict[str, Any]) -> Any:
    """Return the context length before the extension; older files have it outside of the table."""
    key = "original_max_position_embeddings"
    inner = rope.get(key)
    outer = keys.get(key)
    if inner is not None and outer is not None and inner != outer:
        raise keys.make_error(f"{name}.{key}", inner, f"but {key} outside of the table is {outer!r}")
    return inner or outer or keys.get("max_position_embeddings")


def _yarn_attention_factor(rope: dict[str, Any]) -> float:
    """Return the factor that transformers derives from `mscale` and `mscale_all_dim`."""
    if rope["factor"] <= 1:
        return 1.0
    logarithm = 0.1 * math.log(rope["factor"])
    scale, scale_all = (rope.get(key) for key in _MSCALE_KEYS)
    if scale and scale_all:
        return float((scale * logarithm + 1.0) / (scale_all * logarithm + 1.0))
    return logarithm + 1.0


def _longrope_attention_factor(factor: float, original_length: int) -> float:
    """Return the factor that transformers derives from the extension of the context."""
    if factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original_length))


def write_rotary(model: ModelConfig, has_fraction: bool = False) -> dict[str, Any]:
    """Return the keys of rotary positions for config.json, with the rotated fraction if `has_fraction`."""
    fraction = {"partial_rotary_factor": model.rotary_fraction} if has_fraction else {}
    rope = {"rope_type": "default", "rope_theta": model.rotary_base, **fraction}
    scaling = model.rotary_scaling
    if scaling is None or scaling.method == "none":
        # transformers 5 reads the first key, older versions the second.
        return {"rope_parameters": rope, "rope_theta": model.rotary_base, **fraction}
    written = _write_scaling(scaling)
    return {
        "rope_parameters": rope | written,
        "rope_scaling": written | {"rope_theta": model.rotary_base},
        "rope_theta": model.rotary_base,
        **fraction,
    }


def _write_scaling(scaling: RotaryScaling) -> dict[str, Any]:
    table: dict[str, Any] = {"rope_type": scaling.method}
    for ours, theirs in _SCALING_KEYS[scaling.method].items():
        value = getattr(scaling, ours)
        if isinstance(value, tuple):
            table[theirs] = list(value)
        elif value is not None:
            table[theirs] = value
    return table


def rotary_fraction_of(width: int, size: int) -> float:
    """Return the fraction of a head of `size` for which int(fraction x size) is `width`."""
    fraction = width / size
    if int(fraction * size) == width:
        return fraction
    return math.nextafter(fraction, 2.0)


def rotary_width(model: ModelConfig) -> int:
    """Return the width of a head that is rotated."""
    return int(model.head_size * model.rotary_fraction)
