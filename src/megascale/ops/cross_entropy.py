"""Cross-entropy of a linear head without the full logits: chunks of tokens, statistics in float32.

`local_statistics`, `merge_statistics` and `local_gradient_` see one shard of the vocabulary. The tensor-parallel head
runs them too, with two all-reduces in between (`VocabShard`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megascale import torch_private
from megascale.ops.dispatch import jit, next_power_of_2, tl, use_fused
from megascale.ops.gradient_sink import GradientSink, main_grad_of, sink_of
from megascale.ops.linear import Gemms, Operand
from megascale.ops.reduce import column_sum
from megascale.ops.token_loss import TokenLogits, TokenLoss

GEMMS = Gemms()
LOGITS_BYTES = 1 << 30  # limit of a chunk's logits; wider chunks re-read the accumulator less often


@dataclass(frozen=True)
class VocabShard:
    """This rank's rows of a vocabulary-parallel head, and the in-place all-reduces over the tensor-parallel group."""

    start: int
    all_reduce_max: Callable[[Tensor], Any]
    all_reduce_sum: Callable[[Tensor], Any]


def cross_entropy(logits: Tensor, targets: Tensor, vocab: int | None = None, ignore_index: int = -100) -> Tensor:
    """Compute the per-token loss [...] in at least float32 of logits [..., V]; columns from `vocab` on are padding."""
    wide = logits[..., :vocab].to(torch.promote_types(logits.dtype, torch.float32))
    mask = targets != ignore_index
    target_logits = wide.gather(-1, targets.where(mask, 0)[..., None])[..., 0]
    return (wide.logsumexp(-1) - target_logits) * mask


def softcap_(logits: Tensor, softcap: float) -> Tensor:
    """Replace logits x by c tanh(x / c) with the softcap c (Gemma 2), in place."""
    return logits.div_(softcap).tanh_().mul_(softcap)


def local_statistics_reference(
    logits_TV: Tensor, targets: Tensor, start: int, valid: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `local_statistics` in plain PyTorch."""
    wide = logits_TV[:, :valid].to(torch.promote_types(logits_TV.dtype, torch.float32))
    if not valid:
        zeros = wide.new_zeros(targets.shape)
        return zeros - math.inf, zeros, zeros.clone()
    top = wide.amax(-1)
    total = (wide - top[:, None]).exp().sum(-1)
    is_local = (targets >= start) & (targets < start + valid)
    target_logits = wide.gather(-1, (targets - start).where(is_local, 0)[:, None])[:, 0]
    return top, total, target_logits.where(is_local, 0)


def local_gradient_reference_(
    logits_TV: Tensor, targets: Tensor, lse: Tensor, scale: Tensor, start: int, valid: int
) -> Tensor:
    """Compute `local_gradient_` in plain PyTorch."""
    grad = (logits_TV[:, :valid].to(lse.dtype) - lse[:, None]).exp()
    is_local = (targets >= start) & (targets < start + valid)
    if valid:
        grad.scatter_add_(-1, (targets - start).where(is_local, 0)[:, None], -is_local[:, None].to(grad.dtype))
    logits_TV[:, :valid] = (grad * scale[:, None]).to(logits_TV.dtype)
    logits_TV[:, valid:] = 0
    return logits_TV


@jit
def _row_statistics(row_ptr, valid, columns, BLOCK: tl.constexpr):
    """Return the maximum of one row, times log2(e), and the sum of 2^(x log2(e) - maximum), in one pass.

    Powers of two make an exponent one multiply-add. Each lane has a sum of its own. Only the last block, which contains
    the padding, is masked, at the padded width, which is a multiple of whole vectors.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    column = tl.arange(0, BLOCK)
    edge = valid // BLOCK * BLOCK
    x = tl.load(row_ptr + edge + column, mask=edge + column < columns, other=0.0).to(tl.float32)
    x = tl.where(edge + column < valid, x, -float("inf"))
    top = tl.maximum(tl.max(x, 0), -1e30) * LOG2E  # finite even without a valid column
    sums = tl.exp2(x * LOG2E - top)
    for start in range(0, edge, BLOCK):
        x = tl.load(row_ptr + start + column, eviction_policy="evict_last").to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0) * LOG2E)
        sums = sums * tl.exp2(top - higher) + tl.exp2(x * LOG2E - higher)
        top = higher
    total = tl.sum(sums, 0)
    return tl.where(total > 0.0, top, -float("inf")), total


