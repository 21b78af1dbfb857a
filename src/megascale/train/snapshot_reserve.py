"""Size of the host memory for snapshots in a run that may train without some of its replicas."""

from __future__ import annotations

import os

from megascale.config import Config
from megascale.core.preflight import MIB, checkpoint_bytes
from megascale.core.process_orders import MISSING_VARIABLE

_MARGIN = 1.05  # files of ranks differ in size by chunks that are not divided


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
