"""The one count of FLOPs. A multiply-add is two; recomputation is not counted; backward is twice forward.

Convention "full attention": the s x s score matrix is credited whole although the causal half is computed, as in
Megatron-LM's formula 72 B L s h^2 (1 + s/6h + V/12Lh) and PaLM's; it is what published MFU figures use. A sliding
window of w tokens is credited at full credit x the area it keeps of the causal triangle, so w = s gives the full
count. Embedding look-ups are free. The vocabulary counted is the padded one, as computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from megascale.config import ModelConfig
from megascale.core.inventory import (
    ATTENTION_PARTS,
    MLP_PARTS,
    LogicalTensor,
    embedding_tensors,
    head_tensors,
    layer_inventory,
    norm_tensors,
    output_matrix,
)

CONVENTION = "full attention, windows by area, no recompute"


@dataclass(frozen=True)
class FlopCount:
    """FLOPs of one token, forward pass, by part."""

    projections: float
    attention: float
    mlp: float
    logits: float

    @property
    def forward(self) -> float:
        """Forward pass."""
        return self.projections + self.attention + self.mlp + self.logits

    @property
    def training(self) -> float:
        """Forward and backward."""
        return 3 * self.forward


def layer_flops(model: ModelConfig, layer: int) -> FlopCount:
    """One transformer block."""
    tensors, parts = layer_inventory(model), (ATTENTION_PARTS[model.attention], MLP_PARTS[model.mlp])
    scores, inner = (part.flops(model, layer) for part in parts)
    return FlopCount(_gemm_flops(tensors.attention), scores, _gemm_flops(tensors.mlp) + inner, 0.0)


def _gemm_flops(tensors: tuple[LogicalTensor, ...]) -> float:
    return 2.0 * sum(tensor.elements for tensor in tensors if tensor.gemm)


def logits_flops(model: ModelConfig) -> float:
    """The output GEMM, forward, one token."""
    return 2.0 * prod(output_matrix(model).stored)


@lru_cache(maxsize=256)
def flops_per_token(model: ModelConfig) -> FlopCount:
    """The whole model at its training sequence length."""
    # Layers repeat with the window's pattern, so a very deep model costs no more to count than a shallow one.
    period = len(model.window_pattern)
    counts = [(layer_flops(model, i), len(range(i, model.layers, period))) for i in range(min(period, model.layers))]
    return FlopCount(
        sum(n * c.projections for c, n in counts),
        sum(n * c.attention for c, n in counts),
        sum(n * c.mlp for c, n in counts),
        logits_flops(model),
    )


def count_parameters(model: ModelConfig, embeddings: bool = True) -> int:
    """Number of trained parameters, padding rows not counted."""
    total = model.layers * sum(tensor.elements for tensor in layer_inventory(model))
    outer = [*norm_tensors(model, "norm")]
    if embeddings:
        outer += [*embedding_tensors(model), *head_tensors(model)]
    return total + sum(tensor.elements for tensor in outer)


# Dense bf16 peaks in TFLOP/s, as vendors print them, matched against the device name.
PEAKS = {
    "H200": 989.4,
    "H100": 989.4,
    "H800": 989.4,
    "A100": 312.0,
    "A800": 312.0,
    "B200": 2250.0,
    "L40S": 362.0,
}


def device_peak(name: str) -> float | None:
    """Dense bf16 peak of a device in TFLOP/s by its name, or None if unknown."""
    return next((peak for key, peak in PEAKS.items() if key in name), None)


def mfu(model: ModelConfig, tokens_per_second: float, devices: int, peak_tflops: float) -> float:
    """Model FLOPs utilisation, 0 to 1, under CONVENTION."""
    return flops_per_token(model).training * tokens_per_second / (devices * peak_tflops * 1e12)
