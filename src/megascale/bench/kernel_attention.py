"""Measurements of the attention backends by `megascale bench kernels`.

Names of sizes: S sequence, B batch, N heads, G key-value groups, D head width.
"""

from __future__ import annotations

import torch

from megascale.bench.kernel_rows import Bench, KernelRow, compute_distance
from megascale.ops import attention
from megascale.ops.attention_backends import BACKENDS, list_candidates
from megascale.ops.rope import split_qkv

ATTENTION_TOLERANCE = 2e-2  # limit for attention, which rounds its probabilities to bfloat16
# Shapes of the presets: the arguments S, B, N, G, D and window of AttentionChooser.choose.
ATTENTION_SHAPES = [
    (2048, 2, 40, 40, 128, None),
    (2048, 2, 40, 40, 128, 512),
    (2048, 1, 40, 40, 128, None),
    (2048, 4, 20, 20, 128, None),
    (8192, 1, 32, 8, 128, None),
    (8192, 1, 32, 8, 128, 4096),
    (8192, 1, 32, 8, 128, 1024),
    (2048, 8, 16, 16, 128, None),
    (1024, 16, 12, 12, 64, None),
]


def measure_attention_distance(name: str, has_window: bool, device: torch.device) -> float:
    """Return the largest norm-wise distance of output and QKV gradient from float64 attention with an explicit mask.

    Args:
        name: attention backend.
        has_window: whether attention with several windows is checked, or full causal attention.
    """
    S, B, D = 384, 2, 128
    N, G = 4, 2
    generator = torch.Generator(device).manual_seed(4)
    qkv = torch.randn(S, B, (N + 2 * G) * D, device=device, generator=generator).to(torch.bfloat16).requires_grad_()
    largest = 0.0
    windows: list[int | None] = [None]
    if has_window:
        windows = [1, 129, S - 1]  # one token, one more than a tile of 128, and one less than the sequence
    for window in windows:
        out = BACKENDS[name](*split_qkv(qkv, N, G), window)
        upstream = torch.randn(out.shape, device=device, generator=generator).to(out.dtype)
        (grad,) = torch.autograd.grad(out, qkv, upstream)
        qkv64 = qkv.detach().double().requires_grad_()
        q, k, v = qkv64.unflatten(-1, (N + 2 * G, D)).split((N, G, G), dim=2)
        exact = attention.attention_reference(q, k, v, window=window)
        (exact_grad,) = torch.autograd.grad(exact, qkv64, upstream.double())
        largest = max(largest, compute_distance(out, exact), compute_distance(grad, exact_grad))
    return largest


def _check_backends(bench: Bench) -> dict[str, float]:
    """Return the distance of each backend from the reference, by backend and mask, and add a row with each."""
    distances = {}
    for has_window in (False, True):
        mask = "windows" if has_window else "full"
        for name in list_candidates(1 if has_window else None):  # the candidates are the same for all windows
            distance: float | None = None
            error = ""
            try:
                distance = measure_attention_distance(name, has_window, bench.device)
            except ImportError as reason:
                bench.facts[f"attention {name}"] = f"not measured: {reason}"
                continue
            except Exception as reason:
                error = f"{type(reason).__name__}: {str(reason).strip()[:200]}"
            if distance is not None:
                distances[f"{name} ({mask})"] = distance
                if not distance <= ATTENTION_TOLERANCE:  # true for NaN
                    error = f"norm-wise error {distance:.1e}, limit {ATTENTION_TOLERANCE:.1e}"
            bench.rows.append(KernelRow(f"attention {name}, {mask}: check", "384 x 2", distance=distance, error=error))
    return distances


def measure_attention(bench: Bench) -> None:
    """Check every backend against the explicit mask, then measure the backends at the presets' shapes.

    The second part runs `AttentionChooser`, which training runs at its start to choose a backend.
    """
    bench.facts["attention_distance"] = _check_backends(bench)
    chooser = attention.AttentionChooser()
    for shape_arguments in ATTENTION_SHAPES:
        chooser.choose(*shape_arguments)
    bench.facts["attention"] = chooser.describe()
    for shape, choice in chooser.choices.items():
        score_count = shape.S * (shape.S + 1) / 2  # scores within the causal mask, per head
        if shape.window is not None:
            # A window leaves out the scores of keys that are at least `window` tokens back.
            score_count -= (shape.S - shape.window) * (shape.S - shape.window + 1) / 2
        flops = 14 * score_count * shape.B * shape.N * shape.D  # 2 GEMMs forward and 5 backward, 2 FLOPs each
        shape_text = str(shape).rpartition(",")[0]  # without the data type, which is a column of the table
        for name, ms in choice.milliseconds.items():
            chosen_mark = " *" if name == choice.name else ""
            row = KernelRow(f"attention {name}{chosen_mark}, both passes", shape_text, fused=ms / 1e3)
            row.tflops = flops / ms / 1e9
            bench.rows.append(row)