@jit
def _row_gradient(row_ptr, target, target_logit, lse, scale, valid, columns, BLOCK: tl.constexpr):
    """Overwrite one row of logits with scale x (softmax - one at the target).

    target_logit: the target's logit; target: its column, below 0 if it is not local; lse: times log2(e).
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    column = tl.arange(0, BLOCK)
    edge = valid // BLOCK * BLOCK
    for start in range(0, edge, BLOCK):
        x = tl.load(row_ptr + start + column, eviction_policy="evict_first").to(tl.float32)
        tl.store(row_ptr + start + column, tl.exp2(x * LOG2E - lse) * scale, eviction_policy="evict_first")
    for start in range(edge, columns, BLOCK):
        x = tl.load(row_ptr + start + column, mask=start + column < columns, other=0.0).to(tl.float32)
        grad = tl.where(start + column < valid, tl.exp2(x * LOG2E - lse) * scale, 0.0)
        tl.store(row_ptr + start + column, grad, mask=start + column < columns)
    tl.debug_barrier()  # after the thread that has written the target's softmax
    tl.store(row_ptr + target, (tl.exp2(target_logit * LOG2E - lse) - 1.0) * scale, mask=target >= 0)


@jit
def _statistics_kernel(
    logits_ptr, target_ptr, top_ptr, total_ptr, target_logit_ptr, start, valid, columns, stride, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * stride
    target = tl.load(target_ptr + row) - start
    top, total = _row_statistics(row_ptr, valid, columns, BLOCK)
    tl.store(top_ptr + row, top * 0.6931471805599453)
    tl.store(total_ptr + row, total)
    is_local = (target >= 0) & (target < valid)
    tl.store(target_logit_ptr + row, tl.load(row_ptr + target, mask=is_local, other=0.0).to(tl.float32))


@jit
def _gradient_kernel(logits_ptr, target_ptr, lse_ptr, scale_ptr, start, valid, columns, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * stride
    target = tl.load(target_ptr + row) - start
    target = tl.where((target >= 0) & (target < valid), target, -1)
    target_logit = tl.load(row_ptr + target, mask=target >= 0, other=0.0).to(tl.float32)
    lse, scale = tl.load(lse_ptr + row) * 1.4426950408889634, tl.load(scale_ptr + row)
    tl.debug_barrier()  # the target's logit is read before any thread overwrites it
    _row_gradient(row_ptr, target, target_logit, lse, scale, valid, columns, BLOCK)


@jit
def _loss_gradient_kernel(
    logits_ptr,
    target_ptr,
    lse_ptr,
    loss_ptr,
    scale_ptr,
    ignore,
    valid,
    columns,
    stride,
    BLOCK: tl.constexpr,
):
    """Compute statistics, loss and gradient of a whole row, which is read a second time from the cache."""
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * stride
    target = tl.load(target_ptr + row)
    is_valid = (target != ignore) & (target >= 0) & (target < valid)
    top, total = _row_statistics(row_ptr, valid, columns, BLOCK)
    exponent = top + tl.log2(total)
    lse = exponent * 0.6931471805599453
    target_logit = tl.load(row_ptr + target, mask=is_valid, other=0.0).to(tl.float32)
    tl.store(lse_ptr + row, lse)
    tl.store(loss_ptr + row, tl.where(is_valid, lse - target_logit, 0.0))
    scale = tl.where(is_valid, tl.load(scale_ptr + row), 0.0)
    tl.debug_barrier()  # the target's logit is read before any thread overwrites it
    _row_gradient(row_ptr, tl.where(is_valid, target, -1), target_logit, exponent, scale, valid, columns, BLOCK)


def _row_constants(columns: int) -> dict[str, int]:
    block = min(8192, max(16, next_power_of_2(columns)))
    return {"BLOCK": block, "num_warps": max(1, min(8, block // 512))}


def local_statistics(logits_TV: Tensor, targets: Tensor, start: int, valid: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the maximum, sum of exp(logit - maximum) and target's logit (0 if not local) of each token, [T] each.

    Args:
        logits_TV: columns start .. start + V of the vocabulary, of which the first `valid` are no padding.
    """
    if not (targets.numel() and use_fused("cross entropy", logits_TV)):
        return local_statistics_reference(logits_TV, targets, start, valid)
    T, V = logits_TV.shape
    out = torch.empty((3, T), dtype=torch.float32, device=logits_TV.device)
    _statistics_kernel[(T,)](
        logits_TV, targets, out[0], out[1], out[2], start, valid, V, logits_TV.stride(0), **_row_constants(V)
    )
    return out[0], out[1], out[2]


