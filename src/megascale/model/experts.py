"""Mixture of experts: a router, experts that are divided among ranks, and optionally a shared MLP for all tokens.

The router computes in float32, for this rank's tokens only. A token's experts are selected once per micro-batch. If
backward recomputes the layer, the recomputation uses the same selection, because rounding could change it. Gradients of
the balance losses are added to those of the router in backward, so the losses are not sent through pipeline stages.
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
    compute_router_logits,
    count_choices_by_expert,
    count_choices_by_sequence,
    get_wide_dtype,
    score_experts,
    select_experts,
    weigh_experts,
)
from megascale.parallel.collectives import SINGLE_RANK, Axis, all_reduce_small
from megascale.parallel.expert_dispatch import apply_expert_stacks
from megascale.parallel.experts import apply_experts
from megascale.parallel.module import DirectModule
from megascale.parallel.parameters import local_parameter
from megascale.parallel.tensor import ColumnLinear, RowLinear, linear_scatter


@dataclass
class Routing:
    """Selection of experts for one micro-batch in one layer, which a recomputation of the layer uses again.

    Attributes:
        indices: experts of this rank's tokens [s/t, b, top_k]; None before the first forward.
        sequence_counts: number of choices of each expert per whole sequence [b, experts]; None unless a loss needs it.
        row_factor: `ExpertsMlp.row_factor` during the first forward.
        is_blank: `ExpertsMlp.is_blank` during the first forward: the tokens do not count for the balance.
    """

    indices: Tensor | None = None
    sequence_counts: Tensor | None = None
    row_factor: float | None = None
    is_blank: bool = False


class _AttachLoss(torch.autograd.Function):
    """Identity whose backward also runs the backward of a loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.loss = loss.shape, loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        shape, dtype = ctx.loss
        return grads[0], torch.ones(shape, dtype=dtype, device=grads[0].device)


