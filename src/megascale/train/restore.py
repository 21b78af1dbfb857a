"""A trained model out of a run folder, for evaluation and generation, on one process."""

from __future__ import annotations

from pathlib import Path

import torch

from megascale import checkpoint
from megascale.config import Config, OptimizerConfig, ParallelConfig
from megascale.config.parts import LINEAR_PRECISIONS
from megascale.core.layout import lay_out
from megascale.errors import ConfigError
from megascale.model.transformer import Chunk
from megascale.ops.dispatch import Kernels
from megascale.parallel.collectives import Axis
from megascale.parallel.parameters import materialise, piece_views, spec_of
from megascale.parallel.runtime import Runtime
from megascale.train.device_choice import choose_device
from megascale.train.engine import DTYPES, Engine
from megascale.train.resume import trained_config
from megascale.train.run_folder import checkpoint_folder


def restore_engine(
    run: Path, *, step: int | None = None, device: str = "auto", linear_precision: str | None = None
) -> tuple[Engine, Config]:
    """The engine with the weights of a committed checkpoint (default: the newest), and the configuration it was
    trained with, but for `linear_precision` where it is given.

    Raises DataError if `run` is no run folder or has no committed checkpoint, ConfigError for an unknown
    `linear_precision` or a `device` that is not there.
    """
    chosen = choose_device(device)
    config, same = trained_config(run, step)
    parallel = ParallelConfig()
    update: dict[str, object] = {"global_batch": config.train.micro_batch}
    if linear_precision is not None:
        try:
            update["linear_precision"] = LINEAR_PRECISIONS.validate_name(linear_precision)
        except ValueError as error:
            raise ConfigError(str(error)) from None
    train = config.train.model_copy(update=update)
    # No update follows, so any optimizer will do, also for a run whose own one is not known here.
    config = config.model_copy(update={"parallel": parallel, "train": train, "optimizer": OptimizerConfig()})
    engine = Engine(lay_out(config, 1), None, chosen)
    shards = [checkpoint.TensorShard(*parts) for parts in engine.optimizer.logical() if parts[0].startswith("model.")]
    with engine.loading_weights():
        checkpoint.load(checkpoint_folder(run, config), shards, step=step, accept=same)
    return engine, config


@torch.no_grad()
def restore_model(run: Path, *, step: int | None = None, device: str = "auto") -> tuple[Chunk, Config]:
    """As `restore`, the model alone: no master weights, gradients or moments, a fraction of an engine's memory."""
    chosen = choose_device(device)
    config, same = trained_config(run, step)
    axis = Axis(runtime=Runtime(kernels=Kernels(config.kernels.mode)))
    dtype = DTYPES[config.train.precision]
    chunk = Chunk(config.model, range(config.model.layers), first=True, last=True, axis=axis, dtype=dtype)
    # Rows that only fill up the vocabulary are in no checkpoint.
    materialise(chunk, {p: torch.zeros(p.shape, dtype=p.dtype, device=chosen) for p in chunk.parameters()})
    shards = [
        checkpoint.TensorShard(f"model.{piece.name}", piece.shape, piece.box.offsets, view)
        for p in chunk.parameters()
        for piece, view in piece_views(spec_of(p), p.data)
    ]
    checkpoint.load(checkpoint_folder(run, config), shards, step=step, accept=same)
    return chunk.requires_grad_(False), config
