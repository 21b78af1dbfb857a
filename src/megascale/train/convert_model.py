"""Conversion of Hugging Face folders to run folders and back, each with checkpoint, configuration and tokenizer."""

from __future__ import annotations

import errno
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megascale import checkpoint
from megascale.checkpoint.complete_checkpoint import open_checkpoint
from megascale.checkpoint.conversion import write_checkpoint
from megascale.checkpoint.storage.base import explain_save_error
from megascale.checkpoint.storage.opening import open_storage
from megascale.config import Config, from_tree
from megascale.core.adapters import AdapterSpec
from megascale.core.events import Event
from megascale.core.flops import count_parameters
from megascale.core.inventory import logical_shapes
from megascale.data.tokenizer import convert_tokenizer
from megascale.data.tokenizer.base import Tokenizer
from megascale.data.tokenizer.tokenizer import TOKENIZER
from megascale.errors import ConfigError, DataError
from megascale.model.huggingface.export import stage_folder, write_folder
from megascale.model.huggingface.families import choose_family
from megascale.model.huggingface.family import Family
from megascale.model.huggingface.generation_config import (
    export_token_ids,
    list_end_ids,
    load_generation_config,
    write_generation_config,
)
from megascale.model.huggingface.import_model import read_folder
from megascale.model.huggingface.logical_tensors import LogicalTensors
from megascale.model.huggingface.peft_adapter import write_adapter
from megascale.train.imported_weights import check_vocabulary, describe_source
from megascale.train.merged_weights import find_base_model, load_weights
from megascale.train.run_folder import RunFolder, find_checkpoints
from megascale.train.trained_config import (
    hash_tokenizer,
    load_trained_config,
    load_trained_tokenizer,
    read_tokenizer_hash,
)

if TYPE_CHECKING:
    from megascale.checkpoint.loader import AcceptState

EXPORT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# If a running training removes the checkpoint during an export, the export starts again until this time has passed.
_RETRY_SECONDS = 60.0


@dataclass(frozen=True)
class Conversion:
    """Result of an import or export.

    Attributes:
        path: run folder (import) or Hugging Face folder (export).
        family: model family of transformers.
        parameters: number of parameters in the folder: the model's, or the adapters'.
        tokenizer: whether the folder has a tokenizer.
        notes: sentences for the user.
    """

    path: Path
    family: str
    parameters: int
    tokenizer: bool
    notes: list[str] = field(default_factory=list)


def import_model(folder: Path, run: Path, *, sequence_length: int | None = None) -> Conversion:
    """Make a run folder from a Hugging Face folder: a checkpoint of step 0, config.toml and tokenizer.json.

    Weights keep their dtype in the checkpoint.

    Args:
        sequence_length: tokens in a training sample; default: the model's own maximum. Models with learned positions
            have exactly one length.

    Raises DataError for a folder that is not a readable model; ConfigError if the run exists or its name is not
    allowed.
    """
    if run.name in ("", ".."):
        run = run.resolve()  # a run has its folder's name, also if the folder is the working directory
    run_folder = RunFolder(run)
    if run_folder.config.exists() or any(checkpoint.steps(run_folder.checkpoints)):
        raise ConfigError(f"--out={run} is a run already; name another folder, such as {run}-2")
    source = read_folder(folder)
    model = source.model
    if sequence_length is not None and sequence_length != model.sequence_length:
        if model.positions == "learned":
            raise ConfigError(
                f"--sequence-length={sequence_length}: this model has learned positions for exactly "
                f"{model.sequence_length} tokens; omit the option"
            )
        model = model.model_copy(update={"sequence_length": sequence_length})
    config = from_tree(
        {
            "model": model.model_dump(exclude_none=True),
            "checkpoint": {"imported": str(run_folder.checkpoints.absolute())},
            # Relative paths stay relative, as everywhere in a configuration.
            "train": {"name": run.name, "runs": str(run.parent)},
        }
    )
    with tempfile.TemporaryDirectory(prefix="megascale-import-") as staging:
        tokenizer, tokenizer_notes = convert_tokenizer.import_tokenizer(
            folder, Path(staging), list_end_ids(source.generation)
        )
        notes = source.notes + tokenizer_notes
        if tokenizer is not None:
            check_vocabulary(folder, tokenizer, model.vocab)
        try:
            run_folder.create()
        except OSError as error:
            raise ConfigError(f"--out={run} cannot be created: {error.strerror}") from None
        convert_tokenizer.copy_tokenizer_files(Path(staging), run)
    if source.generation:
        write_generation_config(run, source.generation)
    if (run / TOKENIZER).exists():
        data = config.data.model_copy(update={"tokenizer": str(run / TOKENIZER)})
        config = config.model_copy(update={"data": data})
    identity = secrets.token_hex(8)
    state = {
        "step": 0,
        "samples": 0,
        "run": {"id": identity, "name": config.train.name},
        "tokenizer": hash_tokenizer(config),
        "config": config.model_dump(exclude_none=True),
    }
    _write_weights(run_folder.checkpoints, source.tensors, state)
    run_folder.append_event(Event.IMPORTED, family=source.family.name, source=str(folder), notes=notes)
    # Write config.toml last, because a folder with config.toml counts as a run.
    run_folder.write_accepted_start(config, identity)
    return Conversion(run, source.family.name, count_parameters(model), tokenizer is not None, notes)


