"""Size of the host memory for snapshots before a rank knows its shards, and with fewer replicas than configured."""

from __future__ import annotations

import os

from megascale.checkpoint import EarlySlots
from megascale.config import Config
from megascale.core.host_memory import checkpoint_bytes, count_other_snapshots
from megascale.core.preflight import MIB
from megascale.core.process_orders import MISSING_VARIABLE
from megascale.train.rank_info import RankInfo

# Smaller memory is ready before the first step in any case.
_LEAST_EARLY_BYTES = 256 << 20
_MARGIN = 1.05  # files of ranks differ in size by chunks that are not divided


def order_slots(config: Config, info: RankInfo) -> EarlySlots | None:
    """Order memory for a rank's snapshots before its engine exists, if its size is known well and is large.

    The ranks of a pipeline have stages of different sizes, so that memory by the mean size would not suffice for some.

    Args:
        config: the resolved configuration of the attempt.
    """
    if not config.checkpoint.background or config.parallel.pipeline > 1:
        return None
    necessary, sufficient = estimate_slot_sizes(config, info.world)
    if necessary < _LEAST_EARLY_BYTES:
        return None
    other_count = count_other_snapshots(config.checkpoint, info.local_world, has_peer=config.checkpoint.replicas)
    return EarlySlots(
        config.checkpoint,
        config.run_folder,
        rank=info.rank,
        size=int(necessary / _MARGIN),  # memory of an ended process suffices, which has exactly the size of its file
        reserved=sufficient,
        spare=other_count * sufficient,
        device=info.device,
    )


def estimate_slot_sizes(config: Config, world: int) -> tuple[int, int]:
    """Estimate the host memory for a snapshot of a rank that does not know its shards yet.

    Args:
        config: the resolved configuration of the attempt, with its own data-parallel size.
        world: number of ranks of the attempt.

    Returns:
        The bytes that are necessary, and the bytes that suffice although files of ranks differ.
    """
    necessary = int(checkpoint_bytes(config) / world * compute_snapshot_reserve(config))
    sufficient = MIB * (2 + int(necessary * _MARGIN) // MIB)
    return necessary, sufficient


def compute_snapshot_reserve(config: Config) -> float:
    """Return the largest size of this rank's snapshots, relative to their size in the present attempt; at least 1.

    With fewer replicas each rank holds a larger part of the optimizer's state. Memory of that size is allocated and
    page-locked at the first start, since the ranks would otherwise wait for it after the loss of a replica.

    Args:
        config: the resolved configuration of the attempt, with its own data-parallel size.
    """
    missing_share = os.environ.get(MISSING_VARIABLE)
    if not config.resilience.continue_replicas or missing_share is None:
        return 1.0  # Without a driver the number of replicas stays.
    present_count = config.parallel.data
    assert present_count is not None, "a resolved configuration has a data-parallel size"
    full_count = round(present_count / (1 - float(missing_share)))
    smallest_count = max(1, full_count - config.resilience.max_missing_replicas)
    return max(1.0, present_count / smallest_count)
