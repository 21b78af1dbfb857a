"""Cross-entropy of a linear head that never holds the full logits: chunks of tokens, statistics in float32.

The pieces `local_statistics`, `merge_statistics` and `local_gradient_` see one shard of the vocabulary, so that
the tensor-parallel head is the same code with two all-reduces between them (`VocabShard`).
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
from megascale.ops.gradient_sink import main_grad_of, sink_of
from megascale.ops.linear import ComputeType, Gemms, Operand
from megascale.ops.reduce import column_sum
from megascale.ops.token_loss import TokenLogits, TokenLoss

GEMMS = ComputeType()
LOGITS_BYTES = 1 << 30  # a chunk's logits stay below this; wider chunks waste less on re-reading the accumulator


@dataclass(frozen=True)
class VocabShard:
    """This rank's rows of a vocabulary-parallel head, and the in-place all-reduces over the tensor-parallel group."""

    start: int
    all_reduce_max: Callable[[Tensor], Any]
    all_reduce_sum: Callable[[Tensor], Any]


def cross_entropy(logits: Tensor, targets: Tensor, vocab: int | None = None, ignore_index: int = -100) -> Tensor:
    """Reference: per-token loss [...] in at least float32 of logits [..., V]; columns from `vocab` on do not count."""
    wide = logits[..., :vocab].to(torch.promote_types(logits.dtype, torch.float32))
    kept = targets != ignore_index
    picked = wide.gather(-1, targets.where(kept, 0)[..., None])[..., 0]
    return (wide.logsumexp(-1) - picked) * kept


def local_statistics_reference(
    logits_TV: Tensor, targets: Tensor, start: int, valid: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Plain PyTorch of `local_statistics`."""
    wide = logits_TV[:, :valid].to(torch.promote_types(logits_TV.dtype, torch.float32))
    if not valid:
        nothing = wide.new_zeros(targets.shape)
        return nothing - math.inf, nothing, nothing.clone()
    top = wide.amax(-1)
    total = (wide - top[:, None]).exp().sum(-1)
    here = (targets >= start) & (targets < start + valid)
    picked = wide.gather(-1, (targets - start).where(here, 0)[:, None])[:, 0]
    return top, total, picked.where(here, 0)


def local_gradient_reference_(
    logits_TV: Tensor, targets: Tensor, lse: Tensor, scale: Tensor, start: int, valid: int
) -> Tensor:
    """Plain PyTorch of `local_gradient_`."""
    grad = (logits_TV[:, :valid].to(lse.dtype) - lse[:, None]).exp()
    here = (targets >= start) & (targets < start + valid)
    if valid:
        grad.scatter_add_(-1, (targets - start).where(here, 0)[:, None], -here[:, None].to(grad.dtype))
    logits_TV[:, :valid] = (grad * scale[:, None]).to(logits_TV.dtype)
    logits_TV[:, valid:] = 0
    return logits_TV


@jit
def _row_statistics(row_ptr, valid, columns, BLOCK: tl.constexpr):
    """Maximum of one row, times log2(e), and the sum of 2^(x log2(e) - it), read once.

    Powers of two, so that an exponent is one multiply-add; each lane keeps a sum of its own. Only the last block, which
    the padding is in, is masked: with the padded width, which whole vectors fit.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    column = tl.arange(0, BLOCK)
    edge = valid // BLOCK * BLOCK
    x = tl.load(row_ptr + edge + column, mask=edge + column < columns, other=0.0).to(tl.float32)
    x = tl.where(edge + column < valid, x, -float("inf"))
    top = tl.maximum(tl.max(x, 0), -1e30) * LOG2E  # finite, also where nothing is valid
    sums = tl.exp2(x * LOG2E - top)
    for start in range(0, edge, BLOCK):
        x = tl.load(row_ptr + start + column, eviction_policy="evict_last").to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0) * LOG2E)
        sums = sums * tl.exp2(top - higher) + tl.exp2(x * LOG2E - higher)
        top = higher
    total = tl.sum(sums, 0)
    return tl.where(total > 0.0, top, -float("inf")), total


