"""Optimizer on this rank's flat shards, in any layout: state, clipping, and the rule's update.

A step does not synchronise with the device. The gradient norm, the clipping factor and the flag that skips a step with
non-finite gradients stay on the device.

An extent is a range of a shard that holds elements of one logical tensor. Its piece is the box of the tensor that the
elements are from (parallel/buffers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from megascale import torch_private
from megascale.config import OptimizerConfig
from megascale.config.axes import AXES
from megascale.config.parts import OPTIMIZERS, OptimizerFacts
from megascale.core.tensors import list_matrix_names
from megascale.errors import ConfigError
from megascale.optim.base import Shards, ShardState, UpdateStep, make_state_parts
from megascale.optim.first_updates import FirstUpdates
from megascale.optim.offload import HostMemory, OffloadedAdamW
from megascale.optim.rules import RULES
from megascale.optim.update_hold import UpdateHold
from megascale.parallel.buffers import Extent, FlatShard, ParamAndGradBuffer, split_extent
from megascale.parallel.collectives import SINGLE_RANK, Axis, all_reduce
from megascale.parallel.parameters import get_spec


class ShardedOptimizer:
    """Optimizer of all shards of this rank.

    Args:
        config: update rule and its settings.
        buffers: parameter and gradient buffers of this rank's model chunks.
        position: this rank's coordinate by axis; 0 on axes left out. Of several ranks with the same parameter, the one
            at position 0 adds it to norms.
        norm: ranks over which squared gradient norms and piggybacked scalars are summed: the world.
        norm_weight: weight of this rank's squared norm. If several ranks hold the same shards and gradients, it is
            1 / number of these ranks.
        stage: ranks whose shards together hold this stage's tensors, for rules that need whole tensors or their norms.
        duplicates: logical tensors that this rank leaves out of the norm, because another stage adds them: the last
            stage's copy of a tied embedding.

    Attributes:
        states: states of all shards, by chunk and bucket.
        update_hold: holds back queued updates in a process that outlives its process groups; None in other processes.
        before_update: called before each update with its arguments (train/update_check.py); None: not called.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        buffers: Sequence[ParamAndGradBuffer],
        *,
        position: Mapping[str, int] | None = None,
        norm: Axis = SINGLE_RANK,
        norm_weight: float = 1.0,
        stage: Axis = SINGLE_RANK,
        duplicates: frozenset[str] = frozenset(),
    ) -> None:
        position = position or {}
        self.config = config
        self.update_hold: UpdateHold | None = None
        self.before_update: Callable[[UpdateStep], None] | None = None
        self.norm_axis = norm
        self.norm_weight = norm_weight
        facts = OPTIMIZERS[config.name]
        tensor_names = _list_tensor_names(buffers, lists_matrices=facts.has_matrix_norms)
        tensor_indices = {name: index for index, name in enumerate(tensor_names)}
        host_memory = _allocate_host_memory(buffers) if config.offload else None
        self.states: list[ShardState] = []
        # Indices of the states whose bucket holds a tied embedding.
        self._tied_states: set[int] = set()
        for buffer in buffers:
            if buffer.layout.tied_bucket is not None:
                self._tied_states.add(len(self.states) + buffer.layout.tied_bucket)
            for shard in buffer.shards:
                norm_extents = []
                for extent in shard.extents:
                    if extent.spec.is_counted(position) and extent.piece.name not in duplicates:
                        norm_extents.append(extent)
                self.states.append(_make_shard_state(shard, norm_extents, facts, tensor_indices, host_memory))
        # Update buckets in the order in which the next step's forward uses them, which begins with the first chunk.
        first_chunk_states = [self.states[bucket] for bucket in buffers[0].forward_order]
        update_order = first_chunk_states + self.states[len(first_chunk_states) :]
        rule = OffloadedAdamW if config.offload else RULES[config.name]
        # Along the axes of `AXES.copies` ranks hold copies of the same shards. `stage` does not span these axes, so
        # each copy sums its own norms. The rule's position leaves the axes out, so that every copy counts its
        # parameters.
        stage_position = {name: coordinate for name, coordinate in position.items() if name not in AXES.copies}
        shards = Shards(self.states, update_order, tensor_names, stage_position, stage)
        self.rule = rule(config, shards)
        if getattr(self.rule, "shards", None) is not shards:
            raise ConfigError(
                f"optimizer.name={config.name}: the rule's constructor does not call super().__init__(config, shards)"
            )
        self._first_updates: FirstUpdates | None = None
        if config.name not in RULES.builtin_names:
            self._first_updates = FirstUpdates(config.name, self.rule, self.states)

    @torch.no_grad()
    def step(
        self,
        learning_rate: float,
        step: int,
        piggybacked_scalars: torch.Tensor | None = None,
        on_shard_updated: Callable[[FlatShard], None] = lambda shard: None,
        finish_tied: Callable[[], None] = lambda: None,
        skips_if_last_scalar_zero: bool = False,
        hold_index: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Clip gradients and update the weights in place. A step whose norm is not finite changes nothing.

        Args:
            step: number of the step, from 1.
            piggybacked_scalars: float64 vector that is summed over the ranks in the all-reduce of the norm.
            on_shard_updated: called for each shard after its update.
            finish_tied: waits for the gradients of a tied embedding. Their reduction runs while other norms are
                computed.
            skips_if_last_scalar_zero: whether a step changes nothing if the sum of the last piggybacked scalar (the
                loss weights) is zero.
            hold_index: index of the piggybacked scalar that `UpdateHold.write_request` wrote. None: only this rank's
                requests hold its updates back.

        Returns:
            The norm of the whole model's gradient before clipping, and the sum of `piggybacked_scalars`, on the device.
        """
        norm, summed_scalars = self._reduce_norm(piggybacked_scalars, finish_tied)
        if self.update_hold is not None:
            request_sum = None
            if hold_index is not None and summed_scalars is not None:
                request_sum = summed_scalars[hold_index]
            norm = self.update_hold.mask_norm(norm, request_sum)
        grad_scale = None
        if self.config.clip:
            # 1e-6 is the constant of torch.nn.utils.clip_grad_norm_.
            grad_scale = (self.config.clip / (norm + 1e-6)).clamp(max=1.0)
        skip = ~torch.isfinite(norm)
        if skips_if_last_scalar_zero:
            assert summed_scalars is not None
            skip |= summed_scalars[-1] == 0
        update = UpdateStep(learning_rate, step, grad_scale, skip)
        if self.before_update is not None:
            self.before_update(update)
        if self._first_updates is None:
            self.rule.update(update, on_shard_updated)
        else:
            self._first_updates.update(update, on_shard_updated)
            if self._first_updates.is_complete:
                self._first_updates = None
        return norm, summed_scalars

    def _reduce_norm(
        self, piggybacked_scalars: torch.Tensor | None, finish_tied: Callable[[], None]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the 2-norm of the model's gradient (0-d, float64), and the summed scalars.

        Every parameter is in the norm once.
        """
        square_sum = torch.zeros(1, dtype=torch.float64, device=self.states[0].shard.grads.device)
        untied_states = [index for index in range(len(self.states)) if index not in self._tied_states]
        norms_by_state = self._compute_norms(untied_states)
        finish_tied()
        norms_by_state |= self._compute_norms(sorted(self._tied_states))
        norms: list[torch.Tensor] = []
        for index in range(len(self.states)):
            norms += norms_by_state[index]
        if norms:
            square_sum += torch.stack(norms).double().square().sum()
        square_sum *= self.norm_weight
        if piggybacked_scalars is None:
            return all_reduce(square_sum, self.norm_axis).wait()[0].sqrt(), None
        packed = all_reduce(torch.cat([square_sum, piggybacked_scalars]), self.norm_axis).wait()
        return packed[0].sqrt(), packed[1:]

    def _compute_norms(self, state_indices: Sequence[int]) -> dict[int, list[torch.Tensor]]:
        """Return the 2-norms of the gradients of each state's `norm_ranges`, by the state's index."""
        range_states = []
        grads = []
        for index in state_indices:
            state = self.states[index]
            for start, stop in state.norm_ranges:
                range_states.append(index)
                grads.append(state.shard.grads[start:stop])
        norms: dict[int, list[torch.Tensor]] = {index: [] for index in state_indices}
        if grads:
            # One call launches few kernels. With a launch per shard the device would wait for the host.
            for index, norm in zip(range_states, torch_private.foreach_norm(grads), strict=True):
                norms[index].append(norm)
        return norms

    def copy_to_params(self) -> None:
        """Write the weights in use from the master weights (after loading)."""
        for state in self.states:
            if state.param_out is not None:
                state.param_out.copy_(state.master)

    def logical_tensors(self) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]]:
        """Yield a checkpoint's content, one box (range on each dimension) of a logical tensor at a time.

        Yields:
            (name, shape of the logical tensor, offsets of the box, view of the box in this rank's shard), for master
            weights and state tensors.
        """
        for state in self.states:
            for part in state.parts:
                for extent in part.extents:
                    for piece, offsets, view in split_extent(extent, state.master):
                        yield f"model.{piece.name}", piece.shape, offsets, view
                    part_extent = replace(extent, start=extent.start - part.start, stop=extent.stop - part.start)
                    for state_name, flat in part.state.items():
                        for piece, offsets, view in split_extent(part_extent, flat):
                            yield f"optimizer.{state_name}.{piece.name}", piece.shape, offsets, view


