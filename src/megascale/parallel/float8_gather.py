"""Data-parallel gather of linear layers' matrices as E4M3 bytes, half of the volume in bfloat16.

Tensor-wise float8 reads a weight as bytes with the scale of its own amax. A rank that has updated its shard of a
bucket of such matrices (buffer_layout.py) computes the amax of its part of each. One MAX all-reduce among the ranks
that share the matrices gives the amax of each whole matrix. The shard is cast with it and bytes are gathered. The
result is bit for bit what every rank would have cast from the gathered weights. The weights themselves become stale on
all ranks but their owner until something other than a training step reads them
(`DataParallel.gather_full_parameters`).

The all-reduce uses the communicator of the stage, which is idle during the update: on the gathers' communicator it
would wait for the bucket before. The bytes of a bucket lie in the same memory at every step.

Under ZeRO-3 the bytes are gathered into the slot of the unit (parameter_slots.py) in place of the weights. A slot has
room for both the rows and their transpose, which the backward reads. All shards of a chunk are cast once per step,
before the first of them is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from megascale.ops.float8.cast import cast_shard, compute_shard_amaxes, compute_shard_scales, transpose_rows
from megascale.ops.float8.formats import E4M3, Float8, scale_slots
from megascale.ops.segments import Segments
from megascale.parallel.buffers import ParamAndGradBuffer
from megascale.parallel.collectives import Pending, all_gather_into, all_reduce
from megascale.parallel.float8 import TensorWiseFloat8


@dataclass
class _Bucket:
    """One bucket and its matrices.

    Attributes:
        shard: this rank's shard of the weights.
        segments: ranges of the matrices in the shard.
        amax, scales: of the whole matrices, float32 [matrices].
        bytes, own_bytes: the gathered bucket, and this rank's shard of it.
        matrices: each weight, its rows (E4M3, of its shape) and its scale, as views of `bytes` and `scales`.
        transposes: ZeRO-3: each weight's rows and the memory of their transpose.
    """

    shard: torch.Tensor
    segments: Segments
    amax: torch.Tensor
    scales: torch.Tensor
    bytes: torch.Tensor
    own_bytes: torch.Tensor
    matrices: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    transposes: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()


class Float8Gather:
    """Gathers the buckets of a chunk that contain float8 matrices only.

    Args:
        buffer: the chunk's buffers, laid out with `float8_gather`.
        slots: ZeRO-3: memory of each bucket in its slot.
        own_memory: ZeRO-3: memory of this rank's shards as bytes, one per element of `buffer.shard_params`.

    Attributes:
        buckets: the buckets.
        is_stale: ZeRO-3: whether shards have changed since `cast_shards`.
    """

    def __init__(
        self,
        buffer: ParamAndGradBuffer,
        slots: Mapping[int, torch.Tensor] | None = None,
        own_memory: torch.Tensor | None = None,
    ) -> None:
        linears = buffer.module.linears
        assert isinstance(linears, TensorWiseFloat8)
        self._linears = linears
        self._axes = buffer.axes
        matrices = {id(param) for param in buffer.module.collect_linear_weights().values()}  # type: ignore[operator]
        indices = {i for i, param in enumerate(buffer.parameters) if id(param) in matrices}
        spans = buffer.layout.buckets
        self.buckets = [bucket for bucket, span in enumerate(spans) if indices.issuperset(span.members)]
        device = buffer.params.device
        count = sum(len(spans[bucket].members) for bucket in self.buckets)
        self._amax = torch.zeros(count, dtype=torch.float32, device=device)  # of all buckets
        scales = scale_slots(count, device)
        self._bucket_data: dict[int, _Bucket] = {}
        self.is_stale = True
        first = 0
        for bucket in self.buckets:
            stop = first + len(spans[bucket].members)
            slot = own_bytes = None
            if slots is not None:
                assert own_memory is not None
                slot = slots[bucket]
                start = spans[bucket].start // buffer.axes.data.size
                own_bytes = own_memory[start : start + buffer.shards[bucket].params.numel()]
            self._bucket_data[bucket] = data = _make_bucket(
                buffer, bucket, self._amax[first:stop], scales[first:stop], slot=slot, own_bytes=own_bytes
            )
            for (weight, rows, scale), (_, columns) in zip(data.matrices, data.transposes, strict=slot is not None):
                linears.set_slot_weight(weight, Float8(rows, scale, columns, scale))
            first = stop
        self._amax_reductions: dict[int, Pending] = {}

    @torch.no_grad()
    def start_amax_reduce(self, bucket: int | None = None) -> None:
        """Start to agree on the amax of a bucket's matrices (None: of all), whose shards are updated."""
        buckets = self.buckets if bucket is None else [bucket]
        if not buckets:
            return  # a chunk without layers
        for index in buckets:
            data = self._bucket_data[index]
            compute_shard_amaxes(data.shard, data.segments, data.amax)
        if bucket is None:
            amax = self._amax
        else:
            amax = self._bucket_data[bucket].amax
        # Integers order as the floats do, with NaN above all, so that NaN reaches every rank's loss.
        reduction = all_reduce(amax.view(torch.int32), self._axes.stage, dist.ReduceOp.MAX)
        self._amax_reductions |= dict.fromkeys(buckets, reduction)

    @torch.no_grad()
    def start_gather(self, bucket: int) -> Pending:
        """Cast this rank's shard of a bucket after its amax reduction, and gather it.

        When the result is awaited, the linear layers read the gathered bytes.
        """
        data = self._bucket_data[bucket]
        self._amax_reductions.pop(bucket).wait()
        compute_shard_scales(data.amax, E4M3, data.scales)
        cast_shard(data.shard, data.segments, data.scales, E4M3, data.own_bytes)
        gathering = all_gather_into(data.bytes, data.own_bytes, self._axes.data)
        return Pending(data.bytes, finish=partial(self._finish_gather, data, gathering))

    def _finish_gather(self, data: _Bucket, gathering: Pending) -> None:
        gathering.wait()
        for weight, rows, scale in data.matrices:
            self._linears.set_gathered_rows(weight, rows, scale)

    @torch.no_grad()
    def cast_shards(self) -> None:
        """Cast this rank's shards of all buckets if they have changed (ZeRO-3). Collective over the stage."""
        if not self.is_stale:
            return
        self.is_stale = False
        self.start_amax_reduce()
        for bucket in self.buckets:
            data = self._bucket_data[bucket]
            self._amax_reductions.pop(bucket).wait()
            compute_shard_scales(data.amax, E4M3, data.scales)
            cast_shard(data.shard, data.segments, data.scales, E4M3, data.own_bytes)

    def gather_pair(self, bucket: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the memory of a bucket's gathered bytes, and this rank's shard of them."""
        data = self._bucket_data[bucket]
        return data.bytes, data.own_bytes

    def transpose(self, bucket: int) -> None:
        """Transpose the gathered rows of a bucket in its slot, for the backward (ZeRO-3)."""
        for rows, columns in self._bucket_data[bucket].transposes:
            transpose_rows(rows, columns)

    def list_weights_in_use(self) -> Iterator[torch.Tensor]:
        """Yield the bytes and scales that linear layers read until the next update: equal on data-parallel ranks."""
        for data in self._bucket_data.values():
            yield data.bytes
            yield data.scales

    def drop_communication(self) -> None:
        """Forget the reductions in flight, because the step has failed and the groups are gone."""
        self._amax_reductions.clear()
        self.invalidate()

    def invalidate(self) -> None:
        """Make reading gathered bytes an error, because shards are changing."""
        for data in self._bucket_data.values():
            for weight, *_ in data.matrices:
                self._linears.invalidate_rows(weight)

    def set_weights_gathered(self) -> None:
        """Record that the weights themselves have been gathered."""
        for data in self._bucket_data.values():
            for weight, *_ in data.matrices:
                self._linears.set_weight_gathered(weight)


def _make_bucket(
    buffer: ParamAndGradBuffer,
    bucket: int,
    amax: torch.Tensor,
    scales: torch.Tensor,
    slot: torch.Tensor | None,
    own_bytes: torch.Tensor | None,
) -> _Bucket:
    """Allocate the bytes of a bucket, or find them in its slot, and find its matrices in them."""
    span = buffer.layout.buckets[bucket]
    data = buffer.axes.data
    start, stop = buffer.layout.shard(bucket, data.rank, data.size)
    count = span.stop - span.start
    transposed = None
    if slot is None:
        gathered = torch.zeros(count, dtype=torch.uint8, device=amax.device)
        own_bytes = gathered[start - span.start : stop - span.start]
    else:
        slot_bytes = slot.view(torch.uint8)
        gathered, transposed = slot_bytes[:count], slot_bytes[count : 2 * count]
    segments, matrices, transposes = [], [], []
    for index, i in enumerate(sorted(span.members, key=buffer.layout.starts.__getitem__)):
        weight = buffer.parameters[i]
        offset = buffer.layout.starts[i]
        end = offset + weight.numel()
        first, last = max(offset, start), min(end, stop)
        if first < last:
            segments.append((first - start, last - start, False, index))
        rows = gathered[offset - span.start : end - span.start].view(E4M3.dtype).view(weight.shape)
        matrices.append((weight, rows, scales[index]))
        if transposed is not None:
            columns = transposed[offset - span.start : end - span.start].view(E4M3.dtype).view(*weight.shape[::-1])
            transposes.append((rows, columns))
    assert own_bytes is not None
    return _Bucket(
        shard=buffer.shards[bucket].params,
        segments=Segments(segments, len(matrices), amax.device),
        amax=amax,
        scales=scales,
        bytes=gathered,
        own_bytes=own_bytes,
        matrices=matrices,
        transposes=transposes,
    )
