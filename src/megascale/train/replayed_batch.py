"""Replay of another replica's micro-batch on an engine, which keeps the results of the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from megascale.core.batch import Batch
from megascale.parallel.pipeline import EagerRunner
from megascale.train.engine import Engine
from megascale.train.engine_parts import with_engine_kernels


@with_engine_kernels
def replay_batch(
    engine: Engine,
    batch: Batch[torch.Tensor],
    first_sample: int,
    watch: Callable[[EagerRunner], EagerRunner],
) -> None:
    """Run forward and backward of another replica's first micro-batch with the step's weights.

    A replay overwrites the step's gradients. Call it before the step or within `keep_results`.

    Args:
        batch: the micro-batch, with the fields that this rank reads.
        first_sample: index of its first sample in the global batch.
        watch: wraps the runner of the micro-batch.
    """
    engine.mark_weights_changed()
    engine.data_parallel.begin_step()
    if engine.experts is not None:
        engine.experts.begin_step()
    runner = watch(EagerRunner(engine.chunk_forward.run, engine.runtime.weight_gradients))
    with (
        engine.chunk_forward.replace_micro_batch(batch, first_sample),
        torch.autograd.set_multithreading_enabled(False),
        engine.data_parallel.discard_gradients(),
    ):
        engine.pipeline.run_microbatch(runner, engine.data_parallel)


@contextmanager
def keep_results(engine: Engine) -> Iterator[None]:
    """Enclose replays: copy the step's gradients and expert counts to host memory before, and back after.

    A replay that raises an error also gets them back, since a save at the end of the process may still use them.
    """
    results = [shard.grads for buffer in engine.buffers for shard in buffer.shards]
    if engine.experts is not None:
        results += engine.experts.list_counts()
    copies = [tensor.to("cpu", copy=True) for tensor in results]
    try:
        yield
    finally:
        for tensor, copy in zip(results, copies, strict=True):
            tensor.copy_(copy)