def local_gradient_(logits_TV: Tensor, targets: Tensor, lse: Tensor, scale: Tensor, start: int, valid: int) -> Tensor:
    """Turn logits into their gradient in place: scale x (softmax - one at the target); 0 in columns past `valid`.

    Args:
        lse: log-sum-exp over the whole vocabulary [T].
        scale: upstream gradient of each token's loss [T], 0 for ignored tokens.
    """
    if not (targets.numel() and use_fused("cross entropy", logits_TV)):
        return local_gradient_reference_(logits_TV, targets, lse, scale, start, valid)
    T, V = logits_TV.shape
    _gradient_kernel[(T,)](
        logits_TV, targets, lse, scale.contiguous(), start, valid, V, logits_TV.stride(0), **_row_constants(V)
    )
    return logits_TV


def loss_and_gradient_(
    logits_TV: Tensor, targets: Tensor, scale: Tensor, ignore_index: int, valid: int
) -> tuple[Tensor, Tensor]:
    """Return log-sum-exp and loss of each token; logits of the whole vocabulary become their gradient in place."""
    if not (targets.numel() and use_fused("cross entropy", logits_TV)):
        lse, loss = merge_statistics(*local_statistics_reference(logits_TV, targets, 0, valid), None)
        mask = targets != ignore_index
        local_gradient_reference_(logits_TV, targets, lse, scale.where(mask, 0), 0, valid)
        return lse, loss.where(mask, 0)
    T, V = logits_TV.shape
    lse, loss = torch.empty((2, T), dtype=torch.float32, device=logits_TV.device)
    _loss_gradient_kernel[(T,)](
        logits_TV, targets, lse, loss, scale, ignore_index, valid, V, logits_TV.stride(0), **_row_constants(V)
    )
    return lse, loss


def merge_statistics(
    top: Tensor, total: Tensor, target_logits: Tensor, shard: VocabShard | None
) -> tuple[Tensor, Tensor]:
    """Return log-sum-exp over the whole vocabulary and loss of each token from the shards' statistics."""
    if shard is not None:
        highest = top.clone()
        shard.all_reduce_max(highest)
        packed = torch.stack((total * (top - highest).exp(), target_logits))
        shard.all_reduce_sum(packed)
        total, target_logits = packed
        top = highest
    lse = top + total.log()
    return lse, lse - target_logits