@jit
def _row_gradient(row_ptr, target, picked, lse, scale, valid, columns, BLOCK: tl.constexpr):
    """Overwrite one row of logits with scale x (softmax - one at the target).

    picked: the target's logit; target: its column, below 0 if it is not here; lse: times log2(e).
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
    tl.debug_barrier()  # after whichever thread has written the target's softmax
    tl.store(row_ptr + target, (tl.exp2(picked * LOG2E - lse) - 1.0) * scale, mask=target >= 0)


@jit
def _statistics_kernel(
    logits_ptr, target_ptr, top_ptr, total_ptr, picked_ptr, start, valid, columns, stride, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * stride
    target = tl.load(target_ptr + row) - start
    top, total = _row_statistics(row_ptr, valid, columns, BLOCK)
    tl.store(top_ptr + row, top * 0.6931471805599453)
    tl.store(total_ptr + row, total)
    here = (target >= 0) & (target < valid)
    tl.store(picked_ptr + row, tl.load(row_ptr + target, mask=here, other=0.0).to(tl.float32))


@jit
def _gradient_kernel(logits_ptr, target_ptr, lse_ptr, scale_ptr, start, valid, columns, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * stride
    target = tl.load(target_ptr + row) - start
    target = tl.where((target >= 0) & (target < valid), target, -1)
    picked = tl.load(row_ptr + target, mask=target >= 0, other=0.0).to(tl.float32)
    lse, scale = tl.load(lse_ptr + row) * 1.4426950408889634, tl.load(scale_ptr + row)
    tl.debug_barrier()  # the target's logit is read before anyone overwrites it
    _row_gradient(row_ptr, target, picked, lse, scale, valid, columns, BLOCK)


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
    """Statistics, loss and gradient of a whole row: the second reading comes from the cache."""
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * stride
    target = tl.load(target_ptr + row)
    kept = (target != ignore) & (target >= 0) & (target < valid)
    top, total = _row_statistics(row_ptr, valid, columns, BLOCK)
    exponent = top + tl.log2(total)
    lse = exponent * 0.6931471805599453
    picked = tl.load(row_ptr + target, mask=kept, other=0.0).to(tl.float32)
    tl.store(lse_ptr + row, lse)
    tl.store(loss_ptr + row, tl.where(kept, lse - picked, 0.0))
    scale = tl.where(kept, tl.load(scale_ptr + row), 0.0)
    tl.debug_barrier()  # the target's logit is read before anyone overwrites it
    _row_gradient(row_ptr, tl.where(kept, target, -1), picked, exponent, scale, valid, columns, BLOCK)


def _row_launch(columns: int) -> dict[str, int]:
    block = min(8192, max(16, next_power_of_2(columns)))
    return {"BLOCK": block, "num_warps": max(1, min(8, block // 512))}


def local_statistics(logits_TV: Tensor, targets: Tensor, start: int, valid: int) -> tuple[Tensor, Tensor, Tensor]:
    """Maximum, sum of exp(logit - maximum) and target's logit (0 if it is not here) of each token, [T] each.

    logits_TV holds columns start .. start + V of the vocabulary; only the first `valid` count.
    """
    if not (targets.numel() and use_fused("cross entropy", logits_TV)):
        return local_statistics_reference(logits_TV, targets, start, valid)
    T, V = logits_TV.shape
    out = torch.empty((3, T), dtype=torch.float32, device=logits_TV.device)
    _statistics_kernel[(T,)](
        *(logits_TV, targets, out[0], out[1], out[2], start, valid, V, logits_TV.stride(0)), **_row_launch(V)
    )
    return out[0], out[1], out[2]


def local_gradient_(logits_TV: Tensor, targets: Tensor, lse: Tensor, scale: Tensor, start: int, valid: int) -> Tensor:
    """Turn logits into their gradient in place: scale x (softmax - one at the target); 0 in columns past `valid`.

    lse: log-sum-exp over the whole vocabulary [T]; scale: upstream gradient of each token's loss [T], 0 for
    ignored tokens.
    """
    if not (targets.numel() and use_fused("cross entropy", logits_TV)):
        return local_gradient_reference_(logits_TV, targets, lse, scale, start, valid)
    T, V = logits_TV.shape
    _gradient_kernel[(T,)](
        *(logits_TV, targets, lse, scale.contiguous(), start, valid, V, logits_TV.stride(0)), **_row_launch(V)
    )
    return logits_TV


def loss_and_gradient_(
    logits_TV: Tensor, targets: Tensor, scale: Tensor, ignore_index: int, valid: int
) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and loss of each token; logits turn into their gradient in place. The whole vocabulary is here."""
    if not (targets.numel() and use_fused("cross entropy", logits_TV)):
        lse, loss = merge_statistics(*local_statistics_reference(logits_TV, targets, 0, valid), None)
        kept = targets != ignore_index
        local_gradient_reference_(logits_TV, targets, lse, scale.where(kept, 0), 0, valid)
        return lse, loss.where(kept, 0)
    T, V = logits_TV.shape
    lse, loss = torch.empty((2, T), dtype=torch.float32, device=logits_TV.device)
    _loss_gradient_kernel[(T,)](
        *(logits_TV, targets, lse, loss, scale, ignore_index, valid, V, logits_TV.stride(0)), **_row_launch(V)
    )
    return lse, loss


