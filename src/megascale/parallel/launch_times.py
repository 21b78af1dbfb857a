"""Times of eager micro-batches on host and device, and the agreement of all ranks whether they capture CUDA graphs.

The second step of a start is measured: the first one compiles kernels. Before each measured forward or backward the
host waits for its stream, because a full launch queue would block the host for as long as the GPU is busy. The wait
costs the few microseconds until the next kernel is launched. The shortest of some samples counts, so that a pause of
the host does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.core.graph_choice import GraphDecision, LaunchTimes, decide_graphs
from megascale.ops.dispatch import Kernels
from megascale.parallel.chunk_graphs import EAGER_STEPS
from megascale.parallel.collectives import Axis, all_gather, all_reduce
from megascale.parallel.pipeline import EagerRunner, Forward
from megascale.parallel.weight_gradients import WeightGradientQueue

MEASURED_STEP = EAGER_STEPS  # the last step without graphs since the engine was made or has rejoined
MAX_SAMPLES = 2  # per chunk and direction
CHOICE_NAME = "CUDA graphs"


class LaunchClock(Protocol):
    """Clock of a device that measures how long the host submits work, and how long the device takes for it."""

    def start(self) -> None:
        """Wait until the present stream is idle, and start a measurement."""

    def stop(self) -> Callable[[], LaunchTimes]:
        """End the measurement when its work has been submitted.

        The result waits until the device has done the work, and returns the times.
        """
        ...


class CudaLaunchClock:
    """Launch clock of the present CUDA stream.

    Only this stream is awaited: another one may hold a receive whose sender waits for work that is not submitted yet.
    """

    def __init__(self) -> None:
        self._start_event: torch.cuda.Event | None = None
        self._start_seconds = 0.0

    def start(self) -> None:
        """Wait until the present stream is idle, and start a measurement."""
        torch.cuda.current_stream().synchronize()
        self._start_event = torch.cuda.Event(enable_timing=True)
        self._start_seconds = time.perf_counter()
        self._start_event.record()

    def stop(self) -> Callable[[], LaunchTimes]:
        """End the measurement; the result waits for the work and returns its times."""
        host_ms = 1e3 * (time.perf_counter() - self._start_seconds)
        start_event = self._start_event
        assert start_event is not None
        end_event = torch.cuda.Event(enable_timing=True)
        end_event.record()

        def read() -> LaunchTimes:
            end_event.synchronize()
            return LaunchTimes(host_ms, start_event.elapsed_time(end_event))

        return read


class GraphChoice:
    """Decides before the third step of a start whether the ranks of a job capture CUDA graphs.

    Args:
        clock: measures micro-batches of this rank.
        is_typical: is_typical(chunk, micro-batch) returns whether the micro-batch is measured. Graphs must replay it,
            and if possible it neither waits for parameters nor reduces gradients.
        world_axis: all ranks of the job, each of which must have a choice.
        kernels: records the choice for the start-up lines.
        find_missing_gib: returns the GiB that this rank lacks for graphs after the measured step, 0 if it has enough.
        capture_axis: ranks that agree on each capture. If one of them cannot capture, none of them does.
        obstacle: why this rank cannot capture, independent of the times; "" if it can.

    Attributes:
        uses_graphs: whether this rank may make captures and replay them.
        decision: the ranks' decision; None before the third step.
    """

    def __init__(
        self,
        clock: LaunchClock,
        is_typical: Callable[[int, int], bool],
        world_axis: Axis,
        device: torch.device,
        kernels: Kernels,
        find_missing_gib: Callable[[], float],
        capture_axis: Axis,
        obstacle: str = "",
    ) -> None:
        self.uses_graphs = False
        self.decision: GraphDecision | None = None
        self._clock = clock
        self._is_typical = is_typical
        self._world_axis = world_axis
        self._device = device
        self._kernels = kernels
        self._find_missing_gib = find_missing_gib
        self._capture_axis = capture_axis
        self._obstacle = obstacle
        self._has_fitted = False  # whether an earlier attempt had memory for graphs
        self._step_count = 0
        # By chunk and direction: functions that return the times of the samples.
        self._samples: dict[tuple[int, str], list[Callable[[], LaunchTimes]]] = {}
        self._record_pending()

    @property
    def is_measuring(self) -> bool:
        """True during the measured step."""
        return self._step_count == MEASURED_STEP

    def restart(self) -> None:
        """Forget the decision, because ranks of the next attempt may be new and all of them must agree."""
        # The peak of memory contains the graphs of earlier attempts from now on, so it no longer shows what is spare.
        self._has_fitted = self._has_fitted or self.uses_graphs
        self.uses_graphs = False
        self.decision = None
        self._step_count = 0
        self._samples.clear()
        self._record_pending()

    def begin_step(self) -> None:
        """Count a step, and decide before the third one. Collective over all ranks then."""
        self._step_count += 1
        if self._step_count == MEASURED_STEP + 1 and self.decision is None:
            self._decide()

    def measure(self, chunk: int, microbatch: int, direction: str, work: Callable[[], Tensor | None]) -> Tensor | None:
        """Run `work`, and measure it if samples are missing. Return its result.

        Args:
            direction: "forward" or "backward".
        """
        samples = self._samples.setdefault((chunk, direction), [])
        if len(samples) >= MAX_SAMPLES or not self._is_typical(chunk, microbatch):
            return work()
        self._clock.start()
        result = work()
        samples.append(self._clock.stop())
        return result

    def _decide(self) -> None:
        """Agree with all ranks on whether graphs are used."""
        local_times = self._sum_samples()
        self._samples.clear()
        missing_gib = 0.0
        if not self._obstacle and not self._has_fitted:
            missing_gib = self._find_missing_gib()
        numbers = [local_times.host_ms, local_times.device_ms, missing_gib, float(not self._obstacle)]
        row = torch.tensor([numbers], dtype=torch.float64, device=self._device)
        rows = all_gather(row, self._world_axis).wait().tolist()
        times_by_rank = [LaunchTimes(host_ms, device_ms) for host_ms, device_ms, _, _ in rows]
        missing_gib_by_rank = [missing for _, _, missing, _ in rows]
        can_capture = any(can_rank_capture for _, _, _, can_rank_capture in rows)
        decision = decide_graphs(times_by_rank, missing_gib_by_rank, can_capture)
        self.decision = decision
        obstacle = self._obstacle
        if decision.uses_graphs and self._has_obstacle_in_group() and not obstacle:
            obstacle = f"another rank of the axis {self._capture_axis.name} cannot capture"
        self.uses_graphs = decision.uses_graphs and not obstacle
        self._kernels.record_choice(CHOICE_NAME, decision.describe("from the third step on", obstacle))

    def _has_obstacle_in_group(self) -> bool:
        """Return whether any rank that agrees on captures has an obstacle. Collective over these ranks."""
        if self._capture_axis.size == 1:
            return bool(self._obstacle)
        has_obstacle = torch.tensor([float(bool(self._obstacle))], device=self._device)
        return bool(all_reduce(has_obstacle, self._capture_axis, dist.ReduceOp.MAX).wait().item())

    def _sum_samples(self) -> LaunchTimes:
        """Return the times of a micro-batch: the sum over chunks and directions of the shortest samples."""
        host_ms = 0.0
        device_ms = 0.0
        for samples in self._samples.values():
            times = [read() for read in samples]
            host_ms += min((sample.host_ms for sample in times), default=0.0)
            device_ms += min((sample.device_ms for sample in times), default=0.0)
        return LaunchTimes(host_ms, device_ms)

    def _record_pending(self) -> None:
        if self._obstacle:
            text = f"off ({self._obstacle})"
        else:
            text = "decided before the third step by the measured time of launches"
        self._kernels.record_choice(CHOICE_NAME, text)


class MeasuredRunner(EagerRunner):
    """Runs the micro-batches of the measured step eagerly, and measures some of them.

    Args:
        read_inputs: reads the fields of a micro-batch before it is measured, so that no wait for data is.
    """

    def __init__(
        self,
        forward: Forward,
        weight_gradients: WeightGradientQueue,
        choice: GraphChoice,
        read_inputs: Callable[[int, int, Tensor | None], object],
    ) -> None:
        super().__init__(forward, weight_gradients)
        self._choice = choice
        self._read_inputs = read_inputs

    def forward(self, chunk: int, i: int, x: Tensor | None) -> Tensor:
        """Run micro-batch `i` through `chunk` as `EagerRunner` does."""
        self._read_inputs(chunk, i, x)
        run = super().forward
        y = self._choice.measure(chunk, i, "forward", lambda: run(chunk, i, x))
        assert y is not None
        return y

    def backward(self, chunk: int, i: int, grad: Tensor | None) -> Tensor | None:
        """Run the backward of micro-batch `i` as `EagerRunner` does."""
        run = super().backward
        return self._choice.measure(chunk, i, "backward", lambda: run(chunk, i, grad))
