"""Attention kernels (backends) among which `ops.attention` chooses.

A backend takes q [S, B, N, D], k and v [S, B, G, D] and the window, as views that `split_qkv` returns. The result is
[S, B, N*D]. A backend raises an exception for a shape that it does not support.
"""

from __future__ import annotations

import functools
import warnings
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
from megascale.ops.compiled_kernels import enable_kernel_cache
from megascale.ops.rope import allocate_attention_gradients

_MAX_FLEX_VERSIONS = 256  # compiled versions of FlexAttention in a process: shapes, masks, with and without gradients

Backend = Callable[[Tensor, Tensor, Tensor, "int | None"], Tensor]


def make_causal_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return the mask [queries, keys], true where a query sees a key. The last query is at the last key's position."""
    q = torch.arange(keys - queries, keys, device=device)[:, None]
    k = torch.arange(keys, device=device)[None, :]
    mask = k <= q
    if window is not None:
        mask &= k > q - window
    return mask


def view_heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """View [S, B, N, D] as [B, N, S, D]."""
    return tuple([t.permute(1, 2, 0, 3) for t in tensors])


def merge_heads(out_SBND: Tensor) -> Tensor:
    """Reshape [S, B, N, D] to [S, B, N*D]: a view if the kernel's output has the queries' order in memory."""
    S, B, N, D = out_SBND.shape
    return out_SBND.reshape(S, B, N * D)


def join_samples(x_SBND: Tensor) -> Tensor:
    """Return [S, B, N, D] as [B x S, N, D], sample after sample: a view for one sample, else a copy."""
    if x_SBND.shape[1] == 1:
        return x_SBND.squeeze(1)
    return x_SBND.transpose(0, 1).flatten(0, 1)


def separate_samples(x_TND: Tensor, batch: int) -> Tensor:
    """Return [B x S, N, D] as a view [S, B, N, D]."""
    return x_TND.unflatten(0, (batch, -1)).transpose(0, 1)


def sdpa(q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, window: int | None) -> Tensor:
    """Run torch's own choice of kernel, with an explicit mask for windows and fewer queries than keys."""
    S, T = q_SBND.shape[0], k_SBGD.shape[0]
    q, k, v = view_heads_first(q_SBND, k_SBGD, v_SBGD)
    if (window is not None and window < T) or 1 < S < T:
        mask = make_causal_mask(S, T, window, q.device)
        is_causal = False
    else:
        # A single query is at the last key's position and sees all keys.
        mask = None
        is_causal = S == T
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=_is_grouped(q, k))
    return merge_heads(out.permute(2, 0, 1, 3))


def check_equal_lengths(q_SBND: Tensor, k_SBGD: Tensor) -> None:
    """Raise NotImplementedError for a kernel whose causal mask aligns the first query with the first key."""
    if q_SBND.shape[0] != k_SBGD.shape[0]:
        raise NotImplementedError("the kernel takes as many keys as queries")


def _is_grouped(q: Tensor, k: Tensor) -> bool:
    return q.shape[1] != k.shape[1]


