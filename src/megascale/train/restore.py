"""A trained model out of a run folder, for evaluation and generation, on one process."""

from __future__ import annotations

from pathlib import Path

import torch

from megascale import checkpoint
from megascale.config import Config, ParallelConfig, load
from megascale.core.layout import lay_out
from megascale.errors import DataError
from megascale.train.engine import Engine


def restore(run: Path, *, step: int | None = None, device: str = "auto") -> tuple[Engine, Config]:
    """The engine with the weights of a committed checkpoint (default: the newest), and the run's configuration.

    Raises DataError if `run` is no run folder or has no committed checkpoint.
    """
    file = run / "config.toml"
    if not file.exists():
        raise DataError(f"{run} is not a run folder (it has no config.toml); runs are folders such as runs/stdlib")
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    config = load(file)
    parallel = ParallelConfig()
    train = config.train.model_copy(update={"global_batch": config.train.micro_batch})
    config = config.model_copy(update={"parallel": parallel, "train": train})
    engine = Engine(lay_out(config, 1), None, torch.device(kind))
    shards = [checkpoint.Shard(*parts) for parts in engine.optimizer.logical() if parts[0].startswith("model.")]
    checkpoint.load(run / "checkpoints", shards, step=step)
    engine.loaded()
    return engine, config
