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

from megascale.ops.linear import accumulate_mm, finish

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


def local_statistics(logits_TV: Tensor, targets: Tensor, start: int, valid: int) -> tuple[Tensor, Tensor, Tensor]:
    """Maximum, sum of exp(logit - maximum) and target's logit (0 if it is not here) of each token, [T] each.

    logits_TV holds columns start .. start + V of the vocabulary; only the first `valid` count.
    """
    wide = logits_TV[:, :valid].to(torch.promote_types(logits_TV.dtype, torch.float32))
    if valid:
        top = wide.amax(-1)
        total = (wide - top[:, None]).exp().sum(-1)
    else:
        top, total = wide.new_full(targets.shape, float("-inf")), wide.new_zeros(targets.shape)
    here = (targets >= start) & (targets < start + valid)
    if not valid:
        return top, total, torch.zeros_like(total)
    picked = wide.gather(-1, (targets - start).where(here, 0)[:, None])[:, 0]
    return top, total, picked.where(here, 0)


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


def local_gradient_(logits_TV: Tensor, targets: Tensor, lse: Tensor, scale: Tensor, start: int, valid: int) -> Tensor:
    """Turn logits into their gradient in place: scale x (softmax - one at the target); 0 in columns past `valid`.

    scale: upstream gradient of each token's loss [T], 0 for ignored tokens.
    """
    wide = logits_TV[:, :valid].to(lse.dtype)
    grad = (wide - lse[:, None]).exp()
    here = (targets >= start) & (targets < start + valid)
    if valid:
        grad.scatter_add_(-1, (targets - start).where(here, 0)[:, None], -here[:, None].to(grad.dtype))
    logits_TV[:, :valid] = (grad * scale[:, None]).to(logits_TV.dtype)
    logits_TV[:, valid:] = 0
    return logits_TV


