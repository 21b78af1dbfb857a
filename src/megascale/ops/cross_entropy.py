"""Cross-entropy of a linear output head, without all logits in memory: tokens are processed in chunks.

With tensor parallelism each rank has the logits of one shard of the vocabulary. `compute_local_statistics` and
`compute_local_gradient_` see that shard only. `merge_statistics` merges the statistics of all shards by two
all-reduces. Statistics are float32.
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
from megascale.ops.gradient_sink import GradientSink, get_main_grad, get_sink
from megascale.ops.linear import Gemms, Operand
from megascale.ops.reduce import sum_columns
from megascale.ops.token_loss import TokenLogits, TokenLoss

GEMMS = Gemms()
# Maximum bytes of a chunk's logits. Each chunk reads and writes the weight's gradient, so chunks are not small.
LOGITS_BYTES = 1 << 30


@dataclass(frozen=True)
class VocabShard:
    """This rank's shard of a vocabulary-parallel head.

    Attributes:
        start: id of the shard's first token.
        all_reduce_max, all_reduce_sum: in-place all-reduces over the tensor-parallel ranks.
    """

    start: int
    all_reduce_max: Callable[[Tensor], Any]
    all_reduce_sum: Callable[[Tensor], Any]


def cross_entropy(logits: Tensor, targets: Tensor, vocab: int | None = None, ignore_index: int = -100) -> Tensor:
    """Return the loss of each token [...] in at least float32, given logits [..., V]. Columns from `vocab` are padding.

    Tokens whose target is `ignore_index` have loss 0.
    """
    wide = logits[..., :vocab].to(torch.promote_types(logits.dtype, torch.float32))
    mask = targets != ignore_index
    target_logits = wide.gather(-1, targets.where(mask, 0)[..., None])[..., 0]
    return (wide.logsumexp(-1) - target_logits) * mask


def softcap_(logits: Tensor, softcap: float) -> Tensor:
    """Replace logits x by c tanh(x / c) with the softcap c (Gemma 2), in place."""
    return logits.div_(softcap).tanh_().mul_(softcap)


def local_statistics_reference(
    logits_TV: Tensor, targets: Tensor, start: int, valid_columns: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `compute_local_statistics` in plain PyTorch."""
    wide = logits_TV[:, :valid_columns].to(torch.promote_types(logits_TV.dtype, torch.float32))
    if not valid_columns:
        zeros = wide.new_zeros(targets.shape)
        return zeros - math.inf, zeros, zeros.clone()
    max_logit = wide.amax(-1)
    exp_sum = (wide - max_logit[:, None]).exp().sum(-1)
    is_local = (targets >= start) & (targets < start + valid_columns)
    target_logits = wide.gather(-1, (targets - start).where(is_local, 0)[:, None])[:, 0]
    return max_logit, exp_sum, target_logits.where(is_local, 0)


def local_gradient_reference_(
    logits_TV: Tensor, targets: Tensor, lse: Tensor, scale: Tensor, start: int, valid_columns: int
) -> Tensor:
    """Compute `compute_local_gradient_` in plain PyTorch."""
    grad = (logits_TV[:, :valid_columns].to(lse.dtype) - lse[:, None]).exp()
    is_local = (targets >= start) & (targets < start + valid_columns)
    if valid_columns:
        grad.scatter_add_(-1, (targets - start).where(is_local, 0)[:, None], -is_local[:, None].to(grad.dtype))
    logits_TV[:, :valid_columns] = (grad * scale[:, None]).to(logits_TV.dtype)
    logits_TV[:, valid_columns:] = 0
    return logits_TV


