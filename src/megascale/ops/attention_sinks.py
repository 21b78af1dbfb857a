"""Attention with sinks: a learned logit per head that takes part in the softmax without a value (gpt-oss).

Let L be the log-sum-exp of a query's scores, s the sink of its head, and L' = log(exp L + exp s). The output y' with
the sink is the output y without it times exp(L - L') = sigmoid(L - s). Every kernel that returns L can therefore
compute y'. The backward of such a kernel recomputes the probabilities exp(x - L) of scores x, and subtracts <dy, y>
from their gradients. Given L' and y' in place of L and y, this backward computes the gradients with the sink. The
gradient of the sink is the sum over queries of -exp(s - L') <dy, y'>.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megascale import torch_private
from megascale.errors import ConfigError, describe_install
from megascale.ops import attention_documents as documents_module
from megascale.ops import dispatch
from megascale.ops.attention_backends import (
    attend_eagerly,
    check_equal_lengths,
    flex,
    load_flash4,
    make_causal_mask,
    merge_heads,
)
from megascale.ops.attention_documents import DocumentMask
from megascale.ops.rope import allocate_qkv_gradients

Gradients = tuple[Tensor, ...]  # gradients of q, k and v


@dataclass(frozen=True)
class LseKernel:
    """Kernel of causal attention that returns the log-sum-exp of the scores, without autograd.

    Attributes:
        forward: (q, k, v, window) -> (output [S, B, N, D], log-sum-exp [B, N, S], saved state for backward).
        backward: (dy, q, k, v, y, log-sum-exp, saved state, window) -> gradients of q, k and v.
    """

    forward: Callable[[Tensor, Tensor, Tensor, int | None], tuple[Tensor, Tensor, tuple[Tensor, ...]]]
    backward: Callable[..., Gradients]


@torch_private.call_directly
class _CorrectedAttention(torch.autograd.Function):
    """Attention with sinks, computed by a kernel without sinks and corrected by its log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks_N: Tensor, kernel: LseKernel, window: int | None
    ) -> Tensor:
        y_SBND, lse_BNS, state = kernel.forward(q, k, v, window)
        total_BNS = torch.logaddexp(lse_BNS, sinks_N.to(lse_BNS.dtype)[None, :, None])
        factor_SBN1 = torch.exp(lse_BNS - total_BNS).permute(2, 0, 1).unsqueeze(-1)
        y_SBND = (y_SBND * factor_SBN1).to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks_N, y_SBND, total_BNS, *state)
        ctx.kernel = kernel
        ctx.window = window
        return merge_heads(y_SBND)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks_N, y_SBND, total_BNS, *state = ctx.saved_tensors
        dy_SBND = upstream[0].contiguous().view(y_SBND.shape)
        gradients = ctx.kernel.backward(dy_SBND, q, k, v, y_SBND, total_BNS, tuple(state), ctx.window)
        wide = total_BNS.dtype
        products_SBN = (dy_SBND.to(wide) * y_SBND.to(wide)).sum(-1)
        sink_probability_BNS = torch.exp(sinks_N.to(wide)[None, :, None] - total_BNS)
        d_sinks_N = -(sink_probability_BNS.permute(2, 0, 1) * products_SBN).sum((0, 1))
        return *gradients, d_sinks_N.to(sinks_N.dtype), None, None


def attend_corrected(
    kernel: LseKernel, q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, window: int | None, sinks_N: Tensor
) -> Tensor:
    """Compute attention with sinks [S, B, N*D] by a kernel without sinks."""
    return _CorrectedAttention.apply(q_SBND, k_SBGD, v_SBGD, sinks_N, kernel, window)


def _flash_window_options(window: int | None) -> dict[str, int]:
    """Return FlashAttention-2's options for a window. FlashAttention's window does not count the query itself."""
    if window is None:
        return {}
    return {"window_size_left": window - 1, "window_size_right": 0}


def _run_flash(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    length = q.shape[0]
    q_BSND, k_BSGD, v_BSGD = (t.transpose(0, 1) for t in (q, k, v))
    y_BSND, lse_BNS, rng, unused, _ = torch_private.flash_attention_forward(
        q_BSND, k_BSGD, v_BSGD, None, None, length, length, 0.0, True, False, **_flash_window_options(window)
    )
    return y_BSND.transpose(0, 1), lse_BNS, (rng, unused)


def _run_flash_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, state: tuple[Tensor, ...], window: int | None
) -> Gradients:
    length = q.shape[0]
    dy_BSND, q_BSND, k_BSGD, v_BSGD, y_BSND = (t.transpose(0, 1) for t in (dy, q, k, v, y))
    rng, unused = state
    gradients = torch_private.flash_attention_backward(
        dy_BSND,
        q_BSND,
        k_BSGD,
        v_BSGD,
        y_BSND,
        lse,
        None,
        None,
        length,
        length,
        0.0,
        True,
        rng,
        unused,
        **_flash_window_options(window),
    )
    return tuple(gradient.transpose(0, 1) for gradient in gradients)


