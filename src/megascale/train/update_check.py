"""Recomputation of sampled updates on another replica, which finds devices whose optimizer step computes wrong bits.

An update is a function of gradients, master weights and optimizer state. Only one rank holds a given shard of these. In
a checked step each rank copies a range of its shards before the update. The rank at the same coordinate of another
replica receives the copy, repeats the update with its own clipping factor, and compares the bits. Each check takes the
next range, so that successive checks cover the shards.

A range has RANGE elements of each kind of state tensor. With AdamW in float32, a copy takes 16 MiB, and the received
copy takes the same again. The segments of a copy (ops/segments.py) tell the kernels which of its elements belong to
which tensor. Bits are compared as checksums, one per tile of TILE elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megascale.checkpoint.object_collectives import Peers
from megascale.ops.segments import TILE, Segment, Segments
from megascale.optim.base import ShardState, StatePart, UpdateStep
from megascale.optim.optimizer import ShardedOptimizer
from megascale.optim.sharded_muon import ShardedMuon
from megascale.parallel.buffers import FlatShard
from megascale.train.matrix_check import MatrixCheck
from megascale.train.weights import sum_bits_of_rows

RANGE = 1 << 20  # elements of each kind of state that a check recomputes
SEGMENT_FIELDS = 4  # integers that describe a segment: start, stop, weight decay, tensor index

_LABELS = {"master": "master weights", "grads": "gradients after the update", "weights": "weights in use"}

StateNames = tuple[str, ...]
# (tensor, distance): sends the tensor to the replica `distance` after this one, and returns the tensor of the replica
# `distance` before this one.
Shift = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class _Slice:
    """Elements of a part of the optimizer's state (optim/base.py), and their position in a range.

    Attributes:
        state: state of the shard that the part belongs to.
        start, stop: elements of the part. The start is a multiple of TILE, so that kernels divide the elements into
            the same tiles in the shard and in the copy.
        offset: position of the first element within the range, a multiple of TILE.
    """

    state: ShardState
    part: StatePart
    start: int
    stop: int
    offset: int

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy this slice of `source`, which is as long as the part, to its position in the range `target`."""
        target[self.offset : self.offset + self.stop - self.start].copy_(source[self.start : self.stop])


class _Sizes(NamedTuple):
    """Sizes of a family on one rank, or the largest of all ranks; see `_Family`."""

    range_length: int
    max_segments: int
    check_count: int


@dataclass
class _Family:
    """The parts that have state tensors of the same names, divided into ranges.

    Attributes:
        range_length: number of elements of a range, the same on all ranks.
        max_segments: largest number of segments of any range, the same on all ranks.
        check_count: number of checks after which all elements are recomputed: the largest number of ranges of any rank.
        ranges: ranges of this rank's shards, in the order of checks; at least one, which may be empty.
    """

    state_names: StateNames
    range_length: int
    max_segments: int
    check_count: int
    ranges: list[list[_Slice]]


@dataclass
class _RangeCopy:
    """A copy of one range before its update.

    Attributes:
        slices: the elements that the range covers.
        segments_SF: segments of the range, int64 [max_segments, SEGMENT_FIELDS]; unused rows are zero.
        tensors: master weights, gradients, state, weights in use and inputs of the optimizer's rule, by name, as they
            are before the update.
        results: results of the rule that the update does not keep, by name.
    """

    family: _Family
    slices: list[_Slice]
    segments_SF: Tensor
    tensors: dict[str, Tensor]
    results: dict[str, Tensor]


