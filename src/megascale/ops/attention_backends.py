"""The kernels that `ops.attention` chooses among: each takes the views that `split_qkv` gives and returns
[S, B, N*D], and says by raising that it cannot serve a shape."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from megascale import torch_private
from megascale.errors import ConfigError, describe_install
from megascale.ops import dispatch

Backend = Callable[[Tensor, Tensor, Tensor, "int | None"], Tensor]


def causal_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """True where a query sees a key, [queries, keys]; the last query is aligned with the last key."""
    q = torch.arange(keys - queries, keys, device=device)[:, None]
    k = torch.arange(keys, device=device)[None, :]
    seen = k <= q
    return seen if window is None else seen & (k > q - window)


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """[S, B, N, D] as [B, N, S, D], the same memory."""
    return tuple([t.permute(1, 2, 0, 3) for t in tensors])


def _joined(out_SBND: Tensor) -> Tensor:
    """[S, B, N, D] as [S, B, N*D]; a view where the kernel kept the queries' order of dimensions."""
    S, B, N, D = out_SBND.shape
    return out_SBND.reshape(S, B, N * D)


def sdpa(q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, window: int | None) -> Tensor:
    """torch's own pick; windows and fewer queries than keys by an explicit mask. Runs everywhere."""
    S, T = q_SBND.shape[0], k_SBGD.shape[0]
    q, k, v = _heads_first(q_SBND, k_SBGD, v_SBGD)
    if (window is not None and window < T) or 1 < S < T:
        mask, causal = causal_mask(S, T, window, q.device), False
    else:
        mask, causal = None, S == T  # a lone query stands at the last key and sees all
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=_grouped(q, k))
    return _joined(out.permute(2, 0, 1, 3))


def _grouped(q: Tensor, k: Tensor) -> bool:
    return q.shape[1] != k.shape[1]


# torch's own context manager for these takes longer than a launch.
_SWITCHES = (
    (SDPBackend.CUDNN_ATTENTION, cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    (SDPBackend.FLASH_ATTENTION, cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (SDPBackend.EFFICIENT_ATTENTION, cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (SDPBackend.MATH, cuda.math_sdp_enabled, cuda.enable_math_sdp),
)


def _full_causal(kind: SDPBackend, q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, window: int | None) -> Tensor:
    if window is not None:
        raise ConfigError(
            f"kernels.attention={kind.name.split('_')[0].lower()!r} has no sliding window, which this layer has "
            f"({window}); set --kernels.attention=auto to choose a kernel a layer"
        )
    if kind is SDPBackend.CUDNN_ATTENTION and dispatch.deterministic():
        raise ConfigError("torch's cuDNN attention has no deterministic backward (kernels.deterministic)")
    q, k, v = _heads_first(q_SBND, k_SBGD, v_SBGD)
    before = [is_on() for _, is_on, _ in _SWITCHES]
    try:
        for one, _, turn in _SWITCHES:
            turn(one is kind)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=_grouped(q, k))
    except RuntimeError as error:
        if "No viable backend" not in str(error):
            raise
        raise ConfigError(
            f"kernels.attention={kind.name.split('_')[0].lower()!r}: torch has no such kernel for {q.device.type} "
            f"tensors, {str(q.dtype).removeprefix('torch.')}, heads of {q.shape[-1]}; set --kernels.attention=auto"
        ) from error
    finally:
        for on, (_, _, turn) in zip(before, _SWITCHES, strict=True):
            turn(on)
    return _joined(out.permute(2, 0, 1, 3))


@torch_private.called_directly
class _FlashWindow(torch.autograd.Function):
    """torch's built-in FlashAttention-2 with its window, which F.scaled_dot_product_attention does not pass on."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        q_BSND, k_BSGD, v_BSGD = (t.transpose(0, 1) for t in (q, k, v))
        S, T = q.shape[0], k.shape[0]
        # FlashAttention counts the tokens before the query; the query itself comes on top.
        out, lse, rng, unused, _ = torch_private.flash_attention_forward(
            q_BSND, k_BSGD, v_BSGD, None, None, S, T, 0.0, True, False, window_size_left=window - 1, window_size_right=0
        )
        ctx.save_for_backward(q_BSND, k_BSGD, v_BSGD, out, lse, rng, unused)
        ctx.window = window
        return _joined(out.transpose(0, 1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, rng, unused = ctx.saved_tensors
        d_out = grads[0].view(grads[0].shape[0], grads[0].shape[1], q.shape[2], q.shape[3]).transpose(0, 1)
        d_qkv = torch_private.flash_attention_backward(
            *(d_out, q, k, v, out, lse, None, None, q.shape[1], k.shape[1], 0.0, True, rng, unused),
            window_size_left=ctx.window - 1,
            window_size_right=0,
        )
        return *(t.transpose(0, 1) for t in d_qkv), None


def flash_window(q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, window: int | None) -> Tensor:
    """FlashAttention-2 with a window, on strided views."""
    if window is None:
        window = k_SBGD.shape[0]
    return _FlashWindow.apply(q_SBND, k_SBGD, v_SBGD, window)


@functools.cache
def _flex_mask(length: int, window: int | None, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def seen(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k <= q if window is None else (k <= q) & (q - k < window)

    return create_block_mask(seen, None, None, length, length, device=device)


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def flex(q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, window: int | None) -> Tensor:
    """torch's FlexAttention, compiled, with a block mask made once a shape."""
    q, k, v = _heads_first(q_SBND, k_SBGD, v_SBGD)
    mask = _flex_mask(q.shape[2], window, q.device)
    out = _compiled_flex()(q, k, v, block_mask=mask, enable_gqa=_grouped(q, k))
    return _joined(out.permute(2, 0, 1, 3))


def _packaged(name: str, extra: str, q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, window: int | None) -> Tensor:
    """A kernel of an optional package, from its module ops/attention_<extra>.py; ConfigError where it cannot be had."""
    if not q_SBND.is_cuda:
        raise ConfigError(f"kernels.attention={name!r} runs on CUDA devices; set --kernels.attention=auto")
    if q_SBND.shape[0] != k_SBGD.shape[0]:
        raise NotImplementedError("the training kernel takes as many keys as queries")
    module = importlib.import_module(f"megascale.ops.attention_{extra}")
    try:
        return module.attend(q_SBND, k_SBGD, v_SBGD, window)
    except ImportError as error:
        raise ConfigError(f"kernels.attention={name!r} cannot be had: {error}; {describe_install(extra)}") from error


BACKENDS: dict[str, Backend] = {
    "cudnn": functools.partial(_full_causal, SDPBackend.CUDNN_ATTENTION),
    "flash": functools.partial(_full_causal, SDPBackend.FLASH_ATTENTION),
    "flash_window": flash_window,
    "flex": flex,
    "cudnn_frontend": functools.partial(_packaged, "cudnn_frontend", "cudnn"),
    "flash4": functools.partial(_packaged, "flash4", "flash4"),
    "sdpa": sdpa,
}


def candidates(window: int | None) -> list[str]:
    """Backends worth measuring on CUDA for full attention (None) or a window, best guess first."""
    own = ["cudnn", "flash"] if window is None else ["flex", "flash_window"]
    return [*own, "cudnn_frontend", "flash4"]
