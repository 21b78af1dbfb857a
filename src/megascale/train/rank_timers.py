"""Timers of one rank: a clock of training steps, and spans of the operations within them."""

from __future__ import annotations

import logging
import socket
import time
from collections import deque
from typing import Any

import torch

from megascale.config import Config
from megascale.config.axes import AXES
from megascale.core.grid import Grid
from megascale.core.spans import Recorder
from megascale.core.status import StatusFile
from megascale.errors import MegascaleError
from megascale.observe.rank.span_link import SpanLink
from megascale.observe.rank.timers import SpanSink, Timers
from megascale.observe.store.span_messages import get_span_folder
from megascale.observe.store.span_ring import SpanRing
from megascale.observe.store.span_sinks import check_installed
from megascale.parallel.runtime import Runtime
from megascale.train.rank_info import RankInfo, find_device_kind

log = logging.getLogger("megascale.train")


class StepClock:
    """Times steps, by CUDA events on a GPU and by the host's clock on a CPU.

    `start` and `stop` are called when a step's operations are queued; `read` returns the times later, in order.
    A step lasts from the end of the previous step, so that idle time of the device between steps counts. After a
    `pause` (for an evaluation or a checkpoint) a step lasts from its own `start`.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        # Marks are CUDA events on a GPU, and seconds on a CPU.
        self._pending_steps: deque[tuple[Any, Any]] = deque()  # marks of start and end of each step to be read
        self._start: Any = None  # mark of the present step's start; None before the first step and after `pause`

    def _make_mark(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        """Store the start of a step. Call this before the step's first operation is queued."""
        if self._start is None:
            self._start = self._make_mark()

    def stop(self) -> None:
        """Store the end of the step. Call this when the step's last operation has been queued."""
        end = self._make_mark()
        self._pending_steps.append((self._start, end))
        self._start = end

    def pause(self) -> None:
        """Exclude the operations that are queued until the next `start` from the times of steps."""
        self._start = None

    def read(self) -> float:
        """Wait for the end of the oldest step that is not read yet, and return its seconds."""
        start, end = self._pending_steps.popleft()
        if not self._is_cuda:
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1e3  # elapsed_time returns milliseconds


def make_timers(device: torch.device, sink: SpanSink | None, interval: int) -> Timers:
    """Return timers for operations on `device`.

    Args:
        sink, interval: arguments of `Timers`.
    """
    if device.type != "cuda":
        return Timers(sink, interval)
    from megascale.observe.rank.device_timers import DeviceTimers

    return DeviceTimers(device, sink, interval)


class RankTimers:
    """Times the operations of `runtime` until `close`, and sends spans to the host's span service.

    It does neither if observe.timers=false. If spans cannot be sent, operations are timed for the metrics only.

    Args:
        grid: the grid of the whole job.
        attempt: number of this start of the run.

    Attributes:
        timers: the recorder; None if observe.timers=false.
    """

    def __init__(self, config: Config, rank_info: RankInfo, runtime: Runtime, grid: Grid, attempt: int) -> None:
        self._runtime = runtime
        self._rank_info = rank_info
        self.timers: Timers | None = None
        self._link: SpanLink | None = None
        if not config.observe.timers:
            return
        check_installed(config.observe.span_sinks)
        try:
            ring = SpanRing(rank=rank_info.rank, attempt=attempt)
        except (OSError, AttributeError) as error:  # the system has no shared memory
            self._time_without_spans(error)
            return
        try:
            self._link = self._connect(config, ring, grid)
        except (OSError, MegascaleError) as error:  # the folder of the span service cannot be used
            ring.close()
            self._time_without_spans(error)
            return
        self.timers = make_timers(rank_info.device, ring, config.observe.spans)
        runtime.recorder = self.timers

    def _connect(self, config: Config, ring: SpanRing, grid: Grid) -> SpanLink:
        """Connect the ring to the host's span service, which also receives a description of this rank."""
        info, observe = self._rank_info, config.observe
        host_index = (info.rank - info.local_rank) // info.local_world  # ranks are numbered host by host
        host_count = -(-info.world // info.local_world)  # rounded up
        # Spans know three axes: tensor, pipeline and data. The context axis is part of "data". The rank's index on it
        # is added, because it shows which ranks exchange the slices of a sequence.
        rank_description = {
            "tensor": str(grid.index(AXES.replica, info.rank)),
            "pipeline": str(grid.coordinate(info.rank).pipeline),
            "data": str(grid.index(AXES.shards + AXES.copies, info.rank)),
            "context": str(grid.coordinate(info.rank)["context"]),
            "hostname": socket.gethostname(),
            "device": find_device_kind(info.device),
        }
        run = config.run_folder
        log_file = run / "logs" / f"spans-{host_index}.log"
        return SpanLink(
            ring,
            get_span_folder(run, host_index),
            config.train.name,
            host_index,
            rank_description,
            observe.spans_mib,
            log_file,
            hosts=host_count,
            sinks=observe.span_sinks,
        )

    def _time_without_spans(self, error: Exception) -> None:
        """Time operations for the metrics only, because spans cannot be sent."""
        log.warning("rank %d keeps no spans: %s", self._rank_info.rank, error)
        self.timers = make_timers(self._rank_info.device, None, 0)
        self._runtime.recorder = self.timers

    def read(self, step: int, status: StatusFile) -> dict[str, float]:
        """Return this rank's times of `step` by their keys in the metrics; empty if none are known.

        The step must have ended on the device. The keys are

        - compute_seconds: the step without this rank's waits, which is also written to `status`,
        - wait_AXIS_seconds: waits for other ranks along that axis,
        - wait_samples_seconds: waits for samples.
        """
        if self.timers is None:
            return {}
        self.timers.collect()
        totals = self.timers.last_totals
        if totals is None or totals.step != step:
            return {}
        status.compute_seconds = totals.own_seconds
        times = {"compute_seconds": totals.own_seconds}
        for name, seconds in sorted(totals.waits.items()):
            times[f"wait_{name}_seconds"] = seconds
        return times

    def close(self, awaits_service: bool = True) -> None:
        """Stop recording.

        Args:
            awaits_service: whether to wait for a span service that is starting, which takes the last spans. Otherwise
                they are saved as a file.
        """
        if self.timers is not None:
            self._runtime.recorder = Recorder()
            self.timers.close()
        if self._link is not None:
            self._link.close(awaits_service)
