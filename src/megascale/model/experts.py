"""Mixture of experts: a router, experts that tensor-parallel ranks divide, and possibly a shared MLP.

The router reads this rank's sequence shard in float32. A token's experts are selected once per micro-batch. If
backward recomputes the layer, it takes the kept selection, so that the forward that is recomputed is the one that ran.
The balance losses enter as gradients of the logits, and never travel through pipeline stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megascale.config.experts_section import ExpertsConfig
from megascale.core.expert_ranks import gathers_expert_tokens
from megascale.core.layer_spec import ExpertsSpec
from megascale.model.context import LayerSetup
from megascale.ops.activation import RecomputedActivation, activate
from megascale.ops.biased_experts import ExpertStacks
from megascale.ops.routing import (
    RowLimit,
    count_all,
    count_experts,
    router_logits,
    score_experts,
    select_experts,
    weigh_experts,
    wide_dtype,
)
from megascale.parallel.collectives import SINGLE_RANK, Axis, all_reduce_small
from megascale.parallel.expert_dispatch import apply_expert_stacks
from megascale.parallel.experts import apply_experts
from megascale.parallel.module import DirectModule
from megascale.parallel.parameters import local_parameter
from megascale.parallel.tensor import ColumnLinear, RowLinear, linear_scatter


@dataclass
class Routing:
    """Selection of a micro-batch in one layer, kept for the recomputation of the layer.

    Attributes:
        indices: experts of this rank's tokens [s/t, b, top_k]; None before the first forward.
        sequence_counts: tokens of each whole sequence per expert [b, experts], if a loss needs them.
        row_factor: `ExpertsMlp.row_factor` of the first forward.
        is_blank: `ExpertsMlp.is_blank` of the first forward.
    """

    indices: Tensor | None = None
    sequence_counts: Tensor | None = None
    row_factor: float | None = None
    is_blank: bool = False


class _AttachLoss(torch.autograd.Function):
    """Identity whose backward also adds the gradient of a loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.loss = loss.shape, loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        shape, dtype = ctx.loss
        return grads[0], torch.ones(shape, dtype=dtype, device=grads[0].device)


