"""Memory of NCCL's communicators on a GPU, from the buffers that NCCL allocates per connection. Needs no torch.

The first set of communicators is a part of `rank_memory.GPU_CONTEXT`. A second set exists while the groups of the next
attempt are prepared (rendezvous/prepared_groups.py). The sizes are those of NCCL 2.29 (src/include/device.h, init.cc).
"""

from __future__ import annotations

from megascale.config import Config
from megascale.config.axes import AXES
from megascale.core.grid import Grid

# A rank's buffers per channel and peer from which it receives, one per protocol.
_SIMPLE_BYTES = 4 << 20
_LL128_BYTES = 120 * 640 * 8 * 8
_LL_BYTES = 8 * 512 * 8 * 16
_COLLECTIVE_BYTES = _SIMPLE_BYTES + _LL128_BYTES + _LL_BYTES
# A rank of one host receives from one peer in a ring, and from its parent and its child in a tree.
_COLLECTIVE_PEERS = 3
_DEFAULT_CHANNELS = 32  # the most that NCCL chooses
# Maximum NCCL channels of the default group, which sums small values and exchanges the state of a load. NCCL connects
# two ranks once per channel and direction at their first exchange: 1.15 s for four ranks without a limit (dev/log.md).
WORLD_CHANNELS = 4
# Up to this number of ranks, all pairs connect for the exchange of state before it is needed. In larger jobs a rank
# exchanges with few others.
MAX_CONNECTED_RANKS = 16
_P2P_CHANNELS = 4  # channels of a pipeline stage: forward and backward, to and from its neighbours


def estimate_prepared_groups(config: Config, grid: Grid) -> int:
    """Return the bytes on a rank's GPU of the communicators that rendezvous.prepared_groups makes, 0 without it."""
    if not config.rendezvous.prepared_groups:
        return 0
    total = _count_collective_bytes(WORLD_CHANNELS)
    if grid.world_size <= MAX_CONNECTED_RANKS:
        total += (grid.world_size - 1) * WORLD_CHANNELS * _SIMPLE_BYTES
    if grid.shards > 1:
        total += 2 * _count_collective_bytes(config.max_channels("data"))  # gathers and reductions
    for name, axis in AXES.items():
        if axis.has_group and grid.size(name) > 1:
            total += _count_collective_bytes(None)
    if grid.pipeline > 1:
        channels = config.max_channels("pipeline") or _DEFAULT_CHANNELS
        total += _P2P_CHANNELS * channels * _SIMPLE_BYTES
    return total


def _count_collective_bytes(channels: int | None) -> int:
    """Return the bytes of a communicator for collectives. For None, NCCL chooses the channels."""
    return (channels or _DEFAULT_CHANNELS) * _COLLECTIVE_PEERS * _COLLECTIVE_BYTES
