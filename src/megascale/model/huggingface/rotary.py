"""Rotary positions in config.json: base, rotated fraction and scaling, as transformers reads and writes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from megascale.config import ModelConfig
from megascale.config.rotary_scaling import REQUIRED_KEYS, RotaryScaling
from megascale.core.layer_spec import RopeSpec
from megascale.model.huggingface.family import ConfigKeys

# Keys of `rope_parameters` and `rope_scaling` in config.json that all types have.
_COMMON_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
# Further keys by type: the key of [model.rotary_scaling] and the key of config.json.
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
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # types that most families support
_MSCALE_KEYS = ("mscale", "mscale_all_dim")  # keys of yarn that give the attention factor
_NUMBER_KEYS = ("rope_theta", "partial_rotary_factor", "factor", "attention_factor", *_MSCALE_KEYS)


def read_rotary(
    keys: ConfigKeys,
    fraction: float,
    base_key: str,
    fraction_key: str = "partial_rotary_factor",
    *,
    default_base: float = 10000.0,
    types: Sequence[str] = ROPE_TYPES,
) -> dict[str, Any]:
    """Return the settings of [model] for rotary positions, by key, as transformers reads them.

    config.json may have a table `rope_scaling`, a table `rope_parameters` or both; `rope_scaling` has priority. Values
    that the tables lack come from the keys of older files. Raises DataError for an unsupported type or key, and if
    another key contradicts the key that transformers reads.

    Args:
        fraction: rotated fraction of a head if no key gives it.
        base_key: key of the base in older files.
        fraction_key: key of the rotated fraction in older files.
        default_base: base if no key gives it.
        types: types of scaling that the family supports.
    """
    tables: dict[str, dict[str, Any]] = {}
    for name in ("rope_scaling", "rope_parameters"):
        table = keys.get(name, default={})
        if not isinstance(table, dict) or any(isinstance(value, dict) for value in table.values()):
            raise keys.make_error(name, table, "rotary positions that differ between layers are not supported")
        if table:
            tables[name] = table
    main_name = "rope_parameters"  # name of the table that has priority
    if "rope_scaling" in tables:
        main_name = "rope_scaling"
    rope = tables.get(main_name, {})
    base = rope.get("rope_theta")
    if base is None:
        base = keys.get(base_key, default=default_base)
    rotary_fraction = rope.get("partial_rotary_factor")
    if rotary_fraction is None:
        rotary_fraction = keys.get(fraction_key, default=fraction)
    scalings = {name: _read_scaling(keys, name, table, types) for name, table in tables.items()}
    # No other table or key may contradict these values.
    for name, table in tables.items():
        for key, value in (("rope_theta", base), ("partial_rotary_factor", rotary_fraction)):
            if table.get(key, value) not in (value, None):
                raise keys.make_error(f"{name}.{key}", table[key], f"but {main_name} gives {value!r}")
        if scalings[name] != scalings[main_name]:
            raise keys.make_error(name, table, f"but {main_name} gives {rope!r}")
    for key, value in ((base_key, base), ("rope_theta", base), (fraction_key, rotary_fraction)):
        if keys.get(key, default=value) != value:
            raise keys.make_error(key, keys.values[key], f"but {main_name} gives {value!r}")
    model = {"positions": "rotary", "rotary_base": float(base), "rotary_fraction": float(rotary_fraction)}
    if scalings.get(main_name) is not None:
        model["rotary_scaling"] = scalings[main_name]
    return model


def read_rotary_of_kinds(
    keys: ConfigKeys, default_bases: tuple[float, float], local_base_key: str | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of [model] for rotary positions: of layers with a window, and of layers without a window.

    `rope_parameters` has a table for each of the two kinds of layers. Older files have a key for each base, and in
    `rope_scaling` the scaling of layers without a window. Raises DataError like `read_rotary`.

    Args:
        default_bases: default bases of layers with and without a window.
        local_base_key: key of the base of layers with a window in older files; None: older files have no such key.
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
        ("sliding_attention", default_bases[0], local_base_key),
        ("full_attention", default_bases[1], "rope_theta"),
    ):
        name = f"rope_parameters.{kind}"
        table = dict(tables.get(kind) or {})
        if kind == "full_attention":
            for key, value in scaling.items():
                if table.get(key, value) != value and "rope_type" in table:
                    raise keys.make_error(f"{name}.{key}", table[key], f"but rope_scaling gives {value!r}")
                table[key] = value
        older_base = None if base_key is None else keys.get(base_key)
        base = table.get("rope_theta")
        if base is None:
            base = default if older_base is None else older_base
        if older_base is not None and older_base != base:
            raise keys.make_error(f"{name}.rope_theta", base, f"but {base_key} is {older_base!r}")
        if table.get("partial_rotary_factor") not in (None, 1.0):
            raise keys.make_error(name, table, "rotary positions on a part of a head are not supported here")
        if table.get("truncate") is False:
            raise keys.make_error(f"{name}.truncate", False, "transformers ignores it here, so its meaning is unclear")
        setting: dict[str, Any] = {"rotary_base": float(base)}
        model_scaling = _read_scaling(keys, name, table, ROPE_TYPES)
        if model_scaling is not None:
            setting["rotary_scaling"] = model_scaling
        settings.append(setting)
    return settings[0], settings[1]


def write_rotary_of_kinds(local: RopeSpec, full: RopeSpec, local_base_key: str | None) -> dict[str, Any]:
    """Return the keys of config.json for rotary positions of layers with a window (`local`) and of all others (`full`).

    The keys are those that `read_rotary_of_kinds` reads.
    """
    config: dict[str, Any] = {
        "rope_parameters": {"sliding_attention": _write_rope(local), "full_attention": _write_rope(full)},
        "rope_theta": full.base,
    }
    if local_base_key is not None:
        config[local_base_key] = local.base
    return config


def _write_rope(rope: RopeSpec) -> dict[str, Any]:
    """Return the table of one kind of layer in `rope_parameters`."""
    table = {"rope_type": "default", "rope_theta": rope.base}
    if rope.scaling is None or rope.scaling.method == "none":
        return table
    return table | _write_scaling(rope.scaling)


def _read_scaling(keys: ConfigKeys, name: str, rope: dict[str, Any], types: Sequence[str]) -> dict[str, Any] | None:
    """Return the table [model.rotary_scaling] for the table `rope` of config.json, or None without scaling.

    Args:
        name: name of the table `rope` in messages.
        types: types of scaling that the family supports.
    """
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type == "su":
        rope_type = "longrope"  # older files call longrope "su"
    if rope_type not in types:
        reason = f"scaled rotary positions of the types {', '.join(types)} are supported"
        if rope_type == "dynamic":
            reason += (
                "; up to max_position_embeddings tokens this type computes the same as the type default, so for such "
                "texts set rope_type to default and remove factor"
            )
        raise keys.make_error(f"{name}.rope_type", rope_type, reason)
    names = _SCALING_KEYS[rope_type]
    accepted_names = [*_COMMON_KEYS, *names.values()]
    if rope_type == "yarn":
        accepted_names += _MSCALE_KEYS
    elif rope_type == "longrope":
        accepted_names.append("factor")
    for key, value in rope.items():
        if value is None:
            continue
        if key not in accepted_names:
            raise keys.make_error(
                f"{name}.{key}", value, f"the type {rope_type} has no such key, or it is not supported"
            )
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if key in _NUMBER_KEYS and not is_number:
            raise keys.make_error(f"{name}.{key}", value, "it must be a number")
    if rope_type == "default":
        return None
    scaling = {key: rope[hf_key] for key, hf_key in names.items() if rope.get(hf_key) is not None}
    if "original_length" in names:
        scaling["original_length"] = _read_original_length(keys, name, rope)
    missing = [names[key] for key in REQUIRED_KEYS[rope_type] if key not in scaling]
    if missing:
        raise keys.make_error(f"{name}.rope_type", rope_type, f"the table has no {missing[0]}")
    if rope_type == "yarn" and "attention_factor" not in scaling:
        scaling["attention_factor"] = _compute_yarn_attention_factor(rope)
    elif rope_type == "longrope" and "attention_factor" not in scaling:
        factor = rope.get("factor") or keys.require_count("max_position_embeddings") / scaling["original_length"]
        scaling["attention_factor"] = _compute_longrope_attention_factor(factor, scaling["original_length"])
    return {"method": rope_type, **scaling}


def _read_original_length(keys: ConfigKeys, name: str, rope: dict[str, Any]) -> Any:
    """Return the context length before its extension. Older files have it as a key outside of the table."""
    key = "original_max_position_embeddings"
    inner = rope.get(key)
    outer = keys.get(key)
    if inner is not None and outer is not None and inner != outer:
        raise keys.make_error(f"{name}.{key}", inner, f"but {key} outside of the table is {outer!r}")
    return inner or outer or keys.get("max_position_embeddings")


def _compute_yarn_attention_factor(rope: dict[str, Any]) -> float:
    """Return the attention factor that transformers derives from `factor`, `mscale` and `mscale_all_dim`."""
    if rope["factor"] <= 1:
        return 1.0
    growth = 0.1 * math.log(rope["factor"])  # 0.1 is the constant of the YaRN paper (arXiv 2309.00071)
    mscale = rope.get("mscale")
    mscale_all_dim = rope.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return float((mscale * growth + 1.0) / (mscale_all_dim * growth + 1.0))
    return growth + 1.0


def _compute_longrope_attention_factor(factor: float, original_length: int) -> float:
    """Return the attention factor that transformers derives from `factor`, by which the context was extended."""
    if factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original_length))


def write_rotary(model: ModelConfig, has_fraction: bool = False) -> dict[str, Any]:
    """Return the keys of config.json for rotary positions, with the rotated fraction if `has_fraction`."""
    fraction = {"partial_rotary_factor": model.rotary_fraction} if has_fraction else {}
    rope = {"rope_type": "default", "rope_theta": model.rotary_base, **fraction}
    scaling = model.rotary_scaling
    if scaling is None or scaling.method == "none":
        # transformers 5 reads the first key, older versions the second.
        return {"rope_parameters": rope, "rope_theta": model.rotary_base, **fraction}
    table = _write_scaling(scaling)
    return {
        "rope_parameters": rope | table,
        "rope_scaling": table | {"rope_theta": model.rotary_base},
        "rope_theta": model.rotary_base,
        **fraction,
    }


def _write_scaling(scaling: RotaryScaling) -> dict[str, Any]:
    """Return the keys of config.json for [model.rotary_scaling]."""
    table: dict[str, Any] = {"rope_type": scaling.method}
    for key, hf_key in _SCALING_KEYS[scaling.method].items():
        value = getattr(scaling, key)
        if isinstance(value, tuple):
            table[hf_key] = list(value)
        elif value is not None:
            table[hf_key] = value
    return table


def compute_rotary_fraction(width: int, head_size: int) -> float:
    """Return the rotated fraction of a head for which int(fraction x head_size) is `width`, despite rounding."""
    fraction = width / head_size
    if int(fraction * head_size) == width:
        return fraction
    return math.nextafter(fraction, 2.0)


def compute_rotary_width(model: ModelConfig) -> int:
    """Return the number of elements of a head that are rotated."""
    return int(model.head_size * model.rotary_fraction)
