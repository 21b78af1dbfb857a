"""A check of the first updates of a package's optimizer: the rule must update the tensors that the run uses and saves.

A rule that replaces a tensor instead of writing into it, or that leaves the weights in use as they are, trains without
an error. A checkpoint then lacks the new values, or the model never changes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megascale.errors import ConfigError
from megascale.optim.base import ShardState, UpdateRule, UpdateStep
from megascale.parallel.buffers import FlatShard

_MAX_UNCHANGED = 10  # updates that may leave all weights unchanged, such as those of a rule with a delay
# Elements that are summed at once. torch converts them to float64 first, so that a whole shard would take the memory of
# two shards of float32 for a moment.
_PART_ELEMENTS = 1 << 24
_MAX_UPDATES = 50  # updates with checks, if each of them is too small to change the rounded weights in use


class FirstUpdates:
    """Runs the rule's updates with checks, until an update has changed the weights in use.

    The checks wait for the device.

    Args:
        name: value of optimizer.name, for messages.

    Attributes:
        is_complete: whether no further update needs a check.
    """

    def __init__(self, name: str, rule: UpdateRule, states: list[ShardState]) -> None:
        self._setting = f"optimizer.name={name}"
        self._rule = rule
        self._states = states
        self._count = 0
        self._unchanged_count = 0
        self.is_complete = False

    def update(self, step: UpdateStep, on_updated: Callable[[FlatShard], None]) -> None:
        """Update the weights. Raises ConfigError if the rule breaks the contract of `UpdateRule.update`."""
        before = [self._list_memory(state) for state in self._states]
        masters = [_sum_twice(state.master) for state in self._states]
        in_use = [_sum_twice(state.shard.params) for state in self._states]
        has_gradient = any(bool(state.shard.grads.any()) for state in self._states)
        announced: list[FlatShard] = []

        def announce(shard: FlatShard) -> None:
            announced.append(shard)
            on_updated(shard)

        self._rule.update(step, announce)
        for state, addresses in zip(self._states, before, strict=True):
            for tensor, address in self._list_memory(state).items():
                if addresses[tensor] != address:
                    raise ConfigError(
                        f"{self._setting}: the update replaced {tensor} by another tensor, which checkpoints do not "
                        "contain; write into it in place, such as with copy_() or lerp_()"
                    )
        expected = [id(state.shard) for state in self._rule.shards.update_order]
        if [id(shard) for shard in announced] != expected:
            raise ConfigError(
                f"{self._setting}: the update called its second argument for {len(announced)} of {len(expected)} "
                "shards; call it once with each shard.shard in the order of self.shards.update_order, because the "
                "exchange of the weights begins there"
            )
        if bool(step.skip):
            return
        self._count += 1
        has_changed = any(_sum_twice(state.master) != sums for state, sums in zip(self._states, masters, strict=True))
        has_changed_in_use = False
        for state, sums in zip(self._states, in_use, strict=True):
            params = state.shard.params
            if _sum_twice(params) != sums:
                has_changed_in_use = True
            elif not _is_rounded(params, state.master):
                raise ConfigError(
                    f"{self._setting}: the update changed the master weights but not the weights in use "
                    f"({params.dtype}); if shard.param_out is not None, write part.view(shard.param_out) too"
                )
        self.is_complete = (has_changed and has_changed_in_use) or self._count == _MAX_UPDATES
        if not has_changed and step.learning_rate > 0 and has_gradient:
            self._unchanged_count += 1
            if self._unchanged_count == _MAX_UNCHANGED:
                raise ConfigError(
                    f"{self._setting}: {_MAX_UNCHANGED} updates with gradients and a learning rate above 0 changed no "
                    "weight; write the new weights into part.view(shard.master)"
                )

    def _list_memory(self, state: ShardState) -> dict[str, int]:
        """Return the addresses of the tensors that an update writes."""
        addresses = {"shard.master": state.master.data_ptr()}
        for part in state.parts:
            for name, tensor in part.state.items():
                addresses[f'part.state["{name}"] (elements {part.start} to {part.stop})'] = tensor.data_ptr()
        return addresses


def _sum_twice(tensor: torch.Tensor) -> tuple[float, float]:
    """Return the sum and the norm of the elements, of which almost any change alters a bit."""
    parts = tensor.split(_PART_ELEMENTS)
    sums = torch.stack([part.sum(dtype=torch.float64) for part in parts])
    norms = torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts])
    return float(sums.sum()), float(torch.linalg.vector_norm(norms))


def _is_rounded(params: torch.Tensor, master: torch.Tensor) -> bool:
    """Return whether the weights in use are the rounded master weights."""
    parts = zip(params.split(_PART_ELEMENTS), master.split(_PART_ELEMENTS), strict=True)
    return all(torch.equal(part, master_part.to(part.dtype)) for part, master_part in parts)
