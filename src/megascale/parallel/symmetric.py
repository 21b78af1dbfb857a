"""Products fused with their collective over symmetric memory: a copy from a peer runs under the product before it.

A thin layer over torch's micro-pipelined collectives (`torch.distributed._symmetric_memory`), which cut the gather or
the scatter into one piece a rank and alternate two streams (MegaScale section 3.2, Figure 3c; Flux, arXiv 2406.06858,
for what chunking costs). No multicast is used. One workspace a group: two of these never run at once on one group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megascale.core import calls
from megascale.parallel.collectives import Axis


def prepare(axis: Axis, workspace_bytes: int, device: torch.device) -> str | None:
    """Make the group's workspace, collectively; None if fused products work here, else why not, on every rank alike.

    Args:
        workspace_bytes: of the largest message that will be asked for (a scatter needs two chunks at once).
    """
    if axis.size == 1:
        return "one rank has nobody to exchange with"
    if device.type != "cuda":
        return f"{device.type} tensors have no symmetric memory"
    reason = ""
    try:
        from torch.distributed._symmetric_memory import get_symm_mem_workspace

        get_symm_mem_workspace(axis.group.group_name, min_size=workspace_bytes)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    # All or none: a rank that fused alone would wait for ever.
    reasons: list[Any] = [None] * axis.size
    dist.all_gather_object(reasons, reason, group=axis.group)
    return next((f"rank {r} of the group: {text}" for r, text in enumerate(reasons) if text), None)


def gather_and_consume(
    x: torch.Tensor, axis: Axis, consume: Callable[[torch.Tensor, int], None], keep: bool
) -> torch.Tensor:
    """All-gather x [n, ...] on dimension 0, calling consume(shard, rank) for each rank's shard as it arrives.

    Returns the gathered tensor [size * n, ...]; with keep=False this rank's own part of it stays unwritten.
    """
    from torch.distributed import _symmetric_memory as symmetric

    x = x.contiguous()
    whole = x.new_empty((axis.size * x.shape[0], *x.shape[1:]))
    call = calls.current.begin(axis.name, "fused_gather", whole.nbytes)
    symmetric._pipelined_all_gather_and_consume(x, consume, whole, axis.group.group_name, ag_out_needed=keep)
    calls.current.done(call)
    return whole


def produce_and_scatter(
    axis: Axis, produce: Callable[[int, torch.Tensor], None], shape: tuple[int, ...], like: torch.Tensor
) -> torch.Tensor:
    """Reduce-scatter partial sums that are made piece by piece.

    produce(rank, out) writes this rank's partial result for `rank` into out, of `shape`. Returns the sum over ranks
    of what they made for this rank: partials travel in their own type and are summed in one pass.
    """
    from torch.distributed import _symmetric_memory as symmetric

    stack = like.new_empty((axis.size * shape[0], *shape[1:]))
    call = calls.current.begin(axis.name, "fused_scatter", stack.nbytes)
    symmetric._pipelined_produce_and_all2all(produce, stack, axis.group.group_name)
    calls.current.done(call)
    return stack.view(axis.size, *shape).sum(0)
