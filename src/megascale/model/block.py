"""One layer of the transformer, serial or parallel, written for a tensor-parallel axis, which may be of size one.

Activations are x_SBH = [sequence / tensor ranks, batch, hidden] between layers and [sequence, batch, own heads or
columns] inside. Serial block: x + Attn(LN x), then x + MLP(LN x). Parallel block (MegaScale section 3.1):
x + Attn(LN x) + MLP(LN x), with one gather and one scatter a layer. A residual sum is taken by the norm that follows
it, in one pass each way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from megascale.config import ModelConfig
from megascale.core.tensors import Piece
from megascale.ops.activation import RecomputedActivation
from megascale.ops.attention import attention
from megascale.ops.dispatch import use_fused
from megascale.ops.dropout import dropout_add, dropout_key
from megascale.ops.fused_projection import split_fused_projection
from megascale.ops.norm import NormKind, add_norm, layer_norm, rms_norm
from megascale.ops.rope import split_qkv
from megascale.parallel.collectives import Axis
from megascale.parallel.parameters import Spec, parameter
from megascale.parallel.tensor import gather_linear, linear_scatter


@dataclass
class KVCache:
    """Keys and values of the tokens seen so far, one pair a layer, [length, batch, kv heads, head size]."""

    layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    length: int = 0


@dataclass(frozen=True)
class ForwardContext:
    """What a forward pass needs to know besides its input.

    Attributes:
        dropout_key: changes with the optimizer step; None turns dropout off.
        sample_start: index in the global batch of this micro-batch's first sample.
        token_grad: the gradient of each token's loss, where it is known before backward: the last chunk then makes
            its gradients while its logits are there.
        cache: keys and values of earlier tokens, for generation.
    """

    dropout_key: int | None = None
    sample_start: int = 0
    token_grad: torch.Tensor | None = None
    cache: KVCache | None = None


EVALUATION = ForwardContext()


class Norm(nn.Module):
    """LayerNorm or RMSNorm over hidden, on this rank's part of the sequence."""

    def __init__(self, model: ModelConfig, name: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = model.norm_eps
        h = (model.hidden,)
        ones = Spec((Piece.whole(f"{name}.weight", h),), init_value=1.0, replicated=True)
        zeros = Spec((Piece.whole(f"{name}.bias", h),), replicated=True)
        self.weight = parameter(h, ones, dtype)
        self.bias = parameter(h, zeros, dtype) if model.norm == "layernorm" else None

    def forward(self, x_SBH: torch.Tensor) -> torch.Tensor:
        if self.bias is None:
            return rms_norm(x_SBH, self.weight, self.eps)
        return layer_norm(x_SBH, self.weight, self.bias, self.eps)

    def of(self, x: torch.Tensor | DeferredResidualAdd) -> tuple[torch.Tensor, torch.Tensor]:
        """x and the norm of it; a sum that is still to be taken is taken and normed in one pass each way."""
        if isinstance(x, torch.Tensor):
            return x, self(x)
        kind: NormKind = "layernorm" if self.bias is not None else "rmsnorm"
        return add_norm(x.y_SBH, x.residual_SBH, self.weight, self.bias, self.eps, kind, x.bias)


@dataclass(frozen=True)
class DeferredResidualAdd:
    """A residual sum that its reader takes: residual + y + bias."""

    y_SBH: torch.Tensor
    residual_SBH: torch.Tensor
    bias: torch.Tensor | None

    def total(self) -> torch.Tensor:
        """The sum."""
        if self.bias is None:
            return self.residual_SBH + self.y_SBH
        return dropout_add(self.y_SBH, self.bias, self.residual_SBH, 0.0, dropout_key(0, 0, 0), 0, 0)


class ColumnLinear(nn.Module):
    """One GEMM whose output columns are stacked logical tensors, each cut over the tensor axis.

    `parts` lists (logical name, rows of the whole logical weight).
    """

    def __init__(
        self, hidden: int, parts: Sequence[tuple[str, int]], bias: bool, std: float, axis: Axis, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.axis = axis
        columns = sum(rows for _, rows in parts) // axis.size
        pieces = tuple(Piece.cut(f"{name}.weight", (rows, hidden), 0, axis.rank, axis.size) for name, rows in parts)
        self.weight = parameter((columns, hidden), Spec(pieces, init_std=std), dtype)
        self.bias = column_bias(parts, axis, dtype) if bias else None

    def forward(
        self, x_SBH: torch.Tensor, recompute_fn: Norm | None = None, fused_bias_gradient: bool = False
    ) -> torch.Tensor:
        """x times the weight, [s/t, b, h] -> [s, b, columns/t]. With `recompute_fn` the GEMM is of
        recompute_fn(x), which is recomputed in backward instead of being kept. With `fused_bias_gradient` whoever reads
        the result makes the bias's gradient, which is its own gradient's sum over the rows."""
        bias = self.bias.detach() if fused_bias_gradient and self.bias is not None else self.bias
        return gather_linear(x_SBH, self.weight, bias, self.axis, recompute_fn)


def column_bias(parts: Sequence[tuple[str, int]], axis: Axis, dtype: torch.dtype) -> nn.Parameter:
    """The stacked biases of column-parallel GEMMs, [columns/t]."""
    pieces = tuple(Piece.cut(f"{name}.bias", (rows,), 0, axis.rank, axis.size) for name, rows in parts)
    return parameter((sum(rows for _, rows in parts) // axis.size,), Spec(pieces), dtype)


def _row_weight(name: str, rows: int, columns: int, std: float, axis: Axis, dtype: torch.dtype) -> nn.Parameter:
    piece = Piece.cut(f"{name}.weight", (rows, columns), 1, axis.rank, axis.size)
    return parameter((rows, columns // axis.size), Spec((piece,), init_std=std), dtype)


def _replicated_bias(name: str, size: int, dtype: torch.dtype) -> nn.Parameter:
    piece = Piece.whole(f"{name}.bias", (size,))
    return parameter((size,), Spec((piece,), replicated=True), dtype)


class Block(nn.Module):
    """One layer, serial or parallel; `recompute` as parallel.recompute (whole layers are the chunk's to recompute)."""

    def __init__(self, model: ModelConfig, layer: int, axis: Axis, dtype: torch.dtype, recompute: str = "none") -> None:
        super().__init__()
        self.model, self.layer, self.axis, self.recompute = model, layer, axis, recompute
        self.window = model.layer_window(layer)
        h, d, name = model.hidden, model.head_size, f"layers.{layer}"
        out_std = model.init_std / (2 * model.layers) ** 0.5
        qkv = [
            (f"{name}.attention.query", model.heads * d),
            (f"{name}.attention.key", model.kv * d),
            (f"{name}.attention.value", model.kv * d),
        ]
        into = [(f"{name}.mlp.gate", model.ffn)] if model.gated else []
        into.append((f"{name}.mlp.in", model.ffn))
        self.fuses_projections = model.block == "parallel" and model.parallel_norms == 1
        self.norm1 = Norm(model, f"{name}.norm1", dtype)
        self.norm2 = None if self.fuses_projections else Norm(model, f"{name}.norm2", dtype)
        self.qkv_bias = self.mlp_in_bias = None
        if self.fuses_projections:
            both = model.attention_bias and model.mlp_bias
            self.into = ColumnLinear(h, qkv + into, both, model.init_std, axis, dtype)
            # A fused projection has one bias; a model with a bias on one half only (GPT-J) adds it to that half.
            if model.attention_bias and not both:
                self.qkv_bias = column_bias(qkv, axis, dtype)
            if model.mlp_bias and not both:
                self.mlp_in_bias = column_bias(into, axis, dtype)
        else:
            self.qkv = ColumnLinear(h, qkv, model.attention_bias, model.init_std, axis, dtype)
            self.mlp_in = ColumnLinear(h, into, model.mlp_bias, model.init_std, axis, dtype)
        self.attention_out = _row_weight(f"{name}.attention.output", h, model.heads * d, out_std, axis, dtype)
        self.mlp_out = _row_weight(f"{name}.mlp.out", h, model.ffn, out_std, axis, dtype)
        self.attention_out_bias = _replicated_bias(f"{name}.attention.output", h, dtype) if model.out_bias else None
        self.mlp_out_bias = _replicated_bias(f"{name}.mlp.out", h, dtype) if model.mlp_bias else None
        self.heads, self.kv_heads = model.heads // axis.size, model.kv // axis.size

    def forward(
        self,
        x: torch.Tensor | DeferredResidualAdd,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        context: ForwardContext,
        defer_add: bool = False,
    ) -> torch.Tensor | DeferredResidualAdd:
        """[s/t, b, h] -> [s/t, b, h]. With `defer_add` the last residual sum may be left to the next norm."""
        if self.model.block == "serial":
            assert self.norm2 is not None
            x_SBH, qkv = self._into(self.qkv, self.norm1, x)
            y = linear_scatter(self.axis, self._attend(self._split(qkv, rotary), context), self.attention_out)
            between = self._add(y, x_SBH, 0, context, True, self.attention_out_bias)
            x_SBH, inner = self._into(self.mlp_in, self.norm2, between, self._fuses_bias_gradient(y))
            return self._add(self._out(inner), x_SBH, 1, context, defer_add, self.mlp_out_bias)
        if self.fuses_projections:
            in_parts = self.qkv_bias is not None
            x_SBH, fused = self._into(self.into, self.norm1, x, not in_parts and self._fuses_bias_gradient(x))
            if in_parts:
                width = (self.heads + 2 * self.kv_heads) * self.model.head_size
                parts = self._split(_biased(fused[..., :width], self.qkv_bias), rotary)
                y = self._out(fused[..., width:], self._attend(parts, context))
            else:
                y = self._from_fused_projection(fused, rotary, context)
        else:
            assert self.norm2 is not None
            x_SBH, qkv = self._into(self.qkv, self.norm1, x)
            _, inner = self._into(self.mlp_in, self.norm2, x_SBH, self._fuses_bias_gradient(x_SBH))
            y = self._out(inner, self._attend(self._split(qkv, rotary), context))
        return self._add(y, x_SBH, 0, context, defer_add, self.attention_out_bias, self.mlp_out_bias)

    def _recomputes(self, what: str) -> bool:
        """Whether backward recomputes "norms" or the "activation" instead of keeping them."""
        return self.recompute in (what, "selective") and torch.is_grad_enabled()

    def _fuses_bias_gradient(self, x: torch.Tensor | DeferredResidualAdd) -> bool:
        """Whether the activation makes the gradient of its GEMM's bias: where it is fused. A plain one would take a
        pass more for it."""
        name = "split fused projection" if self.fuses_projections else "swiglu" if self.model.gated else "gelu"
        return use_fused(name, x if isinstance(x, torch.Tensor) else x.y_SBH)

    def _into(
        self, linear: ColumnLinear, norm: Norm, x: torch.Tensor | DeferredResidualAdd, fused_bias_gradient: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream as it enters, and the GEMM of its norm."""
        if self._recomputes("norms"):
            x_SBH = x if isinstance(x, torch.Tensor) else x.total()
            return x_SBH, linear(x_SBH, norm, fused_bias_gradient)
        x_SBH, normed = norm.of(x)
        return x_SBH, linear(normed, None, fused_bias_gradient)

    def _out(self, inner: torch.Tensor, attended: torch.Tensor | None = None) -> torch.Tensor:
        """The MLP's output GEMM, with the attention's in the same sum in a parallel block."""
        first = () if attended is None else (attended, self.attention_out)
        activation = self._activation(inner)
        if self._recomputes("activation"):
            recompute_fns = (activation,) if attended is None else (None, activation)
            return linear_scatter(self.axis, *first, inner, self.mlp_out, recompute_fns=recompute_fns)
        return linear_scatter(self.axis, *first, activation(inner), self.mlp_out)

    def _from_fused_projection(
        self, fused: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor] | None, context: ForwardContext
    ) -> torch.Tensor:
        """The parallel block's fused QKV+MLP projection, split in one pass, to its one sum of GEMMs."""
        cos, sin = rotary or (None, None)
        q, k, v, inner, activation = split_fused_projection(
            fused,
            self.heads,
            self.kv_heads,
            self.model.head_size,
            self.model.activation,
            self.mlp_in_bias,
            cos,
            sin,
            self.model.rotary_interleaved,
            self.into.bias if self._fuses_bias_gradient(fused) else None,
            self._recomputes("activation"),
        )
        attended = self._attend((q, k, v), context)
        return linear_scatter(
            self.axis, attended, self.attention_out, inner, self.mlp_out, recompute_fns=(None, activation)
        )

    def _split(
        self, qkv: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[s, b, (n + 2g) d] -> q [s, b, n, d], k and v [s, b, g, d], rotated: this rank's heads."""
        cos, sin = rotary or (None, None)
        return split_qkv(qkv, self.heads, self.kv_heads, cos, sin, self.model.rotary_interleaved)

    def _attend(self, qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor], context: ForwardContext) -> torch.Tensor:
        """q, k, v -> [s, b, n d]."""
        q, k, v = qkv
        if context.cache is not None:
            if self.layer in context.cache.layers:
                old_k, old_v = context.cache.layers[self.layer]
                k, v = torch.cat([old_k, k]), torch.cat([old_v, v])
            context.cache.layers[self.layer] = (k, v)
        return attention(q, k, v, window=self.window)

    def _activation(self, x: torch.Tensor) -> RecomputedActivation:
        """The MLP's, for the result x of its own GEMM or of one half of a fused projection."""
        # The MLP's own GEMM has added its bias, and what is left is its gradient; that of one half of a fused
        # projection is added here.
        added = not self.fuses_projections and self._fuses_bias_gradient(x)
        bias = self.mlp_in.bias if added else self.mlp_in_bias
        return RecomputedActivation(self.model.activation, bias, added)

    def _add(
        self,
        y_SBH: torch.Tensor,
        residual: torch.Tensor,
        site: int,
        context: ForwardContext,
        defer_add: bool,
        *biases: nn.Parameter | None,
    ) -> torch.Tensor | DeferredResidualAdd:
        """residual + dropout(y + biases): in one pass where fused, or left to its reader with `defer_add`."""
        given = [bias for bias in biases if bias is not None]
        bias = sum(given[1:], given[0]) if given else None
        p = self.model.dropout if context.dropout_key is not None else 0.0
        if not p:
            deferred = DeferredResidualAdd(y_SBH, residual, bias)
            return deferred if defer_add else deferred.total()
        key = dropout_key(context.dropout_key or 0, self.layer, site)
        return dropout_add(y_SBH, bias, residual, p, key, self.axis.rank * y_SBH.shape[0], context.sample_start)


def _biased(y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return y if bias is None else y + bias
