"""Routing of tokens to experts: scores, selection, and the plan by which grouped GEMMs read rows. All deterministic.

No token is dropped, no sum uses atomic additions, and ties go to the expert of the lowest index.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megascale.config.experts_section import ExpertsConfig
from megascale.ops.dispatch import use_fused
from megascale.ops.gradient_sink import get_sink, get_tracked
from megascale.ops.linear import multiply_wide
from megascale.ops.routing_kernels import count_choices, select_top, sort_choices, split_float32, sum_rows


def wide_dtype(x: Tensor) -> torch.dtype:
    """Return the type of the router's arithmetic: float32, or float64 for float64 models."""
    return torch.promote_types(x.dtype, torch.float32)


class _RouterLinear(torch.autograd.Function):
    """Logits x @ weight.T in float32 at least, whose weight gradient is not rounded to the weight's type.

    Factors of bfloat16 are multiplied as they are, since their products and sums are in float32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, tracked_weight: Tensor | None, args: tuple[Tensor]) -> Tensor:
        ctx.args = args
        ctx.save_for_backward(x)
        weight = args[0].detach()
        return multiply_wide(x.flatten(0, -2), weight.t()).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        [weight] = ctx.args
        [x] = ctx.saved_tensors
        dy_TE = grads[0].flatten(0, -2)
        x_TH = x.flatten(0, -2)
        matrix = weight.detach()
        if x.dtype == torch.bfloat16 and use_fused("router's gradient", dy_TE):
            return _RouterLinear._multiply_parts(x, weight, split_float32(dy_TE.contiguous()))
        dx = (dy_TE @ matrix.to(dy_TE.dtype)).to(x.dtype).view(x.shape)
        if not weight.requires_grad:
            return dx, None, None
        sink = get_sink(weight)
        if sink is None:
            return dx, (dy_TE.t() @ x_TH.to(dy_TE.dtype)).to(weight.dtype), None
        sink.main_grad.addmm_(dy_TE.t(), x_TH.to(dy_TE.dtype))
        sink.ready()
        return dx, None, None

    @staticmethod
    def _multiply_parts(x: Tensor, weight: Tensor, parts_TP: Tensor) -> Any:
        """Return the gradients for a gradient of the logits in three parts [tokens, 3 * experts]."""
        x_TH = x.flatten(0, -2)
        dx = (parts_TP @ weight.detach().repeat(3, 1)).view(x.shape)
        if not weight.requires_grad:
            return dx, None, None
        gradients = multiply_wide(parts_TP.t(), x_TH)
        gradient = gradients.view(3, *weight.shape).sum(0)
        sink = get_sink(weight)
        if sink is None:
            return dx, gradient.to(weight.dtype), None
        sink.main_grad.add_(gradient)
        sink.ready()
        return dx, None, None


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Return the logits [..., experts] of tokens [..., h] in float32 or wider; weight: [experts, h]."""
    logits: Tensor = _RouterLinear.apply(x, get_tracked(x, weight), (weight,))
    return logits


def score_experts(logits: Tensor, settings: ExpertsConfig) -> Tensor:
    """Return the experts' scores [..., experts], in the type of the logits."""
    if settings.scores == "sigmoid":
        return torch.sigmoid(logits)
    return torch.softmax(logits, -1)


@torch.no_grad()
def select_experts(scores: Tensor, settings: ExpertsConfig, bias: Tensor | None = None) -> Tensor:
    """Return the experts of each token [..., top_k], the best first. Of equal scores the lowest index is better.

    Args:
        scores: [..., experts].
        bias: added to the scores for the selection only [experts].
    """
    has_group_limit = settings.group_limit is not None and settings.group_limit < settings.groups
    if not has_group_limit and use_fused("selection of experts", scores, bias):
        indices_TK = select_top(scores.flatten(0, -2).contiguous(), bias, settings.top_k)
        return indices_TK.view(*scores.shape[:-1], settings.top_k)
    choice = scores if bias is None else scores + bias.to(scores.dtype)
    if has_group_limit:
        grouped = choice.unflatten(-1, (settings.groups, -1))
        best = grouped.sort(dim=-1, descending=True, stable=True).values[..., :2].sum(-1)
        groups = best.sort(dim=-1, descending=True, stable=True).indices[..., : settings.group_limit]
        is_selected = (groups.unsqueeze(-1) == torch.arange(settings.groups, device=groups.device)).any(-2)
        choice = grouped.masked_fill(~is_selected.unsqueeze(-1), -torch.inf).flatten(-2)
    return choice.sort(dim=-1, descending=True, stable=True).indices[..., : settings.top_k].contiguous()


def weigh_experts(scores: Tensor, indices: Tensor, settings: ExpertsConfig) -> Tensor:
    """Return the weights [..., top_k] of each token's experts."""
    weights = scores.gather(-1, indices)
    if settings.normalize == "selected":
        total = weights.sum(-1, keepdim=True)
        if settings.scores == "sigmoid" or settings.bias_rate:
            # All sigmoids of a token may underflow to 0, and so may softmax scores of experts that a bias selects.
            total = total + 1e-20
        weights = weights / total
    return weights * settings.scaling


