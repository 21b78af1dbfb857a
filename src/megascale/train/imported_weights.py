"""Weights of a Hugging Face folder, as a source for conversion or loaded directly into a run's ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from megascale import checkpoint
from megascale.checkpoint.conversion import Source
from megascale.checkpoint.format.index import CheckpointIndex, TensorInfo
from megascale.checkpoint.loader import fill_shards
from megascale.checkpoint.object_collectives import Peers
from megascale.checkpoint.source_chunks import SourceChunks, make_index
from megascale.config import Config, ModelConfig, from_tree, load_written
from megascale.core.inventory import logical_shapes
from megascale.core.model_folder import is_model_folder
from megascale.core.tensors import Box
from megascale.data.tokenizer.base import Tokenizer
from megascale.data.tokenizer.tokenizer import TOKENIZER, has_other_form, load_tokenizer
from megascale.errors import ConfigError, DataError
from megascale.model.huggingface.generation_config import (
    FILE_NAME,
    import_generation_config,
    write_generation_config,
)
from megascale.model.huggingface.import_model import read_folder, read_model
from megascale.model.huggingface.logical_tensors import LogicalTensors


def check_vocabulary(folder: Path, tokenizer: Tokenizer, vocab: int) -> None:
    """Raise DataError if a Hugging Face folder's tokenizer has tokens that its model does not have."""
    if tokenizer.vocab_size > vocab:
        raise DataError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, but vocab_size={vocab} in config.json, so the "
            "model has no embeddings for its last ids; they belong to different models. Put the model's own tokenizer "
            "files there, or resize its embeddings (resize_token_embeddings of transformers)"
        )


def adopt_folder(config: Config) -> Config:
    """Return a configuration with the model and the tokenizer of the Hugging Face folder in checkpoint.imported.

    Keys of [model] and data.tokenizer that the user has set are kept. A run that has begun keeps its model even if the
    folder was removed. Raises DataError as `read_model`, or for a tokenizer that does not match the model; ConfigError
    for a set key that the folder's model contradicts.
    """
    folder = config.checkpoint.imported
    assert folder is not None
    run_config = config.run_folder / "config.toml"
    if is_model_folder(folder):
        model, _ = read_model(Path(folder))
    elif config.checkpoint.resume and run_config.exists() and not config.model.model_fields_set:
        return config.model_copy(update={"model": load_written(run_config).model})
    else:
        return config
    set_keys = config.model.model_dump(include=config.model.model_fields_set)
    tree = {"model": {**model.model_dump(exclude_none=True), **set_keys}}
    try:
        adopted = from_tree(tree).model
    except ConfigError as error:
        raise ConfigError(f"[model] contradicts checkpoint.imported={folder} (model.from): {error}") from None
    _check_same_shapes(folder, model, adopted)
    data = config.data
    file = Path(folder) / TOKENIZER
    # By default data.tokenizer is the data set's tokenizer, whose ids may mean different text than the model's.
    if data.tokenizer is None and (file.exists() or has_other_form(file.parent)):
        check_vocabulary(Path(folder), load_tokenizer(file), adopted.vocab)
        data = data.model_copy(update={"tokenizer": str(file)})
    return config.model_copy(update={"model": adopted, "data": data})


def _check_same_shapes(folder: str, model: ModelConfig, adopted: ModelConfig) -> None:
    """Raise ConfigError if keys of [model] that the user has set change the tensors of the folder's model."""
    if logical_shapes(model) == logical_shapes(adopted):
        return
    before, after = model.model_dump(), adopted.model_dump()
    changes = ", ".join(f"model.{key}={after[key]} ({before[key]} there)" for key in after if after[key] != before[key])
    raise ConfigError(f"checkpoint.imported={folder} (model.from) is of another model: {changes}; leave these keys out")


def copy_generation_config(run: Path, config: Config) -> None:
    """Write the generation settings of the Hugging Face folder in checkpoint.imported, if the run has none."""
    folder = config.checkpoint.imported
    if folder is None or config.checkpoint.start_from is not None:
        return
    if not is_model_folder(folder) or (run / FILE_NAME).exists():
        return
    _, settings = read_model(Path(folder))
    values, _ = import_generation_config(Path(folder), settings)
    if values:
        write_generation_config(run, values)


def describe_source(tensors: LogicalTensors) -> Source:
    """Return logical tensors as a source with the names of a checkpoint: information by name, and a read function."""
    infos = {f"model.{name}": TensorInfo(*tensors.describe(name)) for name in tensors}

    def read(name: str, box: Box) -> Tensor:
        first_row = box.offsets[0]
        rows = tensors.read_rows(name.removeprefix("model."), first_row, first_row + box.sizes[0])
        ranges = [slice(None)]  # all of these rows, and the box's range of every other dimension
        for offset, size in zip(box.offsets[1:], box.sizes[1:], strict=True):
            ranges.append(slice(offset, offset + size))
        return rows[tuple(ranges)]

    return infos, read


def load_folder(folder: Path, weights: Sequence[checkpoint.TensorShard], peers: Peers) -> list[str]:
    """Fill this process's weights from a Hugging Face folder that every host can read, and return notes; collective.

    One process reads each part of the files, and sends the part to the processes that need it. Raises DataError on all
    processes if the folder is not a readable model, or a different model from that of the weights.
    """
    problem: str | None = None
    source: Source | None = None
    notes: list[str] = []
    try:
        imported = read_folder(folder)
        source, notes = describe_source(imported.tensors), imported.notes
    except (ConfigError, DataError) as error:
        problem = str(error)
    problem = peers.find_first_problem(problem)
    if problem is not None:
        raise DataError(problem)
    assert source is not None
    infos, _ = source
    index = peers.broadcast(make_index(infos).to_bytes(), bytes)
    chunks = SourceChunks(str(folder), CheckpointIndex.from_bytes(index), source)
    damage = fill_shards(chunks, weights, peers, covers_model=True)
    if damage is not None:
        raise DataError(f"{folder}: {damage}; get the files again")
    return notes
