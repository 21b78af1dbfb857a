"""Writing of a model as a Hugging Face folder: safetensors files of bounded size, then config.json."""

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
from torch import Tensor

from megascale.config import ModelConfig
from megascale.core.inventory import logical_shapes
from megascale.errors import ConfigError, MegascaleError
from megascale.model.huggingface.family import Family, StoredWeight, join_weight
from megascale.model.huggingface.import_model import INDEX_FILE, SINGLE_FILE
from megascale.model.huggingface.weight_files import write_weights

# Returns whole logical tensors of any float type by name, given their names.
FetchTensors = Callable[[Sequence[str]], Mapping[str, Tensor]]


CONFIG = "config.json"  # name of the file
_LOST_AND_FOUND = "lost+found"  # folder in the root of every new ext4 file system


@contextmanager
def stage_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder, whose files move to `out` when the body ends. If the body fails, nothing is left.

    A new `out` appears by one rename. Files move into an existing empty folder one by one, config.json last, because a
    rename cannot replace the working directory or a mount point.

    Raises ConfigError if `out` is not empty or cannot be created, MegascaleError if it cannot be written.
    """
    exists = _check_empty(out)
    try:
        target = out.resolve()
        staging = (target if exists else target.parent) / f".megascale-{secrets.token_hex(4)}"
        staging.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"--out={out} cannot be created: {error.strerror}") from None
    try:
        yield staging
        if exists:
            _move_files(staging, target)
        else:
            staging.replace(target)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise MegascaleError(f"--out={out} cannot be written: {error}; its files were removed") from error
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _check_empty(out: Path) -> bool:
    """Return whether `out` exists. Raises ConfigError if it exists and is not an empty folder."""
    try:
        exists = out.exists()
        is_empty = not exists or (out.is_dir() and all(file.name == _LOST_AND_FOUND for file in out.iterdir()))
    except OSError as error:
        raise ConfigError(f"--out={out} cannot be read: {error.strerror}") from None
    if not is_empty:
        raise ConfigError(f"--out={out} exists and is not an empty folder; name a new one")
    return exists


def _move_files(staging: Path, target: Path) -> None:
    """Move all files of `staging` into `target`, config.json last. If a move fails, remove the moved files."""
    moved: list[Path] = []
    try:
        for file in sorted(staging.iterdir(), key=lambda file: (file.name == CONFIG, file.name)):
            file.replace(target / file.name)
            moved.append(target / file.name)
        staging.rmdir()
    except BaseException:
        for file in moved:
            if file.is_dir():
                shutil.rmtree(file, ignore_errors=True)
            else:
                file.unlink(missing_ok=True)
        raise


def write_folder(
    out: Path,
    family: Family,
    model: ModelConfig,
    fetch: FetchTensors,
    *,
    dtype: torch.dtype,
    file_bytes: int,
    token_ids: Mapping[str, Any] | None = None,
    progress: Callable[[int], None] = lambda written_bytes: None,
) -> list[Path]:
    """Write a model and return the written files. Only one file's tensors are in memory at a time.

    A bias of the family that the model lacks is written as zeros, which is equivalent. config.json is written last, so
    that an incomplete folder is not mistaken for a model.

    Args:
        out: folder to create; it must be empty if it exists.
        family: a family without faults for the model.
        fetch: called once per file with the names of its logical tensors.
        dtype: type of the written weights.
        file_bytes: maximum bytes of the tensors in a file. A file with a single tensor may have more.
        token_ids: token ids for config.json, such as eos_token_id.
        progress: called after each file with the number of bytes of its tensors.

    Raises ConfigError if `out` is not empty.
    """
    _check_empty(out)
    out.mkdir(parents=True, exist_ok=True)
    shapes = logical_shapes_with_biases(model)
    model_shapes = logical_shapes(model)
    weights = family.list_weights(model)
    groups = _group_by_size(weights, shapes, item_bytes=dtype.itemsize, max_bytes=file_bytes)
    files: list[Path] = []
    file_of_weight: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        if len(groups) == 1:
            file_name = SINGLE_FILE
        else:
            file_name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        logical_names = list(dict.fromkeys(logical_name for weight in group for logical_name in weight.logical_names))
        logical = dict(fetch([logical_name for logical_name in logical_names if logical_name in model_shapes]))
        for logical_name in logical_names:
            if logical_name not in model_shapes:
                logical[logical_name] = torch.zeros(shapes[logical_name])  # a bias that the model lacks
        tensors = {weight.name: join_weight(weight, logical).to(dtype) for weight in group}
        # The format does not allow tensors that share memory.
        if len({tensor.data_ptr() for tensor in tensors.values()}) < len(tensors):
            tensors = {weight_name: tensor.clone() for weight_name, tensor in tensors.items()}
        write_weights(tensors, out / file_name)
        files.append(out / file_name)
        file_of_weight |= {weight.name: file_name for weight in group}
        progress(sum(tensor.nbytes for tensor in tensors.values()))
    if len(groups) > 1:
        total_bytes = sum(prod(weight.compute_shape(shapes)) for weight in weights) * dtype.itemsize
        index = {"metadata": {"total_size": total_bytes}, "weight_map": file_of_weight}
        files.append(_write_json(out / INDEX_FILE, index))
    files.append(_write_json(out / CONFIG, make_config(family, model, dtype, token_ids or {})))
    return files


def make_config(family: Family, model: ModelConfig, dtype: torch.dtype, token_ids: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a model."""
    return {
        "architectures": [family.architecture],
        "model_type": family.name,
        "vocab_size": model.vocab,
        **family.write_config(model),
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tied_embeddings,
        "torch_dtype": str(dtype).removeprefix("torch."),
        # Without these keys transformers takes tokens of the family's own vocabulary.
        "bos_token_id": None,
        "eos_token_id": None,
        **token_ids,
        "use_cache": True,
    }


def logical_shapes_with_biases(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the model's logical tensors by name, including all biases that the model lacks."""
    with_biases = {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True, "head_bias": True}
    return logical_shapes(model.model_copy(update=with_biases))


def _group_by_size(
    weights: Sequence[StoredWeight], shapes: Mapping[str, tuple[int, ...]], item_bytes: int, max_bytes: int
) -> list[list[StoredWeight]]:
    """Group consecutive tensors, at most `max_bytes` per group or a single tensor. An element has `item_bytes`."""
    groups: list[list[StoredWeight]] = [[]]
    remaining_bytes = max_bytes
    for weight in weights:
        weight_bytes = prod(weight.compute_shape(shapes)) * item_bytes
        if weight_bytes > remaining_bytes and groups[-1]:
            groups.append([])
            remaining_bytes = max_bytes
        groups[-1].append(weight)
        remaining_bytes -= weight_bytes
    return groups


def _write_json(path: Path, record: Mapping[str, Any]) -> Path:
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return path
