"""Records of steps: metrics, the ledger of samples, and totals of the run.

A step's results are read from the device while the device computes the next step.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megascale.core.flops import FlopCount, device_peak_tflops, mfu
from megascale.core.layout import Layout
from megascale.core.process_orders import MISSING_VARIABLE
from megascale.core.status import StatusFile
from megascale.data.dataset.read_checksum import ReadTotals, sum_step
from megascale.data.loader.feed import Feed
from megascale.train.rank_info import RankInfo, find_device_kind, memory_gib
from megascale.train.rank_timers import RankTimers
from megascale.train.reporter import Reporter
from megascale.train.step_result import StepResult


@dataclass(frozen=True)
class PendingStep:
    """A step whose results are still on the device.

    Attributes:
        record: the step's metrics that are known without reading the device.
        first_sample: number of the step's first sample.
        sample_ids: hash of the ids of the step's samples; empty on all ranks but rank 0.
    """

    step: int
    record: dict[str, Any]
    result: StepResult
    first_sample: int
    sample_ids: str


@dataclass(frozen=True)
class StepNumbers:
    """Results of a step on the host.

    Attributes:
        loss: NaN if the loss weights sum to 0, since there is no target to take the mean over.
        weight_sum: sum of the loss weights; None if the samples have none.
        read_checksum: numbers of the checksum of the samples that all ranks have read.
    """

    loss: float
    grad_norm: float
    weight_sum: float | None
    read_checksum: list[float]

    @property
    def has_weights(self) -> bool:
        """True if at least one target of the step counts."""
        return self.weight_sum is None or self.weight_sum > 0

    @classmethod
    def read(cls, result: StepResult) -> StepNumbers:
        """Wait for a step and read its results from the device."""
        read_checksum = result.read_checksum.tolist()
        loss, grad_norm = float(result.loss), float(result.grad_norm)
        weight_sum = None
        if result.weight_sum is not None:
            weight_sum = float(result.weight_sum)
            if not weight_sum > 0:
                loss = math.nan
        return cls(loss, grad_norm, weight_sum, read_checksum)


class StepRecords:
    """Writes the records of one start's steps.

    Args:
        reporter: writes the records on rank 0.
        timers: this rank's times per step.
        status: this rank's status file.
        count_exchange_bytes: returns the bytes of the exchanges between GPUs, which torch's statistics do not count.

    Attributes:
        totals: totals up to the last step whose results were read, as they are saved with the state.
        flops: FLOPs per token under data.document_mask; None otherwise.
    """

    def __init__(
        self,
        layout: Layout,
        rank_info: RankInfo,
        feed: Feed,
        *,
        reporter: Reporter,
        timers: RankTimers,
        status: StatusFile,
        count_exchange_bytes: Callable[[], int],
    ) -> None:
        self.totals: dict[str, Any] = {}
        self._read_totals = ReadTotals()  # totals over the samples of these steps
        self.flops: FlopCount | None = None
        self._config = layout.config
        self._tokens_per_step = layout.tokens_per_step
        self._rank_info = rank_info
        self._feed = feed
        self._reporter = reporter
        self._timers = timers
        self._status = status
        self._count_exchange_bytes = count_exchange_bytes
        peak_tflops = layout.config.observe.peak_tflops
        self._peak_flops = peak_tflops or device_peak_tflops(find_device_kind(rank_info.device))
        # The driver sets MISSING_VARIABLE in the environment of ranks that train while replicas have no host.
        self._missing_share = float(os.environ.get(MISSING_VARIABLE) or 0.0)  # fraction of replicas without a host

    def restore_totals(self, state: Mapping[str, Any], first_sample: int, *, is_new_data: bool) -> None:
        """Continue the totals of a saved state.

        Args:
            first_sample: number of the next sample.
            is_new_data: whether the samples differ from those before, so that the totals start again. Only rank 0 knows
                this, and only rank 0 writes the ledger.
        """
        read_totals = ReadTotals.from_record(state.get("read"))
        if read_totals is None or is_new_data:
            read_totals = ReadTotals(first=first_sample)
        self._read_totals = read_totals

    def begin(self, step: int, rate: float, result: StepResult, *, first_sample: int, tokens: int) -> PendingStep:
        """Return the record of a step whose operations are queued.

        Args:
            rate: learning rate.
            first_sample: number of the step's first sample.
            tokens: tokens trained up to this step.
        """
        next_sample = first_sample + self._config.train.global_batch
        record = {
            "step": step,
            "time": time.time(),
            "learning_rate": rate,
            "tokens": tokens,
            "epoch": round(self._feed.count_epochs(next_sample), 4),
            **self._feed.take_measures(),
        }
        if self._missing_share:
            record["missing_share"] = self._missing_share
        sample_ids = ""
        if self._rank_info.rank == 0:
            sample_ids = self._feed.hash_step_ids(first_sample)
        return PendingStep(step, record, result, first_sample, sample_ids)

    def complete(self, pending: PendingStep, numbers: StepNumbers, *, seconds: float, skipped_count: int) -> None:
        """Add to a step's record what is known after its end.

        Args:
            seconds: seconds of the step.
            skipped_count: steps of this process that changed nothing, up to this step.
        """
        record = pending.record
        if numbers.weight_sum is not None:
            record["loss_weight"] = numbers.weight_sum
        record |= self._timers.read(pending.step, self._status)
        record |= {
            "loss": numbers.loss,
            "grad_norm": numbers.grad_norm,
            "seconds": seconds,
            "tokens_per_second": self._tokens_per_step / seconds,
        }
        if skipped_count:
            record["skipped_steps"] = skipped_count
        self._add_optional_metrics(record, pending.result)

    def _add_optional_metrics(self, record: dict[str, Any], result: StepResult) -> None:
        """Add to a step's metrics the casts to float8, routing, memory, and the share of the GPUs' peak (MFU)."""
        clipped_count, flushed_count, cast_count = result.cast_counts.tolist()
        if cast_count:
            record |= {"float8_clipped": clipped_count / cast_count, "float8_flushed": flushed_count / cast_count}
        if result.expert_counts is not None:
            record |= result.expert_counts.summarise()
            if record["step"] % self._config.train.log_interval == 0:
                record["expert_counts"] = result.expert_counts.counts.long().tolist()
        record["memory_gib"] = memory_gib(self._rank_info.device) + self._count_exchange_bytes() / 2**30
        if self._peak_flops:
            record["mfu"] = mfu(
                self._config.model,
                record["tokens_per_second"],
                self._rank_info.world,
                self._peak_flops,
                self.flops,
                has_adapters=self._config.train.lora is not None,
            )

    def write(self, pending: PendingStep, numbers: StepNumbers) -> None:
        """Write a completed record to the ledger of samples and the metrics, and count the step."""
        global_batch = self._config.train.global_batch
        self._read_totals.sums += sum_step(numbers.read_checksum, global_batch)
        self._reporter.write_samples(
            pending.step, pending.first_sample, global_batch, pending.sample_ids, self._read_totals.to_record()
        )
        self._reporter.write_metrics(pending.record)
        self.count(pending.step, pending.first_sample + global_batch, pending.record["tokens"])

    def count(self, step: int, samples: int, tokens: int) -> None:
        """Store the totals up to a step whose results were read."""
        self.totals = {"step": step, "samples": samples, "tokens": tokens, "read": self._read_totals.to_record()}