@jit
def _row_statistics(row_ptr, valid_columns, columns, BLOCK: tl.constexpr):
    """Return M = log2(e) x the maximum of one row, and the sum of 2^(x log2(e) - M), in one pass.

    M scales all sums, as in online softmax. With powers of two an exponent is one multiply-add. Only the last block is
    masked, because it alone contains padding.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    column = tl.arange(0, BLOCK)
    last_block = valid_columns // BLOCK * BLOCK
    x = tl.load(row_ptr + last_block + column, mask=last_block + column < columns, other=0.0).to(tl.float32)
    x = tl.where(last_block + column < valid_columns, x, -float("inf"))
    max_logit = tl.maximum(tl.max(x, 0), -1e30) * LOG2E  # The bound keeps M finite if no column is valid.
    sums = tl.exp2(x * LOG2E - max_logit)
    for start in range(0, last_block, BLOCK):
        x = tl.load(row_ptr + start + column, eviction_policy="evict_last").to(tl.float32)
        new_max = tl.maximum(max_logit, tl.max(x, 0) * LOG2E)
        sums = sums * tl.exp2(max_logit - new_max) + tl.exp2(x * LOG2E - new_max)
        max_logit = new_max
    exp_sum = tl.sum(sums, 0)
    return tl.where(exp_sum > 0.0, max_logit, -float("inf")), exp_sum


@jit
def _row_gradient(row_ptr, target, target_logit, lse_log2, scale, valid_columns, columns, BLOCK: tl.constexpr):
    """Overwrite one row of logits with scale x (softmax - one-hot target).

    target: column of the target, negative if the target is not local. target_logit: logit of the target. lse_log2:
    log-sum-exp x log2(e).
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    column = tl.arange(0, BLOCK)
    last_block = valid_columns // BLOCK * BLOCK
    for start in range(0, last_block, BLOCK):
        x = tl.load(row_ptr + start + column, eviction_policy="evict_first").to(tl.float32)
        tl.store(row_ptr + start + column, tl.exp2(x * LOG2E - lse_log2) * scale, eviction_policy="evict_first")
    for start in range(last_block, columns, BLOCK):
        x = tl.load(row_ptr + start + column, mask=start + column < columns, other=0.0).to(tl.float32)
        grad = tl.where(start + column < valid_columns, tl.exp2(x * LOG2E - lse_log2) * scale, 0.0)
        tl.store(row_ptr + start + column, grad, mask=start + column < columns)
    # Wait until another thread has written the target's softmax, which is overwritten here.
    tl.debug_barrier()
    tl.store(row_ptr + target, (tl.exp2(target_logit * LOG2E - lse_log2) - 1.0) * scale, mask=target >= 0)