class UpdateCheck:
    """Recomputes ranges of other ranks' updates. Construction is collective over the world.

    Args:
        shift: sends a tensor to another replica and returns a tensor from there, see `Shift`.
        peers: all ranks.
        elements: largest length of a range.

    Attributes:
        description: a phrase for the start-up lines, which says what is recomputed.
    """

    def __init__(self, optimizer: ShardedOptimizer, shift: Shift, peers: Peers, elements: int = RANGE) -> None:
        self._optimizer = optimizer
        self._rule = optimizer.rule
        self._shift = shift
        self._families: list[_Family] = []
        self._check_number: int | None = None  # number of the check that has begun
        self._step: UpdateStep | None = None
        self._copies: list[_RangeCopy] = []
        self._matrices: MatrixCheck | None = None
        if not self._rule.can_recompute:
            self.description = f"updates of optimizer.name={optimizer.config.name} are not recomputed"
            return
        self._make_families(peers, elements)
        check_count = max((family.check_count for family in self._families), default=1)
        amount = "all" if check_count == 1 else f"{elements:,}"
        self.description = f"{amount} elements of an update"
        if isinstance(self._rule, ShardedMuon):
            self._matrices = MatrixCheck(self._rule, shift, peers, elements)
            if self._matrices.matrices_per_check == 1:
                self.description += " and one orthogonalised matrix"
            else:
                self.description += f" and {self._matrices.matrices_per_check} orthogonalised matrices per rank"
        self.description += " are recomputed"
        if check_count > 1:
            self.description += f"; {check_count} checks recompute all elements"

    def _make_families(self, peers: Peers, elements: int) -> None:
        """Divide this rank's shards into ranges, and agree with all ranks on their lengths."""
        parts_by_names: dict[StateNames, list[tuple[ShardState, StatePart]]] = {}
        for state in self._optimizer.states:
            for part in state.parts:
                if part.segments.ranges:
                    parts_by_names.setdefault(tuple(part.state), []).append((state, part))
        local_sizes: list[tuple[StateNames, int, int, int]] = []  # names, and the fields of _Sizes
        ranges_by_names = {}
        for names, parts in parts_by_names.items():
            ranges = list(cut_ranges(parts, elements))
            ranges_by_names[names] = ranges
            lengths = []
            for slices in ranges:
                last_slice = slices[-1]
                lengths.append(last_slice.offset + round_to_tiles(last_slice.stop - last_slice.start))
            segment_count = max(len(list_segments(slices)) for slices in ranges)
            local_sizes.append((names, max(lengths), segment_count, len(ranges)))
        # Every rank takes the largest sizes of any rank. A rank may have no part of a family.
        largest_sizes: dict[StateNames, _Sizes] = {}
        for rank_sizes in peers.all_gather(local_sizes, list[tuple[StateNames, int, int, int]]):
            for names, *sizes in rank_sizes:
                previous = largest_sizes.get(names, _Sizes(0, 0, 0))
                largest_sizes[names] = _Sizes(*map(max, previous, sizes))
        for names, largest in sorted(largest_sizes.items()):
            self._families.append(
                _Family(
                    names,
                    range_length=largest.range_length,
                    max_segments=largest.max_segments,
                    check_count=largest.check_count,
                    ranges=ranges_by_names.get(names, [[]]),
                )
            )

    def begin(self, number: int) -> None:
        """Copy a range before the next update. The check's `number` chooses the range."""
        if not self._families:
            return
        self._check_number = number
        self._optimizer.before_update = self._copy_ranges
        self._rule.observer = self._observe
        if self._matrices is not None:
            self._matrices.begin(number)

    @torch.no_grad()
    def _copy_ranges(self, step: UpdateStep) -> None:
        """Copy a range of each family. The optimizer calls this before its update."""
        self._step = step
        self._copies = [self._copy_range(family) for family in self._families]

    def _copy_range(self, family: _Family) -> _RangeCopy:
        """Return a copy of the family's range that the number of the check chooses."""
        assert self._check_number is not None
        slices = family.ranges[self._check_number % len(family.ranges)]
        reference = self._optimizer.states[0]  # the types and the device of all shards are the same
        device = reference.shard.grads.device
        segments_SF = torch.zeros(family.max_segments, SEGMENT_FIELDS, dtype=torch.int64)
        segments = list_segments(slices)
        if segments:
            segments_SF[: len(segments)] = torch.tensor(segments)
        dtypes = {"grads": reference.shard.grads.dtype, "weights": reference.shard.params.dtype}
        tensors = {}
        for name in self._list_updated(family):
            dtype = dtypes.get(name, reference.master.dtype)
            tensors[name] = torch.zeros(family.range_length, dtype=dtype, device=device)
        for state_slice in slices:
            self._copy_slice(state_slice, tensors)
        # The optimizer's rule computes these during its update, and `_observe` copies them.
        results = {}
        for name in self._rule.list_inputs(family.state_names):
            tensors[name] = torch.zeros(family.range_length, dtype=reference.shard.params.dtype, device=device)
        for name in self._rule.list_results(family.state_names):
            results[name] = torch.zeros(family.range_length, dtype=reference.shard.params.dtype, device=device)
        return _RangeCopy(family, slices, segments_SF.to(device), tensors, results)

    @staticmethod
    def _copy_slice(state_slice: _Slice, targets: dict[str, Tensor]) -> None:
        """Copy a slice of the weights, gradients and state tensors that `targets` names."""
        shard, part = state_slice.state.shard, state_slice.part
        sources = {"master": state_slice.state.master, "grads": shard.grads, "weights": shard.params}
        for name, target in targets.items():
            if name in sources:
                state_slice.copy(target, part.view(sources[name]))
            elif name in part.state:
                state_slice.copy(target, part.state[name])

    @torch.no_grad()
    def _observe(self, name: str, part: StatePart, tensor: Tensor) -> None:
        """Copy the range of an input or a result that the rule has only during its update."""
        for copy in self._copies:
            for state_slice in copy.slices:
                if state_slice.part is part:
                    target = copy.results[name] if name in copy.results else copy.tensors[name]
                    state_slice.copy(target, tensor)

    def is_active(self) -> bool:
        """Return whether a range was copied before the last update."""
        return bool(self._copies)

    @torch.no_grad()
    def sum_updated(self) -> Tensor:
        """Return the checksums of this rank's copied ranges after the update, int64 [checksums].

        There is one checksum per tile of each tensor that the update writes, in the order of `describe`.
        """
        sums = []
        for copy in self._copies:
            after = {name: torch.zeros_like(copy.tensors[name]) for name in self._list_updated(copy.family)}
            for state_slice in copy.slices:
                self._copy_slice(state_slice, after)
            sums += [sum_tiles(tensor) for tensor in (after | copy.results).values()]
        if self._matrices is not None:
            sums.append(self._matrices.sum_updated())
        return torch.cat(sums)

    @torch.no_grad()
    def recompute(self, distance: int) -> Tensor:
        """Repeat the update of the replica that is `distance` before this one. Collective.

        Return the checksums as `sum_updated` does. A distance of 0 repeats this rank's update.
        """
        assert self._step is not None
        sums = []
        for copy in self._copies:
            rows = self._shift(copy.segments_SF, distance).tolist()
            tensors = {}
            for name, tensor in copy.tensors.items():
                shifted = self._shift(tensor, distance)
                # The rule updates in place. At distance 0 `shifted` is the copy itself, which later calls need.
                tensors[name] = shifted.clone() if distance == 0 else shifted
            state, part = self._make_state(copy.family, rows, tensors)
            results = self._rule.recompute(state, part, self._step)
            after = {name: tensors[name] for name in self._list_updated(copy.family)}
            sums += [sum_tiles(tensor) for tensor in (after | results).values()]
        if self._matrices is not None:
            sums.append(self._matrices.recompute(distance))
        return torch.cat(sums)

    def _make_state(
        self, family: _Family, rows: list[list[int]], tensors: dict[str, Tensor]
    ) -> tuple[ShardState, StatePart]:
        """Return a received range as a shard with a single part, which the rule can update.

        Args:
            rows: rows of `_RangeCopy.segments_SF`.
        """
        segment_list = []
        for start, stop, decay, tensor_index in rows:
            if stop:  # unused rows are zero
                segment_list.append(Segment(start, stop, bool(decay), tensor_index))
        segments = Segments(segment_list, len(self._rule.shards.tensor_names), tensors["master"].device)
        state_tensors = {
            name: tensors[name] for name in (*family.state_names, *self._rule.list_inputs(family.state_names))
        }
        part = StatePart(0, family.range_length, [], segments, state_tensors)
        shard = FlatShard(tensors.get("weights", tensors["master"]), tensors["grads"], [])
        return ShardState(shard, tensors["master"], [part], []), part

    def _list_updated(self, family: _Family) -> StateNames:
        """Return the names of the tensors that an update may write. LAMB writes its direction over the gradients."""
        names = ("master", "grads", *family.state_names)
        if self._optimizer.states[0].param_out is not None:
            names = (*names, "weights")
        return names

    @property
    def skip(self) -> Tensor:
        """Flag of a skipped update, 0-d bool on the device. Results of skipped updates are undefined."""
        assert self._step is not None
        return self._step.skip

    def describe(self, index: int) -> str:
        """Return the tensors that the checksum at `index` of `sum_updated` covers, as a phrase."""
        for copy in self._copies:
            names = (*self._list_updated(copy.family), *copy.results)
            tile_count = copy.family.range_length // TILE
            if index < len(names) * tile_count:
                name = names[index // tile_count]
                return self._describe_tile(copy, _LABELS.get(name, name), tile=index % tile_count)
            index -= len(names) * tile_count
        assert self._matrices is not None
        return f"orthogonal direction of {self._matrices.find_name(index)}"

    def _describe_tile(self, copy: _RangeCopy, label: str, tile: int) -> str:
        """Return a phrase for a tile of a range: `label` with the names of the first and the last tensor in it."""
        start = tile * TILE
        tensor_names = []
        for segment_start, segment_stop, _, tensor_index in list_segments(copy.slices):
            if segment_start < start + TILE and segment_stop > start:
                tensor_names.append(self._rule.shards.tensor_names[tensor_index])
        if not tensor_names:
            return label
        if tensor_names[0] != tensor_names[-1]:
            return f"{label} from {tensor_names[0]} to {tensor_names[-1]}"
        return f"{label} of {tensor_names[0]}"

    def end(self) -> None:
        """Drop the copies, and let the next update run unobserved."""
        self._check_number = self._step = None
        self._copies = []
        if self._matrices is not None:
            self._matrices.end()
        self._optimizer.before_update = None
        self._rule.observer = None


def cut_ranges(parts: Sequence[tuple[ShardState, StatePart]], elements: int) -> Iterator[list[_Slice]]:
    """Yield ranges that cover the parts, each as its slices.

    Args:
        elements: largest length of a range, a multiple of TILE.
    """
    slices: list[_Slice] = []
    used = 0  # elements of the present range that slices and their padding to tiles occupy
    for state, part in parts:
        start = 0
        while start < part.segments.stop:
            if used == elements:
                yield slices
                slices = []
                used = 0
            stop = min(part.segments.stop, start + elements - used)
            slices.append(_Slice(state, part, start, stop, offset=used))
            used += round_to_tiles(stop - start)
            start = stop
    yield slices


def round_to_tiles(count: int) -> int:
    """Return the smallest multiple of TILE that is not below `count`."""
    return -(-count // TILE) * TILE


def list_segments(slices: Sequence[_Slice]) -> list[tuple[int, int, int, int]]:
    """Return the segments of a range: start and stop within the range, weight decay (0 or 1), index of the tensor."""
    segments = []
    for state_slice in slices:
        shift = state_slice.offset - state_slice.start  # from positions in the part to positions in the range
        for segment in state_slice.part.segments.ranges:
            start, stop = max(segment.start, state_slice.start), min(segment.stop, state_slice.stop)
            if start < stop:
                segments.append((start + shift, stop + shift, int(segment.decay), segment.tensor_index))
    return segments


def sum_tiles(tensor: Tensor) -> Tensor:
    """Return the sum of the bits of each tile, int64 [tiles]."""
    return sum_bits_of_rows(tensor.view(-1, TILE))
