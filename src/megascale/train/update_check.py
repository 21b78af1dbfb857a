"""Recomputation of sampled updates: an optimizer step that computes wrong bits is noticed.

An update is a function of gradients, master weights and optimizer state, which only their owner holds. In a checked
step each rank copies a range of them before its update. The rank at the same coordinate of another replica repeats the
update of the copy, with its own clipping factor, and compares the bits. Ranges move on with each check, so that checks
sweep the shards.

A range has RANGE elements of each kind of state. A copy takes 16 MiB with AdamW in float32, and as much is received.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

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
ROW_FIELDS = 4  # of a segment: start, stop, weight decay, tensor

_LABELS = {"master": "master weights", "grads": "gradients after the update", "weights": "weights in use"}

StateNames = tuple[str, ...]
Shift = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class _Slice:
    """Elements of a part, and where a range holds them.

    Attributes:
        start, stop: elements of the part. The start is a multiple of TILE, so that kernels divide copies alike.
        offset: position of the first element within the range, a multiple of TILE.
    """

    state: ShardState
    part: StatePart
    start: int
    stop: int
    offset: int

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy this slice of a tensor as long as the part into a range."""
        target[self.offset : self.offset + self.stop - self.start].copy_(source[self.start : self.stop])


@dataclass
class _Kind:
    """State tensors that some parts have in common.

    Attributes:
        names: names of the state tensors.
        elements: length of a range, the same on all ranks.
        rows: most segments of a range.
        checks: number of checks that recompute all elements: the most ranges of a rank.
        ranges: ranges of this rank's shards, in the order of checks; at least one, which may be empty.
    """

    names: StateNames
    elements: int
    rows: int
    checks: int
    ranges: list[list[_Slice]]


@dataclass
class _Copy:
    """A range before its update.

    Attributes:
        slices: its elements.
        rows_RF: its segments, int64 [rows, ROW_FIELDS]; unused rows are zero.
        tensors: master weights, gradients, state, weights in use and inputs of the rule, by name.
        results: other results of the rule, by name.
    """

    kind: _Kind
    slices: list[_Slice]
    rows_RF: Tensor
    tensors: dict[str, Tensor]
    results: dict[str, Tensor]