def _make_shard_state(
    shard: FlatShard,
    norm_extents: list[Extent],
    facts: OptimizerFacts,
    tensor_indices: Mapping[str, int],
    host_memory: HostMemory | None,
) -> ShardState:
    """Return the state of a shard: master weights with its present values, and optimizer state of zeros.

    Args:
        norm_extents: extents whose gradients this rank adds to the norm.
        tensor_indices: index of every logical tensor by name.
        host_memory: memory for master weights and state; None: they are on the device.
    """
    master = shard.params
    if host_memory is not None:
        master = host_memory.allocate(master.numel()).copy_(shard.params)
    elif master.dtype != shard.grads.dtype:
        master = master.to(shard.grads.dtype)
    allocate = None if host_memory is None else host_memory.allocate
    parts = make_state_parts(shard, master, facts, tensor_indices, allocate=allocate)
    return ShardState(shard, master, parts, _merge_ranges(shard.extents, norm_extents))


def _allocate_host_memory(buffers: Sequence[ParamAndGradBuffer]) -> HostMemory:
    """Allocate the host memory of master weights and of AdamW's two moments (optimizer.offload)."""
    element_count = sum(shard.params.numel() for buffer in buffers for shard in buffer.shards)
    shard = buffers[0].shards[0]
    return HostMemory(3 * element_count, shard.grads.dtype, shard.params.device)