def chunk_tokens(tokens: int, columns: int, itemsize: int) -> int:
    """Return the tokens of a chunk whose logits stay below LOGITS_BYTES: a multiple of 128, in chunks of equal size."""
    most = max(128, LOGITS_BYTES // max(1, columns * itemsize))
    chunks = max(1, math.ceil(tokens / most))
    return max(1, min(tokens, 128 * math.ceil(tokens / chunks / 128)))


@dataclass(frozen=True)
class _HeadOptions:
    """Arguments of `linear_cross_entropy` that are no tensors of autograd."""

    ignore_index: int
    vocab: int | None
    chunk: int | None
    token_grad: Tensor | None
    shard: VocabShard | None
    gemms: Gemms
    loss: TokenLoss | None
    softcap: float | None


class _Head:
    """The head's tensors flattened to [T, H], and the passes over one chunk of tokens."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: _HeadOptions):
        self.x_TH = x.reshape(-1, x.shape[-1])
        self.weight = weight
        self.bias = bias
        self.targets = targets.reshape(-1).contiguous()
        self.ignore = options.ignore_index
        self.shard = options.shard
        self.custom_loss = options.loss
        self.softcap = options.softcap
        self.slope_TV: Tensor | None = None  # derivative of the softcap for the chunk's logits
        self.gemms = options.gemms
        self.start = options.shard.start if options.shard is not None else 0
        rows = weight.shape[0]
        self.valid = rows if options.vocab is None else max(0, min(rows, options.vocab - self.start))
        T = self.x_TH.shape[0]
        size = options.chunk or chunk_tokens(T, rows, x.element_size())
        self.chunks = [slice(i, min(i + size, T)) for i in range(0, T, size)]
        self.dx_TH: Tensor | None = None
        self.dw: Tensor | None = None
        self.db: Tensor | None = None

    def allocate_gradients(self, needs_x: bool, needs_weight: bool, needs_bias: bool) -> None:
        """Allocate the needed gradients of x, weight and bias."""
        self.dx_TH = torch.empty_like(self.x_TH) if needs_x else None
        self.dw = _accumulator(self.weight) if needs_weight else None
        self.db = _accumulator(self.bias) if self.bias is not None and needs_bias else None

    def logits(self, chunk: slice) -> tuple[Tensor, Operand]:
        """Return logits [tokens of the chunk, rows of weight] in x's type, and the chunk of x as GEMMs read it."""
        x = self.gemms.prepare_input(self.x_TH[chunk], self.weight)
        logits_TV = self.gemms.forward(x, self.weight, self.bias)
        if self.softcap is not None:
            softcap_(logits_TV, self.softcap)
            self.slope_TV = 1 - (logits_TV / self.softcap).square()
        return logits_TV, x

    def losses(self, chunk: slice) -> tuple[Tensor, Tensor]:
        """Return log-sum-exp (0 with a custom loss) and loss (0 where ignored) of a chunk."""
        targets = self.targets[chunk]
        logits_TV, _ = self.logits(chunk)
        if self.custom_loss is not None:
            loss = self.custom_loss(self.token_logits(logits_TV, targets))
            lse = torch.zeros_like(loss)
        else:
            lse, loss = merge_statistics(
                *local_statistics(logits_TV, targets, self.start, self.valid), shard=self.shard
            )
        return lse, loss.where(targets != self.ignore, 0)

    def losses_and_gradients(self, chunk: slice, scale: Tensor, is_last: bool) -> tuple[Tensor, Tensor]:
        """Compute `losses`, and add the chunk's gradients for the upstream gradient `scale` of each token.

        Args:
            is_last: the chunk completes the weight's gradient.
        """
        logits_TV, x = self.logits(chunk)
        targets = self.targets[chunk]
        if self.custom_loss is not None:
            loss = self.custom_loss_and_gradient_(logits_TV, targets, scale)
            lse = torch.zeros_like(loss)
        elif self.shard is None:
            lse, loss = loss_and_gradient_(logits_TV, targets, scale, self.ignore, self.valid)
        else:
            mask = targets != self.ignore
            statistics = local_statistics(logits_TV, targets, self.start, self.valid)
            lse, loss = merge_statistics(*statistics, shard=self.shard)
            loss = loss.where(mask, 0)
            local_gradient_(logits_TV, targets, lse, scale.where(mask, 0), self.start, self.valid)
        self.add_gradients(chunk, x, logits_TV, completes_weight=is_last)
        return lse, loss

    def gradients(self, chunk: slice, lse: Tensor, scale: Tensor) -> None:
        """Add the chunk's gradients when its losses are known."""
        targets = self.targets[chunk]
        scale = scale.where(targets != self.ignore, 0)
        logits_TV, x = self.logits(chunk)
        if self.custom_loss is not None:
            self.custom_loss_and_gradient_(logits_TV, targets, scale)
        else:
            local_gradient_(logits_TV, targets, lse, scale, self.start, self.valid)
        self.add_gradients(chunk, x, logits_TV)

    def token_logits(self, logits_TV: Tensor, targets: Tensor) -> TokenLogits:
        """Return the view of a chunk that a custom loss reads."""
        wide = logits_TV.detach()[:, : self.valid].to(torch.promote_types(logits_TV.dtype, torch.float32))
        targets = targets.where(targets != self.ignore, 0)
        if self.shard is None:
            return TokenLogits(wide, targets, self.start)
        return TokenLogits(wide, targets, self.start, self.shard.all_reduce_max, self.shard.all_reduce_sum)

    def custom_loss_and_gradient_(self, logits_TV: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
        """Return the chunk's custom losses, and turn logits into their gradient for the upstream gradient `scale`."""
        assert self.custom_loss is not None
        mask = targets != self.ignore
        logits = self.token_logits(logits_TV, targets)
        with torch.enable_grad():
            logits.values.requires_grad_()
            loss = self.custom_loss(logits)
            (grad,) = torch.autograd.grad(loss, logits.values, scale.where(mask, 0).to(loss.dtype))
        logits_TV[:, : self.valid] = grad.to(logits_TV.dtype)
        logits_TV[:, self.valid :] = 0
        return loss.detach().where(mask, 0)

    def add_gradients(self, chunk: slice, x: Operand, grad_TV: Tensor, completes_weight: bool = False) -> None:
        """Add the gradients of x, weight and bias for the gradient of a chunk's logits.

        A sink that wants the weight's complete gradient gets it before the gradient of x, so that its reduction
        overlaps with that GEMM.
        """
        if self.slope_TV is not None:
            grad_TV = grad_TV.mul_(self.slope_TV)
            self.slope_TV = None
        gradient = self.gemms.prepare_gradient(grad_TV, self.weight)
        sink: GradientSink | None = getattr(self.weight, "gradient_sink", None)
        if completes_weight and self.dw is not None and sink is not None and sink.complete is not None:
            self.gemms.accumulate_wgrad(self.dw, gradient.for_wgrad(), x.for_wgrad())
            sink.complete()
            if self.dx_TH is not None:
                self.gemms.dgrad(gradient, self.weight, self.dx_TH[chunk])
        else:
            if self.dx_TH is not None:
                self.gemms.dgrad(gradient, self.weight, self.dx_TH[chunk])
            if self.dw is not None:
                self.gemms.accumulate_wgrad(self.dw, gradient.for_wgrad(), x.for_wgrad())
        if self.db is not None:
            column_sum(grad_TV, self.db)


def _accumulator(parameter: Tensor) -> Tensor:
    main_grad = main_grad_of(parameter)
    if main_grad is not None:
        return main_grad
    wide = torch.promote_types(parameter.dtype, torch.float32)
    return torch.zeros(parameter.shape, dtype=wide, device=parameter.device)


def _finish_gradient(parameter: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """Return a parameter's gradient for autograd, or None if it is in its sink already."""
    if parameter is None or grad is None:
        return None
    sink = sink_of(parameter)
    if sink is None:
        return grad.to(parameter.dtype)
    sink.ready()
    return None


@torch_private.call_directly
class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: _HeadOptions
    ) -> Tensor:
        head = _Head(x, weight, bias, targets, options)
        needs = ctx.needs_input_grad[:3]
        token_grad = options.token_grad
        ctx.is_early = token_grad is not None and any(needs)
        ctx.x_shape, ctx.options = x.shape, options
        ctx.weight, ctx.bias = weight, bias
        wide = torch.promote_types(x.dtype, torch.float32)
        lse_T, loss_T = torch.empty((2, targets.numel()), dtype=wide, device=x.device)
        if token_grad is not None and ctx.is_early:
            head.allocate_gradients(*needs)
            scale_T = token_grad.to(wide).expand(targets.shape).reshape(-1).contiguous()
            for chunk in head.chunks:
                is_last = chunk.stop == len(lse_T)
                lse_T[chunk], loss_T[chunk] = head.losses_and_gradients(chunk, scale_T[chunk], is_last)
            ctx.head = head
            ctx.save_for_backward(scale_T)
        else:
            for chunk in head.chunks:
                lse_T[chunk], loss_T[chunk] = head.losses(chunk)
            ctx.save_for_backward(x, targets, lse_T)
        return loss_T.view(targets.shape)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        scale_T = upstream[0].reshape(-1).contiguous()
        if ctx.is_early:
            head = ctx.head
            is_expected = (scale_T == ctx.saved_tensors[0]) | (head.targets == head.ignore)
            torch_private.assert_async(
                is_expected.all(), "linear_cross_entropy: the upstream gradient is not token_grad"
            )
            del ctx.head
        else:
            x, targets, lse_T = ctx.saved_tensors
            head = _Head(x, ctx.weight, ctx.bias, targets, ctx.options)
            head.allocate_gradients(*ctx.needs_input_grad[:3])
            for chunk in head.chunks:
                head.gradients(chunk, lse_T[chunk], scale_T[chunk])
        dx = None if head.dx_TH is None else head.dx_TH.view(ctx.x_shape)
        return dx, _finish_gradient(ctx.weight, head.dw), _finish_gradient(ctx.bias, head.db), None, None


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    vocab: int | None = None,
    chunk: int | None = None,
    token_grad: Tensor | None = None,
    shard: VocabShard | None = None,
    gemms: Gemms = GEMMS,
    loss: TokenLoss | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return the per-token loss [...] (float32 or wider) of the logits x @ weight.T + bias, one chunk at a time.

    Without token_grad backward computes the logits again, a fourth GEMM, for any upstream gradient. Gradients of weight
    and bias go to the parameter's sink if it has one.

    Args:
        x: [..., H].
        weight: [V, H], whose rows from `vocab` on are padding.
        targets: [...], int64; `ignore_index` gives loss 0 and no gradient.
        chunk: tokens at a time (default: by LOGITS_BYTES).
        token_grad: upstream gradient of each token's loss that the caller guarantees ([...] or a scalar tensor, such
            as 1 / tokens in the step). All gradients are then computed in forward while the chunk's logits exist, and
            backward runs no GEMM. Another upstream gradient is an assertion failure on the device.
        shard: this rank's part of a vocabulary-parallel head. Then weight is [V / ranks, H], `vocab` and targets are
            global, and x's gradient is this rank's summand.
        gemms: runs the GEMMs.
        loss: a custom loss instead of cross-entropy (token_loss.py).
        softcap: bound c of the logits x, as c tanh(x / c); None: none.
    """
    options = _HeadOptions(ignore_index, vocab, chunk, token_grad, shard, gemms, loss, softcap)
    return _LinearCrossEntropy.apply(x, weight, bias, targets, options)
