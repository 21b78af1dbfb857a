"""Balance of experts over the global batch: the number of tokens per expert, and the routers' biases (DeepSeek-V3).

The all-reduce of the gradient norm also sums the counts of a step over all ranks, in float64, where integers below 2^53
are exact. Every rank then has the counts of the global batch, and all copies of a layer's biases get the same update.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from megascale.config import ModelConfig
from megascale.config.axes import AXES
from megascale.core.expert_ranks import gathers_expert_tokens
from megascale.core.inventory import resolve_layers
from megascale.core.layer_spec import ExpertsSpec
from megascale.core.layout import Layout
from megascale.model.experts import list_expert_layers
from megascale.model.transformer import Chunk

_LOSS_COUNT = 2  # scalars of the sequence loss and the z-loss, which follow the counts


@dataclass(frozen=True)
class ExpertCounts:
    """Routing statistics of a step, the same on every rank. The tensors are on the device.

    Attributes:
        layers: indices in the model of the layers with experts.
        counts: how often each expert was chosen in the global batch, float64 [layers, experts].
        losses: sequence loss and z-loss, summed over layers, float64 [2].
        ranks: number of ranks that divide the experts of a layer.
        is_repeated: whether the step was computed again without CUDA graphs, because a rank's experts got more tokens
            than the graphs have rows for.
    """

    layers: tuple[int, ...]
    counts: Tensor
    losses: Tensor
    ranks: int
    is_repeated: bool

    def summarise(self) -> dict[str, float]:
        """Return the metrics of a step, and wait for the device.

        expert_entropy is the mean over layers, 1 if all experts have the same load. dead_experts counts experts without
        a token in the batch. expert_load_max and expert_rank_load_max are the largest load of an expert and of a rank
        in any layer, divided by the mean load.
        """
        counts = self.counts.cpu()
        loads = counts / counts.sum(1, keepdim=True).clamp(min=1.0)  # fractions of a layer's tokens
        expert_count = counts.shape[1]
        entropy = -torch.special.xlogy(loads, loads).sum(1)
        if expert_count > 1:
            entropy = entropy / torch.log(torch.tensor(float(expert_count)))
        rank_loads = loads.view(len(loads), self.ranks, -1).sum(2)
        sequence_loss, z_loss = self.losses.tolist()
        return {
            "expert_entropy": float(entropy.mean()),
            "dead_experts": float((counts == 0).sum()),
            "expert_load_max": float(loads.max() * expert_count),
            "expert_rank_load_max": float(rank_loads.max() * self.ranks),
            "expert_step_redone": float(self.is_repeated),
            "expert_sequence_loss": sequence_loss,
            "expert_z_loss": z_loss,
        }


class ExpertBalance:
    """Collects the counts of one rank's layers with experts, and updates the biases of their routers.

    Args:
        counts_tokens: whether this rank adds its counts. Of several ranks with the same tokens, one adds them.
        ranks: number of ranks that divide the experts of a layer.

    Attributes:
        layers: indices in the model of all layers with experts.
        size: number of scalars that a step adds to the all-reduce.
        has_exceeded_rows: whether a captured micro-batch has had more tokens than rows since `begin_step`, bool [].
        is_repeated: whether the present step was computed again for that reason.
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
        layer_specs = resolve_layers(model)
        self.layers = tuple(i for i, layer in enumerate(layer_specs) if isinstance(layer.feed_forward, ExpertsSpec))
        self.settings = model.expert_settings
        self.size = len(self.layers) * self.settings.number + _LOSS_COUNT
        self._modules = list(list_expert_layers(chunks))
        self._counts_tokens = counts_tokens
        self._ranks = ranks
        self.has_exceeded_rows = torch.zeros((), dtype=torch.bool, device=device)
        self.is_repeated = False
        for module in self._modules:
            module.begin_training(tokens_per_step, device, self.has_exceeded_rows)

    def begin_step(self) -> None:
        """Set the counts to zero."""
        self.has_exceeded_rows.zero_()
        for module in self._modules:
            module.begin_step()

    def set_blank(self, is_blank: bool) -> None:
        """Let the next forwards leave their tokens out of the balance if `is_blank` (blank_batches.py)."""
        for module in self._modules:
            module.is_blank = is_blank

    def list_counts(self) -> list[Tensor]:
        """Return the tensors in which a step accumulates counts and losses, of all layers of this rank."""
        tensors = []
        for module in self._modules:
            assert module.counts is not None
            assert module.losses is not None
            tensors += [module.counts, module.losses]
        return tensors

    @contextmanager
    def limit_rows(self, factor: float) -> Iterator[None]:
        """Limit layers to `factor` times the rows of an even load in the enclosed code, as CUDA graphs need."""
        for module in self._modules:
            module.row_factor = factor
        try:
            yield
        finally:
            for module in self._modules:
                module.row_factor = None

    def add_counts(self, scalars: Tensor) -> None:
        """Add this rank's counts and losses to `scalars` of the all-reduce, float64 [size]."""
        if not self._counts_tokens:
            return
        counts = self._view_counts(scalars)
        for module in self._modules:
            assert module.counts is not None
            assert module.losses is not None
            counts[self.layers.index(module.layer_index)] += module.counts
            scalars[-_LOSS_COUNT:] += module.losses

    def update(self, sums: Tensor, is_skipped: Tensor) -> ExpertCounts:
        """Update the biases, and return the step's counts.

        A bias grows by bias_rate if its expert has less than the mean load, and shrinks otherwise. The change is
        centred, because biases that drift together would lose precision.

        Args:
            sums: what `add_counts` has written, summed over all ranks, float64 [size].
            is_skipped: whether the step changes nothing, bool [] on the device.
        """
        counts = self._view_counts(sums)
        rate = self.settings.bias_rate
        for module in self._modules:
            if module.router_bias is None:
                continue
            layer_counts = counts[self.layers.index(module.layer_index)]
            change = torch.sign(layer_counts.mean() - layer_counts) * rate
            change = torch.where(is_skipped, 0.0, change - change.mean())
            module.router_bias += change.to(module.router_bias.dtype)
        return ExpertCounts(
            self.layers,
            counts,
            losses=sums[-_LOSS_COUNT:],
            ranks=self._ranks,
            is_repeated=self.is_repeated,
        )

    def logical_tensors(self) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]:
        """Yield name, shape, offsets and tensor of each bias, as `ShardedOptimizer.logical_tensors` does."""
        for module in self._modules:
            if module.router_bias is not None:
                yield f"model.{module.bias_name}", tuple(module.router_bias.shape), (0,), module.router_bias

    def _view_counts(self, scalars: Tensor) -> Tensor:
        """Return the counts among the scalars, [layers, experts]."""
        return scalars[:-_LOSS_COUNT].view(len(self.layers), self.settings.number)


