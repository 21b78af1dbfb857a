"""The timers of one rank's training: made for its device, put into its runtime, read between steps."""

from __future__ import annotations

import logging
import socket

import torch

from megascale.config import Config
from megascale.core.grid import Grid
from megascale.core.spans import NoRecorder
from megascale.core.status import StatusFile
from megascale.errors import MegascaleError
from megascale.observe.rank.span_link import SpanLink
from megascale.observe.rank.timers import SpanSink, Timers
from megascale.observe.store.span_messages import span_folder
from megascale.observe.store.span_ring import SpanRing
from megascale.parallel.runtime import Runtime
from megascale.train.rank_info import RankInfo

log = logging.getLogger("megascale.train")


def make_timers(device: torch.device, sink: SpanSink | None, every: int) -> Timers:
    """Timers for what runs on `device`; see Timers."""
    if device.type != "cuda":
        return Timers(sink, every)
    from megascale.observe.rank.device_timers import DeviceTimers

    return DeviceTimers(device, sink, every)


class RankTimers:
    """Times what `runtime` runs from now on, unless observe.timers=false, and has it kept under `runs/NAME/spans`;
    `close` ends it.

    Args:
        grid: of the whole job.
        attempt: number of this start of the run.

    Attributes:
        timers: the recorder, None without.
    """

    def __init__(self, config: Config, place: RankInfo, runtime: Runtime, grid: Grid, attempt: int) -> None:
        self._runtime, self._place = runtime, place
        self.timers: Timers | None = None
        self._link: SpanLink | None = None
        observe = config.observe
        if not observe.timers:
            return
        try:
            ring = SpanRing(rank=place.rank, attempt=attempt)
        except (OSError, AttributeError) as error:  # no shared memory is to be had here: metrics have the times alone
            self._time_without_spans(error)
            return
        at = grid.coordinate(place.rank)
        host, hosts = (place.rank - place.local_rank) // place.local_world, -(-place.world // place.local_world)
        device = torch.cuda.get_device_name(place.device) if place.device.type == "cuda" else place.device.type
        facts = {"tensor": at.tensor, "pipeline": at.pipeline, "data": at.data, "hostname": socket.gethostname()}
        words = {name: str(value) for name, value in facts.items()} | {"device": device}
        run = config.run_folder
        out, log_file = span_folder(run, host), run / "logs" / f"spans-{host}.log"
        try:
            self._link = SpanLink(
                ring,
                out,
                config.train.name,
                host,
                words,
                observe.spans_mib,
                log_file,
                hosts=hosts,
                sinks=observe.span_sinks,
            )
        except (OSError, MegascaleError) as error:  # the folder of its service cannot be used
            ring.close()
            self._time_without_spans(error)
            return
        runtime.recorder = self.timers = make_timers(place.device, ring, observe.spans)

    def _time_without_spans(self, error: Exception) -> None:
        log.warning("rank %d keeps no spans: %s", self._place.rank, error)
        self._runtime.recorder = self.timers = make_timers(self._place.device, None, 0)

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
        status.compute_seconds = totals.own_seconds
        waits = {f"wait_{name}_seconds": seconds for name, seconds in sorted(totals.waits.items())}
        return {"compute_seconds": totals.own_seconds, **waits}

    def close(self) -> None:
        """Record nothing more."""
        if self.timers is not None:
            self._runtime.recorder = NoRecorder()
            self.timers.close()
        if self._link is not None:
            self._link.close()