def _list_tensor_names(buffers: Sequence[ParamAndGradBuffer], *, lists_matrices: bool) -> list[str]:
    """Return the names of this stage's logical tensors in an order that all ranks of the stage share.

    If `lists_matrices`, each matrix of a stack has a name of its own.
    """
    names = set()
    for buffer in buffers:
        for param in buffer.parameters:
            for piece in get_spec(param).pieces:
                if lists_matrices:
                    names.update(list_matrix_names(piece.name, piece.shape))
                else:
                    names.add(piece.name)
    return sorted(names)


def _merge_ranges(extents: list[Extent], selected: list[Extent]) -> list[tuple[int, int]]:
    """Return ranges (start, stop) that cover the `selected` extents; adjacent selected extents share a range.

    A range of several extents includes the padding between them.

    Args:
        extents: all extents of a shard, in order.
        selected: some of `extents`.
    """
    selected_ids = {id(extent) for extent in selected}
    ranges: list[tuple[int, int]] = []
    extends_range = False  # whether the previous extent was selected
    for extent in extents:
        if id(extent) not in selected_ids:
            extends_range = False
        elif extends_range:
            ranges[-1] = (ranges[-1][0], extent.stop)
        else:
            ranges.append((extent.start, extent.stop))
            extends_range = True
    return ranges