# Kernels of scaled_dot_product_attention, with the functions that read and set whether torch may use each. torch's own
# context manager for these switches takes longer than a launch.
_SWITCHES = (
    (SDPBackend.CUDNN_ATTENTION, cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    (SDPBackend.FLASH_ATTENTION, cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (SDPBackend.EFFICIENT_ATTENTION, cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (SDPBackend.MATH, cuda.math_sdp_enabled, cuda.enable_math_sdp),
)


def _run_sdpa_backend(
    sdpa_backend: SDPBackend, q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, window: int | None
) -> Tensor:
    """Run one kernel of scaled_dot_product_attention. Raises ConfigError for a window or an unsupported shape."""
    name = sdpa_backend.name.split("_")[0].lower()
    if window is not None:
        raise ConfigError(
            f"kernels.attention={name!r} has no sliding window, which this layer has ({window}); set "
            "--kernels.attention=auto to choose a kernel per layer"
        )
    if sdpa_backend is SDPBackend.CUDNN_ATTENTION and dispatch.is_deterministic():
        raise ConfigError("torch's cuDNN attention has no deterministic backward (kernels.deterministic)")
    check_equal_lengths(q_SBND, k_SBGD)
    q, k, v = view_heads_first(q_SBND, k_SBGD, v_SBGD)
    previous = [is_enabled() for _, is_enabled, _ in _SWITCHES]
    try:
        for backend, _, enable in _SWITCHES:
            enable(backend is sdpa_backend)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=_is_grouped(q, k))
    except RuntimeError as error:
        if "No viable backend" not in str(error):
            raise
        raise ConfigError(
            f"kernels.attention={name!r}: torch has no such kernel for {q.device.type} tensors, "
            f"{str(q.dtype).removeprefix('torch.')}, heads of {q.shape[-1]}; set --kernels.attention=auto"
        ) from error
    finally:
        for was_enabled, (_, _, enable) in zip(previous, _SWITCHES, strict=True):
            enable(was_enabled)
    return merge_heads(out.permute(2, 0, 1, 3))


@torch_private.call_directly
class _FlashWindow(torch.autograd.Function):
    """torch's built-in FlashAttention-2 with its window, which F.scaled_dot_product_attention does not pass on."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        q_BSND, k_BSGD, v_BSGD = (t.transpose(0, 1) for t in (q, k, v))
        S, T = q.shape[0], k.shape[0]
        # FlashAttention's window does not count the query itself.
        out, lse, rng, unused, _ = torch_private.flash_attention_forward(
            q_BSND, k_BSGD, v_BSGD, None, None, S, T, 0.0, True, False, window_size_left=window - 1, window_size_right=0
        )
        ctx.save_for_backward(q_BSND, k_BSGD, v_BSGD, out, lse, rng, unused)
        ctx.window = window
        return merge_heads(out.transpose(0, 1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, rng, unused = ctx.saved_tensors
        d_out = grads[0].view(grads[0].shape[0], grads[0].shape[1], q.shape[2], q.shape[3]).transpose(0, 1)
        d_qkv = torch_private.flash_attention_backward(
            d_out,
            q,
            k,
            v,
            out,
            lse,
            None,
            None,
            q.shape[1],
            k.shape[1],
            0.0,
            True,
            rng,
            unused,
            window_size_left=ctx.window - 1,
            window_size_right=0,
        )
        return *(t.transpose(0, 1) for t in d_qkv), None


def flash_window(q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, window: int | None) -> Tensor:
    """Run FlashAttention-2 with a window, on strided views."""
    if window is None:
        window = k_SBGD.shape[0]
    return _FlashWindow.apply(q_SBND, k_SBGD, v_SBGD, window)


@functools.cache
def _flex_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Any:
    """Return FlexAttention's block mask. The last query is at the last key's position."""
    from torch.nn.attention.flex_attention import create_block_mask

    first_query = keys - queries

    def is_visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if first_query:
            q = q + first_query
        is_causal = k <= q
        if window is None:
            return is_causal
        return is_causal & (q - k < window)

    return create_block_mask(is_visible, None, None, queries, keys, device=device)


@functools.cache
def get_compiled_flex() -> Callable[..., Any]:
    """Return torch's FlexAttention, compiled for static shapes.

    It raises an error instead of running uncompiled, which would keep all scores in memory.
    """
    from torch.nn.attention.flex_attention import flex_attention

    # `ops/dispatch.py` may have made torch deterministic before the compiler was imported. Set it again, because the
    # compiler has an option of its own.
    torch.use_deterministic_algorithms(
        torch.are_deterministic_algorithms_enabled(), warn_only=torch.is_deterministic_algorithms_warn_only_enabled()
    )
    torch_private.raise_recompile_limit(_MAX_FLEX_VERSIONS)
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


@functools.cache
def make_softcap(softcap: float) -> Callable[..., Tensor]:
    """Return FlexAttention's function that bounds scores. It is cached, because each function is compiled once."""

    def bound(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return bound


def flex(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    window: int | None,
    softcap: float | None = None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Run torch's FlexAttention, compiled, with a block mask per shape. For sinks see `flex_with_sinks`."""
    q, k, v = view_heads_first(q_SBND, k_SBGD, v_SBGD)
    mask = _flex_mask(q.shape[2], k.shape[2], window, q.device)
    bound = None if softcap is None else make_softcap(softcap)
    if sinks_N is not None:
        return flex_with_sinks(q, k, v, sinks_N, bound, mask)
    out = get_compiled_flex()(q, k, v, score_mod=bound, block_mask=mask, enable_gqa=_is_grouped(q, k))
    return merge_heads(out.permute(2, 0, 1, 3))


def flex_with_sinks(
    q_BNSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, sinks_N: Tensor, bound: Callable[..., Tensor] | None, mask: Any
) -> Tensor:
    """Run FlexAttention and scale its output by sigmoid(log-sum-exp - sink). Return [S, B, N*D].

    Args:
        bound: function that bounds scores (`make_softcap`); None: unbounded scores.
        mask: FlexAttention's block mask.
    """
    out, lse_BNS = get_compiled_flex()(
        q_BNSD,
        k_BGSD,
        v_BGSD,
        score_mod=bound,
        block_mask=mask,
        enable_gqa=_is_grouped(q_BNSD, k_BGSD),
        return_lse=True,
    )
    factor = torch.sigmoid(lse_BNS - sinks_N.to(lse_BNS.dtype)[None, :, None]).unsqueeze(-1)
    return merge_heads((out * factor).to(q_BNSD.dtype).permute(2, 0, 1, 3))


def eager(q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, window: int | None, softcap: float | None = None) -> Tensor:
    """Compute the scores of all queries and keys in memory, in at least float32, on any device."""
    mask = make_causal_mask(q_SBND.shape[0], k_SBGD.shape[0], window, q_SBND.device)
    return attend_eagerly(q_SBND, k_SBGD, v_SBGD, mask, softcap)


def attend_eagerly(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    mask: Tensor,
    softcap: float | None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Compute the scores of all queries and keys in memory, in at least float32. Return [S, B, N*D].

    Args:
        mask: true where a query sees a key; broadcasts to [batch, groups, heads of a group, queries, keys].
        sinks_N: one logit per head that takes part in the softmax without a value; None: no sinks.
    """
    wide = torch.promote_types(q_SBND.dtype, torch.float32)
    q, k, v = view_heads_first(q_SBND.to(wide), k_SBGD.to(wide), v_SBGD.to(wide))
    q = q.unflatten(1, (k.shape[1], -1))  # [batch, groups, heads of a group, queries, head size]
    scores = torch.matmul(q, k[:, :, None].transpose(-1, -2)) * q.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks_N is None:
        weights = scores.softmax(-1)
    else:
        weights = softmax_with_sinks(scores, sinks_N.to(wide))
    out = torch.matmul(weights, v[:, :, None]).flatten(1, 2)
    return merge_heads(out.permute(2, 0, 1, 3)).to(q_SBND.dtype)


def softmax_with_sinks(scores: Tensor, sinks_N: Tensor) -> Tensor:
    """Return the softmax over the keys' scores and the head's sink, without the sink's probability.

    Args:
        scores: [batch, groups, heads of a group, queries, keys].
    """
    sinks = sinks_N.view(*scores.shape[1:3], 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]


@functools.cache
def load_flash4() -> Any:
    """Return the module of FlashAttention-4. Raises ImportError without the package flash-attn-4."""
    enable_kernel_cache()
    from flash_attn.cute import interface

    # The package's compiler warns about the package's own code for each kernel, on every rank.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"cutlass\.")
    return interface


def _view_batch_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """View [S, B, N, D] as [B, S, N, D]."""
    return tuple(t.transpose(0, 1) for t in tensors)


@torch_private.call_directly
class _FlashAttention4(torch.autograd.Function):
    """FlashAttention-4 for Hopper and newer GPUs (package flash-attn-4), which is compiled at its first use.

    Forward reads views of the QKV projection. Backward writes all gradients into one [q | k | v] tensor, which the
    backward of `split_qkv` uses without a copy.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        S, B, N, D = q.shape
        out = torch.empty((S, B, N, D), dtype=q.dtype, device=q.device)
        lse = torch.empty((B, N, S), dtype=torch.float32, device=q.device)
        # FlashAttention's window does not count the query itself.
        ctx.mask_options = {"causal": True, "window_size_left": None if window is None else window - 1}
        ctx.deterministic = dispatch.is_deterministic()
        q_BSND, k_BSGD, v_BSGD, out_BSND = _view_batch_first(q, k, v, out)
        load_flash4()._flash_attn_fwd(q_BSND, k_BSGD, v_BSGD, **ctx.mask_options, out=out_BSND, lse=lse)
        ctx.save_for_backward(q, k, v, out, lse)
        return out.view(S, B, N * D)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        d_out = upstream[0].contiguous().view(q.shape)
        grads = allocate_attention_gradients(q, k)
        dq, dk, dv = _view_batch_first(*grads)
        load_flash4()._flash_attn_bwd(
            *_view_batch_first(q, k, v, out, d_out),
            lse,
            **ctx.mask_options,
            dq=dq,
            dk=dk,
            dv=dv,
            deterministic=ctx.deterministic,
        )
        return *grads, None


def _run_flash4(q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, window: int | None) -> Tensor:
    return _FlashAttention4.apply(q_SBND, k_SBGD, v_SBGD, window)


def _run_cudnn(q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, window: int | None) -> Tensor:
    from megascale.ops.attention_cudnn import attend

    return attend(q_SBND, k_SBGD, v_SBGD, window)


def _run_packaged(
    name: str, extra: str, run: Backend, q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, window: int | None
) -> Tensor:
    """Run a kernel of an optional package. Raises ConfigError if it is unavailable.

    Args:
        name: name of the backend.
        extra: extra of megascale that installs the package.
    """
    if not q_SBND.is_cuda:
        raise ConfigError(f"kernels.attention={name!r} runs on CUDA devices; set --kernels.attention=auto")
    try:
        return run(q_SBND, k_SBGD, v_SBGD, window)
    except ImportError as error:
        raise ConfigError(f"kernels.attention={name!r} is unavailable: {error}; {describe_install(extra)}") from error


BACKENDS: dict[str, Backend] = {
    "cudnn": functools.partial(_run_sdpa_backend, SDPBackend.CUDNN_ATTENTION),
    "flash": functools.partial(_run_sdpa_backend, SDPBackend.FLASH_ATTENTION),
    "flash_window": flash_window,
    "flex": flex,
    "cudnn_frontend": functools.partial(_run_packaged, "cudnn_frontend", "cudnn", _run_cudnn),
    "flash4": functools.partial(_run_packaged, "flash4", "flash4", _run_flash4),
    "sdpa": sdpa,
    "eager": eager,
}


# Backends with a softcap, which is the last argument.
SoftcapBackend = Callable[[Tensor, Tensor, Tensor, "int | None", float], Tensor]
SOFTCAP_BACKENDS: dict[str, SoftcapBackend] = {"flex": flex, "eager": eager}


def list_candidates(window: int | None) -> list[str]:
    """Return the backends that are measured on CUDA for full attention (None) or a window, the likely fastest first."""
    if window is None:
        names = ["cudnn", "flash"]
    else:
        names = ["flex", "flash_window"]
    return [*names, "cudnn_frontend", "flash4"]


# Backends that are measured if the queries are the last tokens of more keys, the likely fastest first.
SLICE_CANDIDATES = ("flash_window", "cudnn_frontend", "flash4", "flex")


def find_fallback(softcap: float | None, has_sinks: bool = False) -> str:
    """Return the backend that supports every shape on every device, with or without softcap and sinks."""
    if softcap is None and not has_sinks:
        return "sdpa"
    return "eager"


def explain_missing_softcap(name: str, softcap: float) -> str:
    """Return why a backend cannot compute attention with a softcap, or "" if it can."""
    if name in SOFTCAP_BACKENDS:
        return ""
    return (
        f"kernels.attention={name!r} has no softcap, which this layer has ({softcap:g}); set --kernels.attention=auto "
        "to choose a kernel per layer"
    )
