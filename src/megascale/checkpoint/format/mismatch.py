"""Comparison of a checkpoint's tensors with a model's, and the configuration key that likely differs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from megascale.checkpoint.format.chunks import TensorShard
from megascale.checkpoint.format.index import CheckpointIndex

_MAX_SHOWN = 4
_REMEDY = "Use the configuration it was trained with, or another train.name"


def explain_mismatch(
    name: str, index: CheckpointIndex, shards: Sequence[TensorShard], state: Mapping[str, Any]
) -> str | None:
    """Return a paragraph that names shards without a tensor of their shape in the checkpoint, or None.

    Args:
        name: the checkpoint's name in the message.
        state: its saved state.
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
    parts = [f"{key} is {list(stored)} there and {list(shape)} here" for key, stored, shape in differing[:_MAX_SHOWN]]
    if missing:
        parts.append(f"it has no {_join_names(missing)}")
    hints = _guess_keys(shapes, index, missing, differing, state)
    return (
        f"the checkpoint {name!r} is of another model ({len(missing) + len(differing)} tensors differ): "
        f"{'; '.join(parts)}. {'; '.join(hints)}. {_REMEDY}"
    )


def explain_leftovers(name: str, index: CheckpointIndex, rows: np.ndarray) -> str | None:
    """Return a paragraph that names the checkpoint's model tensors that no process loads, or None.

    Args:
        name: the checkpoint's name in the message.
        rows: chunks that the processes load.
    """
    numbers = set(index.columns["tensor"][rows].tolist())
    loaded = {tensor for number, tensor in enumerate(index.tensors) if number in numbers}
    leftovers = [tensor for tensor in index.tensors if tensor.startswith("model.") and tensor not in loaded]
    if not leftovers:
        return None
    hint = _compare_layers(loaded, index) or "this one lacks those parts"
    return (
        f"the checkpoint {name!r} is of another model: {_join_names(leftovers)} ({len(leftovers)} tensors) have no "
        f"place in this; {hint}. {_REMEDY}"
    )


def _guess_keys(
    shapes: Mapping[str, tuple[int, ...]],
    index: CheckpointIndex,
    missing: Sequence[str],
    differing: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]],
    state: Mapping[str, Any],
) -> list[str]:
    """Return hints on the configuration keys that likely differ, without repetitions."""
    if isinstance(state.get("config"), Mapping):
        saved = state.get("config")
    else:
        saved = {}
    model = (saved or {}).get("model", {})
    layers = _compare_layers(shapes, index)
    hints = [layers]
    for _, stored, shape in differing:
        for saved_size, size in zip(stored, shape, strict=False):
            if saved_size != size:
                keys = _keys_of_size(model, saved_size)
            else:
                keys = []
            if keys:
                hints.append(f"{' or '.join(keys)} likely differs ({saved_size} there, {size} here)")
    prefixes = sorted({".".join(key.split(".")[:2]) for key in missing if "." in key})
    if not layers and any(prefix.startswith("optimizer.") for prefix in prefixes):
        hints.append(f"optimizer.name likely differs (no {', '.join(prefixes)} there)")
    return [hint for hint in dict.fromkeys(hints) if hint] or [
        "compare its configuration with `megascale checkpoint inspect`"
    ]


def _compare_layers(names: Iterable[str], index: CheckpointIndex) -> str:
    """Return a hint if the numbers of layers differ, else an empty string."""
    current = _count_layers(names)
    saved = _count_layers(index.tensors)
    if current != saved:
        return f"model.layers is likely {saved} there and {current} here"
    return ""


def _count_layers(names: Iterable[str]) -> int:
    """Return the number of layers among logical names."""
    return len({m.group(1) for name in names if (m := re.search(r"\blayers\.(\d+)\.", name))})


def _keys_of_size(model: Mapping[str, Any], size: int) -> list[str]:
    """Return the keys of a saved [model] section that give a dimension of `size`."""
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
    return keys[:1] if "model.hidden" in keys else keys


def _join_names(names: Sequence[str]) -> str:
    return ", ".join(names[:_MAX_SHOWN]) + (" ..." if len(names) > _MAX_SHOWN else "")
