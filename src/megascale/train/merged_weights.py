"""Weights of a trained run as those of one model: adapters are added to the matrices of their model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megascale import checkpoint
from megascale.checkpoint.base_model import BaseModel, open_base
from megascale.checkpoint.complete_checkpoint import CompleteCheckpoint, open_checkpoint
from megascale.config import Config
from megascale.core.adapters import LORA_A, LORA_B, AdapterSpec, list_adapters
from megascale.errors import DataError
from megascale.train.resume import locate_checkpoints
from megascale.train.run_folder import find_checkpoints

if TYPE_CHECKING:
    from megascale.checkpoint.loader import AcceptState


@torch.no_grad()
def load_weights(
    run: Path,
    config: Config,
    shards: Sequence[checkpoint.TensorShard],
    *,
    step: int | None = None,
    accept: AcceptState | None = None,
) -> None:
    """Fill shards of weights from a committed checkpoint of a run, with its adapters merged if it has any.

    Args:
        config: configuration that the checkpoint was trained with.
        step: step of the checkpoint; default: the newest.

    Raises DataError if there is no such checkpoint, or if the model of the adapters is lost or another one.
    """
    spec = AdapterSpec.from_config(config.train)
    if spec is None:
        checkpoint.load(find_checkpoints(run, config), shards, step=step, accept=accept)
        return
    adapters = open_checkpoint(find_checkpoints(run, config), step)
    if accept is not None:
        accept(adapters.state, str(adapters.storage.url))
    base = find_base_of(adapters, config)
    checkpoint.load(base.folder, shards, step=base.step)
    adapted = {f"model.{matrix.name}" for matrix, _, _ in list_adapters(config.model, spec)}
    for shard in shards:
        if shard.name in adapted:
            _add_adapter(shard, adapters, spec.scale)


def find_base_of(adapters: CompleteCheckpoint, config: Config) -> BaseModel:
    """Return the model that adapters were trained on. Raises DataError if it is lost or has another fingerprint."""
    saved = adapters.state.get("base")
    if not isinstance(saved, dict):
        raise DataError(f"the adapters in {adapters.storage.url} do not name their model; train them again")
    section = config.checkpoint
    key = "checkpoint.start_from" if section.start_from is not None else "checkpoint.imported"
    named = section.start_from if section.start_from is not None else section.imported
    folder = locate_checkpoints(named) if named is not None else saved["folder"]
    base, _ = open_base(folder, saved["step"], key)
    if base.fingerprint != saved["fingerprint"]:
        raise DataError(
            f"{key}={named} holds another model at step {base.step} than the adapters in {adapters.storage.url} were "
            f"trained on (fingerprint {base.fingerprint[:12]}, {saved['fingerprint'][:12]} then); restore that model"
        )
    return base


def _add_adapter(shard: checkpoint.TensorShard, adapters: CompleteCheckpoint, scale: float) -> None:
    """Add scale * B A to the box of a matrix [O, I]."""
    name = shard.name.removesuffix(".weight")
    a, b = adapters.read_tensor(name + LORA_A), adapters.read_tensor(name + LORA_B)
    rows, columns = (slice(start, start + size) for start, size in zip(shard.offsets, shard.tensor.shape, strict=True))
    change = scale * (b[rows] @ a[:, columns])
    wide = torch.promote_types(shard.tensor.dtype, change.dtype)
    shard.tensor.copy_(shard.tensor.to(wide) + change.to(device=shard.tensor.device, dtype=wide))
