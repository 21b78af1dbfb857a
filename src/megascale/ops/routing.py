"""Routing of tokens to experts: scores, selection, and the plan of rows that grouped GEMMs read.

All results are deterministic: sums use no atomic additions, and ties go to the expert with the lowest index. No token
is dropped.
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
from megascale.ops.routing_kernels import count_choices, select_top_experts, sort_choices, split_float32, sum_rows


def get_wide_dtype(x: Tensor) -> torch.dtype:
    """Return the type in which the router computes: float32, or float64 for float64 models."""
    return torch.promote_types(x.dtype, torch.float32)


class _RouterLinear(torch.autograd.Function):
    """Logits x @ weight.T in float32 at least, with a weight gradient that is not rounded to the weight's type.

    x and weight stay bfloat16, because the GEMM computes products and sums of bfloat16 numbers in float32.
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
            return _RouterLinear._multiply_summands(x, weight, split_float32(dy_TE.contiguous()))
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
    def _multiply_summands(x: Tensor, weight: Tensor, summands_TP: Tensor) -> Any:
        """Return the results of backward, given dy as three bfloat16 summands [tokens, 3 * experts]."""
        x_TH = x.flatten(0, -2)
        dx = (summands_TP @ weight.detach().repeat(3, 1)).view(x.shape)
        if not weight.requires_grad:
            return dx, None, None
        summand_gradients = multiply_wide(summands_TP.t(), x_TH)
        gradient = summand_gradients.view(3, *weight.shape).sum(0)
        sink = get_sink(weight)
        if sink is None:
            return dx, gradient.to(weight.dtype), None
        sink.main_grad.add_(gradient)
        sink.ready()
        return dx, None, None


def compute_router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Return the logits [..., experts] of tokens x [..., h] in float32 or wider. The weight is [experts, h]."""
    logits: Tensor = _RouterLinear.apply(x, get_tracked(x, weight), (weight,))
    return logits


def score_experts(logits: Tensor, settings: ExpertsConfig) -> Tensor:
    """Return the experts' scores [..., experts], in the type of the logits."""
    if settings.scores == "sigmoid":
        return torch.sigmoid(logits)
    return torch.softmax(logits, -1)


@torch.no_grad()
def select_experts(scores: Tensor, settings: ExpertsConfig, bias: Tensor | None = None) -> Tensor:
    """Return the experts of each token [..., top_k], the best first. Ties go to the lowest index.

    With a group limit only the experts of the best groups of each token can be selected. The score of a group is the
    sum of its two best scores (DeepSeek-V3).

    Args:
        scores: [..., experts].
        bias: added to the scores for the selection only [experts].
    """
    has_group_limit = settings.group_limit is not None and settings.group_limit < settings.groups
    if not has_group_limit and use_fused("selection of experts", scores, bias):
        indices_TK = select_top_experts(scores.flatten(0, -2).contiguous(), bias, settings.top_k)
        return indices_TK.view(*scores.shape[:-1], settings.top_k)
    selection_scores = scores
    if bias is not None:
        selection_scores = scores + bias.to(scores.dtype)
    if has_group_limit:
        grouped = selection_scores.unflatten(-1, (settings.groups, -1))
        group_scores = grouped.sort(dim=-1, descending=True, stable=True).values[..., :2].sum(-1)
        groups = group_scores.sort(dim=-1, descending=True, stable=True).indices[..., : settings.group_limit]
        is_allowed = (groups.unsqueeze(-1) == torch.arange(settings.groups, device=groups.device)).any(-2)
        selection_scores = grouped.masked_fill(~is_allowed.unsqueeze(-1), -torch.inf).flatten(-2)
    return selection_scores.sort(dim=-1, descending=True, stable=True).indices[..., : settings.top_k].contiguous()


def weigh_experts(scores: Tensor, indices: Tensor, settings: ExpertsConfig) -> Tensor:
    """Return the weights [..., top_k] of each token's experts."""
    weights = scores.gather(-1, indices)
    if settings.normalize == "selected":
        total = weights.sum(-1, keepdim=True)
        if settings.scores == "sigmoid" or settings.bias_rate:
            # All sigmoids of a token may underflow to 0, as may softmax scores of experts that are selected by bias.
            total = total + 1e-20
        weights = weights / total
    return weights * settings.scaling


def count_choices_by_sequence(indices: Tensor, experts: int) -> Tensor:
    """Return how often each sequence chose each expert, int64 [b, experts].

    Args:
        indices: experts of each token [s, b, top_k].
    """
    is_expert = indices.unsqueeze(-1) == torch.arange(experts, device=indices.device)
    return is_expert.sum((0, 2))


