"""Groups of the next attempt, which a rank prepares between its steps, and groups of the attempt before.

Communicators of another attempt are aborted and used for the first time only between steps, while the device is idle
and nothing is launched (`rendezvous/prepared_groups.py`).
"""

from __future__ import annotations

import logging
import time

import torch

from megascale.parallel.chunk_graphs import EAGER_STEPS
from megascale.rendezvous.prepared_groups import FIRST_CALLS_SECONDS, GroupPreparation
from megascale.train.attempt import Attempt
from megascale.train.device_reserve import cache_activations
from megascale.train.engine import Engine
from megascale.train.parking import Parking
from megascale.train.rank_info import RankInfo
from megascale.train.rank_timers import StepClock
from megascale.train.stop_requests import StopRequests

log = logging.getLogger("megascale.train")
_CAPTURE_STEPS = EAGER_STEPS + 3  # the first steps of an attempt, within which CUDA graphs are captured


class NextGroups:
    """Aborts, makes and warms up the groups of other attempts between the steps of this one.

    Without parking or with one rank there are no such groups, and nothing is done.

    Args:
        attempt: the present attempt, whose ranks have met.
        parking: makes and aborts the groups of other attempts.
        clock: measures the steps without these pauses.
        requests: says when the next attempt's groups are connected on all ranks.
    """

    def __init__(
        self,
        attempt: Attempt,
        rank_info: RankInfo,
        engine: Engine,
        parking: Parking | None,
        *,
        clock: StepClock,
        requests: StopRequests,
    ) -> None:
        self._groups = attempt.groups
        self._rank_info = rank_info
        self._engine = engine
        self._parking = parking
        self._clock = clock
        self._requests = requests
        self._first_step = 0  # of this start
        self._capture_end_step = 0  # graphs are captured before this step, during which no communicators are made

    def begin(self, first_step: int) -> None:
        """Set the number of the start's first step."""
        self._first_step = first_step
        if self._engine.graphs is not None:
            self._capture_end_step = first_step - 1 + _CAPTURE_STEPS

    def tend(self, step: int) -> None:
        """Do what is due after `step`: abort the earlier groups, begin to make the next ones, or warm them up."""
        parking = self._parking
        if parking is None or self._groups is None:
            return
        if parking.earlier_groups is not None and step > self._first_step:
            self._abort_earlier_groups(parking)
        if step >= self._capture_end_step and parking.earlier_groups is None:
            parking.start_preparation(self._engine.config, self._rank_info, self._groups)
        preparation = parking.preparation
        if self._requests.must_warm_groups and preparation is not None and preparation.is_connected:
            self._requests.must_warm_groups = False
            self._warm_up(preparation)

    def _abort_earlier_groups(self, parking: Parking) -> None:
        """Abort the groups of the attempt before."""
        begin = time.monotonic()
        self._await_device()
        parking.abort_earlier_groups()
        log.info("aborted the groups of the attempt before in %.2f s", time.monotonic() - begin)
        self._clock.pause()

    def _warm_up(self, preparation: GroupPreparation) -> None:
        """Use the groups of the next attempt for the first time, if they were made on all ranks. Collective."""
        begin = time.monotonic()
        self._await_device()
        if preparation.warm_up(FIRST_CALLS_SECONDS):
            seconds = time.monotonic() - begin
            device = self._rank_info.device
            memory = ""
            if self._engine.graphs is not None and self._engine.graphs.count_captures() > 0:
                cache_activations(preparation.target.config, preparation.target.world, device)
            if device.type == "cuda":
                memory = f"; {torch.cuda.mem_get_info(device)[0] / 2**30:.2f} GiB of the GPU are free"
            log.info(
                "warmed up the groups of the next attempt in %.2f s (%s)%s", seconds, preparation.describe(), memory
            )
        self._clock.pause()

    def _await_device(self) -> None:
        """Wait until this rank's GPU is idle, if it has one."""
        if self._rank_info.device.type == "cuda":
            torch.cuda.synchronize(self._rank_info.device)
