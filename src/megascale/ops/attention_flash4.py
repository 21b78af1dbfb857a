"""FlashAttention-4 for Hopper and newer (package flash-attn-4), compiled when first used: on views of the fused QKV
output, gradients written straight into one [q | k | v] tensor, which `split_qkv` takes without a copy.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor

from megascale import torch_private
from megascale.ops import dispatch
from megascale.ops.rope import empty_gradients


@functools.cache
def _library() -> Any:
    from flash_attn.cute import interface  # raises ImportError where it is not installed: whoever asked is told so

    # Its compiler warns of the package's own arguments at each kernel, on every rank.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"cutlass\.")
    return interface


def _mask(window: int | None) -> dict[str, Any]:
    # FlashAttention counts the tokens before the query; the query itself comes on top.
    return {"causal": True, "window_size_left": None if window is None else window - 1}


def _batch_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """[S, B, N, D] as [B, S, N, D], the same memory."""
    return tuple(t.transpose(0, 1) for t in tensors)


@torch_private.call_directly
class _FlashAttention4(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        S, B, N, D = q.shape
        out = torch.empty((S, B, N, D), dtype=q.dtype, device=q.device)
        lse = torch.empty((B, N, S), dtype=torch.float32, device=q.device)
        _library()._flash_attn_fwd(*_batch_first(q, k, v), **_mask(window), out=out.transpose(0, 1), lse=lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.window, ctx.deterministic = window, dispatch.deterministic()
        return out.view(S, B, N * D)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        d_out = upstream[0].contiguous().view(q.shape)
        grads = empty_gradients(q, k)
        given = dict(zip(("dq", "dk", "dv"), _batch_first(*grads), strict=True))
        given |= {**_mask(ctx.window), "deterministic": ctx.deterministic}
        _library()._flash_attn_bwd(*_batch_first(q, k, v, out, d_out), lse, **given)
        return *grads, None


def attend(q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, window: int | None) -> Tensor:
    """Causal attention [S, B, N*D], with or without a window; ImportError where flash-attn-4 is not installed."""
    return _FlashAttention4.apply(q_SBND, k_SBGD, v_SBGD, window)
