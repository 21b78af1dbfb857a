"""Experts with biases, or divided over ranks that read different tokens (parallel.experts_over=data or context).

The tensor-parallel ranks gather the sequence shards, as in `parallel/experts.py`, and divide the experts. The ranks of
the expert axis divide the experts of each tensor-parallel rank again. Tokens are sent along the expert axis in one of
two ways:

- If a token has experts on most ranks, all ranks gather the tokens of all ranks, and a reduce-scatter adds the results.
- Otherwise an all-to-all sends a token once to each rank that has one of its experts. A second all-to-all returns the
  token's sum over the experts of that rank.

Backward sends tokens and gradients in the same way. The loss is divided by the tokens of the global batch, so gradients
of experts are summed over the tokens of all ranks and never averaged.

In forward, tokens are sent in the form that the GEMMs read. In float8 that is half of bfloat16's bytes. Backward sends
tokens and gradients as they are, because the gradients of matrices read them. Results are sent in train.precision.

Suffixes name the dimensions of a tensor: S sequence on this rank, B micro-batch, H hidden size, K choices per token
(top_k), T tokens of the tensor-parallel group, R rows or ranks, C any columns.
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
from megascale.ops.linear import Operand
from megascale.ops.routing import RoutingPlan, plan_rows, sum_rows_at
from megascale.parallel.collectives import Axis, Pending, all_gather, reduce_scatter
from megascale.parallel.tensor import start_operand_gather


@dataclass(frozen=True)
class TokenGather:
    """Sends all tokens to all ranks of the expert axis; has the interface of `TokenDispatch`."""

    axis: Axis

    def send(self, x_TC: Tensor) -> Pending:
        """Gather one row per token from all ranks. The rows are ordered by rank, then token."""
        return all_gather(x_TC, self.axis)

    def return_results(self, y_RC: Tensor) -> Pending:
        """Return the sum over ranks of the results of this rank's tokens, [tokens, columns]."""
        return reduce_scatter(y_RC, self.axis)