def _write_weights(folder: Path, tensors: LogicalTensors, state: dict[str, Any]) -> None:
    """Write tensors as a checkpoint of step 0. Memory holds one chunk at a time, however large the model is.

    Args:
        state: metadata of the checkpoint.
    """
    storage = open_storage(folder)
    source = describe_source(tensors)
    infos, _ = source  # facts of each tensor, and the function that reads chunks
    needed_bytes = sum(info.nbytes for info in infos.values())
    free_bytes = storage.free()
    if free_bytes is not None and free_bytes < needed_bytes:
        raise explain_save_error(OSError(errno.ENOSPC, "No space left on device"), storage, needed_bytes)
    try:
        write_checkpoint(storage, 0, source, state, files=1, on_file=lambda name: None)
    except OSError as error:
        raise explain_save_error(error, storage, needed_bytes) from None


def export_model(
    run: Path,
    out: Path,
    *,
    family: str | None = None,
    step: int | None = None,
    dtype: str | None = None,
    tokenizer: bool = True,
    file_bytes: int = 4 << 30,
    progress: Callable[[int, int], None] = lambda written, total: None,
) -> Conversion:
    """Write a run's model as a folder that `transformers` loads.

    Args:
        family: model family of transformers; default: the first one that can express the model.
        step: step of the checkpoint; default: the newest.
        dtype: float32, bfloat16 or float16; default: train.precision of the run, float64 as float32.
        tokenizer: write the run's tokenizer too.
        file_bytes: size above which weights are split into several files.
        progress: called with the bytes written and the bytes in total.

    Raises ConfigError if no family (or not the named one) can express the model, naming the keys; DataError if there is
    no checkpoint, or the tokenizer that the run was trained with is lost.
    """
    config, accept = load_trained_config(run, step)
    chosen_family = choose_family(config.model, family)
    precision = config.train.precision
    if dtype is None:
        dtype = "float32" if precision == "float64" else precision
    torch_dtype = _parse_dtype(dtype)
    exported_tokenizer: _RunTokenizer | None = None
    notes: list[str] = []
    if tokenizer:
        exported_tokenizer, notes = _find_tokenizer(run, config, step)
    export = _Export(
        run,
        config,
        family=chosen_family,
        dtype=torch_dtype,
        file_bytes=file_bytes,
        tokenizer=exported_tokenizer,
        accept=accept,
        progress=progress,
    )
    checkpoints = find_checkpoints(run, config)
    deadline = time.monotonic() + _RETRY_SECONDS
    while True:
        if step is None:
            source_step = checkpoint.latest(checkpoints)
        else:
            source_step = step
        if source_step is None:
            raise DataError(f"{run} has no committed checkpoint to export; train it for a step first")
        try:
            export.write(out, source_step)
            break
        except DataError:
            # A running training removes old checkpoints when it has saved a newer one; then export the newer one.
            is_removed = step is None and source_step not in checkpoint.steps(checkpoints)
            if not is_removed or time.monotonic() > deadline:
                raise
    return Conversion(out, chosen_family.name, count_parameters(config.model), exported_tokenizer is not None, notes)


class _RunTokenizer(NamedTuple):
    """The tokenizer that a run was trained with, and its file."""

    file: Path
    tokenizer: Tokenizer


