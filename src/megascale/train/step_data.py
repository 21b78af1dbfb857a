"""Samples of a step: the micro-batches and loss weights that the engine reads, and the waits for them."""

from __future__ import annotations

import torch

from megascale.core.batch import Batch
from megascale.core.spans import SpanKind
from megascale.data.loader.feed import Feed
from megascale.parallel.runtime import Runtime


class StepData:
    """Reads this data-parallel rank's samples of a step, and records the waits for them.

    Args:
        feed: has the samples.
        runtime: has the records of calls and times, which another attempt replaces.
    """

    def __init__(self, feed: Feed, runtime: Runtime) -> None:
        self._feed = feed
        self._runtime = runtime
        self._first_sample = 0
        self._read_batch = feed.make_batch_reader(0)

    def begin_step(self, first_sample: int) -> None:
        """Read the step that begins at sample `first_sample` from now on."""
        self._first_sample = first_sample
        self._read_batch = self._feed.make_batch_reader(first_sample)

    def read_micro_batch(self, i: int) -> Batch[torch.Tensor]:
        """Return micro-batch `i` of this rank's samples."""
        calls, recorder = self._runtime.calls, self._runtime.recorder
        calls.begin_data_wait()
        mark = recorder.mark()
        micro_batch = self._read_batch(i)
        recorder.record_wait(mark, SpanKind.DATA_WAIT)
        calls.end_data_wait()
        return micro_batch

    def sum_weights(self) -> float:
        """Return the sum of the loss weights of this rank's samples."""
        calls, recorder = self._runtime.calls, self._runtime.recorder
        calls.begin_data_wait()
        mark = recorder.mark()
        weight_sum = self._feed.sum_weights(self._first_sample)
        recorder.record_wait(mark, SpanKind.DATA_WAIT)
        calls.end_data_wait()
        return weight_sum
