"""The transformer, as chunks: consecutive blocks, the embedding before the first of all, the loss after the last.

One process holds one chunk; a pipeline stage holds one or more. Every layer is written for a tensor-parallel axis,
which may be of size one. Activations are x_SBH = [sequence / tensor ranks, batch, hidden] between layers and
[sequence, batch, own heads or columns] inside. Serial block: x + Attn(LN x), then x + MLP(LN x). Parallel block
(MegaScale section 3.1): x + Attn(LN x) + MLP(LN x), with one gather and one scatter a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megascale.config import ModelConfig
from megascale.core.tensors import Box, Piece
from megascale.ops.activation import gelu, swiglu
from megascale.ops.attention import attention
from megascale.ops.dropout import dropout, dropout_add, dropout_key
from megascale.ops.norm import layer_norm, rms_norm
from megascale.ops.rope import rotary_tables, split_qkv
from megascale.ops.wide import split_wide
from megascale.parallel.collectives import ALONE, Axis
from megascale.parallel.parameters import Spec, parameter
from megascale.parallel.tensor import gather_linear, linear_scatter
from megascale.parallel.vocabulary import vocabulary_embedding, vocabulary_logits, vocabulary_loss


@dataclass
class KVCache:
    """Keys and values of the tokens seen so far, one pair a layer, [length, batch, kv heads, head size]."""

    layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    length: int = 0


@dataclass(frozen=True)
class Step:
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


EVALUATION = Step()


class Norm(nn.Module):
    """LayerNorm or RMSNorm over hidden, on this rank's part of the sequence."""

    def __init__(self, model: ModelConfig, name: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = model.norm_eps
        h = (model.hidden,)
        ones = Spec((Piece.whole(f"{name}.weight", h),), init_value=1.0, shared=True)
        zeros = Spec((Piece.whole(f"{name}.bias", h),), shared=True)
        self.weight = parameter(h, ones, dtype)
        self.bias = parameter(h, zeros, dtype) if model.norm == "layernorm" else None

    def forward(self, x_SBH: torch.Tensor) -> torch.Tensor:
        if self.bias is None:
            return rms_norm(x_SBH, self.weight, self.eps)
        return layer_norm(x_SBH, self.weight, self.bias, self.eps)


class ColumnLinear(nn.Module):
    """One wide product whose output columns are stacked logical tensors, each cut over the tensor axis.

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

    def forward(self, x_SBH: torch.Tensor, norm: Norm, recompute: bool) -> torch.Tensor:
        """norm(x) times the weight, [s/t, b, h] -> [s, b, columns/t]; `recompute` keeps x instead of norm(x)."""
        if recompute:
            return gather_linear(x_SBH, self.weight, self.bias, self.axis, norm)
        return gather_linear(norm(x_SBH), self.weight, self.bias, self.axis)


def column_bias(parts: Sequence[tuple[str, int]], axis: Axis, dtype: torch.dtype) -> nn.Parameter:
    """The stacked biases of column-parallel products, [columns/t]."""
    pieces = tuple(Piece.cut(f"{name}.bias", (rows,), 0, axis.rank, axis.size) for name, rows in parts)
    return parameter((sum(rows for _, rows in parts) // axis.size,), Spec(pieces), dtype)


def _row_weight(name: str, rows: int, columns: int, std: float, axis: Axis, dtype: torch.dtype) -> nn.Parameter:
    piece = Piece.cut(f"{name}.weight", (rows, columns), 1, axis.rank, axis.size)
    return parameter((rows, columns // axis.size), Spec((piece,), init_std=std), dtype)


def _shared_bias(name: str, size: int, dtype: torch.dtype) -> nn.Parameter:
    piece = Piece.whole(f"{name}.bias", (size,))
    return parameter((size,), Spec((piece,), shared=True), dtype)


class Block(nn.Module):
    """One layer, serial or parallel; `recompute` keeps neither norms nor the MLP's activation for backward."""

    def __init__(self, model: ModelConfig, layer: int, axis: Axis, dtype: torch.dtype, recompute: bool) -> None:
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
        self.one_product = model.block == "parallel" and model.parallel_norms == 1
        self.norm1 = Norm(model, f"{name}.norm1", dtype)
        self.norm2 = None if self.one_product else Norm(model, f"{name}.norm2", dtype)
        self.qkv_bias = self.mlp_in_bias = None
        if self.one_product:
            both = model.attention_bias and model.mlp_bias
            self.into = ColumnLinear(h, qkv + into, both, model.init_std, axis, dtype)
            # One wide product has one bias; a model with a bias on one half only (GPT-J) adds it to that half.
            if model.attention_bias and not both:
                self.qkv_bias = column_bias(qkv, axis, dtype)
            if model.mlp_bias and not both:
                self.mlp_in_bias = column_bias(into, axis, dtype)
        else:
            self.qkv = ColumnLinear(h, qkv, model.attention_bias, model.init_std, axis, dtype)
            self.mlp_in = ColumnLinear(h, into, model.mlp_bias, model.init_std, axis, dtype)
        self.attention_out = _row_weight(f"{name}.attention.output", h, model.heads * d, out_std, axis, dtype)
        self.mlp_out = _row_weight(f"{name}.mlp.out", h, model.ffn, out_std, axis, dtype)
        self.attention_out_bias = _shared_bias(f"{name}.attention.output", h, dtype) if model.out_bias else None
        self.mlp_out_bias = _shared_bias(f"{name}.mlp.out", h, dtype) if model.mlp_bias else None
        self.heads, self.kv_heads = model.heads // axis.size, model.kv // axis.size

    def forward(
        self, x_SBH: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor] | None, step: Step
    ) -> torch.Tensor:
        """[s/t, b, h] -> [s/t, b, h]."""
        again = self.recompute and torch.is_grad_enabled()
        if self.model.block == "serial":
            assert self.norm2 is not None
            attended = self._attend(self._split(self.qkv(x_SBH, self.norm1, again), rotary), step)
            y = linear_scatter(self.axis, attended, self.attention_out)
            x_SBH = self._add(y, x_SBH, 0, step, self.attention_out_bias)
            y = self._scatter(again, self.mlp_in(x_SBH, self.norm2, again))
            return self._add(y, x_SBH, 1, step, self.mlp_out_bias)
        if self.one_product:
            wide = self.into(x_SBH, self.norm1, again)
            if again or self.qkv_bias is not None:
                width = (self.heads + 2 * self.kv_heads) * self.model.head_size
                qkv = self._split(_biased(wide[..., :width], self.qkv_bias), rotary)
                y = self._scatter(again, wide[..., width:], self._attend(qkv, step))
            else:
                y = self._from_wide(wide, rotary, step)
        else:
            assert self.norm2 is not None
            qkv, inner = self.qkv(x_SBH, self.norm1, again), self.mlp_in(x_SBH, self.norm2, again)
            y = self._scatter(again, inner, self._attend(self._split(qkv, rotary), step))
        return self._add(y, x_SBH, 0, step, self.attention_out_bias, self.mlp_out_bias)

    def _from_wide(
        self, wide: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor] | None, step: Step
    ) -> torch.Tensor:
        """The parallel block's one wide product, split in one pass, to its one sum of products."""
        cos, sin = rotary or (None, None)
        q, k, v, inner = split_wide(
            wide,
            self.heads,
            self.kv_heads,
            self.model.head_size,
            self.model.activation,
            self.mlp_in_bias,
            cos,
            sin,
            self.model.rotary_interleaved,
        )
        return linear_scatter(self.axis, self._attend((q, k, v), step), self.attention_out, inner, self.mlp_out)

    def _scatter(self, again: bool, inner: torch.Tensor, attended: torch.Tensor | None = None) -> torch.Tensor:
        """The MLP's output product, with the attention's in the same sum in a parallel block."""
        first = () if attended is None else (attended, self.attention_out)
        if again:
            produces = (self._activate,) if attended is None else (None, self._activate)
            return linear_scatter(self.axis, *first, inner, self.mlp_out, produces=produces)
        return linear_scatter(self.axis, *first, self._activate(inner), self.mlp_out)

    def _split(
        self, qkv: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[s, b, (n + 2g) d] -> q [s, b, n, d], k and v [s, b, g, d], rotated: this rank's heads."""
        cos, sin = rotary or (None, None)
        return split_qkv(qkv, self.heads, self.kv_heads, cos, sin, self.model.rotary_interleaved)

    def _attend(self, qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor], step: Step) -> torch.Tensor:
        """q, k, v -> [s, b, n d]."""
        q, k, v = qkv
        if step.cache is not None:
            if self.layer in step.cache.layers:
                old_k, old_v = step.cache.layers[self.layer]
                k, v = torch.cat([old_k, k]), torch.cat([old_v, v])
            step.cache.layers[self.layer] = (k, v)
        return attention(q, k, v, window=self.window)

    def _activate(self, x: torch.Tensor) -> torch.Tensor:
        if self.model.gated:
            return swiglu(x, self.mlp_in_bias)
        return gelu(x, self.mlp_in_bias, approximate="tanh" if self.model.activation == "gelu_tanh" else "none")

    def _add(
        self, y_SBH: torch.Tensor, residual: torch.Tensor, site: int, step: Step, *biases: nn.Parameter | None
    ) -> torch.Tensor:
        """residual + dropout(y + biases), in one pass where fused."""
        given = [bias for bias in biases if bias is not None]
        bias = sum(given[1:], given[0]) if given else None
        p = self.model.dropout if step.dropout_key is not None else 0.0
        if not p and bias is None:
            return residual + y_SBH
        key = dropout_key(step.dropout_key or 0, self.layer, site)
        return dropout_add(y_SBH, bias, residual, p, key, self.axis.rank * y_SBH.shape[0], step.sample_start)


