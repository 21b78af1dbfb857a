"""Data-parallel gather of linear layers' matrices as E4M3 bytes, half of the volume in bfloat16.

Tensor-wise float8 reads a weight as bytes with a scale from the weight's amax. When a rank has updated its shard of a
bucket of such matrices (buffer_layout.py), it computes the amax of its part of each matrix. One MAX all-reduce over the
ranks that share the matrices gives the amax of each complete matrix. Each rank then casts its shard, and the bytes are
gathered. They are bit for bit the same as a cast of the gathered weights. The weights themselves are out of date on
all ranks but their owner until `DataParallel.gather_full_parameters`, which code outside a training step calls.

The all-reduce uses the communicator of the stage, which is idle during the update. On the communicator of the gathers,
the all-reduce would wait for the gather of the previous bucket. The bytes of a bucket are in the same memory in every
step.

Under ZeRO-3 the bytes are gathered into the slot of the unit (parameter_slots.py) in place of the weights. A slot has
room for both the rows and their transpose, which the backward reads. All shards of a chunk are cast once per step,
before the first of them is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from megascale.ops.float8.cast import cast_shard, compute_shard_amaxes, compute_shard_scales, transpose_rows
from megascale.ops.float8.formats import E4M3, Float8, allocate_scales
from megascale.ops.segments import Segments
from megascale.parallel.buffers import ParamAndGradBuffer
from megascale.parallel.collectives import Pending, all_gather_into, all_reduce
from megascale.parallel.float8 import TensorWiseFloat8


class _Matrix(NamedTuple):
    """A weight of a bucket.

    Attributes:
        rows: its gathered rows, E4M3 in the weight's shape, a view of `_Bucket.bytes`.
        scale: its scale, a view of `_Bucket.scales`.
    """

    weight: torch.Tensor
    rows: torch.Tensor
    scale: torch.Tensor


@dataclass
class _Bucket:
    """One bucket and its matrices.

    Attributes:
        shard: this rank's shard of the weights.
        segments: ranges of the matrices in the shard.
        amax, scales: values of the complete matrices, float32 [matrices].
        bytes, shard_bytes: the gathered bucket, and this rank's shard of it, uint8.
        transposes: with ZeRO-3, for each weight its rows and the memory of their transpose.
    """

    shard: torch.Tensor
    segments: Segments
    amax: torch.Tensor
    scales: torch.Tensor
    bytes: torch.Tensor
    shard_bytes: torch.Tensor
    matrices: Sequence[_Matrix]
    transposes: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()


class Float8Gather:
    """Gathers the buckets of a chunk that contain only matrices of linear layers.

    Args:
        buffer: the chunk's buffers, laid out with `float8_gather`.
        slots: with ZeRO-3, memory of each bucket in the slot of its unit, by index of the bucket.
        shard_memory: with ZeRO-3, memory of this rank's shards as bytes, one per element of `buffer.shard_params`.

    Attributes:
        buckets: indices of the buckets that are gathered in float8.
        is_stale: with ZeRO-3, whether shards have changed since `cast_shards`.
    """

    def __init__(
        self,
        buffer: ParamAndGradBuffer,
        slots: Mapping[int, torch.Tensor] | None = None,
        shard_memory: torch.Tensor | None = None,
    ) -> None:
        linears = buffer.module.linears
        assert isinstance(linears, TensorWiseFloat8)
        self._linears = linears
        self._axes = buffer.axes
        matrix_ids = {id(param) for param in buffer.module.collect_linear_weights().values()}  # type: ignore[operator]
        matrix_indices = {i for i, param in enumerate(buffer.parameters) if id(param) in matrix_ids}
        spans = buffer.layout.buckets
        self.buckets = [bucket for bucket, span in enumerate(spans) if matrix_indices.issuperset(span.members)]
        device = buffer.params.device
        matrix_count = sum(len(spans[bucket].members) for bucket in self.buckets)
        self._amax = torch.zeros(matrix_count, dtype=torch.float32, device=device)  # of the matrices of all buckets
        scales = allocate_scales(matrix_count, device)
        self._bucket_data: dict[int, _Bucket] = {}
        self.is_stale = True
        first = 0
        for bucket in self.buckets:
            stop = first + len(spans[bucket].members)
            slot = shard_bytes = None
            if slots is not None:
                assert shard_memory is not None
                slot = slots[bucket]
                start = spans[bucket].start // buffer.axes.data.size
                shard_bytes = shard_memory[start : start + buffer.shards[bucket].params.numel()]
            data = _make_bucket(
                buffer, bucket, self._amax[first:stop], scales[first:stop], slot=slot, shard_bytes=shard_bytes
            )
            self._bucket_data[bucket] = data
            if slot is not None:
                for matrix, (_, columns) in zip(data.matrices, data.transposes, strict=True):
                    cast = Float8(matrix.rows, matrix.scale, columns, matrix.scale)
                    linears.set_slot_weight(matrix.weight, cast)
            first = stop
        self._amax_reductions: dict[int, Pending] = {}

    @torch.no_grad()
    def start_amax_reduce(self, bucket: int | None = None) -> None:
        """Start to agree on the amax of a bucket's matrices, whose shards have been updated; None: of all buckets."""
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
        # As integers, magnitudes have the same order as floats, and NaN is the largest. NaN thus reaches every rank.
        reduction = all_reduce(amax.view(torch.int32), self._axes.stage, dist.ReduceOp.MAX)
        self._amax_reductions |= dict.fromkeys(buckets, reduction)

    @torch.no_grad()
    def start_gather(self, bucket: int) -> Pending:
        """Wait for a bucket's amax reduction, cast this rank's shard, and start to gather the bucket.

        When the result has been awaited, the linear layers read the gathered bytes.
        """
        data = self._bucket_data[bucket]
        self._amax_reductions.pop(bucket).wait()
        compute_shard_scales(data.amax, E4M3, data.scales)
        cast_shard(data.shard, data.segments, data.scales, E4M3, data.shard_bytes)
        gathering = all_gather_into(data.bytes, data.shard_bytes, self._axes.data)
        return Pending(data.bytes, finish=partial(self._finish_gather, data, gathering))

    def _finish_gather(self, data: _Bucket, gathering: Pending) -> None:
        """Wait for a bucket's gather, and let the linear layers read the bytes."""
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
            cast_shard(data.shard, data.segments, data.scales, E4M3, data.shard_bytes)

    def gather_pair(self, bucket: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the memory of a bucket's gathered bytes, and this rank's shard of them."""
        data = self._bucket_data[bucket]
        return data.bytes, data.shard_bytes

    def transpose(self, bucket: int) -> None:
        """Transpose the gathered rows of a bucket in its slot, for the backward (ZeRO-3)."""
        for rows, columns in self._bucket_data[bucket].transposes:
            transpose_rows(rows, columns)

    def list_weights_in_use(self) -> Iterator[torch.Tensor]:
        """Yield the bytes and scales that linear layers read. They are equal on data-parallel ranks."""
        for data in self._bucket_data.values():
            yield data.bytes
            yield data.scales

    def drop_communication(self) -> None:
        """Forget the reductions in flight, because the step has failed and the groups are gone."""
        self.drop_reductions()
        self.invalidate()

    def drop_reductions(self) -> None:
        """Forget the reductions in flight. With ZeRO-3 the next gather casts the shards again."""
        self._amax_reductions.clear()
        self.is_stale = True

    def invalidate(self) -> None:
        """Let a read of gathered bytes raise TrainingError, because shards are changing."""
        for data in self._bucket_data.values():
            for matrix in data.matrices:
                self._linears.invalidate_rows(matrix.weight)

    def set_weights_gathered(self) -> None:
        """Record that the weights themselves have been gathered."""
        for data in self._bucket_data.values():
            for matrix in data.matrices:
                self._linears.set_weight_gathered(matrix.weight)


def _make_bucket(
    buffer: ParamAndGradBuffer,
    bucket: int,
    amax: torch.Tensor,
    scales: torch.Tensor,
    slot: torch.Tensor | None,
    shard_bytes: torch.Tensor | None,
) -> _Bucket:
    """Return a bucket with views of its matrices.

    Args:
        amax, scales: memory of the values of the bucket's matrices.
        slot, shard_bytes: with ZeRO-3, memory of the bucket in its slot, and of this rank's shard as bytes; otherwise
            None, and both are allocated.
    """
    span = buffer.layout.buckets[bucket]
    data_axis = buffer.axes.data
    start, stop = buffer.layout.find_shard(bucket, data_axis.rank, data_axis.size)
    count = span.stop - span.start  # elements of the bucket, and bytes of its rows
    transposed = None
    if slot is None:
        gathered = torch.zeros(count, dtype=torch.uint8, device=amax.device)
        shard_bytes = gathered[start - span.start : stop - span.start]
    else:
        slot_bytes = slot.view(torch.uint8)
        gathered, transposed = slot_bytes[:count], slot_bytes[count : 2 * count]
    segments = []
    matrices = []
    transposes = []
    for index, i in enumerate(sorted(span.members, key=buffer.layout.starts.__getitem__)):
        weight = buffer.parameters[i]
        offset = buffer.layout.starts[i]
        end = offset + weight.numel()
        first, last = max(offset, start), min(end, stop)  # the part of the matrix in this rank's shard
        if first < last:
            segments.append((first - start, last - start, False, index))
        rows = gathered[offset - span.start : end - span.start].view(E4M3.dtype).view(weight.shape)
        matrices.append(_Matrix(weight, rows, scales[index]))
        if transposed is not None:
            columns = transposed[offset - span.start : end - span.start].view(E4M3.dtype).view(*weight.shape[::-1])
            transposes.append((rows, columns))
    assert shard_bytes is not None
    return _Bucket(
        shard=buffer.shards[bucket].params,
        segments=Segments(segments, len(matrices), amax.device),
        amax=amax,
        scales=scales,
        bytes=gathered,
        shard_bytes=shard_bytes,
        matrices=matrices,
        transposes=transposes,
    )
