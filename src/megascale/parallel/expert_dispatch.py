"""Experts with biases, or divided over ranks that read different tokens (parallel.experts_over=data or context).

The tensor-parallel ranks gather the sequence shards, as in `parallel/experts.py`. Each of them is responsible for a
part of the experts, which the ranks of the expert axis divide again. Tokens reach those ranks in one of two ways. If a
token has experts on most ranks, all ranks gather the tokens of all, and a reduce-scatter adds the sums up. Otherwise a
token goes once, by an all-to-all, to each rank that has one of its experts, and its sum over that rank's experts comes
back. Backward mirrors this and sends tokens again. The loss is divided by the tokens of the global batch, so gradients
of experts are sums over the tokens of all ranks, and are never divided by a number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megascale import torch_private
from megascale.ops.biased_experts import (
    ExpertStacks,
    add_stack_gradients,
    run_expert_stacks,
    run_expert_stacks_backward,
)
from megascale.ops.gradient_sink import get_tracked
from megascale.ops.routing import RoutingPlan, plan_rows, sum_rows_at
from megascale.parallel.collectives import Axis, Pending, all_gather, reduce_scatter


@dataclass(frozen=True)
class Gather:
    """Way of all tokens to all ranks of the expert axis and back; it has the interface of `Dispatch`."""

    axis: Axis

    def send(self, x_TC: Tensor) -> Pending:
        """Send this rank's tokens; returns the rows of all ranks, by rank, then token."""
        return all_gather(x_TC, self.axis)

    def give_back(self, y_RC: Tensor) -> Pending:
        """Return the sum over ranks of the results of this rank's tokens."""
        return reduce_scatter(y_RC, self.axis)


@dataclass(frozen=True)
class Dispatch:
    """Way of a micro-batch's tokens to the ranks of the expert axis that need them, and back.

    Attributes:
        token: token of each sent row, by receiving rank, then token [sent rows].
        row_TR: sent row of each token to each rank; at least `sent rows` where there is none [tokens, ranks].
        sent, received: rows that this rank sends to, and receives from, each rank.
        choices: choices of this rank's experts among the received rows.
        axis: the expert axis.
    """

    token: Tensor
    row_TR: Tensor
    sent: list[int]
    received: list[int]
    choices: int
    axis: Axis

    @classmethod
    def plan(cls, indices_TK: Tensor, first: int, count: int, axis: Axis) -> Dispatch:
        """Plan the way of tokens with these experts; rank r has experts from first + r * count.

        Waits for the device once, to read the numbers of rows.

        Args:
            indices_TK: experts of each token [tokens, top_k].
        """
        device, tokens = indices_TK.device, len(indices_TK)
        ranks = torch.arange(axis.size, device=device)
        owner_TK = torch.div(indices_TK - first, count, rounding_mode="floor")
        is_owner_RTK = owner_TK.unsqueeze(0) == ranks[:, None, None]
        is_sent_RT = is_owner_RTK.any(-1)
        sizes_R2 = torch.stack((is_sent_RT.sum(1), is_owner_RTK.sum((1, 2))), 1)
        received_R2 = torch.empty_like(sizes_R2)
        transfer = axis.transfer("all_to_all", sizes_R2.nbytes)
        dist.all_to_all_single(received_R2, sizes_R2, group=axis.group)
        transfer.done()
        end = is_sent_RT.flatten().cumsum(0)
        sizes, received_sizes = torch.stack((sizes_R2, received_R2)).tolist()
        sent = [rows for rows, _ in sizes]
        row = torch.where(is_sent_RT.flatten(), end - 1, sum(sent)).view(axis.size, tokens)
        # The n-th sent row is the first entry that ends n rows.
        entry = torch.searchsorted(end, torch.arange(1, sum(sent) + 1, device=device))
        received = [rows for rows, _ in received_sizes]
        choices = sum(count for _, count in received_sizes)
        return cls(entry % max(1, tokens), row.t().to(torch.int32).contiguous(), sent, received, choices, axis)

    def send(self, x_TC: Tensor) -> Pending:
        """Send rows of x to the ranks that need them; returns the received rows, by sending rank, then token."""
        return self._exchange(x_TC[self.token], self.sent, self.received)

    def give_back(self, y_RC: Tensor) -> Pending:
        """Send back a result for each received row; returns the sum of each token's results [tokens, columns].

        Sums are in float32 at least, in the order of ranks.
        """
        return self._exchange(y_RC, self.received, self.sent, finish=lambda rows: sum_rows_at(rows, self.row_TR))

    def _exchange(
        self,
        rows: Tensor,
        sent: list[int],
        received: list[int],
        finish: Callable[[Tensor], Tensor] | None = None,
    ) -> Pending:
        rows = rows.contiguous()
        out = rows.new_empty(sum(received), *rows.shape[1:])
        transfer = self.axis.transfer("all_to_all", rows.nbytes)
        work = dist.all_to_all_single(out, rows, received, sent, group=self.axis.group, async_op=True)
        return Pending(out, work, transfer, partial(_end_exchange, rows, out, finish))


