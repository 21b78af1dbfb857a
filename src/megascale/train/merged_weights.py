"""Weights of a trained run, with adapters merged into the matrices of their base model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megascale import checkpoint
from megascale.checkpoint.base_model import BaseCheckpoint, open_base
from megascale.checkpoint.complete_checkpoint import CompleteCheckpoint, open_checkpoint
from megascale.config import Config
from megascale.core.adapters import LORA_A, LORA_B, AdapterSpec, list_adapters
from megascale.errors import DataError
from megascale.train.run_folder import find_checkpoints
from megascale.train.trained_config import locate_checkpoints

if TYPE_CHECKING:
    from megascale.checkpoint.chunk_source import LoadReport
    from megascale.checkpoint.loader import AcceptState


@torch.no_grad()
def load_weights(
    run: Path,
    config: Config,
    shards: Sequence[checkpoint.TensorShard],
    *,
    step: int | None = None,
    accept: AcceptState | None = None,
    report: LoadReport | None = None,
) -> None:
    """Fill shards of weights from a committed checkpoint of a run, with its adapters merged if it has any.

    Args:
        config: configuration that the checkpoint was trained with.
        step: step of the checkpoint; default: the newest.
        accept: called with the checkpoint's metadata and name; raises an error to refuse it.
        report: filled with costs and findings. Its step is that of the adapters, if there are any.

    Raises DataError if there is no such checkpoint, or if the base model of the adapters is lost or a different one.
    """
    spec = AdapterSpec.from_config(config.train)
    if spec is None:
        checkpoint.load(find_checkpoints(run, config), shards, step=step, accept=accept, report=report)
        return
    adapters = open_checkpoint(find_checkpoints(run, config), step)
    if accept is not None:
        accept(adapters.state, str(adapters.storage.url))
    base = find_base_model(adapters, config)
    checkpoint.load(base.folder, shards, step=base.step)
    adapted = {f"model.{adapter.matrix.name}" for adapter in list_adapters(config.model, spec)}
    for shard in shards:
        if shard.name in adapted:
            _add_adapter(shard, adapters, spec.scale)
    if report is not None:
        report.step = adapters.commit.step


def find_base_model(adapters: CompleteCheckpoint, config: Config) -> BaseCheckpoint:
    """Return the base model that adapters were trained on.

    Raises DataError if the base model is lost or has another fingerprint.
    """
    record = adapters.state.get("base")
    if not isinstance(record, dict):
        raise DataError(f"the adapters in {adapters.storage.url} do not name their model; train them again")
    section = config.checkpoint
    if section.start_from is not None:
        key = "checkpoint.start_from"
        path: str | None = section.start_from
    else:
        key = "checkpoint.imported"
        path = section.imported
    folder = locate_checkpoints(path) if path is not None else record["folder"]
    base, _ = open_base(folder, record["step"], key)
    if base.fingerprint != record["fingerprint"]:
        raise DataError(
            f"{key}={path} holds another model at step {base.step} than the adapters in {adapters.storage.url} were "
            f"trained on (fingerprint {base.fingerprint[:12]}, {record['fingerprint'][:12]} then); restore that model"
        )
    return base


def _add_adapter(shard: checkpoint.TensorShard, adapters: CompleteCheckpoint, scale: float) -> None:
    """Add scale * B A (LoRA, Hu et al. 2021) to a shard of a matrix [O, I]."""
    name = shard.name.removesuffix(".weight")
    a_RI, b_OR = adapters.read_tensor(name + LORA_A), adapters.read_tensor(name + LORA_B)
    rows, columns = (slice(start, start + size) for start, size in zip(shard.offsets, shard.tensor.shape, strict=True))
    change_OI = scale * (b_OR[rows] @ a_RI[:, columns])
    sum_dtype = torch.promote_types(shard.tensor.dtype, change_OI.dtype)
    shard.tensor.copy_(shard.tensor.to(sum_dtype) + change_OI.to(device=shard.tensor.device, dtype=sum_dtype))
