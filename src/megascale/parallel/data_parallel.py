"""Data parallelism of a rank: one object owns the buckets of all its chunks, their reductions and their gathers.

The schedule says when (core/schedule.py), hooks only mark, and communication starts here and nowhere else. A chunk's
REDUCE_GRADS *arms* its buckets: in the backward that follows, a bucket is reduced as soon as the last of its gradients
is marked. A GATHER_PARAMS sends for the chunk's buckets in the order in which forward needs them; the list's first one
is armed while the step before updates, and then each bucket leaves as soon as this rank's part of it is updated
(MegaScale section 3.2). Without overlap both are waited for where they start. Matrices that linear layers read in
float8 may be gathered as that (`float8_gather.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from megascale.parallel.buffers import FlatChunk, FlatShard
from megascale.parallel.collectives import (
    Pending,
    all_gather_into,
    all_reduce,
    reduce_scatter_in_place,
    reduce_scatter_rounded,
)
from megascale.parallel.float8_gather import Float8Gather


class _Buckets:
    """What is under way for the buckets of one chunk, and which gradients of the present backward are there."""

    def __init__(self, flat: FlatChunk, float8: bool) -> None:
        self.flat = flat
        self.float8 = Float8Gather(flat) if float8 else None
        self.calls = [0] * len(flat.parameters)  # gradient contributions a micro-batch, learnt in the first one
        self.seen = [0] * len(flat.parameters)
        self.left: list[int] = []  # parameters of each bucket whose gradients are not complete
        # As many at first; a parameter that gets no gradient (another chunk's copy in use) makes no call.
        self.expected = [0] * len(flat.layout.buckets)
        self.needs: list[list[int]] = []  # buckets that each unit of the forward needs
        self.armed = False  # whether the next backward, or the present one, is reduced
        self.as_they_fill = False  # whether the present backward's buckets leave as they fill
        self.reducing: dict[int, Pending] = {}
        self.gathering: dict[int, Pending] = {}


class GradientPool:
    """Two gradient buffers that the chunks of a rank use in turn (ZeRO-2).

    One chunk's backward fills a buffer while the other's is reduced. `drain` ends a user's reductions.
    """

    def __init__(self, flats: Sequence[FlatChunk], drain: Callable[[FlatChunk, dict[int, Pending]], None]) -> None:
        size, like = max(flat.layout.size for flat in flats), flats[0]
        self.buffers = [torch.zeros(size, dtype=like.grad_dtype, device=like.params.device) for _ in range(2)]
        self._users: list[tuple[FlatChunk, dict[int, Pending]] | None] = [None, None]
        self._drain_user, self._index = drain, 0

    def take(self, user: FlatChunk) -> tuple[torch.Tensor, dict[int, Pending]]:
        """A zeroed buffer and a dictionary for its reductions; what it held before is drained first."""
        self._index = 1 - self._index
        self._drain(self._index)
        reducing: dict[int, Pending] = {}
        self._users[self._index] = (user, reducing)
        return self.buffers[self._index][: user.layout.size].zero_(), reducing

    def drain(self) -> None:
        """Drain both."""
        for index in (0, 1):
            self._drain(index)

    def _drain(self, index: int) -> None:
        before, self._users[index] = self._users[index], None
        if before is not None:
            self._drain_user(*before)


class DataParallel:
    """Gradients and parameters of this rank's chunks on their way between the data-parallel ranks.

    Args:
        flats: the chunks' buffers, in the order of the schedule's chunk numbers.
        overlap: reduce buckets as they fill and gather ahead; without it both wait for each other.
        reduce_dtype: communication dtype of gradients; None for their own.
        float8: whether the buckets of linear layers' matrices are gathered as float8: the chunks compute with it.
    """

    def __init__(
        self,
        flats: Sequence[FlatChunk],
        overlap: bool = True,
        reduce_dtype: torch.dtype | None = None,
        float8: bool = False,
    ) -> None:
        self.flats, self.overlap, self.reduce_dtype = list(flats), overlap, reduce_dtype
        self._runtime = flats[0].axes.tensor.runtime
        self._chunks = [_Buckets(flat, float8) for flat in flats]
        self._tied: list[Pending] = []
        self._measured: tuple[_Buckets, int] | None = None  # the bucket that leaves after the next one's update
        for buckets in self._chunks:
            buckets.flat.tell(partial(self._mark, buckets))
            if overlap and (units := buckets.flat.units()):
                buckets.needs = units
                buckets.flat.module.pre_forward_gather = partial(self._await_unit, buckets)  # type: ignore[assignment]
        self.pool = GradientPool(flats, self._drain) if flats[0].zero == 2 else None

    # gradients ---------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Forget the gradients of the step before."""
        for buckets in self._chunks:
            self._runtime.stream.synchronize()
            buckets.flat.zero_grads(buckets.calls)

    def arm(self, chunk: int) -> None:
        """REDUCE_GRADS: the chunk's next backward completes its gradients (ZeRO-2: this micro-batch's)."""
        self._chunks[chunk].armed = True

    def begin_backward(self, chunk: int) -> None:
        """A micro-batch's backward of the chunk is next."""
        buckets = self._chunks[chunk]
        flat = buckets.flat
        buckets.seen = [0] * len(flat.parameters)
        if self.pool is not None:
            grads, buckets.reducing = self.pool.take(flat)
            flat.aim(grads)
        buckets.as_they_fill = self.overlap and buckets.armed and any(buckets.calls)
        buckets.left = buckets.expected.copy()

    def _mark(self, buckets: _Buckets, number: int) -> None:
        """A gradient has one more contribution; the last of an armed bucket sends it off."""
        buckets.seen[number] += 1
        if buckets.as_they_fill and buckets.seen[number] == buckets.calls[number]:
            bucket = buckets.flat.bucket_of[number]
            buckets.left[bucket] -= 1
            if not buckets.left[bucket] and not _waits_for_tensor_axis(buckets.flat, bucket):
                self._reduce(buckets, bucket)

    def end_backward(self, chunk: int) -> None:
        """After a micro-batch's backward: learn the calls, and reduce the armed buckets that have not left."""
        buckets = self._chunks[chunk]
        flat = buckets.flat
        if not any(buckets.calls):
            buckets.calls = list(buckets.seen)
            buckets.expected = [sum(1 for i in span.members if buckets.calls[i]) for span in flat.layout.buckets]
        buckets.as_they_fill = False
        if not buckets.armed:
            return
        buckets.armed = False
        self._runtime.stream.synchronize()
        flat.zero_unwritten()
        start, stop = flat.layout.replicated
        # Each tensor-parallel rank saw its part of the sequence only.
        all_reduce(flat.grads[start:stop], flat.axes.tensor).wait()
        for bucket in range(len(flat.layout.buckets)):
            if bucket not in buckets.reducing:
                self._reduce(buckets, bucket)
                if not self.overlap:
                    buckets.reducing[bucket].wait()

    def finish_reductions(self) -> None:
        """Wait until this rank's shards hold the sum over data-parallel ranks; that of a tied embedding's copies is
        under way then (`finish_tied`)."""
        for buckets in self._chunks:
            flat = buckets.flat
            if self.pool is not None:
                self.pool.drain()
            else:
                self._drain(flat, buckets.reducing)
            if flat.layout.own_bucket is not None:
                self._tied.append(all_reduce(flat.shards[flat.layout.own_bucket].grads, flat.axes.tied))
        if not self.overlap:
            self.finish_tied()

    def finish_tied(self) -> None:
        """Wait until both stages that hold a tied embedding have the sum of its gradients."""
        while self._tied:
            self._tied.pop().wait()

    def _reduce(self, buckets: _Buckets, bucket: int) -> None:
        self._runtime.stream.synchronize()
        flat = buckets.flat
        span = flat.layout.buckets[bucket]
        whole = flat.grads[span.start : span.stop]
        if flat.zero and self.reduce_dtype is not None and self.reduce_dtype != whole.dtype:
            buckets.reducing[bucket] = reduce_scatter_rounded(whole, flat.axes.reduce, self.reduce_dtype)
        else:
            send = all_reduce if flat.zero == 0 else reduce_scatter_in_place
            buckets.reducing[bucket] = send(whole, flat.axes.reduce)

    @staticmethod
    def _drain(flat: FlatChunk, reducing: dict[int, Pending]) -> None:
        """Wait for reductions in flight; ZeRO-2 adds them to the sums."""
        for bucket, pending in reducing.items():
            mine = pending.wait()
            if flat.zero == 2:
                flat.shards[bucket].grads.add_(mine)
        reducing.clear()

    # parameters --------------------------------------------------------------------------------------------------

    def start_gather(self, chunk: int) -> None:
        """GATHER_PARAMS: send for what other ranks updated, first what forward needs first; once, if it is asked
        again while that is under way."""
        buckets = self._chunks[chunk]
        if buckets.gathering:
            return
        if buckets.float8 is not None:
            buckets.float8.measure()
        for bucket in buckets.flat.by_use:
            self._gather(buckets, bucket)
        if not self.overlap:
            self._finish_gather(buckets)

    def parameters_change(self) -> None:
        """Shards are about to be updated or loaded: what was gathered of them is of no use any more."""
        self.finish_gathers()
        for buckets in self._chunks:
            if buckets.float8 is not None:
                buckets.float8.outdated()

    def gather_under_update(self, chunk: int) -> Callable[[FlatShard], None]:
        """Arm the chunk's gather: what the update calls with each shard that is done, whose bucket leaves then. One
        that leaves as float8 does so after the next: meanwhile ranks agree on its scales. `end_update` sends the last.
        """
        if not self.overlap:
            return lambda shard: None
        buckets = self._chunks[chunk]
        of = {id(shard): bucket for bucket, shard in enumerate(buckets.flat.shards)}

        def updated(shard: FlatShard) -> None:
            bucket = of.get(id(shard))
            if bucket is None:
                self.end_update()
            elif buckets.float8 is not None and bucket in buckets.float8.buckets:
                buckets.float8.measure(bucket)
                self.end_update()
                self._measured = buckets, bucket
            else:
                self._gather(buckets, bucket)

        return updated

    def end_update(self) -> None:
        """Send off what `gather_under_update` has left."""
        if self._measured is not None:
            (buckets, bucket), self._measured = self._measured, None
            self._gather(buckets, bucket)

    def await_parameters(self, chunk: int) -> None:
        """A forward is next: wait now, unless the module says of each unit when it needs it."""
        buckets = self._chunks[chunk]
        if not buckets.needs:
            self._finish_gather(buckets)

    def gathering(self, chunk: int) -> bool:
        """Whether a gather of the chunk is under way."""
        return bool(self._chunks[chunk].gathering)

    def gather_full_parameters(self) -> None:
        """Make all parameters whole on this rank, in their own type: what is there as float8 only is gathered."""
        for chunk, buckets in enumerate(self._chunks):
            if buckets.float8 is None:
                self.start_gather(chunk)
                self._finish_gather(buckets)
                continue
            on_its_way = bool(buckets.gathering)
            self._finish_gather(buckets)
            for bucket in buckets.flat.by_use:
                if bucket in buckets.float8.buckets or not on_its_way:
                    self._gather(buckets, bucket, whole=True)
            self._finish_gather(buckets)
            buckets.float8.whole()

    def weights_in_use(self) -> Iterator[torch.Tensor]:
        """What a step computes with, once it is gathered: the same on all data-parallel ranks."""
        for buckets in self._chunks:
            flat, float8 = buckets.flat, buckets.float8
            if float8 is None:
                yield flat.params
                continue
            for bucket, span in enumerate(flat.layout.buckets):
                if bucket not in float8.buckets:
                    yield flat.params[span.start : span.stop]
            yield from float8.in_use()

    def finish_gathers(self) -> None:
        """Leave no gather under way."""
        self.end_update()
        for buckets in self._chunks:
            self._finish_gather(buckets)

    def _gather(self, buckets: _Buckets, bucket: int, whole: bool = False) -> None:
        """whole: in the parameters' own type, whatever training gathers."""
        flat = buckets.flat
        data = flat.axes.data
        if flat.zero == 0 or data.size == 1 or bucket in buckets.gathering:
            return
        if buckets.float8 is not None and bucket in buckets.float8.buckets and not whole:
            buckets.gathering[bucket] = buckets.float8.start_gather(bucket)
            return
        # Under its own version counter: gloo writes while a forward saves parameters that are there already, and
        # backward would take those for changed.
        params = flat.params.data
        span = flat.layout.buckets[bucket]
        start, stop = flat.layout.shard(bucket, data.rank, data.size)
        buckets.gathering[bucket] = all_gather_into(params[span.start : span.stop], params[start:stop], data)

    def _await_unit(self, buckets: _Buckets, unit: int) -> None:
        if buckets.gathering:
            for bucket in buckets.needs[unit]:
                if pending := buckets.gathering.pop(bucket, None):
                    pending.wait()

    @staticmethod
    def _finish_gather(buckets: _Buckets) -> None:
        for pending in buckets.gathering.values():
            pending.wait()
        buckets.gathering.clear()


def _waits_for_tensor_axis(flat: FlatChunk, bucket: int) -> bool:
    start, stop = flat.layout.replicated
    return flat.axes.tensor.size > 1 and start <= flat.layout.buckets[bucket].start < stop
