"""Choice of CUDA graphs by the measured times of eager micro-batches (kernels.graphs=auto). No torch.

A host that needs most of the GPU's time to submit a micro-batch cannot run ahead of its GPU, so that each delay of the
host is a gap between kernels. Graphs remove the submission. They gain nothing if the host is far ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Share of the GPU's time above which graphs are captured. The remainder is for what a micro-batch does not include on
# the host: data, communication between replays, optimizer and pauses.
MAX_HOST_SHARE = 0.7


@dataclass(frozen=True)
class LaunchTimes:
    """Times of an eager micro-batch on a rank, forward and backward of all its chunks, in milliseconds.

    Attributes:
        host_ms: time in which the host submits the micro-batch to an idle GPU; 0 if none was measured.
        device_ms: time between the first and the last operation on the GPU, which waits for a slow host in between.
    """

    host_ms: float = 0.0
    device_ms: float = 0.0

    @property
    def host_share(self) -> float:
        """Time on the host relative to the time on the GPU; 0 if none was measured."""
        if self.device_ms == 0:
            return 0.0
        return self.host_ms / self.device_ms


@dataclass(frozen=True)
class GraphDecision:
    """Decision of the ranks of a job on CUDA graphs, and the times that decide it.

    Attributes:
        uses_graphs: whether the ranks that can capture do.
        slowest_rank: rank whose host needs the largest share of the GPU's time.
        times: times of this rank.
        fullest_rank: rank whose memory lacks most for the buffers of graphs.
        missing_gib: GiB that it lacks; 0 if all ranks have enough.
    """

    uses_graphs: bool
    slowest_rank: int
    times: LaunchTimes
    fullest_rank: int = 0
    missing_gib: float = 0.0

    def describe(self, start: str, obstacle: str = "") -> str:
        """Return the start-up line's text.

        Args:
            start: when captures begin.
            obstacle: why this rank cannot capture, independent of the times; "" if it can.
        """
        times = self.times
        if times.device_ms == 0:
            if obstacle:
                return f"off ({obstacle})"
            measurement = "no micro-batch of a step can be replayed"
        else:
            measurement = (
                f"rank {self.slowest_rank} submits a micro-batch in {times.host_ms:.1f} ms, and its GPU runs it in "
                f"{times.device_ms:.1f} ms: a share of {times.host_share:.2f}, "
                f"and graphs are used above {MAX_HOST_SHARE}"
            )
        if self.missing_gib > 0 and not obstacle:
            obstacle = (
                f"rank {self.fullest_rank} lacks {self.missing_gib:.1f} GiB of memory for the graphs' buffers; "
                "--kernels.graphs=on tries anyway"
            )
        if obstacle:
            return f"off ({obstacle}; {measurement})"
        if not self.uses_graphs:
            return f"off ({measurement})"
        return f"forward and backward of each chunk, {start} ({measurement})"


def decide_graphs(
    times_by_rank: Sequence[LaunchTimes], missing_gib_by_rank: Sequence[float], can_capture: bool = True
) -> GraphDecision:
    """Return the decision of all ranks: the largest share of a host counts, since all ranks wait for the slowest.

    Args:
        missing_gib_by_rank: GiB of memory that each rank lacks for graphs, 0 if it has enough.
        can_capture: whether any rank can capture, independent of the times.
    """
    shares = [times.host_share for times in times_by_rank]
    slowest_rank = shares.index(max(shares))
    missing_gib = max(missing_gib_by_rank)
    return GraphDecision(
        uses_graphs=can_capture and shares[slowest_rank] > MAX_HOST_SHARE and missing_gib == 0,
        slowest_rank=slowest_rank,
        times=times_by_rank[slowest_rank],
        fullest_rank=missing_gib_by_rank.index(missing_gib),
        missing_gib=missing_gib,
    )
