"""Models of Hugging Face as run folders, and the reverse: checkpoint, configuration and tokenizer together."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megascale import checkpoint
from megascale.config import Config, from_tree
from megascale.core.events import Event
from megascale.core.flops import parameters
from megascale.core.inventory import logical_shapes
from megascale.data.tokenizer import convert_tokenizer
from megascale.data.tokenizer.base import Tokenizer
from megascale.data.tokenizer.tokenizer_files import TOKENIZER
from megascale.errors import ConfigError, DataError
from megascale.model.huggingface.export import complete_folder, write_folder
from megascale.model.huggingface.families import family_for
from megascale.model.huggingface.generation_config import (
    end_ids,
    load_generation_config,
    token_ids,
    write_generation_config,
)
from megascale.model.huggingface.import_model import read_folder
from megascale.train.resume import tokenizer_hash, trained_config, trained_tokenizer, trained_tokenizer_hash
from megascale.train.run_folder import RunFolder, checkpoint_folder

EXPORT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_RETRY_SECONDS = 60.0  # of an export in which it begins again if its checkpoint is removed meanwhile


@dataclass(frozen=True)
class Converted:
    """What a conversion made.

    Attributes:
        path: run folder (import) or Hugging Face folder (export).
        family: of transformers.
        parameters: trained numbers.
        tokenizer: whether there is one beside the model.
        notes: what a person should know.
    """

    path: Path
    family: str
    parameters: int
    tokenizer: bool
    notes: list[str] = field(default_factory=list)


def import_model(folder: Path, run: Path, *, sequence_length: int | None = None) -> Converted:
    """Make a run folder of a Hugging Face model: a checkpoint of step 0, config.toml, tokenizer.json.

    Weights keep their type in the checkpoint. `sequence_length`: tokens in a training sample, where the model's own
    reach is more than one wants; not for learned positions, whose table would be cut.

    Raises DataError as `read_folder`; ConfigError if the run is there already or its name cannot be one.
    """
    if run.name in ("", ".."):
        run = run.resolve()  # the working directory, say: a run is called as its folder
    place = RunFolder(run)
    if place.config.exists() or any(checkpoint.steps(place.checkpoints)):
        raise ConfigError(f"--out={run} is a run already; name another folder, such as {run}-2")
    found = read_folder(folder)
    model = found.model
    if sequence_length is not None and sequence_length != model.sequence_length:
        if model.positions == "learned":
            raise ConfigError(
                f"--sequence-length={sequence_length}: this model has learned positions for exactly "
                f"{model.sequence_length} tokens; leave the option out"
            )
        model = model.model_copy(update={"sequence_length": sequence_length})
    imported = {"imported": str(place.checkpoints.absolute())}
    config = _config(run, {"model": model.model_dump(exclude_none=True), "checkpoint": imported})
    try:
        place.create()
    except OSError as error:
        raise ConfigError(f"--out={run} cannot be made: {error.strerror}") from None
    notes = list(found.notes)
    tokenizer, told = convert_tokenizer.import_tokenizer(folder, run, end_ids(found.generation))
    notes += told
    if tokenizer is not None and tokenizer.vocab_size > model.vocab:
        notes.append(f"the tokenizer has {tokenizer.vocab_size} tokens and the model only {model.vocab}")
    if found.generation:
        write_generation_config(run, found.generation)
    if (run / TOKENIZER).exists():
        data = config.data.model_copy(update={"tokenizer": str(run / TOKENIZER)})
        config = config.model_copy(update={"data": data})
    shards = [
        checkpoint.TensorShard(f"model.{name}", tuple(tensor.shape), (0,) * tensor.dim(), tensor)
        for name, tensor in found.tensors.items()
    ]
    identity = secrets.token_hex(8)
    state = {
        "step": 0,
        "samples": 0,
        "run": {"id": identity, "name": config.train.name},
        "tokenizer": tokenizer_hash(config),
        "config": config.model_dump(exclude_none=True),
    }
    checkpoint.save(place.checkpoints, 0, shards, state, keep=1)
    place.append_event(Event.IMPORTED, family=found.family.name, source=str(folder), notes=notes)
    # Last, because a folder with it counts as a run.
    place.accept(config, identity)
    return Converted(run, found.family.name, parameters(model), tokenizer is not None, notes)


def _config(run: Path, tree: dict) -> Config:
    # Relative paths stay relative, as everywhere in a configuration.
    return from_tree({**tree, "train": {"name": run.name, "runs": str(run.parent)}})


def export_model(
    run: Path,
    out: Path,
    *,
    family: str | None = None,
    step: int | None = None,
    dtype: str | None = None,
    tokenizer: bool = True,
    file_bytes: int = 4 << 30,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Converted:
    """Write a run's model as a folder that `transformers` loads.

    Args:
        run: run folder.
        out: folder to make.
        family: of transformers; default: the first that the model is of.
        step: checkpoint; default: the newest.
        dtype: float32, bfloat16 or float16; default: train.precision of the run, float64 as float32.
        tokenizer: write the run's tokenizer too.
        file_bytes: size from which weights are spread over several files.
        progress: told bytes written and bytes in all.

    Raises ConfigError if no family (or not the named one) can say what the model is, naming the keys; DataError if
    there is no checkpoint, or the tokenizer that the run was trained with is lost.
    """
    config, same = trained_config(run, step)
    model = config.model
    chosen = family_for(model, family)
    if dtype is None:
        dtype = config.train.precision if config.train.precision in EXPORT_DTYPES else "float32"
    if dtype not in EXPORT_DTYPES:
        raise ConfigError(f"--dtype={dtype} cannot be exported; choose {', '.join(EXPORT_DTYPES)}")
    checkpoints = checkpoint_folder(run, config)
    shapes = logical_shapes(model)
    kind = EXPORT_DTYPES[dtype]
    total = parameters(model) * kind.itemsize
    found, note = _find_tokenizer(run, config, step, tokenizer)
    generation = load_generation_config(run)
    ids = token_ids(generation, found[1].end_of_document if found is not None else None, model.vocab)

    def write(source: int) -> None:
        written = 0

        def fetch(names: Sequence[str]) -> Mapping[str, torch.Tensor]:
            tensors = {name: torch.empty(shapes[name], dtype=kind) for name in names}
            shards = [checkpoint.TensorShard(f"model.{n}", shapes[n], (0,) * t.dim(), t) for n, t in tensors.items()]
            checkpoint.load(checkpoints, shards, step=source, accept=same)
            return tensors

        def count(size: int) -> None:
            nonlocal written
            written += size
            progress(written, total)

        with complete_folder(out) as made:
            write_folder(made, chosen, model, fetch, dtype=kind, file_bytes=file_bytes, token_ids=ids, progress=count)
            if generation:
                write_generation_config(made, generation)
            if found is not None:
                convert_tokenizer.export_tokenizer(found[1], found[0], made, model.sequence_length)

    begun, done = time.monotonic(), False
    while not done:
        source = checkpoint.latest(checkpoints) if step is None else step
        if source is None:
            raise DataError(f"{run} has no committed checkpoint to export; train it for a step first")
        try:
            write(source)
            done = True
        except DataError:
            # Training next to this export may have removed the checkpoint, since it has saved a newer one.
            late = time.monotonic() - begun > _RETRY_SECONDS
            if late or step is not None or source in checkpoint.steps(checkpoints):
                raise
    return Converted(out, chosen.name, parameters(model), found is not None, [note] if note else [])


def _find_tokenizer(
    run: Path, config: Config, step: int | None, wanted: bool
) -> tuple[tuple[Path, Tokenizer] | None, str | None]:
    """Return the run's tokenizer with its file, or None and why.

    Raises DataError if the run was trained with one that is lost: a model that goes out without it is of little use.
    """
    if not wanted:
        return None, None
    try:
        return trained_tokenizer(run, config, step), None
    except (ConfigError, DataError) as error:
        if config.data.tokenizer is not None or trained_tokenizer_hash(run, config, step) is not None:
            raise DataError(f"{error}; or write the model without a tokenizer (--no-tokenizer)") from None
        return None, f"no tokenizer is written: {error}"