def merge_statistics(top: Tensor, total: Tensor, picked: Tensor, shard: VocabShard | None) -> tuple[Tensor, Tensor]:
    """Log-sum-exp over the whole vocabulary and loss of each token from the shards' statistics."""
    if shard is not None:
        highest = top.clone()
        shard.all_reduce_max(highest)
        packed = torch.stack((total * (top - highest).exp(), picked))
        shard.all_reduce_sum(packed)
        top, (total, picked) = highest, packed
    lse = top + total.log()
    return lse, lse - picked


def chunk_tokens(tokens: int, columns: int, itemsize: int) -> int:
    """Tokens a chunk: as many as keep its logits below LOGITS_BYTES, chunks of equal size, a multiple of 128."""
    most = max(128, LOGITS_BYTES // max(1, columns * itemsize))
    chunks = max(1, math.ceil(tokens / most))
    return max(1, min(tokens, 128 * math.ceil(tokens / chunks / 128)))


class _Head:
    """The head's tensors flattened to [T, H], and what is done with one chunk of tokens."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: dict[str, Any]):
        self.x_TH, self.weight, self.bias = x.reshape(-1, x.shape[-1]), weight, bias
        self.targets, self.ignore = targets.reshape(-1).contiguous(), options["ignore_index"]
        self.shard: VocabShard | None = options["shard"]
        rows = weight.shape[0]
        self.start = self.shard.start if self.shard is not None else 0
        self.own: TokenLoss | None = options["loss"]
        vocab = options["vocab"]
        self.gemms: Gemms = options["gemms"]
        self.valid = rows if vocab is None else max(0, min(rows, vocab - self.start))
        T = self.x_TH.shape[0]
        size = options["chunk"] or chunk_tokens(T, rows, x.element_size())
        self.chunks = [slice(i, min(i + size, T)) for i in range(0, T, size)]
        self.dx_TH: Tensor | None = None
        self.dw: Tensor | None = None
        self.db: Tensor | None = None

    def want_gradients(self, needs: tuple[bool, ...]) -> None:
        """Make room for the gradients of x, weight and bias that are needed."""
        self.dx_TH = torch.empty_like(self.x_TH) if needs[0] else None
        self.dw = _accumulator(self.weight) if needs[1] else None
        self.db = _accumulator(self.bias) if self.bias is not None and needs[2] else None

    def logits(self, part: slice) -> tuple[Tensor, Operand]:
        """Logits [tokens of the chunk, rows of weight] in x's type, and the chunk of x as GEMMs read it."""
        x = self.gemms.prepare_input(self.x_TH[part], self.weight)
        return self.gemms.forward(x, self.weight, self.bias), x

    def losses(self, part: slice) -> tuple[Tensor, Tensor]:
        """Log-sum-exp (0 with a loss of one's own) and loss (0 where ignored) of a chunk."""
        targets = self.targets[part]
        if self.own is not None:
            loss = self.own(self.seen(self.logits(part)[0], targets))
            return torch.zeros_like(loss), loss.where(targets != self.ignore, 0)
        statistics = local_statistics(self.logits(part)[0], targets, self.start, self.valid)
        lse, loss = merge_statistics(*statistics, self.shard)
        return lse, loss.where(targets != self.ignore, 0)

    def losses_and_gradients(self, part: slice, scale: Tensor) -> tuple[Tensor, Tensor]:
        """As `losses`, and the chunk's share of the gradients, with `scale` sent back to each token."""
        (logits_TV, x), targets = self.logits(part), self.targets[part]
        if self.own is not None:
            loss = self.own_loss_and_gradient_(logits_TV, targets, scale)
            lse = torch.zeros_like(loss)
        elif self.shard is None:
            lse, loss = loss_and_gradient_(logits_TV, targets, scale, self.ignore, self.valid)
        else:
            kept = targets != self.ignore
            statistics = local_statistics(logits_TV, targets, self.start, self.valid)
            lse, loss = merge_statistics(*statistics, self.shard)
            loss = loss.where(kept, 0)
            local_gradient_(logits_TV, targets, lse, scale.where(kept, 0), self.start, self.valid)
        self.add(part, x, logits_TV)
        return lse, loss

    def gradients(self, part: slice, lse: Tensor, scale: Tensor) -> None:
        """The chunk's share of the gradients when the losses are already known."""
        targets = self.targets[part]
        scale = scale.where(targets != self.ignore, 0)
        logits_TV, x = self.logits(part)
        if self.own is not None:
            self.own_loss_and_gradient_(logits_TV, targets, scale)
            self.add(part, x, logits_TV)
            return
        self.add(part, x, local_gradient_(logits_TV, targets, lse, scale, self.start, self.valid))

    def seen(self, logits_TV: Tensor, targets: Tensor) -> TokenLogits:
        """What a loss of one's own sees of a chunk."""
        wide = logits_TV.detach()[:, : self.valid].to(torch.promote_types(logits_TV.dtype, torch.float32))
        known = targets.where(targets != self.ignore, 0)
        reduces = (self.shard.all_reduce_max, self.shard.all_reduce_sum) if self.shard is not None else (None, None)
        return TokenLogits(wide, known, self.start, *reduces)

    def own_loss_and_gradient_(self, logits_TV: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
        """The chunk's losses by a loss of one's own; logits become their gradient, `scale` sent to each token."""
        assert self.own is not None
        kept, seen = targets != self.ignore, self.seen(logits_TV, targets)
        with torch.enable_grad():
            seen.values.requires_grad_()
            loss = self.own(seen)
            (grad,) = torch.autograd.grad(loss, seen.values, scale.where(kept, 0).to(loss.dtype))
        logits_TV[:, : self.valid] = grad.to(logits_TV.dtype)
        logits_TV[:, self.valid :] = 0
        return loss.detach().where(kept, 0)

    def add(self, part: slice, x: Operand, grad_TV: Tensor) -> None:
        gradient = self.gemms.gradient(grad_TV, self.weight)
        if self.dx_TH is not None:
            self.gemms.dgrad(gradient, self.weight, self.dx_TH[part])
        if self.dw is not None:
            self.gemms.accumulate(self.dw, gradient, x)
        if self.db is not None:
            column_sum(grad_TV, self.db)


def _accumulator(parameter: Tensor) -> Tensor:
    main = main_grad_of(parameter)
    if main is not None:
        return main
    wide = torch.promote_types(parameter.dtype, torch.float32)
    return torch.zeros(parameter.shape, dtype=wide, device=parameter.device)


def _accumulate_gradient(parameter: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """What autograd is told of a parameter's gradient: nothing if it already went to its sink."""
    if parameter is None or grad is None:
        return None
    if (sink := sink_of(parameter)) is not None:
        sink.ready()
        return None
    return grad.to(parameter.dtype)


@torch_private.called_directly
class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: dict[str, Any]
    ) -> Tensor:
        head = _Head(x, weight, bias, targets, options)
        token_grad, needs = options["token_grad"], tuple(ctx.needs_input_grad[:3])
        early = token_grad is not None and any(needs)
        ctx.x_shape, ctx.options, ctx.early, ctx.weight, ctx.bias = x.shape, options, early, weight, bias
        wide = torch.promote_types(x.dtype, torch.float32)
        lse_T, loss_T = torch.empty((2, targets.numel()), dtype=wide, device=x.device)
        if early:
            head.want_gradients(needs)
            scale_T = token_grad.to(wide).expand(targets.shape).reshape(-1).contiguous()
            for part in head.chunks:
                lse_T[part], loss_T[part] = head.losses_and_gradients(part, scale_T[part])
            ctx.head = head
            ctx.save_for_backward(scale_T)
        else:
            for part in head.chunks:
                lse_T[part], loss_T[part] = head.losses(part)
            ctx.save_for_backward(x, targets, lse_T)
        return loss_T.view(targets.shape)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        scale_T = upstream[0].reshape(-1).contiguous()
        if ctx.early:
            head = ctx.head
            kept = (scale_T == ctx.saved_tensors[0]) | (head.targets == head.ignore)
            torch_private.assert_async(kept.all(), "linear_cross_entropy: the upstream gradient is not token_grad")
            del ctx.head
        else:
            x, targets, lse_T = ctx.saved_tensors
            head = _Head(x, ctx.weight, ctx.bias, targets, ctx.options)
            head.want_gradients(tuple(ctx.needs_input_grad[:3]))
            for part in head.chunks:
                head.gradients(part, lse_T[part], scale_T[part])
        dx = head.dx_TH.view(ctx.x_shape) if head.dx_TH is not None else None
        return dx, _accumulate_gradient(ctx.weight, head.dw), _accumulate_gradient(ctx.bias, head.db), None, None


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
) -> Tensor:
    """Per-token loss [...] (float32 or wider) of the logits x @ weight.T + bias, which exist one chunk at a time.

    x: [..., H]; weight: [V, H], rows from `vocab` on are padding and do not count; targets: [...] of int64,
    `ignore_index` gives loss 0 and no gradient. chunk: tokens at a time (default: by LOGITS_BYTES). Weight and bias
    gradients go to the sink where the parameter has one (see parallel/linear.py).

    token_grad: the gradient that the caller promises to send back, of each token's loss ([...] or a scalar tensor,
    such as 1 / tokens in the step). With it all gradients are made in the forward pass while the chunk's logits
    are there, and the backward pass does no GEMM; a broken promise is an assertion failure on the device. Without
    it the backward pass computes the logits again: a fourth GEMM, any upstream gradient.

    shard: this rank's part of a vocabulary-parallel head; weight is then [V / ranks, H], `vocab` and targets are
    global, and x's gradient is this rank's share, to be summed by the caller.

    gemms: how the GEMMs are done.

    loss: instead of cross-entropy (token_loss.py).
    """
    options = {
        "loss": loss,
        "ignore_index": ignore_index,
        "vocab": vocab,
        "chunk": chunk,
        "token_grad": token_grad,
        "shard": shard,
        "gemms": gemms,
    }
    return _LinearCrossEntropy.apply(x, weight, bias, targets, options)
