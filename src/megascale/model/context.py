"""Types that blocks, attention and MLP share: arguments of their constructors, and context of a forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from megascale.core.inventory import LayerInventory, layer_inventory
from megascale.core.layer_spec import LayerSpec
from megascale.core.layers import Half
from megascale.ops.attention_documents import DocumentMask
from megascale.ops.token_loss import TokenLoss
from megascale.parallel.collectives import Axis
from megascale.parallel.linear import LinearPrecision


@dataclass(frozen=True)
class LayerSetup:
    """Arguments of the constructors of a block, its attention and its MLP.

    Attributes:
        layer: specification of the layer.
        index: index of the layer in the model, from 0.
        linears: precision of the linear layers, with the tensor-parallel axis.
        dtype: type of weights and activations.
        dropout: probability of dropout before a residual sum.
        recompute: value of parallel.recompute. For "full" the chunk recomputes whole layers.
        half: "attention" or "mlp" if the other half of the layer is in another chunk.
        axes: axes of the grid that attention and MLP may communicate along, by name. An axis that is absent has one
            rank.
    """

    layer: LayerSpec
    index: int
    linears: LinearPrecision
    dtype: torch.dtype
    dropout: float = 0.0
    recompute: str = "none"
    half: Half = "both"
    axes: Mapping[str, Axis] = field(default_factory=dict)

    @property
    def axis(self) -> Axis:
        """The tensor-parallel axis."""
        return self.linears.axis

    @property
    def tensors(self) -> LayerInventory:
        """The layer's logical tensors."""
        return layer_inventory(self.layer, self.index)

    def recomputes(self, activation: str) -> bool:
        """Return whether backward recomputes an activation: "norms", or the MLP's "activation"."""
        return self.recompute in (activation, "selective")


@dataclass
class KVCache:
    """Keys and values of earlier tokens.

    Attributes:
        layers: keys and values by layer index, each [tokens, batch, kv heads, head size]. A layer with a window holds
            only the tokens that later tokens attend to.
        length: number of earlier tokens.
    """

    layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    length: int = 0

    def extend(
        self, index: int, k: torch.Tensor, v: torch.Tensor, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append k and v of new tokens to layer `index`. Return the keys and values of all tokens in the cache.

        Afterwards the cache drops tokens that lie outside the window of the next token.
        """
        if index in self.layers:
            past_k, past_v = self.layers[index]
            k = torch.cat([past_k, k])
            v = torch.cat([past_v, v])
        first_kept = 0
        if window is not None:
            first_kept = max(0, k.shape[0] - window + 1)
        self.layers[index] = k[first_kept:], v[first_kept:]
        return k, v


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Context of a forward pass, in addition to its input.

    Attributes:
        dropout_key: key of the dropout masks, which differs between optimizer steps; None: no dropout.
        sample_start: index in the global batch of this micro-batch's first sample.
        token_grad: gradient of each token's loss, if it is known before backward. The last chunk then computes the
            gradient of the logits together with the logits.
        cache: keys and values of earlier tokens, for generation.
        token_loss: loss to use instead of cross-entropy.
        documents: documents of the samples; tokens attend within their document. None: a sample is one document. The
            chunk makes the mask from the document boundaries of its batch.
        sequence_start: index in each sample of the first token of this context rank's slice. The chunk sets it.
        is_replicated: whether all context ranks have the same tokens instead of slices, as in generation.
    """

    dropout_key: int | None = None
    sample_start: int = 0
    token_grad: torch.Tensor | None = None
    cache: KVCache | None = None
    token_loss: TokenLoss | None = None
    documents: DocumentMask | None = None
    sequence_start: int = 0
    is_replicated: bool = False

    @property
    def past_length(self) -> int:
        """Number of cached tokens, which precede the input."""
        if self.cache is None:
            return 0
        return self.cache.length


EVALUATION = ForwardContext()

# Cosines and sines of the positions, each [length, rotated width / 2]. If positions differ between samples, each is
# [length, batch, rotated width / 2]. None: the layer has no rotary positions.
Rotary = tuple[torch.Tensor, torch.Tensor] | None
