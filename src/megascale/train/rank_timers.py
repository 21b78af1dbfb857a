"""The timers of one rank's training: made for its device, put into its runtime, read between steps."""

from __future__ import annotations

import torch

from megascale.config import ObserveConfig
from megascale.core.spans import NoRecorder
from megascale.core.status import StatusFile
from megascale.observe.rank.timers import SpanSink, Timers
from megascale.parallel.runtime import Runtime
from megascale.train.rank_info import RankInfo


def make_timers(device: torch.device, sink: SpanSink | None, every: int) -> Timers:
    """Timers for what runs on `device`; see Timers."""
    if device.type != "cuda":
        return Timers(sink, every)
    from megascale.observe.rank.device_timers import DeviceTimers

    return DeviceTimers(device, sink, every)


class RankTimers:
    """Times what `runtime` runs from now on, unless observe.timers=false; `close` ends it.

    Attributes:
        timers: the recorder, None without.
    """

    def __init__(self, observe: ObserveConfig, place: RankInfo, runtime: Runtime, sink: SpanSink | None = None) -> None:
        self._runtime = runtime
        self.timers: Timers | None = None
        if observe.timers:
            runtime.recorder = self.timers = make_timers(place.device, sink, observe.spans)

    def read(self, step: int, status: StatusFile) -> dict[str, float]:
        """What `step`, which has ended on the device, took of this rank: keys of its metrics.

        compute_seconds: of the step, without what this rank waited for; wait_AXIS_seconds: for other ranks along that
        axis; wait_samples_seconds. The rank's status gets the first.
        """
        if self.timers is None:
            return {}
        self.timers.collect()
        totals = self.timers.last
        if totals is None or totals.step != step:
            return {}
        status.compute_seconds = totals.own
        waits = {f"wait_{name}_seconds": seconds for name, seconds in sorted(totals.waits.items())}
        return {"compute_seconds": totals.own, **waits}

    def close(self) -> None:
        """Record nothing more."""
        if self.timers is not None:
            self._runtime.recorder = NoRecorder()
            self.timers.close()
