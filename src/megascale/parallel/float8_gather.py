"""Data-parallel gather of linear layers' matrices as E4M3 bytes, half of the volume in bfloat16.

Tensor-wise float8 reads a weight as bytes with the scale of its own amax. A rank that has updated its shard of a
bucket of such matrices (buffer_layout.py) computes the amax of its part of each. One MAX all-reduce among the ranks
that share the matrices gives the amax of each whole matrix. The shard is cast with it and bytes are gathered. The
result is bit for bit what every rank would have cast from the gathered weights. The weights themselves become stale on
all ranks but their owner until something other than a training step reads them
(`DataParallel.gather_full_parameters`).

The all-reduce uses the communicator of the stage, which is idle during the update: on the gathers' communicator it
would wait for the bucket before. The bytes of a bucket lie in the same memory at every step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from megascale.ops.float8.cast import cast_shard, compute_shard_amaxes, compute_shard_scales
from megascale.ops.float8.formats import E4M3, scale_slots
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
    """

    shard: torch.Tensor
    segments: Segments
    amax: torch.Tensor
    scales: torch.Tensor
    bytes: torch.Tensor
    own_bytes: torch.Tensor
    matrices: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


class Float8Gather:
    """Gathers the buckets of a chunk that contain float8 matrices only.

    Args:
        buffer: the chunk's buffers, laid out with `float8_gather`.
    """

    def __init__(self, buffer: ParamAndGradBuffer) -> None:
        linears = buffer.module.linears
        assert isinstance(linears, TensorWiseFloat8)
        self._linears = linears
        self._axes = buffer.axes
        matrices = {id(param) for param in buffer.module.linear_weights().values()}  # type: ignore[operator]
        indices = {i for i, param in enumerate(buffer.parameters) if id(param) in matrices}
        spans = buffer.layout.buckets
        self.buckets = [bucket for bucket, span in enumerate(spans) if indices.issuperset(span.members)]
        device = buffer.params.device
        count = sum(len(spans[bucket].members) for bucket in self.buckets)
        self._amax = torch.zeros(count, dtype=torch.float32, device=device)  # of all buckets
        scales = scale_slots(count, device)
        self._bucket_data: dict[int, _Bucket] = {}
        first = 0
        for bucket in self.buckets:
            stop = first + len(spans[bucket].members)
            self._bucket_data[bucket] = _make_bucket(buffer, bucket, self._amax[first:stop], scales[first:stop])
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

    def compute_weights(self) -> Iterator[torch.Tensor]:
        """Yield the bytes and scales that linear layers read until the next update: equal on data-parallel ranks."""
        for data in self._bucket_data.values():
            yield data.bytes
            yield data.scales

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


def _make_bucket(buffer: ParamAndGradBuffer, bucket: int, amax: torch.Tensor, scales: torch.Tensor) -> _Bucket:
    """Allocate the bytes of a bucket and find its matrices in them."""
    span = buffer.layout.buckets[bucket]
    data = buffer.axes.data
    start, stop = buffer.layout.shard(bucket, data.rank, data.size)
    gathered = torch.zeros(span.stop - span.start, dtype=torch.uint8, device=amax.device)
    segments, matrices = [], []
    for index, i in enumerate(sorted(span.members, key=buffer.layout.starts.__getitem__)):
        weight = buffer.parameters[i]
        offset = buffer.layout.starts[i]
        end = offset + weight.numel()
        first, last = max(offset, start), min(end, stop)
        if first < last:
            segments.append((first - start, last - start, False, index))
        rows = gathered[offset - span.start : end - span.start].view(E4M3.dtype).view(weight.shape)
        matrices.append((weight, rows, scales[index]))
    return _Bucket(
        shard=buffer.params[start:stop],
        segments=Segments(segments, len(matrices), amax.device),
        amax=amax,
        scales=scales,
        bytes=gathered,
        own_bytes=gathered[start - span.start : stop - span.start],
        matrices=matrices,
    )