def chunk_tokens(tokens: int, columns: int, itemsize: int) -> int:
    """Tokens a chunk: as many as keep its logits below LOGITS_BYTES, chunks of equal size, a multiple of 128."""
    most = max(128, LOGITS_BYTES // max(1, columns * itemsize))
    chunks = max(1, math.ceil(tokens / most))
    return max(1, min(tokens, 128 * math.ceil(tokens / chunks / 128)))


class _Head:
    """The head's tensors flattened to [T, H] and what each chunk does with them."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: dict[str, Any]):
        self.x_TH, self.weight, self.bias = x.reshape(-1, x.shape[-1]), weight, bias
        self.targets, self.ignore = targets.reshape(-1), options["ignore_index"]
        self.shard: VocabShard | None = options["shard"]
        rows = weight.shape[0]
        self.start = self.shard.start if self.shard is not None else 0
        vocab = options["vocab"]
        self.valid = rows if vocab is None else max(0, min(rows, vocab - self.start))
        T = self.x_TH.shape[0]
        size = options["chunk"] or chunk_tokens(T, rows, x.element_size())
        self.chunks = [slice(i, min(i + size, T)) for i in range(0, T, size)]

    def logits(self, part: slice) -> Tensor:
        return torch.nn.functional.linear(self.x_TH[part], self.weight, self.bias)

    def forward(self, part: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, log-sum-exp and loss (0 where ignored) of a chunk."""
        logits_TV, targets = self.logits(part), self.targets[part]
        statistics = local_statistics(logits_TV, targets, self.start, self.valid)
        lse, loss = merge_statistics(*statistics, self.shard)
        return logits_TV, lse, loss.where(targets != self.ignore, 0)


class _Gradients:
    """Gradients of x, weight and bias, built chunk by chunk."""

    def __init__(self, head: _Head, weight: Tensor, bias: Tensor | None, needs: tuple[bool, bool, bool]):
        self.head, self.weight, self.bias = head, weight, bias
        self.dx_TH = torch.empty_like(head.x_TH) if needs[0] else None
        self.dw = self._target(weight) if needs[1] else None
        self.db = self._target(bias) if bias is not None and needs[2] else None

    @staticmethod
    def _target(parameter: Tensor) -> Tensor:
        main = getattr(parameter, "main_grad", None)
        if main is not None:
            return main
        wide = torch.promote_types(parameter.dtype, torch.float32)
        return torch.zeros(parameter.shape, dtype=wide, device=parameter.device)

    def add(self, part: slice, logits_TV: Tensor, lse: Tensor, scale: Tensor) -> None:
        head = self.head
        targets = head.targets[part]
        scale = scale.where(targets != head.ignore, 0).to(lse.dtype)
        grad_TV = local_gradient_(logits_TV, targets, lse, scale, head.start, head.valid)
        if self.dx_TH is not None:
            torch.mm(grad_TV, self.weight.detach(), out=self.dx_TH[part])
        if self.dw is not None:
            accumulate_mm(self.dw, grad_TV.t(), head.x_TH[part])
        if self.db is not None:
            self.db.add_(grad_TV.sum(0, dtype=self.db.dtype))

    def finish(self, parameter: Tensor | None, grad: Tensor | None) -> Tensor | None:
        if parameter is None or grad is None:
            return None
        if hasattr(parameter, "main_grad"):
            finish(parameter)
            return None
        return grad.to(parameter.dtype)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: dict[str, Any]
    ) -> Tensor:
        head = _Head(x, weight, bias, targets, options)
        promised = options["token_grad"]
        needs = tuple(ctx.needs_input_grad[:3])
        early = promised is not None and any(needs)
        ctx.x_shape, ctx.options, ctx.early, ctx.weight, ctx.bias = x.shape, options, early, weight, bias
        wide = torch.promote_types(x.dtype, torch.float32)
        loss_T = torch.empty(head.targets.shape, dtype=wide, device=x.device)
        lse_T = torch.empty_like(loss_T)
        if early:
            scale_T = promised.to(wide).expand(targets.shape).reshape(-1)
            grads = _Gradients(head, weight, bias, needs)
        for part in head.chunks:
            logits_TV, lse_T[part], loss_T[part] = head.forward(part)
            if early:
                grads.add(part, logits_TV, lse_T[part], scale_T[part])
            del logits_TV
        if early:
            ctx.grads = grads
            ctx.save_for_backward(scale_T, head.targets)
        else:
            ctx.save_for_backward(x, weight, bias, targets, lse_T)
        return loss_T.view(targets.shape)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        scale_T = upstream[0].reshape(-1)
        if ctx.early:
            promised_T, targets = ctx.saved_tensors
            kept = (scale_T == promised_T) | (targets == ctx.options["ignore_index"])
            torch._assert_async(kept.all(), "linear_cross_entropy: the upstream gradient is not token_grad")
            grads = ctx.grads
            del ctx.grads
        else:
            x, weight, bias, targets, lse_T = ctx.saved_tensors
            head = _Head(x, weight, bias, targets, ctx.options)
            grads = _Gradients(head, ctx.weight, ctx.bias, tuple(ctx.needs_input_grad[:3]))
            for part in head.chunks:
                grads.add(part, head.logits(part), lse_T[part], scale_T[part])
        dx = grads.dx_TH.view(ctx.x_shape) if grads.dx_TH is not None else None
        return dx, grads.finish(ctx.weight, grads.dw), grads.finish(ctx.bias, grads.db), None, None


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
) -> Tensor:
    """Per-token loss [...] (float32 or wider) of the logits x @ weight.T + bias, which exist one chunk at a time.

    x: [..., H]; weight: [V, H], rows from `vocab` on are padding and do not count; targets: [...] of int64,
    `ignore_index` gives loss 0 and no gradient. chunk: tokens at a time (default: by LOGITS_BYTES). Weight and bias
    gradients go to `main_grad` where the parameter has it (see ops/linear.py).

    token_grad: the gradient that the caller promises to send back, of each token's loss ([...] or a scalar tensor,
    such as 1 / tokens in the step). With it all gradients are made in the forward pass while the chunk's logits
    are there, and the backward pass does no GEMM; a broken promise is an assertion failure on the device. Without
    it the backward pass computes the logits again: a fourth GEMM, any upstream gradient.

    shard: this rank's part of a vocabulary-parallel head; weight is then [V / ranks, H], `vocab` and targets are
    global, and x's gradient is this rank's share, to be summed by the caller.
    """
    options = {
        "ignore_index": ignore_index,
        "vocab": vocab,
        "chunk": chunk,
        "token_grad": token_grad,
        "shard": shard,
    }
    return _LinearCrossEntropy.apply(x, weight, bias, targets, options)
