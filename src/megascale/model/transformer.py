"""The transformer, as chunks: consecutive blocks, the embedding before the first of all, the loss after the last.

One process holds one chunk; a pipeline stage holds one or more. Every layer is written for a tensor-parallel axis,
which may be of size one. Activations are x_SBH = [sequence / tensor ranks, batch, hidden] between layers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megascale.config import ModelConfig
from megascale.core.inventory import LogicalTensor, embedding_tensors, head_tensors, norm_tensors
from megascale.core.layers import ChunkLayers
from megascale.model.block import make_block
from megascale.model.context import EVALUATION, ForwardContext, LayerSetup, Rotary
from megascale.model.fusion import Flow
from megascale.model.norm import Norm
from megascale.ops.dropout import dropout, dropout_key
from megascale.ops.rope import rotary_tables
from megascale.parallel.collectives import ALONE, Axis
from megascale.parallel.linear import make_linears
from megascale.parallel.parameters import local_parameter, spec_of
from megascale.parallel.tensor import ColumnLinear, RowLinear
from megascale.parallel.vocabulary import vocabulary_embedding, vocabulary_logits, vocabulary_loss


class Chunk(nn.Module):
    """Consecutive blocks; `first` adds the embeddings in front, `last` the final norm and the loss behind.

    Args:
        model: shape of the whole model.
        layers: the blocks held here; a range is of whole ones.
        first, last: whether the embedding and the loss are here.
        axis: the tensor-parallel axis.
        dtype: type of weights and activations.
        recompute: what backward recomputes, as parallel.recompute.
        linear_precision: how GEMMs are done, as train.linear_precision.
        embedding: the token embedding of another chunk of this process, for tied logits here: it stays that chunk's.
    """

    def __init__(
        self,
        model: ModelConfig,
        layers: ChunkLayers | range,
        *,
        first: bool,
        last: bool,
        axis: Axis = ALONE,
        dtype: torch.dtype = torch.float32,
        recompute: str = "none",
        linear_precision: str = "default",
        embedding: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.model, self.axis, self.first, self.last, self.dtype = model, axis, first, last, dtype
        self.recompute, self.linears = recompute, make_linears(linear_precision, axis)
        self._borrowed = () if embedding is None else (embedding,)  # in a tuple it is no parameter of this module
        tied_here = first or (last and model.tied_embeddings and not self._borrowed)
        tokens, *positions = embedding_tensors(model)
        self.token_embedding = self._local(tokens) if tied_here else None
        self.position_embedding = self._local(positions[0]) if first and positions else None
        own = ChunkLayers.from_range(layers) if isinstance(layers, range) else layers
        self.blocks = nn.ModuleList(
            make_block(LayerSetup(model, i, self.linears, dtype), recompute, half) for i, half in own
        )
        self.norm = Norm(model, norm_tensors(model, "norm"), dtype) if last else None
        head = {tensor.name: tensor for tensor in head_tensors(model)} if last else {}
        self.head, self.head_bias = (
            self._local(head[name]) if name in head else None for name in ("head.weight", "head.bias")
        )
        self._tables: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        self.pre_forward_gather: Callable[[int], None] = lambda unit: None

    def units(self) -> list[list[nn.Parameter]]:
        """Parameters in the order in which forward needs them. `pre_forward_gather(i)` is called before unit i is
        used, so that parameters can still be on their way when forward begins; the last unit has all that is left."""
        blocks = [list(block.parameters()) for block in self.blocks]
        embeddings = [p for p in (self.token_embedding, self.position_embedding) if self.first and p is not None]
        return [embeddings, *blocks, list(self.parameters())]

    def matrices(self) -> dict[str, torch.Tensor]:
        """The weights [O, I] that `linears` multiplies with, by the logical tensors in them; not the vocabulary's."""
        linears = [part for part in self.modules() if isinstance(part, ColumnLinear | RowLinear)]
        return {" + ".join(piece.name for piece in spec_of(m.weight).pieces): m.weight for m in linears}

    def _local(self, tensor: LogicalTensor) -> nn.Parameter:
        """This rank's part of a logical tensor."""
        return local_parameter([tensor], self.axis.rank, self.axis.size, self.dtype)

    def forward(
        self, x: torch.Tensor, targets_SB: torch.Tensor | None = None, context: ForwardContext = EVALUATION
    ) -> torch.Tensor:
        """Run the chunk.

        Args:
            x: tokens [s, b] for the first chunk, else x_SBH [s/t, b, h].
            targets_SB: next tokens [s, b] for the last chunk; None returns the normed hidden states.
        Returns:
            x_SBH, or on the last chunk with targets the loss of every token [s, b] in float32 or wider.
        """
        self.pre_forward_gather(0)
        if self.first:
            x = self._embed(x, context)
        rotary = self._rotary(x.shape[0] * self.axis.size, x.device, context)
        whole_layers = self.recompute == "full" and torch.is_grad_enabled()
        flow: Flow = x
        for i, block in enumerate(self.blocks):
            self.pre_forward_gather(i + 1)
            if whole_layers:
                flow = checkpoint(block, flow, rotary, context, use_reentrant=False, preserve_rng_state=False)
            else:
                # Every sum but the last is followed by a norm that takes it.
                flow = block(flow, rotary, context, defer_add=self.last or i + 1 < len(self.blocks))
        self.pre_forward_gather(len(self.blocks) + 1)
        if not self.last:
            assert isinstance(flow, torch.Tensor)
            return flow
        assert self.norm is not None
        _, x = self.norm.of(flow)
        if targets_SB is None:
            return x
        grad = context.token_grad if torch.is_grad_enabled() else None
        head = (self.output_weight, self.head_bias)
        return vocabulary_loss(
            x, *head, targets_SB, self.model.vocab, self.axis, grad, self.linears, context.token_loss
        )

    @property
    def output_weight(self) -> nn.Parameter:
        """The matrix of the logits, own vocabulary rows."""
        weight = self._borrowed[0] if self._borrowed else self.head if self.head is not None else self.token_embedding
        assert weight is not None
        return weight

    def logits(self, x_SBH: torch.Tensor) -> torch.Tensor:
        """Logits [s, b, vocab] of normed hidden states, gathered over the tensor axis (for generation)."""
        return vocabulary_logits(x_SBH, self.output_weight, self.head_bias, self.model.vocab, self.axis, self.linears)

    def _embed(self, tokens_SB: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        assert self.token_embedding is not None
        x = vocabulary_embedding(tokens_SB, self.token_embedding, self.axis)
        if self.position_embedding is not None:
            past = context.cache.length if context.cache is not None else 0
            start = past + self.axis.rank * x.shape[0]
            x = x + self.position_embedding[start : start + x.shape[0], None, :]
        if self.model.dropout and context.dropout_key is not None:
            key = dropout_key(context.dropout_key, self.model.layers, 0)
            x = dropout(x, self.model.dropout, key, self.axis.rank * x.shape[0], context.sample_start)
        return x

    def _rotary(self, length: int, device: torch.device, context: ForwardContext) -> Rotary:
        model = self.model
        if model.positions != "rotary":
            return None
        past = context.cache.length if context.cache is not None else 0
        if device not in self._tables or self._tables[device][0].shape[0] < past + length:
            width = int(model.head_size * model.rotary_fraction)
            size = max(model.sequence_length, past + length)
            table_dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
            self._tables[device] = rotary_tables(size, width, model.rotary_base, device, table_dtype)
        cos, sin = self._tables[device]
        return cos[past : past + length], sin[past : past + length]
