"""Training samples of a configuration, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megascale.config import Config
from megascale.core.layout import lay_out
from megascale.data.dataset import data_checks
from megascale.data.dataset.indexed import IndexedWriter
from megascale.data.dataset.samples import SampleSource
from megascale.data.loader.host_plan import HostPlan, plan_host


def open_samples(config: Config, index: Path | None = None) -> SampleSource:
    """Return the samples that a run of `config` trains on."""
    return SampleSource(
        config.data,
        config.model.sequence_length,
        vocab_size=config.model.vocab_size,
        seed=config.train.seed,
        index=index,
    )


def check_run(config: Config, consumed: int, leader: bool) -> list[str]:
    """Check the data of a run of `config` at a start after `consumed` samples."""
    return data_checks.check_run_data(
        config.run_folder,
        config.data,
        sequence_length=config.model.sequence_length,
        vocab_size=config.model.vocab_size,
        consumed=consumed,
        is_leader=leader,
        accept_changes="data.train" in config.checkpoint.accept_changes,
    )


def check_data_of(config: Config) -> None:
    """Check the data of a run of `config` before its processes start."""
    prompted = config.train.sample_prompt is not None
    data_checks.check_data(config.data, config.model.sequence_length, needs_tokenizer=prompted)


def check_tokenizers_of(config: Config) -> None:
    """Check that the data of a run of `config` belong to one tokenizer."""
    data_checks.check_tokenizers(config.data, config.model.sequence_length, config.model.vocab_size)


def plan_host_of(config: Config, world: int, first_rank: int, ranks: int) -> HostPlan:
    """Return the plan of a host that runs `ranks` ranks of `world`."""
    return plan_host(lay_out(config, world), first_rank, ranks)


def write_documents(prefix: Path, lengths: Sequence[int], vocabulary: int | None = None) -> str:
    """Write a token file with documents of these lengths; the tokens are their numbers, or random ids."""
    total = sum(lengths)
    tokens = np.arange(total)
    if vocabulary is not None:
        tokens = np.random.default_rng(total).integers(0, vocabulary, total)
    with IndexedWriter(prefix, "int32") as writer:
        writer.add_documents(tokens, lengths)
    return str(prefix)
