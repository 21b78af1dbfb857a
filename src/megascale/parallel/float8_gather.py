"""The matrices of linear layers, gathered over data parallelism as E4M3 bytes: half of what bfloat16 moves.

Tensor-wise float8 reads a weight as bytes with the scale of its own largest magnitude. A rank that has updated its
shard of a bucket of such matrices (buffer_layout.py) measures its part of each; one MAX all-reduce among the ranks that
share them tells what the whole matrix has, the shard is cast by it, and bytes travel. What arrives is, bit for bit,
what every rank would have cast from the gathered weights. Those stay as they were on all ranks but their owner until
something else than a training step reads them (`DataParallel.complete`).

The largest magnitudes go over the communicator of the stage, which is idle under the update: on that of the gathers
they would wait for the bucket before. The bytes of a bucket lie in the same memory at every step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megascale.ops.float8.formats import E4M3, scale_slots
from megascale.ops.float8.shards import amaxes, cast_shard, scales_of
from megascale.ops.segments import Segments
from megascale.parallel.buffers import FlatChunk
from megascale.parallel.collectives import Pending, all_gather_into, all_reduce
from megascale.parallel.float8 import TensorWiseFloat8


@dataclass
class _Bucket:
    """One bucket, and the matrices in it by number.

    Attributes:
        shard: this rank's part of the weights.
        segments: where matrices lie in the shard.
        amax, scales: of the whole matrices, float32 [matrices].
        bytes: of all ranks' parts; own: of this rank's.
        matrices: each weight, its rows (E4M3, of its shape) and its scale, in `bytes` and `scales`.
    """

    shard: torch.Tensor
    segments: Segments
    amax: torch.Tensor
    scales: torch.Tensor
    bytes: torch.Tensor
    own: torch.Tensor
    matrices: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


class Float8Gather:
    """Gathers those buckets of a chunk whose members are float8 matrices.

    Args:
        flat: the chunk's buffers, laid out with `apart`.
    """

    def __init__(self, flat: FlatChunk) -> None:
        linears = flat.module.linears
        assert isinstance(linears, TensorWiseFloat8)
        self._linears, self._axes = linears, flat.axes
        matrices = {id(p) for p in flat.module.matrices().values()}  # type: ignore[operator]
        numbers = {i for i, p in enumerate(flat.parameters) if id(p) in matrices}
        self.buckets = [b for b, span in enumerate(flat.layout.buckets) if numbers.issuperset(span.members)]
        device = flat.params.device
        count = sum(len(flat.layout.buckets[b].members) for b in self.buckets)
        self._amax = torch.zeros(count, dtype=torch.float32, device=device)  # of all buckets
        scales, first = scale_slots(count, device), 0
        self._parts: dict[int, _Bucket] = {}
        for b in self.buckets:
            stop = first + len(flat.layout.buckets[b].members)
            self._parts[b] = self._part(flat, b, self._amax[first:stop], scales[first:stop])
            first = stop
        self._agreeing: dict[int, Pending] = {}

    @staticmethod
    def _part(flat: FlatChunk, b: int, amax: torch.Tensor, scales: torch.Tensor) -> _Bucket:
        span, data = flat.layout.buckets[b], flat.axes.data
        start, stop = flat.layout.shard(b, data.rank, data.size)
        gathered = torch.zeros(span.stop - span.start, dtype=torch.uint8, device=amax.device)
        rows, matrices = [], []
        for number, i in enumerate(sorted(span.members, key=lambda i: flat.layout.starts[i])):
            weight, at = flat.parameters[i], flat.layout.starts[i]
            a, z = max(at, start), min(at + weight.numel(), stop)
            if a < z:
                rows.append((a - start, z - start, False, number))
            here = gathered[at - span.start : at - span.start + weight.numel()]
            matrices.append((weight, here.view(E4M3.dtype).view(weight.shape), scales[number]))
        return _Bucket(
            flat.params[start:stop],
            Segments(rows, len(matrices), amax.device),
            amax,
            scales,
            gathered,
            gathered[start - span.start : stop - span.start],
            matrices,
        )

    @torch.no_grad()
    def measure(self, bucket: int | None = None) -> None:
        """This rank's part of a bucket (None: of each) is updated: begin to agree on the largest magnitudes."""
        buckets = self.buckets if bucket is None else [bucket]
        if not buckets:
            return  # a chunk without layers
        for b in buckets:
            part = self._parts[b]
            amaxes(part.shard, part.segments, part.amax)
        amax = self._amax if bucket is None else self._parts[bucket].amax
        # As integers they order as the numbers do, with NaN above all: it reaches every rank's loss.
        agreeing = all_reduce(amax.view(torch.int32), self._axes.stage, dist.ReduceOp.MAX)
        self._agreeing = {**self._agreeing, **dict.fromkeys(buckets, agreeing)}

    @torch.no_grad()
    def start_gather(self, bucket: int) -> Pending:
        """Cast this rank's part of a bucket that is measured, and gather all; when that is waited for, the linear
        layers read what has arrived."""
        part = self._parts[bucket]
        self._agreeing.pop(bucket).wait()
        scales_of(part.amax, E4M3, part.scales)
        cast_shard(part.shard, part.segments, part.scales, E4M3, part.own)
        gathering = all_gather_into(part.bytes, part.own, self._axes.data)

        def arrived() -> None:
            gathering.wait()
            for weight, rows, scale in part.matrices:
                self._linears.rows_arrived(weight, rows, scale)

        return Pending(part.bytes, then=arrived)

    def in_use(self) -> Iterator[torch.Tensor]:
        """What the linear layers read between the gather and the next update: the same on all data-parallel ranks."""
        for part in self._parts.values():
            yield part.bytes
            yield part.scales

    def outdated(self) -> None:
        """Shards are changing: nothing that has arrived may be read."""
        for part in self._parts.values():
            for weight, *_ in part.matrices:
                self._linears.rows_outdated(weight)

    def whole(self) -> None:
        """The weights themselves have been gathered."""
        for part in self._parts.values():
            for weight, *_ in part.matrices:
                self._linears.weight_whole(weight)