def count_choices_by_expert(scores: Tensor, indices: Tensor) -> Tensor:
    """Return how often each expert was chosen, int64 [experts].

    Args:
        scores: [s, b, experts]; only the number of experts and the device are used.
        indices: experts of each token [s, b, top_k].
    """
    experts = scores.shape[-1]
    if use_fused("counts of experts", scores):
        return count_choices(indices.flatten(0, -2), experts)
    return count_choices_by_sequence(indices, experts).sum(0)


@dataclass(frozen=True)
class RoutingPlan:
    """Rows that a rank's experts process, sorted by expert and then by token.

    Each pair of a token and one of the token's experts on this rank has a row. A slot is the index of an expert among
    the token's experts.

    Attributes:
        offsets: first row of each expert and end of the last expert, int32 [experts + 1].
        row_tokens: token of each row, int32 [rows].
        row_slots: slot of each row, int32 [rows].
        rows_TK: row of each token's slot, or at least `rows` if another rank has the expert, int32 [tokens, top_k].
    """

    offsets: Tensor
    row_tokens: Tensor
    row_slots: Tensor
    rows_TK: Tensor


@dataclass(frozen=True)
class RowLimit:
    """Fixed number of rows in work that a CUDA graph captures, because a graph cannot allocate by a number it computes.

    Attributes:
        rows: capacity. Choices beyond it get no row.
        exceeded: flag on the device, set to true if choices got no row, bool [].
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
    """Return the plan of rows for experts `first:first + count`.

    The host waits for the number of rows, unless `rows` or `limit` is given, or the range has all experts of the layer.

    Args:
        indices: experts of each token [tokens, top_k].
        weights: weights of these experts [tokens, top_k], whose device and type decide whether kernels run.
        experts: number of experts of the layer.
        limit: fixed number of rows. Rows beyond the last offset are then undefined.
        rows: number of choices of these experts, if the host knows it.
    """
    tokens, top_k = indices.shape
    if use_fused("plan of experts", weights):
        capacity = tokens * top_k
        if limit is not None:
            capacity = limit.rows
        offsets, token, slot, row, needed = sort_choices(indices.contiguous(), first, count, capacity)
        if limit is not None:
            limit.exceeded.logical_or_(needed > limit.rows)
        elif count < experts:
            if rows is None:
                rows = int(needed)
            token = token[:rows]
            slot = slot[:rows]
        return RoutingPlan(offsets, token, slot, row)
    # Index of each choice's expert among these experts, or `count` for an expert of another rank.
    local_experts = indices.reshape(-1) - first
    local_experts = torch.where((local_experts >= 0) & (local_experts < count), local_experts, count)
    order = local_experts.argsort(stable=True)
    experts_range = torch.arange(count, device=order.device)
    sizes = (local_experts.unsqueeze(0) == experts_range.unsqueeze(1)).sum(1)
    offsets = torch.zeros(count + 1, dtype=torch.int32, device=order.device)
    offsets[1:] = sizes.cumsum(0)
    rows = int(offsets[-1])
    if limit is not None:
        limit.exceeded.logical_or_(offsets[-1] > limit.rows)
        rows = min(rows, limit.rows)
        offsets.clamp_(max=rows)
    # `order` lists the choices by row. Invert it to get the row of each choice.
    row = torch.empty_like(order, dtype=torch.int32)
    row[order] = torch.arange(len(order), dtype=torch.int32, device=order.device)
    order = order[:rows].to(torch.int32)
    return RoutingPlan(offsets, order // top_k, order % top_k, row.clamp(max=rows).view(tokens, top_k))


def combine_rows(rows: Tensor, plan: RoutingPlan, weights: Tensor | None = None) -> Tensor:
    """Return the sum of each token's rows [tokens, columns], added in the order of slots in float32 at least.

    Args:
        rows: rows of the plan [rows, columns].
        weights: weights of each token's experts [tokens, top_k]; None: all 1.
    """
    return sum_rows_at(rows, plan.rows_TK, weights)


def sum_rows_at(rows: Tensor, row_TK: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return for each token the sum of rows[row_TK], [tokens, columns], added in order in float32 at least.

    Args:
        rows: [rows, columns].
        row_TK: indices of rows [tokens, K]. An index of at least `rows` adds nothing.
        weights: factor of each row [tokens, K]; None: all 1.
    """
    if use_fused("sum over experts", rows, weights):
        return sum_rows(rows, row_TK, weights)
    wide = get_wide_dtype(rows)
    padded = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
    total = torch.zeros(len(row_TK), rows.shape[1], dtype=wide, device=rows.device)
    for slot in range(row_TK.shape[1]):
        summand = padded[row_TK[:, slot].clamp(max=len(rows))].to(wide)
        if weights is not None:
            summand = summand * weights[:, slot : slot + 1]
        total += summand
    return total.to(rows.dtype)
