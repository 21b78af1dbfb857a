"""Count of a model's FLOPs.

A multiply-add counts as two FLOPs. Backward counts twice as much as forward, and recomputation is not counted.
Convention "full attention": the whole s x s score matrix of a sequence of s tokens counts although only the causal half
is computed. Published MFU figures use this convention: PaLM's formula, and Megatron-LM's 72 B L s h^2 (1 + s/6h +
V/12Lh) for B sequences, L layers of width h and V words. A sliding window of w tokens counts as full attention times
the fraction of the causal triangle that it covers, so w = s gives the full count. Under data.document_mask each
document counts as a sequence of its own length, and padding has no attention. Embedding look-ups are not counted. The
vocabulary counts with its padding, because the padding is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from megascale.config import ModelConfig
from megascale.core.inventory import (
    count_distinct_layers,
    embedding_tensors,
    head_tensors,
    layer_inventory,
    output_matrix,
)
from megascale.core.inventory_records import LogicalTensor, norm_tensors
from megascale.core.layer_spec import LayerSpec
from megascale.core.part_inventories import ATTENTION_PARTS, MLP_PARTS

CONVENTION = "full attention, windows by area, no recompute"
DOCUMENT_CONVENTION = f"{CONVENTION}, documents as sequences of their own"


@dataclass(frozen=True)
class FlopCount:
    """Forward FLOPs per token, by part of the model. `attention` is that of scores and values, without projections."""

    projections: float
    attention: float
    mlp: float
    logits: float

    @property
    def forward(self) -> float:
        """FLOPs of the forward pass."""
        return self.projections + self.attention + self.mlp + self.logits

    @property
    def training(self) -> float:
        """FLOPs of forward and backward."""
        return 3 * self.forward

    @property
    def adapter_training(self) -> float:
        """FLOPs of forward and backward if only adapters are trained.

        Backward then computes no gradients of matrices, so it costs as much as the forward. Attention has no weights,
        so its backward costs twice its forward. The FLOPs of the adapters themselves are not counted.
        """
        return 2 * self.forward + self.attention


@lru_cache(maxsize=256)
def layer_flops(layer: LayerSpec, sequence: int) -> FlopCount:
    """Return the FLOPs per token of a layer in a sequence of `sequence` tokens."""
    tensors = layer_inventory(layer)
    return FlopCount(
        projections=_gemm_flops(tensors.attention),
        attention=ATTENTION_PARTS[layer.mixer.name].flops(layer, sequence),
        mlp=_gemm_flops(tensors.mlp) + MLP_PARTS[layer.feed_forward.name].flops(layer, sequence),
        logits=0.0,
    )


def _gemm_flops(tensors: tuple[LogicalTensor, ...]) -> float:
    """Return the FLOPs per token of the GEMMs with these weights: a multiply-add per element."""
    return 2.0 * sum(tensor.elements for tensor in tensors if tensor.is_gemm_weight)


@lru_cache(maxsize=256)
def flops_per_token(model: ModelConfig) -> FlopCount:
    """Return the FLOPs per token of the whole model at its training sequence length."""
    counted_flops = []
    for layer, layer_count in count_distinct_layers(model):
        counted_flops.append((layer_count, layer_flops(layer, model.sequence_length)))
    return FlopCount(
        projections=sum(layer_count * flops.projections for layer_count, flops in counted_flops),
        attention=sum(layer_count * flops.attention for layer_count, flops in counted_flops),
        mlp=sum(layer_count * flops.mlp for layer_count, flops in counted_flops),
        logits=2.0 * prod(output_matrix(model).padded_shape),
    )


def document_flops(model: ModelConfig, lengths: Mapping[int, float], padding: float = 0.0) -> FlopCount:
    """Return the FLOPs per token of samples whose attention stays within documents.

    Args:
        lengths: number of documents by length in tokens.
        padding: number of padding tokens, which have no attention.
    """
    tokens = padding + sum(length * documents for length, documents in lengths.items())
    attention = 0.0
    for layer, layer_count in count_distinct_layers(model):
        count_flops = ATTENTION_PARTS[layer.mixer.name].flops
        total = sum(length * documents * count_flops(layer, length) for length, documents in lengths.items())
        attention += layer_count * total / tokens
    return replace(flops_per_token(model), attention=attention)


def count_parameters(model: ModelConfig, embeddings: bool = True) -> int:
    """Return the number of trained parameters, without padding rows.

    Args:
        embeddings: whether embeddings and output matrix count.
    """
    total = 0
    for layer, layer_count in count_distinct_layers(model):
        total += layer_count * sum(tensor.elements for tensor in layer_inventory(layer))
    outer = norm_tensors(model.norm, model.hidden, "norm")
    if embeddings:
        outer += embedding_tensors(model) + head_tensors(model)
    return total + sum(tensor.elements for tensor in outer)


# Dense bf16 peaks in TFLOP/s from the vendors' data sheets, by a part of the name that the driver gives the device.
# The first entry that matches counts, so variants of a GPU with other peaks stand before it.
PEAK_TFLOPS = {
    "H200 NVL": 835.5,
    "H100 NVL": 835.5,
    "H100 PCIe": 756.5,
    "GB200": 2500.0,
    "H200": 989.4,
    "H100": 989.4,
    "H800": 989.4,
    "A100": 312.0,
    "A800": 312.0,
    "B200": 2250.0,
    "L40S": 362.0,
}


def device_peak_tflops(name: str) -> float | None:
    """Return the dense bf16 peak of a device in TFLOP/s, or None for an unknown device name."""
    for model_name, peak in PEAK_TFLOPS.items():
        if model_name.lower() in name.lower():
            return peak
    return None


def count_training_flops(model: ModelConfig, has_adapters: bool = False, flops: FlopCount | None = None) -> float:
    """Return the FLOPs per token of training the model, or of training only its adapters if `has_adapters`.

    Args:
        flops: FLOPs per token of samples that consist of documents (`document_flops`); default: each sample is one
            sequence.
    """
    count = flops or flops_per_token(model)
    return count.adapter_training if has_adapters else count.training


def mfu(
    model: ModelConfig,
    tokens_per_second: float,
    devices: int,
    peak_tflops: float,
    flops: FlopCount | None = None,
    has_adapters: bool = False,
) -> float:
    """Return the model FLOPs utilisation, 0 to 1, under CONVENTION.

    Args:
        tokens_per_second: of all devices together.
        flops, has_adapters: as for `count_training_flops`.
    """
    return count_training_flops(model, has_adapters, flops) * tokens_per_second / (devices * peak_tflops * 1e12)
