"""Check by the ranks of a host that it has the memory for them, if the process that started them has not made it."""

from __future__ import annotations

import os

from megascale.checkpoint.background.service_memory import measure_service_memory
from megascale.core.capacity import Capacity, measure_memory_limit
from megascale.core.layout import Layout
from megascale.core.preflight import CHECKED_VARIABLE, HostShare, check_host, check_host_memory
from megascale.train.rank_info import RankInfo
from megascale.train.snapshot_reserve import compute_snapshot_reserve


def check_local_ranks(layout: Layout, rank_info: RankInfo, *, saves_checkpoints: bool) -> None:
    """Check on local rank 0 that this host has the GPUs and the memory for its ranks of the run.

    The check is skipped if `megascale train` has made it. Ranks of an agent compare their needs with all memory of the
    host, used or free, since processes of an earlier attempt may still use a part of it. Raises FitError if the ranks
    do not fit.
    """
    if rank_info.local_rank or os.environ.get(CHECKED_VARIABLE):
        return
    if not 0 <= rank_info.rank < rank_info.world:
        return  # the rendezvous refuses this rank
    is_agent = "MEGASCALE_NODE" in os.environ
    reused_bytes = 0
    if saves_checkpoints and not is_agent:
        reused_bytes = measure_service_memory(layout.config)
    share = HostShare(
        rank_info.world,
        rank_info.rank - rank_info.local_rank,
        rank_info.local_world,
        uses_gpus=rank_info.device.type == "cuda",
        writes_checkpoints=saves_checkpoints,
        is_running=True,
        reused_bytes=reused_bytes,
    )
    if not is_agent:
        check_host(layout, share)
        return
    memory, memory_from = measure_memory_limit()
    capacity = Capacity(memory=memory, memory_from=memory_from)
    check_host_memory(layout, share, capacity, snapshot_growth=compute_snapshot_reserve(layout.config))
