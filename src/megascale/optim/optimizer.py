"""Optimizer on this rank's flat shards, in any layout: state, clipping, and the rule's update.

A step does not synchronise with the device: the gradient norm, the clipping factor and the flag that skips a step with
non-finite gradients all stay there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from megascale import torch_private
from megascale.config import OptimizerConfig
from megascale.config.axes import AXES
from megascale.config.parts import OPTIMIZERS
from megascale.core.tensors import list_matrix_names
from megascale.optim.base import Shards, ShardState, UpdateStep, make_state_parts
from megascale.optim.offload import HostMemory, OffloadedAdamW
from megascale.optim.rules import RULES
from megascale.optim.update_hold import UpdateHold
from megascale.parallel.buffers import Extent, FlatShard, ParamAndGradBuffer, extent_boxes
from megascale.parallel.collectives import SINGLE_RANK, Axis, all_reduce
from megascale.parallel.parameters import spec_of


class ShardedOptimizer:
    """Optimizer of all shards of this rank.

    Args:
        config: update rule and its settings.
        chunks: buffers of this rank's chunks.
        position: this rank's coordinate; a replicated parameter counts on the first of its replicas only. Axes left
            out are at position 0.
        norm: axis over which squared gradient norms (and piggybacked scalars) are summed: the world.
        norm_weight: weight of this rank's squares; 1 / ranks that share the shards if those have the same gradients.
        stage: ranks whose shards together hold this stage's tensors, for rules that need whole tensors or their norms.
        duplicates: logical names that count on another stage (the second copy of a tied embedding).

    Attributes:
        hold: holds back queued updates in a process that outlives its groups; None elsewhere.
        before_update: called with the arguments of an update before it (train/update_check.py); None: not called.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        chunks: Sequence[ParamAndGradBuffer],
        *,
        position: Mapping[str, int] | None = None,
        norm: Axis = SINGLE_RANK,
        norm_weight: float = 1.0,
        stage: Axis = SINGLE_RANK,
        duplicates: frozenset[str] = frozenset(),
    ) -> None:
        position = position or {}
        self.config = config
        self.hold: UpdateHold | None = None
        self.before_update: Callable[[UpdateStep], None] | None = None
        self.norm_axis = norm
        self.norm_weight = norm_weight
        facts = OPTIMIZERS[config.name]
        names = _list_names(chunks, facts.has_matrix_norms)
        host = _allocate_host_memory(chunks) if config.offload else None
        index = {name: i for i, name in enumerate(names)}
        self.states: list[ShardState] = []
        self._tied_states: set[int] = set()
        for chunk in chunks:
            if chunk.layout.tied_bucket is not None:
                self._tied_states.add(len(self.states) + chunk.layout.tied_bucket)
            for shard in chunk.shards:
                accumulation_dtype = shard.grads.dtype
                master = shard.params
                if host is not None:
                    master = host.take(master.numel()).copy_(shard.params)
                elif master.dtype != accumulation_dtype:
                    master = master.to(accumulation_dtype)
                counted = []
                for extent in shard.extents:
                    if extent.spec.is_counted(position) and extent.piece.name not in duplicates:
                        counted.append(extent)
                allocate = None if host is None else host.take
                parts = make_state_parts(shard, master, facts, index, allocate=allocate)
                self.states.append(ShardState(shard, master, parts, _merge_ranges(shard.extents, counted)))
        # The next step needs the first chunk first, and its buckets in the order of their use.
        first_chunk = [self.states[bucket] for bucket in chunks[0].forward_order]
        update_order = first_chunk + self.states[len(first_chunk) :]
        rule = OffloadedAdamW if config.offload else RULES[config.name]
        # Each copy of the state sums over its own ranks.
        position = {name: number for name, number in position.items() if name not in AXES.copies}
        self.rule = rule(config, Shards(self.states, update_order, names, position, stage))

    @torch.no_grad()
    def step(
        self,
        learning_rate: float,
        step: int,
        piggybacked_scalars: torch.Tensor | None = None,
        on_shard_updated: Callable[[FlatShard], None] = lambda shard: None,
        finish_tied: Callable[[], None] = lambda: None,
        needs_last_scalar: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Clip and update in place; a step whose norm is not finite changes nothing.

        Args:
            piggybacked_scalars: float64 vector that is summed over ranks in the message of the norm.
            on_shard_updated: called for each shard after its update.
            finish_tied: waits for the gradients of a tied embedding, which are in flight while other norms are
                computed.
            needs_last_scalar: a step in which the sum of the last scalar (the loss weights) is zero changes nothing.

        Returns:
            The norm of the whole model's gradient before clipping, and the sum of `piggybacked_scalars`, on the device.
        """
        norm, summed_scalars = self._reduce_norm(piggybacked_scalars, finish_tied)
        if self.hold is not None:
            norm = self.hold.apply(norm)
        grad_scale = None
        if self.config.clip:
            grad_scale = (self.config.clip / (norm + 1e-6)).clamp(max=1.0)
        skip = ~torch.isfinite(norm)
        if needs_last_scalar:
            assert summed_scalars is not None
            skip |= summed_scalars[-1] == 0
        update = UpdateStep(learning_rate, step, grad_scale, skip)
        if self.before_update is not None:
            self.before_update(update)
        self.rule.update(update, on_shard_updated)
        return norm, summed_scalars

    def _reduce_norm(
        self, piggybacked_scalars: torch.Tensor | None, finish_tied: Callable[[], None]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the 2-norm of the model's gradient (0-d, float64), and the summed scalars.

        Every parameter counts once.
        """
        squares = torch.zeros(1, dtype=torch.float64, device=self.states[0].shard.grads.device)
        numbers = range(len(self.states))
        norms_by_state = self._compute_norms([number for number in numbers if number not in self._tied_states])
        finish_tied()
        norms_by_state |= self._compute_norms(sorted(self._tied_states))
        norms = [norm for number in numbers for norm in norms_by_state[number]]
        if norms:
            squares += torch.stack(norms).double().square().sum()
        squares *= self.norm_weight
        if piggybacked_scalars is None:
            packed = squares
        else:
            packed = torch.cat([squares, piggybacked_scalars])
        packed = all_reduce(packed, self.norm_axis).wait()
        return packed[0].sqrt(), None if piggybacked_scalars is None else packed[1:]

    def _compute_norms(self, numbers: Sequence[int]) -> dict[int, list[torch.Tensor]]:
        """Return the 2-norms of the gradients that this rank counts, by state number."""
        owners = []
        grads = []
        for number in numbers:
            state = self.states[number]
            for start, stop in state.counted_ranges:
                owners.append(number)
                grads.append(state.shard.grads[start:stop])
        norms: dict[int, list[torch.Tensor]] = {number: [] for number in numbers}
        if grads:
            # One call launches few kernels; a launch per shard would leave the device idle in between.
            for number, norm in zip(owners, torch_private.foreach_norm(grads), strict=True):
                norms[number].append(norm)
        return norms

    def copy_to_params(self) -> None:
        """Write the weights in use from the master weights (after loading)."""
        for state in self.states:
            if state.param_out is not None:
                state.param_out.copy_(state.master)

    def logical_tensors(self) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]]:
        """Yield a checkpoint's content: (name, whole shape, offsets, view of this rank's box) of weights and state."""
        for state in self.states:
            for part in state.parts:
                for extent in part.extents:
                    for piece, offsets, view in extent_boxes(extent, state.master):
                        yield f"model.{piece.name}", piece.shape, offsets, view
                    part_extent = replace(extent, start=extent.start - part.start, stop=extent.stop - part.start)
                    for state_name, flat in part.state.items():
                        for piece, offsets, view in extent_boxes(part_extent, flat):
                            yield f"optimizer.{state_name}.{piece.name}", piece.shape, offsets, view


