"""Loading of a trained model from a run folder, for evaluation and generation."""

from __future__ import annotations

from pathlib import Path

import torch

from megascale import checkpoint
from megascale.checkpoint.chunk_source import LoadReport
from megascale.config import Config, OptimizerConfig, ParallelConfig
from megascale.config.base import Section
from megascale.config.parts import LINEAR_PRECISIONS
from megascale.core.layout import lay_out
from megascale.errors import ConfigError
from megascale.model.transformer import Chunk
from megascale.ops.dispatch import Kernels
from megascale.parallel.collectives import Axis
from megascale.parallel.parameters import get_spec, list_piece_views, materialise
from megascale.parallel.runtime import Runtime
from megascale.train.context_ranks import ContextRanks
from megascale.train.engine import Engine
from megascale.train.engine_axes import make_axis
from megascale.train.engine_parts import DTYPES
from megascale.train.merged_weights import load_weights
from megascale.train.rank_info import choose_device
from megascale.train.trained_config import load_trained_config


def restore_engine(
    run: Path,
    *,
    step: int | None = None,
    device: str = "auto",
    linear_precision: str | None = None,
    ranks: ContextRanks | None = None,
    report: LoadReport | None = None,
) -> tuple[Engine, Config]:
    """Return an engine with the weights of a committed checkpoint, and the configuration it was trained with.

    Args:
        step: step of the checkpoint; default: the newest.
        device: name as in `choose_device`.
        linear_precision: precision of linear layers; default: train.linear_precision of training.
        ranks: processes that divide the tokens of each sequence, with this process's device; the call is then
            collective. Default: this process alone.
        report: filled with costs and findings, such as the step. It is older than the newest if that is damaged.

    Raises DataError if `run` is not a run folder or has no committed checkpoint, ConfigError for an unknown
    `linear_precision` or a missing device.
    """
    torch_device = choose_device(device) if ranks is None else ranks.device
    trained_config, accept = load_trained_config(run, step)
    config = trained_config
    changes: dict[str, object] = {"global_batch": config.train.micro_batch, "lora": None}
    if linear_precision is not None:
        try:
            changes["linear_precision"] = LINEAR_PRECISIONS.validate_name(linear_precision)
        except ValueError as error:
            raise ConfigError(str(error)) from None
    train = config.train.model_copy(update=changes)
    context, groups = 1, None
    if ranks is not None and ranks.groups is not None:
        context, groups = ranks.config.parallel.context, ranks.groups
    parallel = ParallelConfig(context=context)
    # Take the default optimizer: the run's may be registered by user code, and no update follows.
    updates: dict[str, Section] = {"parallel": parallel, "train": train, "optimizer": OptimizerConfig()}
    # Nothing is trained, so no replica replays it, and the cost of determinism need not be measured.
    updates["resilience"] = config.resilience.model_copy(update={"replay_interval": 0})
    is_deterministic = config.requested_determinism is True
    updates["kernels"] = config.kernels.model_copy(update={"deterministic": is_deterministic})
    config = config.model_copy(update=updates)
    engine = Engine(lay_out(config, context), groups, torch_device)
    shards = [checkpoint.TensorShard(*fields) for fields in engine.logical_tensors()]
    weights = [shard for shard in shards if shard.name.startswith("model.")]
    with engine.loading_weights():
        load_weights(run, trained_config, weights, step=step, accept=accept, report=report)
    return engine, config


@torch.no_grad()
def restore_model(
    run: Path,
    *,
    step: int | None = None,
    device: str = "auto",
    ranks: ContextRanks | None = None,
    report: LoadReport | None = None,
) -> tuple[Chunk, Config]:
    """Return the model without an engine, and its configuration; arguments and errors as `restore_engine`.

    The model takes a fraction of an engine's memory: it has no master weights, gradients and optimizer state.
    """
    torch_device = choose_device(device) if ranks is None else ranks.device
    config, accept = load_trained_config(run, step)
    axis = Axis(runtime=Runtime(kernels=Kernels(config.kernels.mode)))
    axes = {}
    if ranks is not None:
        axes["context"] = make_axis(axis.runtime, ranks.groups, "context")
    dtype = DTYPES[config.train.precision]
    chunk = Chunk(
        config.model, range(config.model.layers), is_first=True, is_last=True, axis=axis, axes=axes, dtype=dtype
    )
    parameters = list(chunk.parameters())
    # Checkpoints do not hold the rows that pad the vocabulary, so these stay zero.
    materialise(chunk, {p: torch.zeros(p.shape, dtype=p.dtype, device=torch_device) for p in parameters})
    shards = []
    for parameter in chunk.parameters():
        for piece, view in list_piece_views(get_spec(parameter), parameter.data):
            shards.append(checkpoint.TensorShard(f"model.{piece.name}", piece.shape, piece.box.offsets, view))
    load_weights(run, config, shards, step=step, accept=accept, report=report)
    return chunk.requires_grad_(False), config
