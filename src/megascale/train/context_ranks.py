"""Context ranks on this host: processes that divide the tokens of a sequence, for evaluation and generation."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megascale.config import Config, ParallelConfig
from megascale.core.layout import lay_out
from megascale.errors import ConfigError
from megascale.rendezvous.groups import Groups, shutdown
from megascale.rendezvous.start_job import initialise
from megascale.train import launcher
from megascale.train.rank_info import choose_device, find_rank_info


@dataclass(frozen=True)
class ContextRanks:
    """Configuration, groups and device of one of the context ranks.

    Attributes:
        config: the run's configuration with a parallel layout of only these ranks.
        groups: communicators of the ranks; None for a single process.
        device: device that this process computes on.
    """

    config: Config
    groups: Groups | None
    device: torch.device


def start_ranks(config: Config, context: int, device: str, arguments: Sequence[str]) -> int:
    """Run `megascale` with `arguments` on each context rank of this host, and return the exit code.

    Raises FitError if the ranks do not divide the sequence, or if this host has too few GPUs for them.
    """
    with tempfile.TemporaryDirectory(prefix="megascale-") as folder:
        train = config.train.model_copy(update={"runs": folder, "name": "context"})
        data = type(config.data)()  # Without training data the launcher starts no data loader.
        rank_config = _set_context_layout(config.model_copy(update={"train": train, "data": data}), context, device)
        # The check of memory is omitted, because it estimates training. These ranks have no gradients and no optimizer
        # state.
        return launcher.launch(list(arguments), lay_out(rank_config, context), holds_model=False)


@contextmanager
def join_ranks(config: Config, context: int, device: str) -> Iterator[ContextRanks]:
    """Enclose code that runs on all context ranks: create their groups, and destroy them at the end. Collective.

    Raises ConfigError if this process is not one of `context` ranks.
    """
    rank_config = _set_context_layout(config, context, device)
    if context == 1:
        yield ContextRanks(rank_config, None, choose_device(device))
        return
    info = find_rank_info(rank_config)
    if info.world != context:
        raise ConfigError(
            f"--context={context} needs {context} processes and this is one of {info.world}; start it with "
            f"`megascale`, or with torchrun --nproc-per-node={context}"
        )
    groups = initialise(rank_config, rank=info.rank, world=info.world, local_rank=info.local_rank, device=info.device)
    failed = True
    try:
        yield ContextRanks(rank_config, groups, info.device)
        failed = False
    finally:
        shutdown(groups, failed=failed)


def _set_context_layout(config: Config, context: int, device: str) -> Config:
    """Return the configuration with `context` context ranks on the kind of device that --device names.

    Raises ConfigError if --device names a single GPU for several ranks.
    """
    kind = device.partition(":")[0]
    if context > 1 and device != kind:
        raise ConfigError(f"--device={device} names one GPU and --context={context} uses several; use --device=cuda")
    train = config.train.model_copy(update={"device": kind})
    resilience = config.resilience.model_copy(update={"replay_interval": 0})  # these ranks have no replica
    return config.model_copy(
        update={"parallel": ParallelConfig(context=context), "train": train, "resilience": resilience}
    )