@dataclass(frozen=True)
class TokenDispatch:
    """Sends a micro-batch's tokens to the ranks of the expert axis that have their experts, and returns the results.

    Attributes:
        row_tokens: token of each sent row [sent rows]; the rows are ordered by receiving rank, then token.
        rows_TR: index of the row with which a token is sent to a rank [tokens, ranks]; at least the number of sent rows
            if the token is not sent to that rank.
        sent_counts, received_counts: number of rows that this rank sends to, and receives from, each rank.
        choice_count: how often the received tokens have chosen an expert of this rank.
    """

    row_tokens: Tensor
    rows_TR: Tensor
    sent_counts: list[int]
    received_counts: list[int]
    choice_count: int
    axis: Axis

    @classmethod
    def plan(cls, indices_TK: Tensor, first: int, count: int, axis: Axis) -> TokenDispatch:
        """Return the dispatch of tokens that have chosen these experts. Collective over the expert axis.

        The host waits for the device once, to read the numbers of rows.

        Args:
            indices_TK: experts of each token [tokens, top_k].
            first: first expert of the axis's first rank.
            count: number of experts of each rank.
        """
        device, token_count = indices_TK.device, len(indices_TK)
        ranks = torch.arange(axis.size, device=device)
        owner_TK = torch.div(indices_TK - first, count, rounding_mode="floor")
        is_owner_RTK = owner_TK.unsqueeze(0) == ranks[:, None, None]
        is_sent_RT = is_owner_RTK.any(-1)
        # For each rank: the number of rows that it gets, and how often their tokens have chosen one of its experts.
        sent_sizes_R2 = torch.stack((is_sent_RT.sum(1), is_owner_RTK.sum((1, 2))), 1)
        received_sizes_R2 = torch.empty_like(sent_sizes_R2)
        transfer = axis.transfer("all_to_all", sent_sizes_R2.nbytes)
        dist.all_to_all_single(received_sizes_R2, sent_sizes_R2, group=axis.group)
        transfer.done()
        row_counts = is_sent_RT.flatten().cumsum(0)  # number of sent rows up to each entry of is_sent_RT
        sent_sizes, received_sizes = torch.stack((sent_sizes_R2, received_sizes_R2)).tolist()
        sent_counts = [row_count for row_count, _ in sent_sizes]
        sent_total = sum(sent_counts)
        rows_RT = torch.where(is_sent_RT.flatten(), row_counts - 1, sent_total).view(axis.size, token_count)
        # Row n is the first entry of is_sent_RT up to which there are n + 1 rows.
        entries = torch.searchsorted(row_counts, torch.arange(1, sent_total + 1, device=device))
        return cls(
            row_tokens=entries % max(1, token_count),
            rows_TR=rows_RT.t().to(torch.int32).contiguous(),
            sent_counts=sent_counts,
            received_counts=[row_count for row_count, _ in received_sizes],
            choice_count=sum(choice_count for _, choice_count in received_sizes),
            axis=axis,
        )

    def send(self, x_TC: Tensor) -> Pending:
        """Send rows of x to the ranks that need them. The received rows are ordered by sending rank, then token."""
        return self._exchange(x_TC[self.row_tokens], self.sent_counts, self.received_counts)

    def return_results(self, y_RC: Tensor) -> Pending:
        """Send back a result for each received row, and return the sum of each token's results [tokens, columns].

        Sums are computed in float32 at least, in the order of ranks.
        """
        return self._exchange(
            y_RC, self.received_counts, self.sent_counts, finish=lambda rows: sum_rows_at(rows, self.rows_TR)
        )

    def _exchange(
        self,
        rows: Tensor,
        sent_counts: list[int],
        received_counts: list[int],
        finish: Callable[[Tensor], Tensor] | None = None,
    ) -> Pending:
        """Send rows by an all-to-all, and apply `finish` to the received rows."""
        rows = rows.contiguous()
        out = rows.new_empty(sum(received_counts), *rows.shape[1:])
        transfer = self.axis.transfer("all_to_all", rows.nbytes)
        work = dist.all_to_all_single(out, rows, received_counts, sent_counts, group=self.axis.group, async_op=True)
        return Pending(out, work, transfer, partial(_finish_exchange, rows, out, finish))


def _send_operand(dispatch: TokenGather | TokenDispatch, x: Operand) -> Callable[[], Operand]:
    """Start to send an operand's rows, with their scales. Return a function that waits for the received operand."""
    sending = dispatch.send(x.data)
    if x.scale is None:
        return lambda: Operand(sending.wait())
    sending_scales = dispatch.send(x.scale)
    return lambda: Operand(sending.wait(), sending_scales.wait())


def _finish_exchange(sent_rows: Tensor, out: Tensor, finish: Callable[[Tensor], Tensor] | None) -> Tensor:
    """Return the result of an all-to-all. The argument keeps the sent rows alive until they have arrived."""
    return out if finish is None else finish(out)