def _run_flash4(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    S, B, N, _ = q.shape
    y = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty((B, N, S), dtype=torch.float32, device=q.device)
    q_BSND, k_BSGD, v_BSGD = (t.transpose(0, 1) for t in (q, k, v))
    # FlashAttention's window does not count the query itself.
    window_size = None if window is None else window - 1
    load_flash4()._flash_attn_fwd(
        q_BSND, k_BSGD, v_BSGD, causal=True, window_size_left=window_size, out=y.transpose(0, 1), lse=lse
    )
    return y, lse, ()


def _run_flash4_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, state: tuple[Tensor, ...], window: int | None
) -> Gradients:
    gradients = allocate_qkv_gradients(q, k)
    dq, dk, dv = (t.transpose(0, 1) for t in gradients)
    q_BSND, k_BSGD, v_BSGD, y_BSND, dy_BSND = (t.transpose(0, 1) for t in (q, k, v, y, dy))
    load_flash4()._flash_attn_bwd(
        q_BSND,
        k_BSGD,
        v_BSGD,
        y_BSND,
        dy_BSND,
        lse,
        dq=dq,
        dk=dk,
        dv=dv,
        causal=True,
        window_size_left=None if window is None else window - 1,
        deterministic=dispatch.is_deterministic(),
    )
    return gradients


def _run_cudnn(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    from megascale.ops.attention_cudnn import attend_with_statistics

    y, statistics = attend_with_statistics(q, k, v, window)
    return y, statistics.squeeze(-1), ()


def _run_cudnn_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, state: tuple[Tensor, ...], window: int | None
) -> Gradients:
    from megascale.ops.attention_cudnn import attend_backward

    return attend_backward(dy, q, k, v, y, lse.unsqueeze(-1), window)


LSE_KERNELS: dict[str, LseKernel] = {
    "flash_window": LseKernel(_run_flash, _run_flash_backward),
    "flash4": LseKernel(_run_flash4, _run_flash4_backward),
    "cudnn_frontend": LseKernel(_run_cudnn, _run_cudnn_backward),
}
_EXTRAS = {"flash4": "flash4", "cudnn_frontend": "cudnn"}  # extra of megascale that installs a kernel's package
# Backends that support every combination of sinks, softcap and documents.
_GENERAL_BACKENDS = ("flex", "eager")
# Backends that are measured on CUDA, the likely fastest first.
SINK_CANDIDATES = ("flash4", "cudnn_frontend", "flash_window", "flex")


def explain_missing_sinks(name: str, softcap: float | None, has_documents: bool) -> str:
    """Return why a backend cannot compute attention with sinks, or "" if it can."""
    remedy = "set --kernels.attention=auto to choose a kernel per layer"
    if name in _GENERAL_BACKENDS:
        return ""
    if name not in LSE_KERNELS:
        return (
            f"kernels.attention={name!r} has no attention sinks, which this layer has (model.attention_sinks=true), "
            f"and returns no log-sum-exp to correct its output with; {remedy}"
        )
    if softcap is not None or has_documents:
        feature = "a softcap" if softcap is not None else "documents"
        return f"kernels.attention={name!r} has no attention sinks together with {feature}; {remedy}"
    return ""


def run_with_sinks(
    name: str,
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    window: int | None,
    documents: DocumentMask | None,
    softcap: float | None,
    sinks_N: Tensor,
) -> Tensor:
    """Run a backend with one sink per head. Raises ConfigError if the backend does not support the arguments."""
    reason = explain_missing_sinks(name, softcap, documents is not None)
    if reason:
        raise ConfigError(reason)
    if name == "eager":
        if documents is None:
            mask = make_causal_mask(q_SBND.shape[0], k_SBGD.shape[0], window, q_SBND.device)
        else:
            mask = documents.make_mask(window, len(q_SBND)).unsqueeze(1)
        return attend_eagerly(q_SBND, k_SBGD, v_SBGD, mask, softcap, sinks_N)
    if name == "flex" and documents is None:
        return flex(q_SBND, k_SBGD, v_SBGD, window, softcap, sinks_N)
    if name == "flex":
        assert documents is not None
        return documents_module.flex(q_SBND, k_SBGD, v_SBGD, window, documents, softcap, sinks_N)
    if not q_SBND.is_cuda:
        raise ConfigError(f"kernels.attention={name!r} runs on CUDA devices; set --kernels.attention=auto")
    check_equal_lengths(q_SBND, k_SBGD)
    try:
        return attend_corrected(LSE_KERNELS[name], q_SBND, k_SBGD, v_SBGD, window, sinks_N)
    except ImportError as error:
        extra = _EXTRAS.get(name, "")
        raise ConfigError(f"kernels.attention={name!r} is unavailable: {error}; {describe_install(extra)}") from error
