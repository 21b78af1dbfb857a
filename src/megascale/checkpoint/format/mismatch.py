"""Comparison of a checkpoint's tensors with a model's, with hints on the configuration key that probably differs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from megascale.checkpoint.format.chunks import TensorShard
from megascale.checkpoint.format.index import CheckpointIndex

_MAX_SHOWN = 4  # tensors that a message names
_REMEDY = "Use the configuration it was trained with, or another train.name"


def explain_mismatch(
    name: str, index: CheckpointIndex, shards: Sequence[TensorShard], state: Mapping[str, Any]
) -> str | None:
    """Return an error message if the checkpoint lacks tensors of the shards or has them in other shapes, or None.

    Args:
        state: saved state of the checkpoint, whose configuration gives hints.
    """
    shapes = {shard.name: tuple(shard.shape) for shard in shards}
    missing = [key for key in shapes if key not in index.tensors]
    differing = [
        (key, index.tensors[key].shape, shape)
        for key, shape in shapes.items()
        if key in index.tensors and index.tensors[key].shape != shape
    ]
    if not missing and not differing:
        return None
    differences = [
        f"{key} is {list(stored)} there and {list(shape)} here" for key, stored, shape in differing[:_MAX_SHOWN]
    ]
    if missing:
        differences.append(f"it has no {_join_names(missing)}")
    hints = _guess_keys(shapes, index, missing, differing, state)
    return (
        f"the checkpoint {name!r} is of another model ({len(missing) + len(differing)} tensors differ): "
        f"{'; '.join(differences)}. {'; '.join(hints)}. {_REMEDY}"
    )


def explain_leftovers(name: str, index: CheckpointIndex, rows: np.ndarray) -> str | None:
    """Return an error message if no process loads some of the checkpoint's model tensors, or None.

    Args:
        rows: rows of the chunks that the processes load.
    """
    loaded_positions = set(index.columns["tensor"][rows].tolist())
    loaded_names = {tensor for position, tensor in enumerate(index.tensors) if position in loaded_positions}
    leftovers = [tensor for tensor in index.tensors if tensor.startswith("model.") and tensor not in loaded_names]
    if not leftovers:
        return None
    hint = _compare_layers(loaded_names, index) or "this model lacks these tensors"
    return (
        f"the checkpoint {name!r} is of another model: {_join_names(leftovers)} ({len(leftovers)} tensors) are not "
        f"in this model; {hint}. {_REMEDY}"
    )


def _guess_keys(
    shapes: Mapping[str, tuple[int, ...]],
    index: CheckpointIndex,
    missing: Sequence[str],
    differing: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]],
    state: Mapping[str, Any],
) -> list[str]:
    """Return hints on the configuration keys that probably differ, without repetitions."""
    saved_config = state.get("config")
    if not isinstance(saved_config, Mapping):
        saved_config = {}
    model = saved_config.get("model", {})
    layers = _compare_layers(shapes, index)
    hints = [layers]
    for _, stored, shape in differing:
        for saved_size, size in zip(stored, shape, strict=False):
            if saved_size == size:
                continue
            keys = _find_keys_of_size(model, saved_size)
            if keys:
                hints.append(f"{' or '.join(keys)} likely differs ({saved_size} there, {size} here)")
    prefixes = sorted({".".join(key.split(".")[:2]) for key in missing if "." in key})
    if not layers and any(prefix.startswith("optimizer.") for prefix in prefixes):
        hints.append(f"optimizer.name likely differs (no {', '.join(prefixes)} there)")
    unique_hints = [hint for hint in dict.fromkeys(hints) if hint]
    if not unique_hints:
        return ["compare its configuration with `megascale checkpoint inspect`"]
    return unique_hints


def _compare_layers(names: Iterable[str], index: CheckpointIndex) -> str:
    """Return a hint if the numbers of layers differ, or an empty text."""
    current = _count_layers(names)
    saved = _count_layers(index.tensors)
    if current != saved:
        return f"model.layers is likely {saved} there and {current} here"
    return ""


def _count_layers(names: Iterable[str]) -> int:
    """Return the number of layers among logical names."""
    matches = [re.search(r"\blayers\.(\d+)\.", name) for name in names]
    return len({match.group(1) for match in matches if match})


def _find_keys_of_size(model: Mapping[str, Any], size: int) -> list[str]:
    """Return the keys of a saved section `model` that give a dimension of `size`."""
    hidden = model.get("hidden") or 0
    heads = model.get("heads") or 1
    vocab = model.get("vocab_size") or 0
    multiple = model.get("vocab_multiple") or 1
    sizes = {
        "hidden": {hidden},
        "ffn_hidden": {model.get("ffn_hidden") or 4 * hidden},
        "vocab_size": {vocab, -(-vocab // multiple) * multiple},
        "sequence_length": {model.get("sequence_length") or 0},
        "kv_heads": {(model.get("kv_heads") or heads) * (model.get("head_dim") or hidden // heads)},
    }
    keys = [f"model.{key}" for key, values in sizes.items() if size in values and size]
    if "model.hidden" in keys:
        return ["model.hidden"]  # other sizes follow from it
    return keys


def _join_names(names: Sequence[str]) -> str:
    return ", ".join(names[:_MAX_SHOWN]) + (" ..." if len(names) > _MAX_SHOWN else "")