def make_expert_balance(
    layout: Layout, chunks: Sequence[Chunk], *, rank: int, device: torch.device
) -> ExpertBalance | None:
    """Return the balance of a rank's experts, None for a model without experts."""
    grid, model = layout.grid, layout.config.model
    if not any(isinstance(layer.feed_forward, ExpertsSpec) for layer in resolve_layers(model)):
        return None
    axes_of_equal_tokens = [name for name in AXES.stage if AXES[name].cuts_batch == "nothing"]
    return ExpertBalance(
        model,
        chunks,
        tokens_per_step=layout.tokens_per_step,
        device=device,
        counts_tokens=grid.is_first(axes_of_equal_tokens, rank),
        ranks=grid.tensor * grid.expert,
    )


def describe_experts(layout: Layout) -> dict[str, str]:
    """Return start-up lines by name: which ranks divide the experts, and what experts change in other parts."""
    grid, config = layout.grid, layout.config
    settings = config.model.expert_settings
    lines: dict[str, str] = {}
    ranks = f"{grid.tensor} tensor-parallel ranks"
    if grid.expert > 1:
        communication = "an all-to-all"
        if gathers_expert_tokens(settings, grid.tensor, grid.expert, config.overlap.expert):
            communication = "gathers"
        if grid.size("slice") > 1:
            tokens, key = "slices of each sample", "parallel.context"
        else:
            tokens, key = "samples", "parallel.expert"
        ranks += f" x {grid.expert} ranks with different {tokens}, whose tokens come by {communication}"
        if config.parallel.zero >= 2:
            lines["sharding of other matrices"] = (
                f"optimizer state only, over {grid.shards} ranks: their gradients are summed over the ranks of "
                f"{key} at the end of a step"
            )
    lines["experts"] = f"{settings.number} on {ranks}, dropless"
    if config.parallel.recompute in ("norms", "selective"):
        lines["recomputed norms"] = "not those before experts, which keep their input"
    if settings.top_k == 1 and settings.number > 1 and settings.normalize == "selected":
        # A model may be imported like this, so it is not an error.
        lines["router"] = (
            "gets no gradient of the loss: with model.experts.top_k=1 and normalize=selected all weights are 1; "
            "normalize=none keeps the scores"
        )
    return lines