def count_experts(indices: Tensor, experts: int) -> Tensor:
    """Return how often each sequence chose each expert, int64 [b, experts].

    Args:
        indices: experts of each token [s, b, top_k].
    """
    is_expert = indices.unsqueeze(-1) == torch.arange(experts, device=indices.device)
    return is_expert.sum((0, 2))


def count_all(scores: Tensor, indices: Tensor) -> Tensor:
    """Return how often each expert was chosen, int64 [experts].

    Args:
        scores: [s, b, experts].
        indices: experts of each token [s, b, top_k].
    """
    experts = scores.shape[-1]
    if use_fused("counts of experts", scores):
        return count_choices(indices.flatten(0, -2), experts)
    return count_experts(indices, experts).sum(0)


@dataclass(frozen=True)
class RoutingPlan:
    """Rows that a rank's experts process: one for each pair of a token and one of these experts, by expert, then token.

    Attributes:
        offsets: first row of each expert, and the end of the last one's, int32 [experts + 1].
        token: token of each row [rows].
        slot: position of the row's expert among the token's experts [rows].
        row: row of each token's slot, at least `rows` where another rank has the expert [tokens, top_k].
    """

    offsets: Tensor
    token: Tensor
    slot: Tensor
    row: Tensor


@dataclass(frozen=True)
class RowLimit:
    """Number of rows that captured work has room for, because a graph cannot read a number of rows.

    Attributes:
        rows: capacity; choices beyond it get no row.
        exceeded: raised when choices got no row, bool [].
    """

    rows: int
    exceeded: Tensor


def plan_rows(
    indices: Tensor,
    first: int,
    count: int,
    weights: Tensor,
    experts: int,
    limit: RowLimit | None = None,
    rows: int | None = None,
) -> RoutingPlan:
    """Plan the rows of experts `first` to `first + count`.

    The number of rows is read on the host, unless it is known, there is a limit, or these are all experts, so that
    every choice has a row.

    Args:
        indices: experts of each token [tokens, top_k].
        weights: weights of these experts, which decide whether kernels run [tokens, top_k].
        experts: number of experts of the layer.
        limit: with it the plan has `limit.rows` rows; those beyond the last offset are undefined.
        rows: number of choices of these experts, if the host knows it.
    """
    tokens, top_k = indices.shape
    if use_fused("plan of experts", weights):
        capacity = tokens * top_k if limit is None else limit.rows
        offsets, token, slot, row, needed = sort_choices(indices.contiguous(), first, count, capacity)
        if limit is not None:
            limit.exceeded.logical_or_(needed > limit.rows)
        elif count < experts:
            rows = int(needed) if rows is None else rows
            token = token[:rows]
            slot = slot[:rows]
        return RoutingPlan(offsets, token, slot, row)
    local = indices.reshape(-1) - first
    local = torch.where((local >= 0) & (local < count), local, count)
    order = local.argsort(stable=True)
    sizes = (local.unsqueeze(0) == torch.arange(count, device=local.device).unsqueeze(1)).sum(1)
    offsets = torch.zeros(count + 1, dtype=torch.int32, device=local.device)
    offsets[1:] = sizes.cumsum(0)
    rows = int(offsets[-1])
    if limit is not None:
        limit.exceeded.logical_or_(offsets[-1] > limit.rows)
        rows = min(rows, limit.rows)
        offsets.clamp_(max=rows)
    row = torch.empty_like(order)
    row[order] = torch.arange(len(order), device=order.device)
    order = order[:rows]
    return RoutingPlan(offsets, order // top_k, order % top_k, row.clamp(max=rows).view(tokens, top_k))


def combine_rows(rows: Tensor, plan: RoutingPlan, weights: Tensor | None = None) -> Tensor:
    """Return the sum of each token's rows [tokens, columns], in the order of its experts, summed in float32 at least.

    Args:
        rows: [rows, columns].
        weights: weight of each token's experts [tokens, top_k]; None: 1.
    """
    return sum_rows_at(rows, plan.row, weights)


def sum_rows_at(rows: Tensor, row_TK: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the sum of the rows at the indices of each token [tokens, columns], in order, in float32 at least.

    Args:
        rows: [rows, columns].
        row_TK: indices; those of at least `rows` add nothing [tokens, K].
        weights: factor of each index [tokens, K]; None: 1.
    """
    if use_fused("sum over experts", rows, weights):
        return sum_rows(rows, row_TK, weights)
    wide = wide_dtype(rows)
    padded = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
    total = torch.zeros(len(row_TK), rows.shape[1], dtype=wide, device=rows.device)
    for slot in range(row_TK.shape[1]):
        part = padded[row_TK[:, slot].clamp(max=len(rows))].to(wide)
        if weights is not None:
            part = part * weights[:, slot : slot + 1]
        total += part
    return total.to(rows.dtype)
