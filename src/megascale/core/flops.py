"""The one count of FLOPs. A multiply-add is two; recomputation is not counted; backward is twice forward.

Convention "full attention": the s x s score matrix is credited whole although the causal half is computed, as in
Megatron-LM's formula 72 B L s h^2 (1 + s/6h + V/12Lh) and PaLM's; it is what published MFU figures use. A sliding
window of w tokens is credited at full credit x the area it keeps of the causal triangle, so w = s gives the full
count. Embedding look-ups are free. The vocabulary counted is the padded one, as computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from megascale.config import ModelConfig

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


def window_share(sequence: int, window: int | None) -> float:
    """Part of the causal triangle's area that a window keeps: 1 for full attention."""
    if window is None or window >= sequence:
        return 1.0
    kept = window * (window + 1) / 2 + (sequence - window) * window
    return kept / (sequence * (sequence + 1) / 2)


def layer_flops(model: ModelConfig, layer: int) -> FlopCount:
    """One transformer block."""
    h, d, s = model.hidden, model.head_size, model.sequence_length
    q, kv = model.heads * d, model.kv * d
    projections = 2.0 * h * (q + 2 * kv) + 2.0 * q * h
    attention = 4.0 * s * q * window_share(s, model.layer_window(layer))
    mlp = 2.0 * h * model.ffn * (3 if model.gated else 2)
    return FlopCount(projections, attention, mlp, 0.0)


def logits_flops(model: ModelConfig) -> float:
    """The output GEMM, forward, one token."""
    return 2.0 * model.hidden * model.padded_vocab


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


def parameters(model: ModelConfig, embeddings: bool = True) -> int:
    """Number of trained parameters, padding rows not counted."""
    h, d = model.hidden, model.head_size
    q, kv = model.heads * d, model.kv * d
    norm = h * (2 if model.norm == "layernorm" else 1)
    norms = norm * (2 if model.block == "serial" or model.parallel_norms == 2 else 1)
    attention = h * (q + 2 * kv) + q * h
    attention += (q + 2 * kv) * model.attention_bias + h * model.out_bias
    inner = model.ffn * (2 if model.gated else 1)
    mlp = h * inner + model.ffn * h + (inner + h) * model.mlp_bias
    total = model.layers * (norms + attention + mlp) + norm
    if embeddings:
        total += model.vocab * h * (1 if model.tied_embeddings else 2)
        total += model.sequence_length * h if model.positions == "learned" else 0
        total += model.vocab if model.head_bias else 0
    return total


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
