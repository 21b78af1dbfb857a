"""Experts with biases, or divided over ranks that read different tokens (parallel.experts_over=data or context).

The tensor-parallel ranks gather the sequence shards, as in `parallel/experts.py`. Each of them is responsible for a
part of the experts, which the ranks of the expert axis divide again. Tokens reach those ranks in one of two ways. If a
token has experts on most ranks, all ranks gather the tokens of all, and a reduce-scatter adds the sums up. Otherwise a
token goes once, by an all-to-all, to each rank that has one of its experts, and its sum over that rank's experts comes
back. Backward mirrors this and sends tokens again. The loss is divided by the tokens of the global batch, so gradients
of experts are sums over the tokens of all ranks, and are never divided by a number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megascale import torch_private
from megascale.ops.biased_experts import (
    ExpertStacks,
    run_expert_stacks,
    run_expert_stacks_backward,
)
from megascale.ops.gradient_sink import tracked
from megascale.ops.routing import RoutingPlan, plan_rows, wide_dtype
from megascale.parallel.collectives import Axis, all_gather, reduce_scatter


@dataclass(frozen=True)
class Gather:
    """Way of all tokens to all ranks of the expert axis and back; it has the interface of `Dispatch`."""

    axis: Axis

    def send(self, x_TC: Tensor) -> Tensor:
        """Return the rows of all ranks, by rank, then token."""
        return all_gather(x_TC, self.axis).wait()

    def give_back(self, y_RC: Tensor, tokens: int) -> Tensor:
        """Return the sum over ranks of the results of this rank's tokens."""
        return reduce_scatter(y_RC, self.axis).wait()


@dataclass(frozen=True)
class Dispatch:
    """Way of a micro-batch's tokens to the ranks of the expert axis that need them, and back.

    Attributes:
        token: token of each sent row, by receiving rank, then token [sent rows].
        sent, received: rows that this rank sends to, and receives from, each rank.
        axis: the expert axis.
    """

    token: Tensor
    sent: list[int]
    received: list[int]
    axis: Axis

    @classmethod
    def plan(cls, indices_TK: Tensor, first: int, count: int, axis: Axis) -> Dispatch:
        """Plan the way of tokens with these experts; rank r has experts from first + r * count. Waits for the device.

        Args:
            indices_TK: experts of each token [tokens, top_k].
        """
        ranks = torch.arange(axis.size, device=indices_TK.device)
        owner_TK = torch.div(indices_TK - first, count, rounding_mode="floor")
        is_sent_RT = (owner_TK.unsqueeze(0) == ranks[:, None, None]).any(-1)
        sizes = is_sent_RT.sum(1)
        received = torch.empty_like(sizes)
        transfer = axis.transfer("all_to_all", sizes.nbytes)
        dist.all_to_all_single(received, sizes, group=axis.group)
        transfer.done()
        return cls(is_sent_RT.nonzero()[:, 1], sizes.tolist(), received.tolist(), axis)

    def send(self, x_TC: Tensor) -> Tensor:
        """Send rows of x to the ranks that need them; returns the received rows, by sending rank, then token."""
        return self._exchange(x_TC[self.token], self.sent, self.received)

    def give_back(self, y_RC: Tensor, tokens: int) -> Tensor:
        """Send back a result for each received row; returns the sum of each token's results [tokens, columns].

        Sums are in float32 at least, in the order of ranks.
        """
        y_SC = self._exchange(y_RC, self.received, self.sent)
        total = torch.zeros(tokens, y_SC.shape[1], dtype=wide_dtype(y_SC), device=y_SC.device)
        start = 0
        for count in self.sent:
            part = slice(start, start + count)
            # A rank returns at most one row per token, so the order of additions does not matter.
            total.index_add_(0, self.token[part], y_SC[part].to(total.dtype))
            start += count
        return total.to(y_SC.dtype)

    def _exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        out = rows.new_empty(sum(received), *rows.shape[1:])
        transfer = self.axis.transfer("all_to_all", rows.nbytes)
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=self.axis.group)
        transfer.done()
        return out