@jit
def _statistics_kernel(
    logits_ptr,
    target_ptr,
    max_ptr,
    exp_sum_ptr,
    target_logit_ptr,
    start,
    valid_columns,
    columns,
    stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * stride
    target = tl.load(target_ptr + row) - start
    max_logit, exp_sum = _row_statistics(row_ptr, valid_columns, columns, BLOCK)
    tl.store(max_ptr + row, max_logit * 0.6931471805599453)  # x ln(2)
    tl.store(exp_sum_ptr + row, exp_sum)
    is_local = (target >= 0) & (target < valid_columns)
    tl.store(target_logit_ptr + row, tl.load(row_ptr + target, mask=is_local, other=0.0).to(tl.float32))


@jit
def _gradient_kernel(
    logits_ptr, target_ptr, lse_ptr, scale_ptr, start, valid_columns, columns, stride, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * stride
    target = tl.load(target_ptr + row) - start
    target = tl.where((target >= 0) & (target < valid_columns), target, -1)
    target_logit = tl.load(row_ptr + target, mask=target >= 0, other=0.0).to(tl.float32)
    lse_log2 = tl.load(lse_ptr + row) * 1.4426950408889634  # x log2(e)
    scale = tl.load(scale_ptr + row)
    tl.debug_barrier()  # The target's logit is read before any thread overwrites it.
    _row_gradient(row_ptr, target, target_logit, lse_log2, scale, valid_columns, columns, BLOCK)


@jit
def _loss_gradient_kernel(
    logits_ptr,
    target_ptr,
    lse_ptr,
    loss_ptr,
    scale_ptr,
    ignore,
    valid_columns,
    columns,
    stride,
    BLOCK: tl.constexpr,
):
    """Compute statistics, loss and gradient of a row of all logits. The second reading of the row is from cache."""
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * stride
    target = tl.load(target_ptr + row)
    is_valid = (target != ignore) & (target >= 0) & (target < valid_columns)
    max_logit, exp_sum = _row_statistics(row_ptr, valid_columns, columns, BLOCK)
    lse_log2 = max_logit + tl.log2(exp_sum)
    lse = lse_log2 * 0.6931471805599453  # x ln(2)
    target_logit = tl.load(row_ptr + target, mask=is_valid, other=0.0).to(tl.float32)
    tl.store(lse_ptr + row, lse)
    tl.store(loss_ptr + row, tl.where(is_valid, lse - target_logit, 0.0))
    scale = tl.where(is_valid, tl.load(scale_ptr + row), 0.0)
    tl.debug_barrier()  # The target's logit is read before any thread overwrites it.
    _row_gradient(row_ptr, tl.where(is_valid, target, -1), target_logit, lse_log2, scale, valid_columns, columns, BLOCK)


def _choose_block(columns: int) -> dict[str, int]:
    """Return the block of columns and the number of warps for rows of `columns`."""
    block = min(8192, max(16, next_power_of_2(columns)))
    return {"BLOCK": block, "num_warps": max(1, min(8, block // 512))}


def compute_local_statistics(
    logits_TV: Tensor, targets: Tensor, start: int, valid_columns: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the maximum, the sum of exp(logit - maximum) and the target's logit (0 if not local) of each token, [T].

    Args:
        logits_TV: logits of the tokens `start:start + V` of the vocabulary. The first `valid_columns` are real tokens.
    """
    if not (targets.numel() and use_fused("cross entropy", logits_TV)):
        return local_statistics_reference(logits_TV, targets, start, valid_columns)
    T, V = logits_TV.shape
    out = torch.empty((3, T), dtype=torch.float32, device=logits_TV.device)
    _statistics_kernel[(T,)](
        logits_TV, targets, out[0], out[1], out[2], start, valid_columns, V, logits_TV.stride(0), **_choose_block(V)
    )
    return out[0], out[1], out[2]


def compute_local_gradient_(
    logits_TV: Tensor, targets: Tensor, lse: Tensor, scale: Tensor, start: int, valid_columns: int
) -> Tensor:
    """Replace logits by their gradient: scale x (softmax - one-hot target), and 0 in columns from `valid_columns`.

    Args:
        lse: log-sum-exp over the whole vocabulary [T].
        scale: upstream gradient of each token's loss [T], 0 for ignored tokens.
    """
    if not (targets.numel() and use_fused("cross entropy", logits_TV)):
        return local_gradient_reference_(logits_TV, targets, lse, scale, start, valid_columns)
    T, V = logits_TV.shape
    _gradient_kernel[(T,)](
        logits_TV, targets, lse, scale.contiguous(), start, valid_columns, V, logits_TV.stride(0), **_choose_block(V)
    )
    return logits_TV


def compute_loss_and_gradient_(
    logits_TV: Tensor, targets: Tensor, scale: Tensor, ignore_index: int, valid_columns: int
) -> tuple[Tensor, Tensor]:
    """Return log-sum-exp and loss of each token [T], and replace logits of the whole vocabulary by their gradient.

    Args:
        scale: upstream gradient of each token's loss [T].
        valid_columns: number of real tokens; further columns are padding.
    """
    if not (targets.numel() and use_fused("cross entropy", logits_TV)):
        lse, loss = merge_statistics(*local_statistics_reference(logits_TV, targets, 0, valid_columns), None)
        mask = targets != ignore_index
        local_gradient_reference_(logits_TV, targets, lse, scale.where(mask, 0), 0, valid_columns)
        return lse, loss.where(mask, 0)
    T, V = logits_TV.shape
    lse, loss = torch.empty((2, T), dtype=torch.float32, device=logits_TV.device)
    _loss_gradient_kernel[(T,)](
        logits_TV, targets, lse, loss, scale, ignore_index, valid_columns, V, logits_TV.stride(0), **_choose_block(V)
    )
    return lse, loss


def merge_statistics(
    max_logit: Tensor, exp_sum: Tensor, target_logits: Tensor, shard: VocabShard | None
) -> tuple[Tensor, Tensor]:
    """Return log-sum-exp over the whole vocabulary and loss of each token, given `compute_local_statistics`.

    `shard`: None if the statistics are of the whole vocabulary.
    """
    if shard is not None:
        local_max = max_logit
        max_logit = local_max.clone()
        shard.all_reduce_max(max_logit)
        packed = torch.stack((exp_sum * (local_max - max_logit).exp(), target_logits))
        shard.all_reduce_sum(packed)
        exp_sum, target_logits = packed
    lse = max_logit + exp_sum.log()
    return lse, lse - target_logits


def chunk_tokens(tokens: int, columns: int, itemsize: int) -> int:
    """Return the number of tokens per chunk, such that logits stay below LOGITS_BYTES and chunks are about equal.

    The number is a multiple of 128, or `tokens`.
    """
    max_tokens = max(128, LOGITS_BYTES // max(1, columns * itemsize))
    chunk_count = max(1, math.ceil(tokens / max_tokens))
    return max(1, min(tokens, 128 * math.ceil(tokens / chunk_count / 128)))


@dataclass(frozen=True)
class _HeadOptions:
    """Arguments of `linear_cross_entropy` that autograd does not track."""

    ignore_index: int
    vocab: int | None
    chunk: int | None
    token_grad: Tensor | None
    shard: VocabShard | None
    gemms: Gemms
    loss: TokenLoss | None
    softcap: float | None


class _Head:
    """Tensors of the output head, flattened to [T, H], and its forward and backward for one chunk of tokens.

    Attributes:
        start: id of the first token of this rank's shard of the vocabulary.
        valid_columns: number of columns of the logits that are real tokens.
        chunks: slices of tokens.
        dx_TH, weight_grad, bias_grad: gradients, None if they are not needed.
        divided_sink: sink of the weight's gradient if it exists for some rows at a time; `weight_grad` is then None.
    """

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: _HeadOptions):
        self.x_TH = x.reshape(-1, x.shape[-1])
        self.weight = weight
        self.bias = bias
        self.targets = targets.reshape(-1).contiguous()
        self.ignore_index = options.ignore_index
        self.shard = options.shard
        self.custom_loss = options.loss
        self.softcap = options.softcap
        self.softcap_derivative_TV: Tensor | None = None  # for the logits of the current chunk
        self.gemms = options.gemms
        self.start = options.shard.start if options.shard is not None else 0
        vocab_rows = weight.shape[0]
        self.valid_columns = vocab_rows
        if options.vocab is not None:
            self.valid_columns = max(0, min(vocab_rows, options.vocab - self.start))
        T = self.x_TH.shape[0]
        chunk_length = options.chunk or chunk_tokens(T, vocab_rows, x.element_size())
        self.chunks = [slice(i, min(i + chunk_length, T)) for i in range(0, T, chunk_length)]
        self.dx_TH: Tensor | None = None
        self.weight_grad: Tensor | None = None
        self.bias_grad: Tensor | None = None
        self.divided_sink: GradientSink | None = None

    def allocate_gradients(self, needs_x: bool, needs_weight: bool, needs_bias: bool) -> None:
        if needs_x:
            self.dx_TH = torch.empty_like(self.x_TH)
        sink: GradientSink | None = getattr(self.weight, "gradient_sink", None)
        if needs_weight and sink is not None and sink.is_divided:
            self.divided_sink = sink
        elif needs_weight:
            self.weight_grad = _get_accumulator(self.weight)
        if needs_bias and self.bias is not None:
            self.bias_grad = _get_accumulator(self.bias)

    def compute_logits(self, chunk: slice) -> tuple[Tensor, Operand]:
        """Return the chunk's logits [tokens, rows of weight] in x's type, and the chunk of x as GEMMs read it."""
        x = self.gemms.prepare_input(self.x_TH[chunk], self.weight)
        logits_TV = self.gemms.forward(x, self.weight, self.bias)
        if self.softcap is not None:
            softcap_(logits_TV, self.softcap)
            self.softcap_derivative_TV = 1 - (logits_TV / self.softcap).square()
        return logits_TV, x

    def compute_losses(self, chunk: slice) -> tuple[Tensor, Tensor]:
        """Return log-sum-exp (0 with a custom loss) and loss (0 for ignored tokens) of each token of the chunk."""
        targets = self.targets[chunk]
        logits_TV, _ = self.compute_logits(chunk)
        if self.custom_loss is not None:
            loss = self.custom_loss(self.make_token_logits(logits_TV, targets))
            lse = torch.zeros_like(loss)
        else:
            lse, loss = merge_statistics(
                *compute_local_statistics(logits_TV, targets, self.start, self.valid_columns), shard=self.shard
            )
        return lse, loss.where(targets != self.ignore_index, 0)

    def compute_losses_and_gradients(self, chunk: slice, scale: Tensor, is_last: bool) -> tuple[Tensor, Tensor]:
        """Return `compute_losses`, and add the chunk's gradients.

        Args:
            scale: upstream gradient of each token's loss.
            is_last: whether the weight's gradient is complete after this chunk.
        """
        logits_TV, x = self.compute_logits(chunk)
        targets = self.targets[chunk]
        if self.custom_loss is not None:
            loss = self.compute_custom_loss_and_gradient_(logits_TV, targets, scale)
            lse = torch.zeros_like(loss)
        elif self.shard is None:
            lse, loss = compute_loss_and_gradient_(logits_TV, targets, scale, self.ignore_index, self.valid_columns)
        else:
            mask = targets != self.ignore_index
            statistics = compute_local_statistics(logits_TV, targets, self.start, self.valid_columns)
            lse, loss = merge_statistics(*statistics, shard=self.shard)
            loss = loss.where(mask, 0)
            compute_local_gradient_(logits_TV, targets, lse, scale.where(mask, 0), self.start, self.valid_columns)
        self.add_gradients(chunk, x, logits_TV, completes_weight=is_last)
        return lse, loss

    def compute_gradients(self, chunk: slice, lse: Tensor, scale: Tensor) -> None:
        """Compute the chunk's logits again and add its gradients.

        Args:
            lse: log-sum-exp of each token, from forward.
            scale: upstream gradient of each token's loss.
        """
        targets = self.targets[chunk]
        scale = scale.where(targets != self.ignore_index, 0)
        logits_TV, x = self.compute_logits(chunk)
        if self.custom_loss is not None:
            self.compute_custom_loss_and_gradient_(logits_TV, targets, scale)
        else:
            compute_local_gradient_(logits_TV, targets, lse, scale, self.start, self.valid_columns)
        self.add_gradients(chunk, x, logits_TV)

    def make_token_logits(self, logits_TV: Tensor, targets: Tensor) -> TokenLogits:
        """Return the logits and targets of a chunk in the form that a custom loss reads."""
        wide = logits_TV.detach()[:, : self.valid_columns].to(torch.promote_types(logits_TV.dtype, torch.float32))
        targets = targets.where(targets != self.ignore_index, 0)
        if self.shard is None:
            return TokenLogits(wide, targets, self.start)
        return TokenLogits(wide, targets, self.start, self.shard.all_reduce_max, self.shard.all_reduce_sum)

    def compute_custom_loss_and_gradient_(self, logits_TV: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
        """Return the chunk's custom losses, and replace logits by their gradient.

        `scale`: upstream gradient of each token's loss.
        """
        assert self.custom_loss is not None
        mask = targets != self.ignore_index
        logits = self.make_token_logits(logits_TV, targets)
        with torch.enable_grad():
            logits.values.requires_grad_()
            loss = self.custom_loss(logits)
            (grad,) = torch.autograd.grad(loss, logits.values, scale.where(mask, 0).to(loss.dtype))
        logits_TV[:, : self.valid_columns] = grad.to(logits_TV.dtype)
        logits_TV[:, self.valid_columns :] = 0
        return loss.detach().where(mask, 0)

    def add_gradients(self, chunk: slice, x: Operand, grad_TV: Tensor, completes_weight: bool = False) -> None:
        """Add the gradients of x, weight and bias, given the gradient of a chunk's logits.

        If the weight's gradient is complete and its sink has a callback `complete`, the weight's gradient is computed
        before that of x. The reduction of the weight's gradient then overlaps with the GEMM for x. The same applies to
        a gradient that is written and reduced by rows.
        """
        if self.softcap_derivative_TV is not None:
            grad_TV = grad_TV.mul_(self.softcap_derivative_TV)
            self.softcap_derivative_TV = None
        gradient = self.gemms.prepare_gradient(grad_TV, self.weight)
        sink: GradientSink | None = getattr(self.weight, "gradient_sink", None)
        if self.divided_sink is not None:
            dy, inputs = gradient.for_wgrad(), x.for_wgrad()
            for rows, rows_grad in self.divided_sink.write_rows(is_overwritten=True):
                self.gemms.accumulate_wgrad(rows_grad, dy.select_columns(rows), inputs, overwrite=True)
            if self.dx_TH is not None:
                self.gemms.dgrad(gradient, self.weight, self.dx_TH[chunk])
        elif completes_weight and self.weight_grad is not None and sink is not None and sink.complete is not None:
            self.gemms.accumulate_wgrad(self.weight_grad, gradient.for_wgrad(), x.for_wgrad())
            sink.complete()
            if self.dx_TH is not None:
                self.gemms.dgrad(gradient, self.weight, self.dx_TH[chunk])
        else:
            if self.dx_TH is not None:
                self.gemms.dgrad(gradient, self.weight, self.dx_TH[chunk])
            if self.weight_grad is not None:
                self.gemms.accumulate_wgrad(self.weight_grad, gradient.for_wgrad(), x.for_wgrad())
        if self.bias_grad is not None:
            sum_columns(grad_TV, self.bias_grad)


def _get_accumulator(parameter: Tensor) -> Tensor:
    """Return the buffer of the parameter's gradient sink, or zeros if it has no sink."""
    main_grad = get_main_grad(parameter)
    if main_grad is not None:
        return main_grad
    wide = torch.promote_types(parameter.dtype, torch.float32)
    return torch.zeros(parameter.shape, dtype=wide, device=parameter.device)


def _finish_gradient(parameter: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """Return a parameter's gradient for autograd, or None if the gradient was added to the parameter's sink."""
    if parameter is None or grad is None:
        return None
    sink = get_sink(parameter)
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
        needs_gradients = ctx.needs_input_grad[:3]
        token_grad = options.token_grad
        # With a known upstream gradient, forward computes all gradients.
        ctx.has_gradients = token_grad is not None and any(needs_gradients)
        ctx.x_shape, ctx.options = x.shape, options
        ctx.weight, ctx.bias = weight, bias
        wide = torch.promote_types(x.dtype, torch.float32)
        lse_T, loss_T = torch.empty((2, targets.numel()), dtype=wide, device=x.device)
        if token_grad is not None and ctx.has_gradients:
            head.allocate_gradients(*needs_gradients)
            scale_T = token_grad.to(wide).expand(targets.shape).reshape(-1).contiguous()
            for chunk in head.chunks:
                is_last = chunk.stop == len(lse_T)
                lse_T[chunk], loss_T[chunk] = head.compute_losses_and_gradients(chunk, scale_T[chunk], is_last)
            ctx.head = head
            ctx.save_for_backward(scale_T)
        else:
            for chunk in head.chunks:
                lse_T[chunk], loss_T[chunk] = head.compute_losses(chunk)
            ctx.save_for_backward(x, targets, lse_T)
        return loss_T.view(targets.shape)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        scale_T = upstream[0].reshape(-1).contiguous()
        if ctx.has_gradients:
            head = ctx.head
            is_expected = (scale_T == ctx.saved_tensors[0]) | (head.targets == head.ignore_index)
            torch_private.assert_async(
                is_expected.all(), "linear_cross_entropy: the upstream gradient is not token_grad"
            )
            del ctx.head
        else:
            x, targets, lse_T = ctx.saved_tensors
            head = _Head(x, ctx.weight, ctx.bias, targets, ctx.options)
            head.allocate_gradients(*ctx.needs_input_grad[:3])
            for chunk in head.chunks:
                head.compute_gradients(chunk, lse_T[chunk], scale_T[chunk])
        dx = None if head.dx_TH is None else head.dx_TH.view(ctx.x_shape)
        if head.divided_sink is not None:
            head.divided_sink.ready()
        return (
            dx,
            _finish_gradient(ctx.weight, head.weight_grad),
            _finish_gradient(ctx.bias, head.bias_grad),
            None,
            None,
        )


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
    """Return the loss of each token [...] (float32 or wider) for the logits x @ weight.T + bias.

    The logits of one chunk of tokens exist at a time. Without `token_grad`, backward computes the logits again, which
    costs a fourth GEMM. Gradients of weight and bias are added to the parameter's sink if it has one.

    Args:
        x: [..., H].
        weight: [V, H]; rows from `vocab` are padding.
        targets: [...], int64; tokens with `ignore_index` have loss 0 and no gradient.
        chunk: tokens per chunk; None: `chunk_tokens`.
        token_grad: upstream gradient of each token's loss, which the caller guarantees ([...] or a scalar tensor, such
            as 1 / tokens in the step). Forward then computes all gradients while the chunk's logits exist, and
            backward runs no GEMM. If backward receives another gradient, an assertion on the device fails.
        shard: this rank's shard of a vocabulary-parallel head; None: the head is whole. With a shard, weight is
            [V / ranks, H], `vocab` and targets are those of the whole head, and the gradient of x is not summed over
            ranks.
        gemms: runs the GEMMs.
        loss: custom loss (token_loss.py); None: cross-entropy.
        softcap: bound c, which replaces logits x by c tanh(x / c); None: unbounded logits.
    """
    options = _HeadOptions(ignore_index, vocab, chunk, token_grad, shard, gemms, loss, softcap)
    return _LinearCrossEntropy.apply(x, weight, bias, targets, options)
