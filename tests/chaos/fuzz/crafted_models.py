"""Hugging Face folders that lie: a small sound one of a family with something changed. For tests and campaigns."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

Craft = Callable[[Path], object]

_SIZES = {"hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 32}
SETTINGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 24, "n_head": 4, "n_layer": 2, "n_positions": 16, "vocab_size": 32},
    "gptj": {"n_embd": 24, "n_head": 4, "n_layer": 2, "n_positions": 16, "vocab_size": 32, "rotary_dim": 4},
    "gpt_neox": {**_SIZES, "rotary_pct": 1.0, "intermediate_size": 48, "max_position_embeddings": 16},
    "llama": {**_SIZES, "intermediate_size": 48, "max_position_embeddings": 16},
    "mistral": {**_SIZES, "intermediate_size": 48, "max_position_embeddings": 16, "num_key_value_heads": 2},
    "qwen2": {**_SIZES, "intermediate_size": 48, "max_position_embeddings": 16, "num_key_value_heads": 2},
}


def write_model(folder: Path, family: str) -> None:
    """A sound folder of one file: a model of zeros."""
    import torch
    from safetensors.torch import save_file

    from megascale.config import from_tree
    from megascale.core.inventory import logical_shapes
    from megascale.model.huggingface.families import FAMILIES
    from megascale.model.huggingface.family import ConfigKeys

    settings = {"model_type": family, **SETTINGS[family]}
    model = from_tree({"model": FAMILIES[family].read_config(ConfigKeys(settings, "config.json"))}).model
    shapes = logical_shapes(model)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    tensors = {
        weight.name: torch.zeros(weight.compute_shape(shapes)) for weight in FAMILIES[family].list_weights(model)
    }
    save_file(tensors, folder / "model.safetensors")


def edit_settings(folder: Path, **changes: Any) -> None:
    """Change keys of config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _settings(**changes: Any) -> Craft:
    return lambda folder: edit_settings(folder, **changes)


def _config(text: bytes) -> Craft:
    return lambda folder: (folder / "config.json").write_bytes(text)


def _index(locations: Any) -> Craft:
    """An index in the place of the one file, which would be read first."""

    def craft(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps(locations))

    return craft


def _pipe(name: str) -> Craft:
    def craft(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return craft


def _sparse(folder: Path) -> None:
    with open(folder / "config.json", "r+b") as file:
        file.truncate(1 << 40)


def _header(text: bytes, length: int | None = None) -> Craft:
    """A safetensors file of this header, which may say that it is longer."""

    def craft(folder: Path) -> None:
        output = len(text) if length is None else length
        (folder / "model.safetensors").write_bytes(output.to_bytes(8, "little") + text)

    return craft


# Llama, Mistral and Qwen2 share the names of their keys; what is crafted starts from the family named first.
CRAFTED: dict[str, tuple[str, Craft]] = {
    "thirty million layers": ("qwen2", _settings(num_hidden_layers=30_000_000)),
    "thirty million layers of GPT-2": ("gpt2", _settings(n_layer=30_000_000)),
    "as many layers as there may be": ("llama", _settings(num_hidden_layers=10_000)),
    "layers beyond numbers": ("llama", _settings(num_hidden_layers=10**1000)),
    "a width beyond numbers": ("llama", _settings(hidden_size=10**1000)),
    "heads beyond numbers": ("gpt_neox", _settings(num_attention_heads=10**400)),
    "a fraction beyond numbers": ("gpt_neox", _settings(rotary_pct=10**400)),
    "a width of text": ("mistral", _settings(hidden_size="24")),
    "a width of true": ("mistral", _settings(hidden_size=True)),
    "layer types that are a number": ("qwen2", _settings(layer_types=5)),
    "layer types of millions": ("qwen2", _settings(layer_types=["full_attention"] * 400_000)),
    "an activation that is a table": ("gpt2", _settings(activation_function={"a": 1})),
    "dropout that is a list": ("gpt2", _settings(resid_pdrop=[1])),
    "a family that is a list": ("gpt2", _settings(model_type=["gpt2"])),
    "settings that are a list": ("gpt2", _config(b"[]")),
    "settings a hundred thousand deep": ("gpt2", _config(b"[" * 100_000)),
    "settings of five million tables": ("gpt2", _config(b"[" + b"[]," * 5_000_000 + b"[]]")),
    "settings that are no text": ("gpt2", _config(b"\xff\xfe\x00")),
    "settings of a terabyte": ("gpt2", _sparse),
    "settings that are a pipe": ("gpt2", _pipe("config.json")),
    "tensors that are a pipe": ("gpt2", _pipe("model.safetensors")),
    "an index that is a list": ("gpt2", _index([])),
    "an index whose map is a list": ("gpt2", _index({"weight_map": ["a"]})),
    "an index whose files are numbers": ("gpt2", _index({"weight_map": {"wte.weight": 5}})),
    "an index that leads out": ("gpt2", _index({"weight_map": {"wte.weight": "../secret.safetensors"}})),
    "an index that leads to the folder": ("gpt2", _index({"weight_map": {"wte.weight": ".."}})),
    "an index with a zero byte": ("gpt2", _index({"weight_map": {"wte.weight": "a\0b"}})),
    "an index of files that are not there": ("gpt2", _index({"weight_map": {"wte.weight": "a.safetensors"}})),
    "a header longer than the file": ("gpt2", _header(b"{}", 1 << 62)),
    "a header that is no table": ("gpt2", _header(b"[]")),
    "a header a hundred thousand deep": ("gpt2", _header(b"[" * 100_000)),
    "a tensor outside the file": (
        "gpt2",
        _header(b'{"wte.weight":{"dtype":"F32","shape":[32,24],"data_offsets":[0,3072]}}'),
    ),
    "a tensor of a terabyte": (
        "gpt2",
        _header(b'{"wte.weight":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4398046511104]}}'),
    ),
}