def _end_exchange(sent: Tensor, out: Tensor, finish: Callable[[Tensor], Tensor] | None) -> Tensor:
    """Return the result of an exchange. It keeps the sent rows, which must live until they have arrived."""
    return out if finish is None else finish(out)


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
        count = stacks.in_matrices.shape[0]
        first = tensor.rank * count * expert.size
        indices_TK = gathering_indices.wait().flatten(0, 1)
        weights_TK = gathering_weights.wait().flatten(0, 1)
        x = gathering_x.wait()
        x_TH = x.flatten(0, 1)
        dispatch: Gather | Dispatch | None = None
        if expert.size > 1:
            dispatch = Gather(expert) if gathers else Dispatch.plan(indices_TK, first, count, expert)
            sending = [dispatch.send(part) for part in (weights_TK, indices_TK, x_TH)]
            weights_TK, indices_TK, x_TH = (pending.wait() for pending in sending)
        total = count * tensor.size * expert.size
        rows = dispatch.choices if isinstance(dispatch, Dispatch) else None
        plan = plan_rows(indices_TK, first + expert.rank * count, count, weights_TK, total, rows=rows)
        y_TH, inner = run_expert_stacks(x_TH, weights_TK, plan, stacks)
        if dispatch is not None:
            y_TH = dispatch.give_back(y_TH).wait()
        ctx.args = stacks, tensor, dispatch
        ctx.save_for_backward(x_SBH, weights_TK, inner, plan.offsets, plan.row_tokens, plan.row_slots, plan.rows_TK)
        return reduce_scatter(y_TH.view(x.shape), tensor).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        stacks, tensor, dispatch = ctx.args
        x_SBH, weights_TK, inner, *plan = ctx.saved_tensors
        gathering_dy = all_gather(grads[0], tensor)
        gathering_x = all_gather(x_SBH, tensor)
        dy = gathering_dy.wait()
        dy_TH = dy.flatten(0, 1)
        x_TH = gathering_x.wait().flatten(0, 1)
        sending_x: Pending | None = None
        if dispatch is not None:
            sending_dy = dispatch.send(dy_TH)
            sending_x = dispatch.send(x_TH)
            dy_TH = sending_dy.wait()
        routing_plan = RoutingPlan(*plan)
        rows = run_expert_stacks_backward(dy_TH, weights_TK, inner, routing_plan, stacks)
        dx_TH, d_weights_TK = rows.x_TH, rows.weights_TK
        returning: list[Pending] = []
        if dispatch is not None:
            # The gradients of the parameters hide this transfer.
            returning = [dispatch.give_back(part) for part in (d_weights_TK, dx_TH)]
        if sending_x is not None:
            x_TH = sending_x.wait()
        d_parameters = add_stack_gradients(rows, x_TH, weights_TK, routing_plan, stacks)
        if returning:
            d_weights_TK, dx_TH = (pending.wait() for pending in returning)
        scattering_weights = reduce_scatter(d_weights_TK.view(*dy.shape[:2], -1), tensor)
        dx_SBH = reduce_scatter(dx_TH.view(dy.shape), tensor).wait()
        return dx_SBH, scattering_weights.wait(), None, *d_parameters


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
    parameters = [get_tracked(x_SBH, parameter) for parameter in stacks.parameters]
    args = indices_SBK, stacks, tensor, expert, gathers
    y: Tensor = _DispatchedExperts.apply(x_SBH, weights_SBK, args, *parameters)
    return y
