"""Choice between copy engines and collectives for the units of ZeRO-2 and 3 (overlap.gathers, overlap.reductions).

The choice is made from the settings alone. The trainer also falls back to collectives with `auto` if the GPUs cannot
map each other's memory, and to copies of own shards if the driver cannot map them into slots.
"""

from __future__ import annotations

import math
import os

from megascale.config import Config
from megascale.config.axes import AXES
from megascale.core.grid import Grid
from megascale.errors import ConfigError

SHARD_SWITCH = "MEGASCALE_MAPPED_SHARDS"  # environment variable; 0: copy own shards, for measurements

# Least tokens of a rank's micro-batch for which overlap.reductions=auto chooses copies of float32 gradients. With 8,192
# tokens and the sizes of Llama 3.2 3B copies are 2% faster than collectives, with 2,048 tokens and GPT 13B 3% slower.
# Sizes in between are not measured (dev/log.md, 2026-11-28 and 2026-11-27).
COPIED_REDUCTION_TOKENS = 4096
# Why own shards are copied next to float8 gathers.
FLOAT8_SLOTS = "slots of float8 gathers hold transposes too"


def explain_collective_gathers(config: Config, grid: Grid) -> str:
    """Return why collectives gather the matrices of ZeRO-3, or "" if copy engines do."""
    requested = config.overlap.gathers
    if requested == "auto" and config.parallel.zero != 3:
        return f"parallel.zero={config.parallel.zero} gathers no units"
    return _explain_collectives("gathers", requested, grid)


def explain_copied_shards(config: Config, grid: Grid, gathers_in_float8: bool) -> str:
    """Return why a gather of ZeRO-3 copies the rank's own shard into the slot, or "" if the slot contains the shard.

    Shards with few bytes are copied all the same (core/mapped_layout.py).

    Args:
        gathers_in_float8: whether matrices are gathered in float8.
    """
    if config.parallel.zero != 3:
        return f"parallel.zero={config.parallel.zero} gathers no units"
    collectives = explain_collective_gathers(config, grid)
    if collectives:
        return collectives
    if gathers_in_float8:
        return FLOAT8_SLOTS
    if read_shard_switch() == "0":
        return f"{SHARD_SWITCH}=0"
    return ""


def read_shard_switch() -> str:
    """Return the value of SHARD_SWITCH. Raises ConfigError if it is neither 0 nor 1."""
    text = os.environ.get(SHARD_SWITCH, "1")
    if text not in ("0", "1"):
        raise ConfigError(f"{SHARD_SWITCH}={text} is neither 0 nor 1; set it to 0, or unset it")
    return text


def explain_collective_reductions(config: Config, grid: Grid) -> str:
    """Return why collectives reduce the gradients of units, or "" if copy engines do."""
    requested = config.overlap.reductions
    if requested == "auto":
        # The first two conditions are those of `find_copied_reduction_tokens`.
        if config.parallel.zero != 3:
            return f"overlap.reductions=auto chooses copies with parallel.zero=3, not {config.parallel.zero}"
        if config.parallel.reduce_dtype != "float32":
            return f"with parallel.reduce_dtype={config.parallel.reduce_dtype} copies round a rank's own gradients too"
        tokens = config.model.sequence_length // grid.context * config.train.micro_batch
        if tokens < COPIED_REDUCTION_TOKENS:
            return f"collectives are faster with micro-batches of fewer than {COPIED_REDUCTION_TOKENS:,} tokens"
    return _explain_collectives("reductions", requested, grid)


def find_copied_reduction_tokens(config: Config) -> float:
    """Return the least tokens of a rank's micro-batch for which copies reduce units within a host; infinity for never.

    A search of layouts knows the settings before it knows the tokens.
    """
    if config.overlap.reductions == "copies":
        return 0
    has_default_type = config.parallel.reduce_dtype == "float32"
    if config.overlap.reductions == "auto" and config.parallel.zero == 3 and has_default_type:
        return COPIED_REDUCTION_TOKENS
    return math.inf


def _explain_collectives(key: str, requested: str, grid: Grid) -> str:
    """Return why overlap.`key`, with the value `requested`, or the grid leads to collectives; "" for copies."""
    if requested == "collectives":
        return f"overlap.{key}=collectives"
    if grid.shards == 1:
        return "there is one data-parallel rank"
    if requested == "auto" and not _has_groups_within_hosts(grid):
        return f"its ranks are on several hosts of {grid.ranks_per_host} GPUs"
    return ""


def _has_groups_within_hosts(grid: Grid) -> bool:
    """Return whether the ranks of each data-parallel group are on one host."""
    first_group = grid.group(AXES.shards, 0)
    if first_group[-1] >= grid.ranks_per_host:
        return False  # without a list of all groups of a large world
    return all(grid.host(ranks[0]) == grid.host(ranks[-1]) for ranks in grid.groups(AXES.shards))