class UpdateCheck:
    """Recomputes ranges of other ranks' updates. Construction is collective over the world.

    Args:
        optimizer: updates this rank's shards.
        shift: sends a tensor to the replica at a distance after this one, and returns that of the one before.
        peers: all ranks.
        elements: length of a range.

    Attributes:
        description: what is recomputed, for the start-up lines.
    """

    def __init__(self, optimizer: ShardedOptimizer, shift: Shift, peers: Peers, elements: int = RANGE) -> None:
        self._optimizer = optimizer
        self._rule = optimizer.rule
        self._shift = shift
        self._kinds: list[_Kind] = []
        self._number: int | None = None  # of the check under way
        self._step: UpdateStep | None = None
        self._copies: list[_Copy] = []
        self._matrices: MatrixCheck | None = None
        if not self._rule.can_recompute:
            self.description = f"updates of optimizer.name={optimizer.config.name} are not recomputed"
            return
        self._make_kinds(peers, elements)
        checks = max((kind.checks for kind in self._kinds), default=1)
        part = "all" if checks == 1 else f"{elements:,}"
        self.description = f"{part} elements of an update"
        if isinstance(self._rule, ShardedMuon):
            self._matrices = MatrixCheck(self._rule, shift, peers)
            self.description += " and one orthogonalised matrix"
        self.description += " are recomputed"
        if checks > 1:
            self.description += f"; {checks} checks recompute all elements"

    def _make_kinds(self, peers: Peers, elements: int) -> None:
        """Divide this rank's shards into ranges, and agree on their lengths."""
        parts_by_names: dict[StateNames, list[tuple[ShardState, StatePart]]] = {}
        for state in self._optimizer.states:
            for part in state.parts:
                if part.segments.ranges:
                    parts_by_names.setdefault(tuple(part.state), []).append((state, part))
        local = []
        ranges_by_names = {}
        for names, parts in parts_by_names.items():
            ranges = list(cut_ranges(parts, elements))
            ranges_by_names[names] = ranges
            longest = max(slices[-1].offset + round_to_tiles(slices[-1].stop - slices[-1].start) for slices in ranges)
            rows = max(len(list_rows(slices)) for slices in ranges)
            local.append((names, longest, rows, len(ranges)))
        gathered = [
            entry for entries in peers.all_gather(local, list[tuple[StateNames, int, int, int]]) for entry in entries
        ]
        for names in sorted({names for names, *_ in gathered}):
            counts = [counts for entry_names, *counts in gathered if entry_names == names]
            longest, rows, checks = [max(column) for column in zip(*counts, strict=True)]
            self._kinds.append(_Kind(names, longest, rows, checks, ranges_by_names.get(names, [[]])))

    def begin(self, number: int) -> None:
        """Copy a range before the next update; `number`: of the check, which chooses the range."""
        if not self._kinds:
            return
        self._number = number
        self._optimizer.before_update = self._copy_ranges
        self._rule.observer = self._observe
        if self._matrices is not None:
            self._matrices.begin(number)

    @torch.no_grad()
    def _copy_ranges(self, step: UpdateStep) -> None:
        self._step = step
        self._copies = [self._copy_range(kind) for kind in self._kinds]

    def _copy_range(self, kind: _Kind) -> _Copy:
        assert self._number is not None
        slices = kind.ranges[self._number % len(kind.ranges)]
        reference = self._optimizer.states[0]
        device = reference.shard.grads.device
        rows_RF = torch.zeros(kind.rows, ROW_FIELDS, dtype=torch.int64)
        rows = list_rows(slices)
        if rows:
            rows_RF[: len(rows)] = torch.tensor(rows)
        dtypes = {"grads": reference.shard.grads.dtype, "weights": reference.shard.params.dtype}
        tensors = {}
        for name in self._list_updated(kind):
            dtype = dtypes.get(name, reference.master.dtype)
            tensors[name] = torch.zeros(kind.elements, dtype=dtype, device=device)
        for item in slices:
            self._copy_slice(item, tensors)
        results = {}
        for name in self._rule.list_inputs(kind.names):
            tensors[name] = torch.zeros(kind.elements, dtype=reference.shard.params.dtype, device=device)
        for name in self._rule.list_results(kind.names):
            results[name] = torch.zeros(kind.elements, dtype=reference.shard.params.dtype, device=device)
        return _Copy(kind, slices, rows_RF.to(device), tensors, results)

    @staticmethod
    def _copy_slice(item: _Slice, targets: dict[str, Tensor]) -> None:
        """Copy a slice of what the update writes."""
        shard = item.state.shard
        sources = {"master": item.state.master, "grads": shard.grads, "weights": shard.params}
        for name, target in targets.items():
            if name in sources:
                item.copy(target, item.part.view(sources[name]))
            elif name in item.part.state:
                item.copy(target, item.part.state[name])

    @torch.no_grad()
    def _observe(self, name: str, part: StatePart, tensor: Tensor) -> None:
        """Copy the range of an input or a result that the rule has during its update only."""
        for copy in self._copies:
            for item in copy.slices:
                if item.part is part:
                    target = copy.results[name] if name in copy.results else copy.tensors[name]
                    item.copy(target, tensor)

    def is_active(self) -> bool:
        """Return whether a range was copied before the last update."""
        return bool(self._copies)

    @torch.no_grad()
    def sum_updated(self) -> Tensor:
        """Return the checksums of the own range after its update, int64 [results of all tiles]."""
        sums = []
        for copy in self._copies:
            after = {name: torch.zeros_like(copy.tensors[name]) for name in self._list_updated(copy.kind)}
            for item in copy.slices:
                self._copy_slice(item, after)
            sums += [sum_tiles(tensor) for tensor in (after | copy.results).values()]
        if self._matrices is not None:
            sums.append(self._matrices.sum_updated())
        return torch.cat(sums)

    @torch.no_grad()
    def recompute(self, distance: int) -> Tensor:
        """Repeat the update of the replica at this distance before this one. Collective.

        Return the checksums as `sum_updated` does. A distance of 0 repeats the own update.
        """
        assert self._step is not None
        sums = []
        for copy in self._copies:
            rows = self._shift(copy.rows_RF, distance).tolist()
            tensors = {}
            for name, tensor in copy.tensors.items():
                shifted = self._shift(tensor, distance)
                tensors[name] = shifted.clone() if distance == 0 else shifted
            results = self._rule.recompute(*self._make_state(copy.kind, rows, tensors), self._step)
            after = {name: tensors[name] for name in self._list_updated(copy.kind)}
            sums += [sum_tiles(tensor) for tensor in (after | results).values()]
        if self._matrices is not None:
            sums.append(self._matrices.recompute(distance))
        return torch.cat(sums)

    def _make_state(
        self, kind: _Kind, rows: list[list[int]], tensors: dict[str, Tensor]
    ) -> tuple[ShardState, StatePart]:
        """Return a received range as the rule updates it."""
        segments_rows = [Segment(start, stop, bool(decay), tensor) for start, stop, decay, tensor in rows if stop]
        segments = Segments(segments_rows, len(self._rule.shards.tensor_names), tensors["master"].device)
        state_tensors = {name: tensors[name] for name in (*kind.names, *self._rule.list_inputs(kind.names))}
        part = StatePart(0, kind.elements, [], segments, state_tensors)
        shard = FlatShard(tensors.get("weights", tensors["master"]), tensors["grads"], [])
        return ShardState(shard, tensors["master"], [part], []), part

    def _list_updated(self, kind: _Kind) -> StateNames:
        """Return the tensors that an update may write. LAMB writes its direction over the gradients."""
        names = ("master", "grads", *kind.names)
        if self._optimizer.states[0].param_out is not None:
            names = (*names, "weights")
        return names

    @property
    def skip(self) -> Tensor:
        """Flag of a skipped update, 0-d bool on the device. Results of skipped updates are undefined."""
        assert self._step is not None
        return self._step.skip

    def describe(self, index: int) -> str:
        """Return the tensor of this rank's range that a checksum belongs to; the first and last of a shared tile."""
        for copy in self._copies:
            names = (*self._list_updated(copy.kind), *copy.results)
            tiles = copy.kind.elements // TILE
            if index < len(names) * tiles:
                name = _LABELS.get(names[index // tiles], names[index // tiles])
                start = index % tiles * TILE
                rows = [row for row in list_rows(copy.slices) if row[0] < start + TILE and row[1] > start]
                tensors = list(dict.fromkeys(self._rule.shards.tensor_names[row[-1]] for row in rows))
                if len(tensors) > 1:
                    return f"{name} from {tensors[0]} to {tensors[-1]}"
                return f"{name} of {tensors[0]}" if tensors else name
            index -= len(names) * tiles
        assert self._matrices is not None
        return f"orthogonal direction of {self._matrices.name}"

    def end(self) -> None:
        """Drop the copies."""
        self._number = self._step = None
        self._copies = []
        if self._matrices is not None:
            self._matrices.end()
        self._optimizer.before_update = None
        self._rule.observer = None


def cut_ranges(parts: Sequence[tuple[ShardState, StatePart]], elements: int) -> Iterator[list[_Slice]]:
    """Yield ranges of at most `elements` elements, a multiple of TILE, that cover the parts."""
    slices: list[_Slice] = []
    used = 0
    for state, part in parts:
        start, end = 0, part.segments.stop
        while start < end:
            if used == elements:
                yield slices
                slices, used = [], 0
            stop = min(end, start + elements - used)
            slices.append(_Slice(state, part, start, stop, used))
            used += round_to_tiles(stop - start)
            start = stop
    yield slices


def round_to_tiles(count: int) -> int:
    """Return the smallest multiple of TILE that is not below `count`."""
    return -(-count // TILE) * TILE


def list_rows(slices: Sequence[_Slice]) -> list[tuple[int, int, int, int]]:
    """Return the segments of a range: start, stop, weight decay, tensor."""
    rows = []
    for item in slices:
        for row in item.part.segments.ranges:
            start, stop = max(row.start, item.start), min(row.stop, item.stop)
            if start < stop:
                shift = item.offset - item.start
                rows.append((start + shift, stop + shift, int(row.decay), row.tensor_index))
    return rows


def sum_tiles(tensor: Tensor) -> Tensor:
    """Return the sum of the bits of each tile, int64 [tiles]."""
    return sum_bits_of_rows(tensor.view(-1, TILE))