@torch_private.call_directly
class _DispatchedExperts(torch.autograd.Function):
    """The function of `apply_expert_stacks`."""

    @staticmethod
    def forward(
        ctx: Any,
        x_SBH: Tensor,
        weights_SBK: Tensor,
        args: tuple[Tensor, ExpertStacks, Axis, Axis, bool],
        *tracked_parameters: Tensor | None,
    ) -> Tensor:
        indices_SBK, stacks, tensor_axis, expert_axis, gathers_tokens = args
        wait_for_x = start_operand_gather(stacks.gemms.prepare(x_SBH), tensor_axis, all_gather)
        gathering_weights = all_gather(weights_SBK, tensor_axis)
        gathering_indices = all_gather(indices_SBK, tensor_axis)
        local_expert_count = stacks.in_matrices.shape[0]
        first_expert = tensor_axis.rank * local_expert_count * expert_axis.size  # of this tensor-parallel rank
        indices_TK = gathering_indices.wait().flatten(0, 1)
        weights_TK = gathering_weights.wait().flatten(0, 1)
        x = wait_for_x()
        shape = x.data.shape
        x = x.flatten_rows()
        dispatch: TokenGather | TokenDispatch | None = None
        if expert_axis.size > 1:
            if gathers_tokens:
                dispatch = TokenGather(expert_axis)
            else:
                dispatch = TokenDispatch.plan(indices_TK, first_expert, local_expert_count, expert_axis)
            sending = [dispatch.send(values) for values in (weights_TK, indices_TK)]
            wait_for_x = _send_operand(dispatch, x)
            weights_TK, indices_TK = (pending.wait() for pending in sending)
            x = wait_for_x()
        expert_count = local_expert_count * tensor_axis.size * expert_axis.size
        row_count = dispatch.choice_count if isinstance(dispatch, TokenDispatch) else None
        first_expert += expert_axis.rank * local_expert_count  # now of this rank
        plan = plan_rows(indices_TK, first_expert, local_expert_count, weights_TK, expert_count, rows=row_count)
        y_TH, inner = run_expert_stacks(x, weights_TK, plan, stacks)
        if dispatch is not None:
            y_TH = dispatch.return_results(y_TH).wait()
        ctx.args = stacks, tensor_axis, dispatch
        ctx.save_for_backward(x_SBH, weights_TK, inner, plan.offsets, plan.row_tokens, plan.row_slots, plan.rows_TK)
        return reduce_scatter(y_TH.view(shape), tensor_axis).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        stacks, tensor_axis, dispatch = ctx.args
        x_SBH, weights_TK, inner, *plan_tensors = ctx.saved_tensors
        gathering_dy = all_gather(grads[0], tensor_axis)
        gathering_x = all_gather(x_SBH, tensor_axis)
        dy = gathering_dy.wait()
        dy_TH = dy.flatten(0, 1)
        x_TH = gathering_x.wait().flatten(0, 1)
        sending_x: Pending | None = None
        if dispatch is not None:
            sending_dy = dispatch.send(dy_TH)
            sending_x = dispatch.send(x_TH)
            dy_TH = sending_dy.wait()
        plan = RoutingPlan(*plan_tensors)
        row_gradients = run_expert_stacks_backward(dy_TH, weights_TK, inner, plan, stacks)
        dx_TH, d_weights_TK = row_gradients.x_TH, row_gradients.weights_TK
        returning: list[Pending] = []
        if dispatch is not None:
            # The GEMMs of the parameters' gradients hide these transfers.
            returning = [dispatch.return_results(gradient) for gradient in (d_weights_TK, dx_TH)]
        if sending_x is not None:
            x_TH = sending_x.wait()
        d_parameters = add_stack_gradients(row_gradients, x_TH, weights_TK, plan, stacks)
        if returning:
            d_weights_TK, dx_TH = (pending.wait() for pending in returning)
        scattering_weights = reduce_scatter(d_weights_TK.view(*dy.shape[:2], -1), tensor_axis)
        dx_SBH = reduce_scatter(dx_TH.view(dy.shape), tensor_axis).wait()
        return dx_SBH, scattering_weights.wait(), None, *d_parameters


def apply_expert_stacks(
    x_SBH: Tensor,
    weights_SBK: Tensor,
    indices_SBK: Tensor,
    stacks: ExpertStacks,
    tensor_axis: Axis,
    expert_axis: Axis,
    gathers_tokens: bool,
) -> Tensor:
    """Return the weighted sum of the results of each token's experts, [s/t, b, h]. Two axes may divide the experts.

    Args:
        x_SBH: this rank's tokens [s/t, b, h].
        weights_SBK, indices_SBK: weights and experts of these tokens [s/t, b, top_k].
        tensor_axis: ranks that divide the tokens and the experts.
        expert_axis: ranks that read different tokens, and divide the experts of a tensor-parallel rank.
        gathers_tokens: whether the ranks of the expert axis gather all tokens, instead of an all-to-all.
    """
    parameters = [get_tracked(x_SBH, parameter) for parameter in stacks.parameters]
    args = indices_SBK, stacks, tensor_axis, expert_axis, gathers_tokens
    y: Tensor = _DispatchedExperts.apply(x_SBH, weights_SBK, args, *parameters)
    return y
