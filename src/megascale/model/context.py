"""Types that blocks and their parts share: arguments of their construction, and context of a forward pass."""

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
    """Arguments for the construction of a block and its parts.

    Attributes:
        layer: specification of the layer.
        index: index of the layer in the model, from 0.
        linears: precision of GEMMs, which also has the tensor-parallel axis.
        dtype: type of weights and activations.
        dropout: probability of dropout on what a layer adds to the residual stream.
        recompute: value of parallel.recompute; the chunk recomputes whole layers.
        half: "attention" or "mlp" if the other half of the layer is in another chunk.
        axes: axes of the grid that parts may communicate along, by name; absent names have a single rank.
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
        """Return whether backward recomputes "norms" or the "activation"."""
        return self.recompute in (activation, "selective")


@dataclass
class KVCache:
    """Keys and values of earlier tokens.

    Attributes:
        layers: one pair per layer, [tokens, batch, kv heads, head size]; in a window, those of its tokens.
        length: number of earlier tokens.
    """

    layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    length: int = 0

    def extend(
        self, index: int, k: torch.Tensor, v: torch.Tensor, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of layer `index` with those of new tokens, and keep what later tokens see."""
        if index in self.layers:
            old_k, old_v = self.layers[index]
            k = torch.cat([old_k, k])
            v = torch.cat([old_v, v])
        first = 0
        if window is not None:
            first = max(0, k.shape[0] - window + 1)
        self.layers[index] = k[first:], v[first:]
        return k, v


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Context of a forward pass, in addition to its input.

    Attributes:
        dropout_key: depends on the optimizer step; None: no dropout.
        sample_start: index in the global batch of this micro-batch's first sample.
        token_grad: gradient of each token's loss, if it is known before backward: the last chunk then computes its
            gradients together with the logits.
        cache: keys and values of earlier tokens, for generation.
        token_loss: loss to use instead of cross-entropy.
        documents: documents of the samples, which attention does not leave; None: a sample is one document. The chunk
            makes it from the boundaries of its batch.
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
        """Number of tokens before those of the input: none without a cache."""
        if self.cache is None:
            return 0
        return self.cache.length


EVALUATION = ForwardContext()

# Cosines and sines of the positions, each [length, rotated width / 2], or [length, batch, rotated width / 2] if samples
# have positions of their own; None without rotary positions.
Rotary = tuple[torch.Tensor, torch.Tensor] | None