@torch_private.call_directly
class _DispatchedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_SBH: Tensor,
        weights_SBK: Tensor,
        args: tuple[Tensor, ExpertStacks, Axis, Axis, bool],
        *tracked_parameters: Tensor | None,
    ) -> Tensor:
        indices_SBK, stacks, tensor, expert, gathers = args
        gathering_x = all_gather(x_SBH, tensor)
        gathering_weights = all_gather(weights_SBK, tensor)
        gathering_indices = all_gather(indices_SBK, tensor)
        count = stacks.into.shape[0]
        first = tensor.rank * count * expert.size
        indices_TK = gathering_indices.wait().flatten(0, 1)
        weights_TK = gathering_weights.wait().flatten(0, 1)
        x = gathering_x.wait()
        x_TH = x.flatten(0, 1)
        dispatch: Gather | Dispatch | None = None
        if expert.size > 1:
            dispatch = Gather(expert) if gathers else Dispatch.plan(indices_TK, first, count, expert)
            x_TH = dispatch.send(x_TH)
            weights_TK = dispatch.send(weights_TK)
            indices_TK = dispatch.send(indices_TK)
        total = count * tensor.size * expert.size
        plan = plan_rows(indices_TK, first + expert.rank * count, count, weights_TK, total)
        y_TH, inner = run_expert_stacks(x_TH, weights_TK, plan, stacks)
        if dispatch is not None:
            y_TH = dispatch.give_back(y_TH, x.shape[0] * x.shape[1])
        ctx.args = stacks, tensor, dispatch
        ctx.save_for_backward(x_SBH, weights_TK, inner, plan.offsets, plan.token, plan.slot, plan.row)
        return reduce_scatter(y_TH.view(x.shape), tensor).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        stacks, tensor, dispatch = ctx.args
        x_SBH, weights_TK, inner, *plan = ctx.saved_tensors
        gathering_dy = all_gather(grads[0], tensor)
        gathering_x = all_gather(x_SBH, tensor)
        dy_TH = gathering_dy.wait().flatten(0, 1)
        x = gathering_x.wait()
        x_TH = x.flatten(0, 1)
        if dispatch is not None:
            dy_TH = dispatch.send(dy_TH)
            x_TH = dispatch.send(x_TH)
        gradients = run_expert_stacks_backward(dy_TH, x_TH, weights_TK, inner, RoutingPlan(*plan), stacks)
        dx_TH, d_weights_TK = gradients.x_TH, gradients.weights_TK
        if dispatch is not None:
            tokens = x.shape[0] * x.shape[1]
            dx_TH = dispatch.give_back(dx_TH, tokens)
            d_weights_TK = dispatch.give_back(d_weights_TK, tokens)
        scattering_weights = reduce_scatter(d_weights_TK.view(*x.shape[:2], -1), tensor)
        dx_SBH = reduce_scatter(dx_TH.view(x.shape), tensor).wait()
        return dx_SBH, scattering_weights.wait(), None, *gradients.parameters


def apply_expert_stacks(
    x_SBH: Tensor,
    weights_SBK: Tensor,
    indices_SBK: Tensor,
    stacks: ExpertStacks,
    tensor: Axis,
    expert: Axis,
    gathers: bool,
) -> Tensor:
    """Return the weighted sum of each token's experts, [s/t, b, h].

    Args:
        x_SBH: this rank's tokens [s/t, b, h].
        weights_SBK, indices_SBK: weights and experts of these tokens [s/t, b, top_k].
        stacks: this rank's experts.
        tensor: the ranks that divide the tokens and the experts.
        expert: the ranks that read other tokens and divide the experts of a tensor-parallel rank.
        gathers: whether all of those ranks gather the tokens of all.
    """
    parameters = [tracked(x_SBH, parameter) for parameter in stacks.parameters]
    args = indices_SBK, stacks, tensor, expert, gathers
    y: Tensor = _DispatchedExperts.apply(x_SBH, weights_SBK, args, *parameters)
    return y
