"""Balance of experts over the global batch: counts of all ranks, and the routers' biases that follow from them.

The counts of a step travel as float64 in the all-reduce of the gradient's norm, where integers below 2^53 are exact.
Every rank then has the counts of the whole batch, and updates its copy of its layers' biases alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from megascale.config import ModelConfig
from megascale.core.inventory import resolve_layers
from megascale.core.layer_spec import ExpertsSpec
from megascale.model.experts import list_expert_layers
from megascale.model.transformer import Chunk


@dataclass(frozen=True)
class ExpertCounts:
    """Routing of a step, the same on every rank, still on the device.

    Attributes:
        layers: index of each layer of experts in the model.
        counts: choices of each expert in the global batch, float64 [layers, experts].
        losses: sequence loss and z-loss, summed over layers, float64 [2].
        ranks: ranks that divide the experts of a layer.
        redone: whether the step was computed again without CUDA graphs, because a rank had too many tokens for them.
    """

    layers: tuple[int, ...]
    counts: Tensor
    losses: Tensor
    ranks: int
    redone: bool

    def summarise(self) -> dict[str, float]:
        """Return the metrics of a step; reading them waits for the device.

        Entropy is relative to an even load, 0 to 1, the mean over layers. Dead experts got no token of the batch. The
        loads are relative to an even load, of the expert and of the rank that have the most tokens in any layer.
        """
        counts = self.counts.cpu()
        shares = counts / counts.sum(1, keepdim=True).clamp(min=1.0)
        number = counts.shape[1]
        entropy = -torch.special.xlogy(shares, shares).sum(1)
        if number > 1:
            entropy = entropy / torch.log(torch.tensor(float(number)))
        by_rank = shares.view(len(shares), self.ranks, -1).sum(2)
        sequence_loss, z_loss = self.losses.tolist()
        return {
            "expert_entropy": float(entropy.mean()),
            "dead_experts": float((counts == 0).sum()),
            "expert_load_max": float(shares.max() * number),
            "expert_rank_load_max": float(by_rank.max() * self.ranks),
            "expert_step_redone": float(self.redone),
            "expert_sequence_loss": sequence_loss,
            "expert_z_loss": z_loss,
        }


class ExpertBalance:
    """Counts and biases of the layers of experts of one rank.

    Args:
        counts_tokens: whether this rank's tokens count, because no other rank has the same.
        ranks: ranks that divide the experts of a layer.

    Attributes:
        size: number of scalars that a step adds to the all-reduce.
        exceeded: whether captured work had too little room for rows since `begin_step`, bool [].
        redone: whether the present step was computed again for that reason.
    """

    def __init__(
        self,
        model: ModelConfig,
        chunks: Sequence[Chunk],
        tokens_per_step: int,
        device: torch.device,
        counts_tokens: bool,
        ranks: int,
    ) -> None:
        specs = resolve_layers(model)
        self.layers = tuple(i for i, spec in enumerate(specs) if isinstance(spec.feed_forward, ExpertsSpec))
        self.settings = model.expert_settings
        self.size = len(self.layers) * self.settings.number + 2
        self._modules = list(list_expert_layers(chunks))
        self._counts_tokens = counts_tokens
        self._ranks = ranks
        self.exceeded = torch.zeros((), dtype=torch.bool, device=device)
        self.redone = False
        for module in self._modules:
            module.begin_training(tokens_per_step, device, self.exceeded)

    def begin_step(self) -> None:
        """Set the counts to zero."""
        self.exceeded.zero_()
        for module in self._modules:
            module.begin_step()

    def set_blank(self, is_blank: bool) -> None:
        """Set whether the tokens of the next forwards do not count."""
        for module in self._modules:
            module.is_blank = is_blank

    def list_counts(self) -> list[Tensor]:
        """Return the counts and losses of all layers, which a step adds to."""
        tensors = []
        for module in self._modules:
            assert module.counts is not None
            assert module.losses is not None
            tensors += [module.counts, module.losses]
        return tensors

    @contextmanager
    def limiting_rows(self, factor: float) -> Iterator[None]:
        """Let layers compute, within, with room for `factor` times the rows of an even load, as graphs need."""
        for module in self._modules:
            module.row_factor = factor
        try:
            yield
        finally:
            for module in self._modules:
                module.row_factor = None

    def fill(self, scalars: Tensor) -> None:
        """Write this rank's counts and losses into its share of the all-reduce, float64 [size]."""
        if not self._counts_tokens:
            return
        counts = self._view_counts(scalars)
        for module in self._modules:
            assert module.counts is not None
            assert module.losses is not None
            counts[self.layers.index(module.layer_index)] += module.counts
            scalars[-2:] += module.losses

    def update(self, summed: Tensor, skip: Tensor) -> ExpertCounts:
        """Move the biases by the sum of the all-reduce, unless `skip` [] is true, and return the step's counts.

        The move is centred: without that, biases would drift together and lose precision.
        """
        counts = self._view_counts(summed)
        rate = self.settings.bias_rate
        for module in self._modules:
            if module.router_bias is None:
                continue
            layer_counts = counts[self.layers.index(module.layer_index)]
            move = torch.sign(layer_counts.mean() - layer_counts) * rate
            move = torch.where(skip, 0.0, move - move.mean())
            module.router_bias += move.to(module.router_bias.dtype)
        return ExpertCounts(self.layers, counts, summed[-2:], self._ranks, self.redone)

    def logical_tensors(self) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]:
        """Yield the biases as content of a checkpoint, like `ShardedOptimizer.logical_tensors`."""
        for module in self._modules:
            if module.router_bias is not None:
                yield f"model.{module.bias_name}", tuple(module.router_bias.shape), (0,), module.router_bias

    def _view_counts(self, scalars: Tensor) -> Tensor:
        """Return the counts among the scalars, [layers, experts]."""
        return scalars[:-2].view(len(self.layers), self.settings.number)
