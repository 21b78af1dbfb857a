"""Whether a checkpoint is of the model that wants it, and if not, which configuration key likely differs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from megascale.checkpoint.format.chunks import TensorShard
from megascale.checkpoint.format.index import CheckpointIndex

_SHOWN = 4


def explain_mismatch(
    name: str, index: CheckpointIndex, shards: Sequence[TensorShard], state: Mapping[str, Any]
) -> str | None:
    """One paragraph naming what does not fit, or None if every shard finds its tensor."""
    wanted = {shard.name: tuple(shard.shape) for shard in shards}
    missing = [key for key in wanted if key not in index.tensors]
    shapes = [
        (key, index.tensors[key].shape, shape)
        for key, shape in wanted.items()
        if key in index.tensors and index.tensors[key].shape != shape
    ]
    if not missing and not shapes:
        return None
    parts = [f"{key} is {list(stored)} there and {list(want)} here" for key, stored, want in shapes[:_SHOWN]]
    if missing:
        parts.append(f"it has no {', '.join(missing[:_SHOWN])}" + (" ..." if len(missing) > _SHOWN else ""))
    hint = _likely_key(wanted, index, missing, shapes, state)
    return (
        f"the checkpoint {name!r} is of another model ({len(missing) + len(shapes)} tensors differ): "
        f"{'; '.join(parts)}. {hint}"
    )


def explain_leftovers(name: str, index: CheckpointIndex, rows: np.ndarray) -> str | None:
    """One paragraph naming the model's tensors of which nobody wants a chunk, or None; `rows`: wanted chunks."""
    wanted = set(index.columns["tensor"][rows].tolist())
    names = {n for number, n in enumerate(index.tensors) if number in wanted}
    left = [n for n in index.tensors if n.startswith("model.") and n not in names]
    if not left:
        return None
    here, there = _layers(names), _layers(index.tensors)
    hint = f"model.layers is likely {there} there and {here} here" if here != there else "this one lacks those parts"
    shown = ", ".join(left[:_SHOWN]) + (" ..." if len(left) > _SHOWN else "")
    return (
        f"the checkpoint {name!r} is of another model: {shown} ({len(left)} tensors) have no place in this; {hint}. "
        "Use the configuration it was trained with, or another train.name"
    )


def _likely_key(
    wanted: Mapping[str, tuple[int, ...]],
    index: CheckpointIndex,
    missing: Sequence[str],
    shapes: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]],
    state: Mapping[str, Any],
) -> str:
    saved = state.get("config") if isinstance(state.get("config"), Mapping) else {}
    model = (saved or {}).get("model", {})
    guesses = []
    here, there = _layers(wanted), _layers(index.tensors)
    if here != there:
        guesses.append(f"model.layers is likely {there} there and {here} here")
    for _, stored, want in shapes:
        for a, b in zip(stored, want, strict=False):
            if a != b:
                keys = [f"model.{key}" for key in _keys_of_size(model, a)]
                guesses += [f"{' or '.join(keys)} likely differs ({a} there, {b} here)"] if keys else []
    names = {name.split(".")[0] + "." + name.split(".")[1] for name in missing if name.count(".")}
    if here == there and any(name.startswith("optimizer.") for name in names):
        guesses.append(f"optimizer.name likely differs (no {', '.join(sorted(names))} there)")
    if not guesses:
        guesses.append("compare its configuration with `megascale checkpoint inspect`")
    return "; ".join(dict.fromkeys(guesses)) + ". Use the configuration it was trained with, or another train.name"


def _layers(names: Iterable[str]) -> int:
    """Number of layers that logical names speak of."""
    return len({m.group(1) for name in names if (m := re.search(r"\blayers\.(\d+)\.", name))})


def _keys_of_size(model: Mapping[str, Any], size: int) -> list[str]:
    """Keys of a saved [model] section that give a dimension of `size`."""
    hidden, heads = model.get("hidden") or 0, model.get("heads") or 1
    vocab, multiple = model.get("vocab_size") or 0, model.get("vocab_multiple") or 1
    sizes = {
        "hidden": {hidden},
        "ffn_hidden": {model.get("ffn_hidden") or 4 * hidden},
        "vocab_size": {vocab, -(-vocab // multiple) * multiple},
        "sequence_length": {model.get("sequence_length") or 0},
        "kv_heads": {(model.get("kv_heads") or heads) * (model.get("head_dim") or hidden // heads)},
    }
    keys = [key for key, values in sizes.items() if size in values and size]
    return keys[:1] if "hidden" in keys else keys