class ExpertsMlp(DirectModule):
    """Feed-forward layer with experts.

    Attributes:
        columns: matrices of the input projection that the block computes before `forward`: none. `forward` receives the
            output of the norm.
        bias: None; a `DenseMlp` may have a bias here.
        layer_index: index of the layer in the model.
        router_bias: added to the scores for the selection, float32 or wider [experts]; equal on all ranks. None if the
            balance uses no bias.
        counts: number of this rank's choices of each expert since `begin_step`, int64 [experts]; None before
            `begin_training`.
        losses: this rank's summands of the two balance losses since `begin_step`, float64 [2]: of the sequence loss
            and of the z-loss. None before `begin_training`.
        tokens_per_step: number of tokens of the global batch, by which balance losses are divided.
        expert_axis: ranks that divide this tensor-parallel rank's experts. They read different samples, or with
            parallel.experts_over=context different slices of the same samples.
        gathers_tokens: whether ranks of `expert_axis` gather all tokens, instead of sending each token to the ranks of
            its experts.
        gather_axis: axis along which `apply_experts` gathers tokens. If `expert_axis` has one rank, this is the tensor
            axis, which may have one rank too. Otherwise it is `expert_axis` if the tensor axis has one rank and
            `gathers_tokens`. None: the layer needs `apply_expert_stacks`.
        is_recomputed: whether backward recomputes the activation of the shared MLP.
        routing: selection that `forward` uses, and sets if it is not set, in layers that backward recomputes; None in
            other layers.
        selection_override: used instead of `ops.routing.select_experts`, to measure a given load; None: not used.
        row_factor: number of token rows that a CUDA graph has room for, divided by the number with an even load; None
            outside captures.
        is_blank: whether the current micro-batch only fills the step (train/blank_batches.py). Its tokens do not count
            for the balance. `ExpertBalance.set_blank` sets it.
        exceeded: set to true if a CUDA graph had too few rows, bool []; shared by all layers of an engine.
    """

    columns: tuple[()] = ()
    bias: nn.Parameter | None = None

    def __init__(self, setup: LayerSetup) -> None:
        super().__init__()
        spec: ExpertsSpec = setup.layer.feed_forward
        self.spec = spec
        self.settings = spec.settings
        self.layer_index = setup.index
        self.activation = spec.activation
        self.linears = setup.linears
        self.axis = axis = setup.axis
        # With parallel.experts_over=context, the axis slice takes the place of the axis context, and its ranks also
        # divide the experts.
        self.expert_axis = setup.axes.get("slice", SINGLE_RANK)
        if self.expert_axis.size == 1:
            self.expert_axis = setup.axes.get("expert", SINGLE_RANK)
        overlap_mode = "collectives"  # value of overlap.expert
        if self.expert_axis.exchange is not None:
            overlap_mode = "copies"
        self.gathers_tokens = gathers_expert_tokens(self.settings, axis.size, self.expert_axis.size, overlap_mode)
        self.gather_axis: Axis | None = axis
        if self.expert_axis.size > 1:
            self.gather_axis = None
            if axis.size == 1 and self.gathers_tokens:
                self.gather_axis = self.expert_axis
        self._context_axis = setup.axes.get("context", SINGLE_RANK)
        self.is_recomputed = setup.recomputes("activation")
        # Logical tensors by the part of their name after the layer's, such as "experts.in.weight".
        tensors = {tensor.name.partition(".mlp.")[2]: tensor for tensor in setup.tensors.mlp}

        def make_parameter(name: str) -> nn.Parameter:
            return local_parameter([tensors[name]], axis.rank, axis.size, setup.dtype, setup.axes)

        self.router = make_parameter("router.weight")
        self.experts_in = make_parameter("experts.in.weight")
        self.experts_out = make_parameter("experts.out.weight")
        has_biases = self.settings.biases
        self.logit_bias = make_parameter("router.logit.bias") if has_biases else None
        self.in_bias = make_parameter("experts.in.bias") if has_biases else None
        self.out_bias = make_parameter("experts.out.bias") if has_biases else None
        self.shared_in: ColumnLinear | None = None
        self.shared_out: RowLinear | None = None
        if spec.shared is not None:
            names = ("shared.gate.weight", "shared.in.weight")
            self.shared_in = ColumnLinear([tensors[n] for n in names if n in tensors], setup.linears, setup.dtype)
            self.shared_out = RowLinear([tensors["shared.out.weight"]], setup.linears, setup.dtype)
        # This gate scales the output of the shared MLP. "shared.gate.weight" above is the gate of its activation.
        self.shared_scale = make_parameter("shared.scale.weight") if self.settings.shared_gate else None
        self.router_bias: Tensor | None = None
        self.counts: Tensor | None = None
        self.losses: Tensor | None = None
        self.tokens_per_step = 0
        self.routing: Routing | None = None
        self.selection_override: Callable[[Tensor, ExpertsConfig, Tensor | None], Tensor] | None = None
        self.row_factor: float | None = None
        self.is_blank = False
        self.exceeded: Tensor | None = None

    @property
    def bias_name(self) -> str:
        """Logical name of the router's bias."""
        return f"layers.{self.layer_index}.mlp.router.bias"

    def begin_training(self, tokens_per_step: int, device: torch.device, exceeded: Tensor) -> None:
        """Allocate the router's bias, counts and losses. Later forwards with gradients compute the balance losses."""
        self.exceeded = exceeded
        expert_count = self.settings.number
        if self.settings.bias_rate:
            self.router_bias = torch.zeros(expert_count, dtype=get_wide_dtype(self.router), device=device)
        self.counts = torch.zeros(expert_count, dtype=torch.int64, device=device)
        self.losses = torch.zeros(2, dtype=torch.float64, device=device)
        self.tokens_per_step = tokens_per_step

    def begin_step(self) -> None:
        """Set counts and losses to zero."""
        assert self.counts is not None
        assert self.losses is not None
        self.counts.zero_()
        self.losses.zero_()

    def fuses_bias_gradient(self, x: Tensor) -> bool:
        """Return False, since the block computes no projection whose bias gradient this layer could sum in backward."""
        return False

    def forward(self, x_SBH: Tensor, projection: ColumnLinear | None) -> Tensor:
        """Return the output [s/t, b, h] for the normed input [s/t, b, h]. `projection` is None."""
        weights, indices = self.route(x_SBH)
        gemms = self.linears.expert_gemms
        # `apply_experts` is for experts without biases that one axis divides. `apply_expert_stacks` also adds biases,
        # sends tokens by an all-to-all, and combines both axes.
        if self.in_bias is None and self.gather_axis is not None:
            row_limit = self._limit_rows(x_SBH)
            y = apply_experts(
                x_SBH,
                weights,
                indices,
                in_matrices=self.experts_in,
                out_matrices=self.experts_out,
                activation=self.activation,
                axis=self.gather_axis,
                limit=row_limit,
                gemms=gemms,
            )
        else:
            stacks = ExpertStacks(
                self.experts_in,
                self.experts_out,
                in_bias=self.in_bias,
                out_bias=self.out_bias,
                activation=self.activation,
                gemms=gemms,
            )
            y = apply_expert_stacks(x_SBH, weights, indices, stacks, self.axis, self.expert_axis, self.gathers_tokens)
        if self.shared_in is not None:
            y = y + self._run_shared(x_SBH)
        return y

    def _limit_rows(self, x_SBH: Tensor) -> RowLimit | None:
        """Return the fixed number of this rank's rows in a CUDA graph, or None without a limit."""
        factor = self.row_factor if self.routing is None else self.routing.row_factor
        axis = self.gather_axis
        if factor is None or axis is None or axis.size == 1:
            return None
        assert self.exceeded is not None
        top_k = self.settings.top_k
        token_count = x_SBH.shape[0] * x_SBH.shape[1]  # tokens of this rank
        # All ranks' tokens have token_count x ranks x top_k rows together. An even load is token_count x top_k rows per
        # rank.
        row_count = math.ceil(token_count * top_k * factor)
        return RowLimit(min(row_count, token_count * axis.size * top_k), self.exceeded)

    def route(self, x_SBH: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and the indices of each token's experts, each [s/t, b, top_k]."""
        logits = compute_router_logits(x_SBH, self.router)
        if self.logit_bias is not None:
            logits = logits + self.logit_bias.to(logits.dtype)
        scores = score_experts(logits, self.settings)
        routing = self.routing or Routing()
        is_first = routing.indices is None
        if routing.indices is None:
            select = self.selection_override or select_experts
            routing.indices = select(scores, self.settings, self.router_bias)
            routing.row_factor = self.row_factor
            routing.is_blank = self.is_blank
        indices = routing.indices
        weights = weigh_experts(scores, indices, self.settings)
        if self.counts is not None and torch.is_grad_enabled() and not routing.is_blank:
            if is_first:
                self.counts += count_choices_by_expert(scores, indices)
            weights = self._attach_losses(weights, logits, scores, routing, is_first)
        return weights, indices

    def _attach_losses(
        self, weights: Tensor, logits: Tensor, scores: Tensor, routing: Routing, is_first: bool
    ) -> Tensor:
        """Return the weights. Their backward also adds the gradients of the balance losses.

        Args:
            is_first: whether this is not a recomputation, so that the losses are added to `self.losses`.
        """
        settings = self.settings
        losses: dict[int, Tensor] = {}  # by index in `self.losses`
        if settings.sequence_loss:
            losses[0] = self._compute_sequence_loss(scores, routing)
        if settings.z_loss:
            squares = torch.logsumexp(logits, -1).square().sum()
            losses[1] = squares * (settings.z_loss / self.tokens_per_step)
        if not losses:
            return weights
        if is_first:
            assert self.losses is not None
            for index, loss in losses.items():
                self.losses[index] += loss.detach()
        weights_with_losses: Tensor = _AttachLoss.apply(weights, torch.stack(list(losses.values())).sum())
        return weights_with_losses

    def _compute_sequence_loss(self, scores: Tensor, routing: Routing) -> Tensor:
        """Return this rank's summand of the sequence loss: coefficient x mean over sequences of sum_e f_e P_e.

        f_e is the fraction of the sequence's choices that are expert e, times the number of experts. P_e is the mean of
        the expert's normalised scores over the sequence (DeepSeek-V3, arXiv 2412.19437, equations 17 to 20).
        """
        settings = self.settings
        if routing.sequence_counts is None:
            assert routing.indices is not None
            counts = all_reduce_small(count_choices_by_sequence(routing.indices, settings.number), self.axis)
            routing.sequence_counts = all_reduce_small(counts, self._context_axis)
        length = scores.shape[0] * self.axis.size * self._context_axis.size
        fractions_BE = routing.sequence_counts.to(scores.dtype) * (settings.number / (settings.top_k * length))
        if settings.scores == "sigmoid":
            scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)  # the constant of DeepSeek-V3's code
        # The mean over sequences of means over their tokens is the mean over all tokens.
        return (scores * fractions_BE).sum() * (settings.sequence_loss / self.tokens_per_step)

    def _run_shared(self, x_SBH: Tensor) -> Tensor:
        """Return the output of the shared MLP, [s/t, b, h]."""
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
        wide = get_wide_dtype(x_SBH)
        scale = torch.sigmoid(x_SBH.to(wide) @ self.shared_scale.to(wide)).unsqueeze(-1)
        return (y * scale).to(y.dtype)


def keep_routing(block: nn.Module, call: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return a function that runs a block, and whose repeated calls use the selection of experts of the first call.

    Without experts in the block, return the block or `call` itself.

    Args:
        call: function that runs a part of the block; None: the block.
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
    """Yield the `ExpertsMlp` of all layers with experts, in the order of chunks and blocks."""
    for chunk in chunks:
        for block in chunk.blocks:
            if isinstance(getattr(block, "mlp", None), ExpertsMlp):
                yield block.mlp
