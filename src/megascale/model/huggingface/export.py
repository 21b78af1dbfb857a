"""A model written as a Hugging Face folder: safetensors files of bounded size, config.json last."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megascale.config import ModelConfig
from megascale.core.inventory import logical_shapes
from megascale.errors import ConfigError, MegascaleError
from megascale.model.huggingface.import_model import INDEX, SINGLE
from megascale.model.huggingface.settings import Family
from megascale.model.huggingface.tensor_names import Weight, join_weight

# Given logical names, the whole tensors, of any float type.
Fetch = Callable[[Sequence[str]], Mapping[str, Tensor]]


CONFIG = "config.json"
_OF_A_FILE_SYSTEM = "lost+found"  # in the root of a file system that holds nothing else


@contextmanager
def complete_folder(out: Path) -> Iterator[Path]:
    """Yield a folder to write into, whose files appear in `out` when the body ends; a body that fails leaves nothing.

    A new `out` appears whole. An empty one is filled: it may be the working directory or a mount point, which nothing
    can be renamed to. config.json comes last there.

    Raises ConfigError if `out` holds anything or cannot be made, MegascaleError if it cannot be written.
    """
    exists = _check_empty(out)
    try:
        target = out.resolve()
        staging = (target if exists else target.parent) / f".megascale-{secrets.token_hex(4)}"
        staging.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"--out={out} cannot be made: {error.strerror}") from None
    try:
        yield staging
        if exists:
            _move_files(staging, target)
        else:
            staging.replace(target)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise MegascaleError(f"--out={out} cannot be written: {error}; nothing is kept there") from error
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _check_empty(out: Path) -> bool:
    """Return whether `out` exists; ConfigError unless it is an empty folder then."""
    try:
        exists = out.exists()
        empty = not exists or (out.is_dir() and all(file.name == _OF_A_FILE_SYSTEM for file in out.iterdir()))
    except OSError as error:
        raise ConfigError(f"--out={out} cannot be read: {error.strerror}") from None
    if not empty:
        raise ConfigError(f"--out={out} is there already and is not an empty folder; name a new one")
    return exists


def _move_files(staging: Path, target: Path) -> None:
    """Move all of `staging` into `target`, config.json last, and remove `staging`; what fails leaves nothing there."""
    moved: list[Path] = []
    try:
        for file in sorted(staging.iterdir(), key=lambda file: (file.name == CONFIG, file.name)):
            file.replace(target / file.name)
            moved.append(target / file.name)
        staging.rmdir()
    except BaseException:
        for file in moved:
            shutil.rmtree(file, ignore_errors=True) if file.is_dir() else file.unlink(missing_ok=True)
        raise


def write_folder(
    out: Path,
    family: Family,
    model: ModelConfig,
    fetch: Fetch,
    *,
    dtype: torch.dtype,
    file_bytes: int,
    token_ids: Mapping[str, Any] | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Path]:
    """Write a model; one file's tensors are in memory at a time.

    Args:
        out: folder to make; ConfigError if it holds anything.
        family: one that the model has no faults for.
        fetch: called once a file, with the logical tensors that go into it.
        dtype: of the weights written.
        file_bytes: largest file, but for a single tensor above it.
        token_ids: those that config.json names, such as eos_token_id.
        progress: told the bytes of each file written.

    Returns the files. A tensor that the family has and the model has not (a bias) is written as zeros, which is the
    same function. config.json comes last, so that a folder cut short is not taken for a model.
    """
    _check_empty(out)
    out.mkdir(parents=True, exist_ok=True)
    shapes = all_shapes(model)
    own = logical_shapes(model)
    weights = family.list_weights(model)
    groups = _groups(weights, shapes, dtype.itemsize, file_bytes)
    files: list[Path] = []
    index: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        name = SINGLE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        parts = dict.fromkeys(part for weight in group for part in weight.parts)
        logical = dict(fetch([part for part in parts if part in own]))
        zeros = {part: torch.zeros(shapes[part]) for part in parts if part not in own}
        tensors = {weight.name: join_weight(weight, logical | zeros).to(dtype) for weight in group}
        if len({t.data_ptr() for t in tensors.values()}) < len(tensors):
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}  # the format forbids shared memory
        save_file(tensors, out / name, {"format": "pt"})
        files.append(out / name)
        index |= {weight.name: name for weight in group}
        progress(sum(t.nbytes for t in tensors.values()))
    if len(groups) > 1:
        total = sum(prod(weight.shape(shapes)) for weight in weights) * dtype.itemsize
        files.append(_write_json(out / INDEX, {"metadata": {"total_size": total}, "weight_map": index}))
    files.append(_write_json(out / CONFIG, make_config(family, model, dtype, token_ids or {})))
    return files


def make_config(family: Family, model: ModelConfig, dtype: torch.dtype, token_ids: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a model."""
    return {
        "architectures": [family.architecture],
        "model_type": family.name,
        "vocab_size": model.vocab,
        **family.write(model),
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tied_embeddings,
        "torch_dtype": str(dtype).removeprefix("torch."),
        # The families' own defaults are tokens of their own vocabularies, so these are always said.
        "bos_token_id": None,
        "eos_token_id": None,
        **token_ids,
        "use_cache": True,
    }


def all_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """`logical_shapes`, and those of the biases that the model leaves out."""
    with_biases = {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True, "head_bias": True}
    return logical_shapes(model.model_copy(update=with_biases))


def _groups(
    weights: Sequence[Weight], shapes: Mapping[str, tuple[int, ...]], item: int, limit: int
) -> list[list[Weight]]:
    """Consecutive tensors of at most `limit` bytes together."""
    groups: list[list[Weight]] = [[]]
    room = limit
    for weight in weights:
        size = prod(weight.shape(shapes)) * item
        if size > room and groups[-1]:
            groups.append([])
            room = limit
        groups[-1].append(weight)
        room -= size
    return groups


def _write_json(path: Path, record: Mapping[str, Any]) -> Path:
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return path