def _biased(y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return y if bias is None else y + bias


class Chunk(nn.Module):
    """Consecutive blocks; `first` adds the embeddings in front, `last` the final norm and the loss behind.

    Args:
        model: shape of the whole model.
        layers: the blocks held here.
        first, last: whether the embedding and the loss are here.
        axis: the tensor-parallel axis.
        dtype: type of weights and activations.
        recompute: what backward computes again: nothing; "selective": norms and activations; "full": whole layers.
    """

    def __init__(
        self,
        model: ModelConfig,
        layers: range,
        *,
        first: bool,
        last: bool,
        axis: Axis = ALONE,
        dtype: torch.dtype = torch.float32,
        recompute: str = "none",
    ) -> None:
        super().__init__()
        self.model, self.axis, self.first, self.last, self.dtype = model, axis, first, last, dtype
        self.recompute = recompute
        h = model.hidden
        tied_here = first or (last and model.tied_embeddings)
        self.token_embedding = self._vocabulary("embedding.token.weight", dtype) if tied_here else None
        self.position_embedding = None
        if first and model.positions == "learned":
            shape = (model.sequence_length, h)
            spec = Spec(
                (Piece.whole("embedding.position.weight", shape),),
                init_std=model.init_std,
                shared=True,
            )
            self.position_embedding = parameter(shape, spec, dtype)
        self.blocks = nn.ModuleList(Block(model, i, axis, dtype, recompute == "selective") for i in layers)
        self.norm = Norm(model, "norm", dtype) if last else None
        self.head = self._vocabulary("head.weight", dtype) if last and not model.tied_embeddings else None
        self.head_bias = None
        if last and model.head_bias:
            self.head_bias = parameter(
                (model.padded_vocab // axis.size,), Spec(self._vocabulary_pieces("head.bias", (model.vocab,))), dtype
            )
        self._tables: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        self.arrive: Callable[[int], None] = lambda unit: None

    def units(self) -> list[list[nn.Parameter]]:
        """Parameters in the order in which forward needs them. `arrive(i)` is called before unit i is used, so that
        parameters can still be on their way when forward begins; the last unit has all that is left."""
        blocks = [list(block.parameters()) for block in self.blocks]
        embeddings = [p for p in (self.token_embedding, self.position_embedding) if self.first and p is not None]
        return [embeddings, *blocks, list(self.parameters())]

    def _vocabulary_pieces(self, name: str, shape: tuple[int, ...]) -> tuple[Piece, ...]:
        """This rank's rows of a tensor with a row a token; rows past the real vocabulary are nobody's."""
        rows = self.model.padded_vocab // self.axis.size
        start = min(self.axis.rank * rows, self.model.vocab)
        count = max(0, min(rows, self.model.vocab - start))
        whole = Piece.whole(name, shape)
        box = Box((start, *whole.box.offsets[1:]), (count, *whole.box.sizes[1:]))
        return (Piece(name, shape, box, whole.decay),)

    def _vocabulary(self, name: str, dtype: torch.dtype) -> nn.Parameter:
        pieces = self._vocabulary_pieces(name, (self.model.vocab, self.model.hidden))
        shape = (self.model.padded_vocab // self.axis.size, self.model.hidden)
        return parameter(shape, Spec(pieces, init_std=self.model.init_std), dtype)

    def forward(self, x: torch.Tensor, targets_SB: torch.Tensor | None = None, step: Step = EVALUATION) -> torch.Tensor:
        """Run the chunk.

        Args:
            x: tokens [s, b] for the first chunk, else x_SBH [s/t, b, h].
            targets_SB: next tokens [s, b] for the last chunk; None returns the normed hidden states.
        Returns:
            x_SBH, or on the last chunk with targets the loss of every token [s, b] in float32 or wider.
        """
        self.arrive(0)
        if self.first:
            x = self._embed(x, step)
        rotary = self._rotary(x.shape[0] * self.axis.size, x.device, step)
        whole_layers = self.recompute == "full" and torch.is_grad_enabled()
        for i, block in enumerate(self.blocks):
            self.arrive(i + 1)
            if whole_layers:
                x = checkpoint(block, x, rotary, step, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, rotary, step)
        self.arrive(len(self.blocks) + 1)
        if not self.last:
            return x
        assert self.norm is not None
        x = self.norm(x)
        if targets_SB is None:
            return x
        grad = step.token_grad if torch.is_grad_enabled() else None
        return vocabulary_loss(x, self.output_weight, self.head_bias, targets_SB, self.model.vocab, self.axis, grad)

    @property
    def output_weight(self) -> nn.Parameter:
        """The matrix of the logits, own vocabulary rows."""
        weight = self.head if self.head is not None else self.token_embedding
        assert weight is not None
        return weight

    def logits(self, x_SBH: torch.Tensor) -> torch.Tensor:
        """Logits [s, b, vocab] of normed hidden states, gathered over the tensor axis (for generation)."""
        return vocabulary_logits(x_SBH, self.output_weight, self.head_bias, self.model.vocab, self.axis)

    def _embed(self, tokens_SB: torch.Tensor, step: Step) -> torch.Tensor:
        assert self.token_embedding is not None
        x = vocabulary_embedding(tokens_SB, self.token_embedding, self.axis)
        if self.position_embedding is not None:
            past = step.cache.length if step.cache is not None else 0
            start = past + self.axis.rank * x.shape[0]
            x = x + self.position_embedding[start : start + x.shape[0], None, :]
        if self.model.dropout and step.dropout_key is not None:
            key = dropout_key(step.dropout_key, self.model.layers, 0)
            x = dropout(x, self.model.dropout, key, self.axis.rank * x.shape[0], step.sample_start)
        return x

    def _rotary(self, length: int, device: torch.device, step: Step) -> tuple[torch.Tensor, torch.Tensor] | None:
        model = self.model
        if model.positions != "rotary":
            return None
        past = step.cache.length if step.cache is not None else 0
        if device not in self._tables or self._tables[device][0].shape[0] < past + length:
            width = int(model.head_size * model.rotary_fraction)
            size = max(model.sequence_length, past + length)
            wide = torch.float64 if self.dtype == torch.float64 else torch.float32
            self._tables[device] = rotary_tables(size, width, model.rotary_base, device, wide)
        cos, sin = self._tables[device]
        return cos[past : past + length], sin[past : past + length]