@dataclass(frozen=True)
class _Export:
    """What an export writes, apart from the step of the checkpoint.

    Attributes:
        config: configuration that the checkpoint was trained with.
        tokenizer: the tokenizer to write; None: no tokenizer.
        accept: checks the metadata of a checkpoint before it is loaded.
        progress: called with the bytes written and the bytes in total.
    """

    run: Path
    config: Config
    family: Family
    dtype: torch.dtype
    file_bytes: int
    tokenizer: _RunTokenizer | None
    accept: AcceptState
    progress: Callable[[int, int], None]

    def write(self, out: Path, step: int) -> None:
        """Write the model of a step as the folder `out`, which appears complete or not at all."""
        model = self.config.model
        shapes = logical_shapes(model)
        total_bytes = count_parameters(model) * self.dtype.itemsize
        written_bytes = 0

        def load_tensors(names: Sequence[str]) -> Mapping[str, torch.Tensor]:
            tensors = {name: torch.empty(shapes[name], dtype=self.dtype) for name in names}
            shards = [
                checkpoint.TensorShard(f"model.{name}", shapes[name], (0,) * tensor.dim(), tensor)
                for name, tensor in tensors.items()
            ]
            load_weights(self.run, self.config, shards, step=step, accept=self.accept)
            return tensors

        def report_progress(size: int) -> None:
            nonlocal written_bytes
            written_bytes += size
            self.progress(written_bytes, total_bytes)

        generation = load_generation_config(self.run)
        end_of_document = None if self.tokenizer is None else self.tokenizer.tokenizer.end_of_document
        with stage_folder(out) as folder:
            write_folder(
                folder,
                self.family,
                model,
                load_tensors,
                dtype=self.dtype,
                file_bytes=self.file_bytes,
                token_ids=export_token_ids(generation, end_of_document, model.vocab),
                progress=report_progress,
            )
            if generation:
                write_generation_config(folder, generation)
            if self.tokenizer is not None:
                convert_tokenizer.export_tokenizer(
                    self.tokenizer.tokenizer, self.tokenizer.file, folder, model.sequence_length
                )


def _parse_dtype(dtype: str) -> torch.dtype:
    """Return the type with this name. Raises ConfigError if it cannot be exported."""
    if dtype not in EXPORT_DTYPES:
        raise ConfigError(f"--dtype={dtype} cannot be exported; choose {', '.join(EXPORT_DTYPES)}")
    return EXPORT_DTYPES[dtype]


def export_adapter(
    run: Path,
    out: Path,
    *,
    family: str | None = None,
    step: int | None = None,
    dtype: str | None = None,
) -> Conversion:
    """Write a run's adapters as a folder that `peft` can load onto the base model of the adapters.

    Args:
        run, out, family, step: as for `export_model`.
        dtype: float32, bfloat16 or float16; default: float32, the type in which adapters are trained.

    Raises ConfigError if the run has no adapters, or for matrices that PEFT cannot express; DataError as
    `export_model`.
    """
    config, _ = load_trained_config(run, step)
    spec = AdapterSpec.from_config(config.train)
    if spec is None:
        raise ConfigError(f"{run} trains the whole model and has no adapters (train.lora); omit --adapter")
    chosen_family = choose_family(config.model, family)
    torch_dtype = _parse_dtype(dtype or "float32")
    source = open_checkpoint(find_checkpoints(run, config), step)
    base = find_base_model(source, config)

    def read(name: str) -> torch.Tensor:
        return source.read_tensor(f"model.{name}")

    with stage_folder(out) as folder:
        parameters = write_adapter(folder, chosen_family, config.model, spec, read, dtype=torch_dtype, base=base.folder)
    note = (
        f"the adapters belong to step {base.step} of {base.folder}; export that run too, and set "
        "base_model_name_or_path of adapter_config.json to its folder"
    )
    return Conversion(out, chosen_family.name, parameters, tokenizer=False, notes=[note])


def _find_tokenizer(run: Path, config: Config, step: int | None) -> tuple[_RunTokenizer | None, list[str]]:
    """Return the tokenizer of a run, and notes for the user.

    Returns:
        (the tokenizer, no notes), or (None, [why there is no tokenizer]).

    Raises DataError if the run was trained with a tokenizer that is lost: the model is of little use without it.
    """
    try:
        return _RunTokenizer(*load_trained_tokenizer(run, config, step)), []
    except (ConfigError, DataError) as error:
        if config.data.tokenizer is not None or read_tokenizer_hash(run, config, step) is not None:
            raise DataError(f"{error}; or write the model without a tokenizer (--no-tokenizer)") from None
        return None, [f"no tokenizer is written: {error}"]