def _allocate_host_memory(chunks: Sequence[ParamAndGradBuffer]) -> HostMemory:
    """Allocate the host memory of master weights and of AdamW's two moments (optimizer.offload)."""
    count = sum(shard.params.numel() for chunk in chunks for shard in chunk.shards)
    shard = chunks[0].shards[0]
    return HostMemory(3 * count, shard.grads.dtype, shard.params.device)


def _list_names(chunks: Sequence[ParamAndGradBuffer], by_matrix: bool) -> list[str]:
    """Return this stage's logical tensors in an order that all its tensor- and data-parallel ranks share.

    by_matrix: the matrices of a stack one by one.
    """
    names = set()
    for chunk in chunks:
        for param in chunk.parameters:
            for piece in spec_of(param).pieces:
                names.update(list_matrix_names(piece.name, piece.shape) if by_matrix else [piece.name])
    return sorted(names)


def _merge_ranges(extents: list[Extent], selected: list[Extent]) -> list[tuple[int, int]]:
    """Return few contiguous ranges that cover `selected` and no other extents; they may include padding."""
    selected_ids = {id(extent) for extent in selected}
    ranges: list[tuple[int, int]] = []
    is_open = False
    for extent in extents:
        if id(extent) not in selected_ids:
            is_open = False
        elif is_open:
            ranges[-1] = (ranges[-1][0], extent.stop)
        else:
            ranges.append((extent.start, extent.stop))
            is_open = True
    return ranges