class ExpertsMlp(DirectModule):
    """Feed-forward of experts.

    Attributes:
        columns: empty: it reads the norm and projects by itself.
        bias: of a fused projection; None, as it has none.
        index: index of the layer in the model.
        router_bias: added to the scores for the selection, float32 or wider [experts]; equal on all ranks. None
            without balance by bias.
        counts: tokens of this rank per expert since `begin_step`, int64 [experts].
        losses: this rank's share of the sequence loss and of the z-loss since `begin_step`, float64 [2].
        tokens_per_step: tokens of the global batch, by which balance losses are divided.
        expert_axis: ranks that read other samples, or other slices of them, and divide this rank's part of the experts.
        gathers: whether those ranks gather the tokens of all, instead of sending each to the ranks of its experts.
        routing: selection to use and to fill while a layer runs that backward recomputes.
        select: selects the experts of tokens, as `ops.routing.select_experts`; another one measures a forced load.
        row_factor: while work is captured, the rows that a rank has room for relative to an even load; None otherwise.
        is_blank: whether the tokens of the present micro-batch do not count for the balance.
        exceeded: raised when captured work had too little room, bool []; of all layers of an engine.
    """

    columns: tuple[()] = ()
    bias: nn.Parameter | None = None

    def __init__(self, setup: LayerSetup) -> None:
        super().__init__()
        spec: ExpertsSpec = setup.layer.feed_forward
        self.spec = spec
        self.settings = spec.settings
        self.index = setup.index
        self.activation = spec.activation
        self.linears = setup.linears
        self.axis = axis = setup.axis
        self.expert_axis = setup.axes.get("slice", SINGLE_RANK)
        if self.expert_axis.size == 1:
            self.expert_axis = setup.axes.get("expert", SINGLE_RANK)
        has_exchange = self.expert_axis.exchange is not None
        exchange = "copies" if has_exchange else "collectives"
        self.gathers = gathers_expert_tokens(self.settings, axis.size, self.expert_axis.size, exchange)
        # The only axis that divides the experts; None if there are two, or tokens go by an all-to-all.
        self.gather_axis: Axis | None = axis
        if self.expert_axis.size > 1:
            self.gather_axis = self.expert_axis if axis.size == 1 and self.gathers else None
        self._context_axis = setup.axes.get("context", SINGLE_RANK)
        self.is_recomputed = setup.recomputes("activation")
        tensors = {tensor.name.partition(".mlp.")[2]: tensor for tensor in setup.tensors.mlp}

        def make(name: str) -> nn.Parameter:
            return local_parameter([tensors[name]], axis.rank, axis.size, setup.dtype, setup.axes)

        self.router = make("router.weight")
        self.experts_in = make("experts.in.weight")
        self.experts_out = make("experts.out.weight")
        has_biases = self.settings.biases
        self.logit_bias = make("router.logit.bias") if has_biases else None
        self.in_bias = make("experts.in.bias") if has_biases else None
        self.out_bias = make("experts.out.bias") if has_biases else None
        self.shared_in: ColumnLinear | None = None
        self.shared_out: RowLinear | None = None
        if spec.shared is not None:
            names = ("shared.gate.weight", "shared.in.weight")
            self.shared_in = ColumnLinear([tensors[n] for n in names if n in tensors], setup.linears, setup.dtype)
            self.shared_out = RowLinear([tensors["shared.out.weight"]], setup.linears, setup.dtype)
        self.shared_scale = make("shared.scale.weight") if self.settings.shared_gate else None
        self.router_bias: Tensor | None = None
        self.counts: Tensor | None = None
        self.losses: Tensor | None = None
        self.tokens_per_step = 0
        self.routing: Routing | None = None
        self.select: Callable[[Tensor, ExpertsConfig, Tensor | None], Tensor] | None = None
        self.row_factor: float | None = None
        self.is_blank = False
        self.exceeded: Tensor | None = None

    @property
    def bias_name(self) -> str:
        """Logical name of the router's bias."""
        return f"layers.{self.index}.mlp.router.bias"

    def begin_training(self, tokens_per_step: int, device: torch.device, exceeded: Tensor) -> None:
        """Allocate the router's bias and the counts, and turn on the balance losses."""
        self.exceeded = exceeded
        number = self.settings.number
        if self.settings.bias_rate:
            self.router_bias = torch.zeros(number, dtype=wide_dtype(self.router), device=device)
        self.counts = torch.zeros(number, dtype=torch.int64, device=device)
        self.losses = torch.zeros(2, dtype=torch.float64, device=device)
        self.tokens_per_step = tokens_per_step

    def begin_step(self) -> None:
        """Set counts and losses to zero."""
        assert self.counts is not None
        assert self.losses is not None
        self.counts.zero_()
        self.losses.zero_()

    def fuses_bias_gradient(self, x: Tensor) -> bool:
        """Return False: no projection before it has a bias."""
        return False

    def forward(self, x_SBH: Tensor, projection: ColumnLinear | None) -> Tensor:
        """Return what the layer adds to the residual stream, [s/t, b, h], for its normed input [s/t, b, h]."""
        weights, indices = self.route(x_SBH)
        if self.in_bias is None and self.gather_axis is not None:
            limit = self._limit_rows(x_SBH)
            y = apply_experts(
                x_SBH, weights, indices, self.experts_in, self.experts_out, self.activation, self.gather_axis, limit
            )
        else:
            stacks = ExpertStacks(self.experts_in, self.experts_out, self.in_bias, self.out_bias, self.activation)
            y = apply_expert_stacks(x_SBH, weights, indices, stacks, self.axis, self.expert_axis, self.gathers)
        if self.shared_in is not None:
            y = y + self._run_shared(x_SBH)
        return y

    def _limit_rows(self, x_SBH: Tensor) -> RowLimit | None:
        """Return the room for this rank's rows in captured work, or None."""
        factor = self.row_factor if self.routing is None else self.routing.row_factor
        axis = self.gather_axis
        if factor is None or axis is None or axis.size == 1:
            return None
        assert self.exceeded is not None
        top_k = self.settings.top_k
        tokens = x_SBH.shape[0] * x_SBH.shape[1]
        rows = math.ceil(tokens * top_k * factor)  # an even load is that of this rank's own tokens
        return RowLimit(min(rows, tokens * axis.size * top_k), self.exceeded)

    def route(self, x_SBH: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and the indices of each token's experts, [s/t, b, top_k]."""
        logits = router_logits(x_SBH, self.router)
        if self.logit_bias is not None:
            logits = logits + self.logit_bias.to(logits.dtype)
        scores = score_experts(logits, self.settings)
        routing = self.routing or Routing()
        is_first = routing.indices is None
        if routing.indices is None:
            select = self.select or select_experts
            routing.indices = select(scores, self.settings, self.router_bias)
            routing.row_factor = self.row_factor
            routing.is_blank = self.is_blank
        indices = routing.indices
        weights = weigh_experts(scores, indices, self.settings)
        if self.counts is not None and torch.is_grad_enabled() and not routing.is_blank:
            if is_first:
                self.counts += count_all(scores, indices)
            weights = self._attach_losses(weights, logits, scores, routing, is_first)
        return weights, indices

    def _attach_losses(
        self, weights: Tensor, logits: Tensor, scores: Tensor, routing: Routing, is_first: bool
    ) -> Tensor:
        """Return the weights, whose backward also adds the gradients of the balance losses."""
        settings = self.settings
        losses = []
        if settings.sequence_loss:
            losses.append(self._compute_sequence_loss(scores, routing))
        if settings.z_loss:
            squares = torch.logsumexp(logits, -1).square().sum()
            losses.append(squares * (settings.z_loss / self.tokens_per_step))
        if not losses:
            return weights
        if is_first:
            assert self.losses is not None
            parts = iter(losses)
            for i, coefficient in enumerate((settings.sequence_loss, settings.z_loss)):
                if coefficient:
                    self.losses[i] += next(parts).detach()
        attached: Tensor = _AttachLoss.apply(weights, torch.stack(losses).sum())
        return attached

    def _compute_sequence_loss(self, scores: Tensor, routing: Routing) -> Tensor:
        """Return this rank's part of the sequence loss: coefficient x mean over sequences of sum_e f_e P_e.

        f_e is the share of the sequence's choices that went to expert e, times the number of experts. P_e is the mean
        of the normalised scores (DeepSeek-V3, arXiv 2412.19437, equations 17 to 20).
        """
        settings = self.settings
        if routing.sequence_counts is None:
            assert routing.indices is not None
            counts = all_reduce_small(count_experts(routing.indices, settings.number), self.axis)
            routing.sequence_counts = all_reduce_small(counts, self._context_axis)
        length = scores.shape[0] * self.axis.size * self._context_axis.size
        fractions_BE = routing.sequence_counts.to(scores.dtype) * (settings.number / (settings.top_k * length))
        if settings.scores == "sigmoid":
            scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
        # A sequence's mean over tokens, averaged over sequences, is a mean over all tokens.
        return (scores * fractions_BE).sum() * (settings.sequence_loss / self.tokens_per_step)

    def _run_shared(self, x_SBH: Tensor) -> Tensor:
        """Return the shared MLP of the tokens, [s/t, b, h]."""
        assert self.shared_in is not None
        assert self.shared_out is not None
        inner = self.shared_in(x_SBH)
        weight = self.shared_out.weight
        if self.is_recomputed and torch.is_grad_enabled():
            y = linear_scatter(self.linears, inner, weight, recompute_fns=[RecomputedActivation(self.activation, None)])
        else:
            y = linear_scatter(self.linears, activate(self.activation, inner), weight)
        if self.shared_scale is None:
            return y
        wide = wide_dtype(x_SBH)
        scale = torch.sigmoid(x_SBH.to(wide) @ self.shared_scale.to(wide)).unsqueeze(-1)
        return (y * scale).to(y.dtype)


def keep_routing(block: nn.Module, call: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return a call of a block that, in a layer of experts, selects experts the first time only.

    Args:
        call: a part of the block to call instead of the whole.
    """
    call = call or block
    mlp = getattr(block, "mlp", None)
    if not isinstance(mlp, ExpertsMlp):
        return call
    routing = Routing()

    def run(*args: Any) -> Any:
        mlp.routing = routing
        try:
            return call(*args)
        finally:
            mlp.routing = None

    return run


def list_expert_layers(chunks: Iterable[Any]) -> Iterator[ExpertsMlp]:
    """Yield the layers of experts of chunks, in model order."""
    for chunk in chunks:
        for block in chunk.blocks:
            if isinstance(getattr(block, "mlp", None), ExpertsMlp):
                yield block.mlp
